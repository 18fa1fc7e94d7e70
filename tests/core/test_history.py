"""History of the last hour: bounded, and made of differences."""

from __future__ import annotations

from gateway.core.history import CLASSES, EVENTS, KEPT, WORDS, History
from gateway.shared.notice import Notice


def test_a_bucket_has_what_came_since_the_one_before() -> None:
    history = History()
    history.look(queued=3, running=2, up=2, engines=2)
    history.look(queued=1, running=5, up=1, engines=2)
    history.close(10.0, {"default": (5, 2, 0), "batch": (1, 0, 1)})
    history.close(20.0, {"default": (9, 2, 0), "batch": (0, 0, 0)})
    first, second = history.after(0)
    assert (first.at, first.answered, first.refused, first.failed) == (10.0, 6, 2, 1)
    assert (first.queued, first.running, first.up, first.engines) == (3, 5, 1, 2), "the most that waited, the fewest up"
    assert first.classes == {"default": (5, 2, 0), "batch": (1, 0, 1)}
    assert (second.answered, second.refused, second.classes) == (4, 0, {"default": (4, 0, 0)})
    assert (second.queued, second.up) == (0, 0), "nobody has looked"
    assert history.after(1) == [second]
    assert history.after(2) == history.after(99) == []


def test_it_is_bounded_whatever_happens() -> None:
    history = History()
    for number in range(KEPT + 5):
        history.close(10.0 * number, {f"c{each}": (number, 0, 0) for each in range(CLASSES + 5)})
    for number in range(EVENTS + 5):
        history.note(float(number), "x" * 1000)
    assert history.closed == KEPT + 5
    kept = history.after(0)
    assert (len(kept), len(history.after(KEPT)), kept[0].at) == (KEPT, 5, 50.0)
    assert {len(bucket.classes) for bucket in kept} == {CLASSES}
    assert kept[-1].answered == CLASSES + 5, "the sum has all classes"
    assert (len(history.events), history.events[0].at) == (EVENTS, 5.0)
    assert len(history.events[0].text) == WORDS


def test_lines_for_the_operator_are_events() -> None:
    history, said = History(), []
    say = history.noting(said.append, lambda: 7.0)
    say(Notice("engine left is down", "engine_down", "warning"))
    say("plain")
    assert said == ["engine left is down", "plain"]
    assert [(each.at, each.level, each.event, each.text) for each in history.events] == [
        (7.0, "warning", "engine_down", "engine left is down"),
        (7.0, "info", "notice", "plain"),
    ]
