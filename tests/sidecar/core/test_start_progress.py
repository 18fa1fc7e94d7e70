"""Progress of a start: what counts as a sign of it, and until when one without a sign goes on."""

from __future__ import annotations

import random

import pytest

from gateway.shared.files.units import MIB
from sidecar.core import start_progress as module
from sidecar.core.start_progress import Look, StartProgress

STALL = 300.0
HUNG = "(EngineCore pid=40) INFO 08-20 17:{:02}:38 [shm_broadcast.py:705] No available shared memory broadcast block"


def made() -> StartProgress:
    return StartProgress(0.0, STALL)


def test_a_line_of_a_new_kind_is_a_sign_and_the_same_with_another_time_is_none() -> None:
    start = made()
    assert start.ends_at == STALL
    start.wrote("INFO 08-20 17:00:01 Initializing a V1 LLM engine (v0.32.0)", 10.0)
    for minute in range(1, 6):
        start.wrote(HUNG.format(minute), 60.0 * minute)
    assert (start.at, start.ends_at) == (60.0, 60.0 + STALL)
    assert start.words(360.0) == (
        f"300.0 s of them without progress (the last, 60.0 s after its start: it wrote {HUNG.format(1)!r})"
    )


def test_a_line_without_words_and_the_beginning_of_one_tell_nothing() -> None:
    start = made()
    start.wrote("12:00:03 3/4", 5.0)
    start.wrote("Loading", 6.0, whole=False)
    assert start.at == 0.0


def test_a_progress_bar_is_a_sign_while_its_share_grows() -> None:
    start = made()
    for now, bar in ((1.0, "0/4"), (2.0, "1/4"), (3.0, "1/4"), (4.0, "3/4"), (5.0, "2/4"), (6.0, "3/4")):
        start.wrote(f"Loading safetensors checkpoint shards: {bar} [00:{now:02.0f}<?]", now, whole=now < 4.0)
    assert start.at == 4.0


def test_the_bar_of_the_next_file_begins_anew_once_the_last_was_full() -> None:
    start = made()
    for now, bar in ((1.0, "50%"), (2.0, "100%"), (3.0, "100%"), (4.0, "10%"), (5.0, "20%")):
        start.wrote(f"model.safetensors: {bar}", now)
        assert start.at == {3.0: 2.0, 4.0: 2.0}.get(now, now)


def test_there_are_finitely_many_kinds_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KINDS", 3)
    start = made()
    for now, line in enumerate(("one is", "two are", "three are", "four are", "five are"), 1):
        start.wrote(line, float(now))
    assert start.at == 3.0


def test_gpu_memory_that_grows_is_a_sign() -> None:
    start = made()
    for now, size in enumerate((50, 50, 80, 80), 1):
        start.looked(Look(gpu=size * MIB), float(now))
    assert (start.at, start.what) == (3.0, "its GPU memory grew by 30.0 MiB")


def test_a_download_of_its_model_is_a_sign_whoever_makes_it() -> None:
    start = made()
    for now, size in enumerate((50, 50, 80, 20, 80, 81, 81), 1):
        start.looked(Look(stored=size * MIB), float(now))
        assert start.at == {1: 0.0, 2: 0.0, 3: 3.0, 4: 3.0, 5: 3.0}.get(now, 6.0), "a download that begins anew is none"
    assert start.what == "its model's files grew by 1.0 MiB"


def test_what_was_moved_is_a_sign_unless_it_is_a_little_of_proc() -> None:
    start = made()
    for now, moved in enumerate((500 * MIB, 501 * MIB - 1, 701 * MIB - 1, 701 * MIB, 702 * MIB - 1), 1):
        start.looked(Look(moved={7: moved}), float(now))
    assert (start.at, start.what) == (3.0, "it read and wrote 200.0 MiB")


def test_compilers_that_come_and_go_are_signs() -> None:
    start = made()
    for now in range(1, 9):
        start.looked(Look(moved={7: 900 * MIB, 100 + now // 2: (9 if now < 7 else 0) * MIB}), float(now))
        assert start.at == {1: 0.0, 2: 2.0, 3: 2.0, 4: 4.0, 5: 4.0}.get(now, 6.0)


def test_cpu_time_alone_counts_until_one_stall_after_the_last_other_sign() -> None:
    """A compilation without a line goes on longer than what sleeps, and a hang that spins is found out."""
    start = made()
    start.reached("it is healthy", 20.0)
    for now in range(30, 1000, 10):
        start.looked(Look(cpu=0.9 * now), float(now))
        assert start.ends_at == (20.0 if now == 30 else min(now, 20.0 + STALL)) + STALL
    assert start.words(620.0).startswith("600.0 s of them without progress, though it burnt CPU (the last, 20.0 s")
    asleep = made()
    for now in range(10, 200, 10):
        asleep.looked(Look(cpu=0.1 * now), float(now))
    assert asleep.ends_at == STALL


def test_a_look_at_the_same_moment_again_changes_nothing() -> None:
    start = made()
    for _ in range(2):
        start.looked(Look(cpu=5.0), 10.0)
    assert start.ends_at == STALL


@pytest.mark.parametrize("seed", range(50))
def test_laws_of_random_starts(seed: int) -> None:
    """It never ends within a stall of a true sign, and always within two of the last, whatever else it does."""
    rng = random.Random(seed)
    start, now, sign, cpu, size, bar = made(), 0.0, 0.0, 0.0, 0, 0
    seen: set[str] = set()
    for _ in range(200):
        now += rng.expovariate(1 / 20.0)
        match rng.randrange(4):
            case 0:
                line = rng.choice((HUNG.format(rng.randrange(60)), f"stage {rng.choice('abcdefgh') * 2} at {now}"))
                kind = line[-12:] if line.startswith("(") else line[:8]
                sign = sign if kind in seen else now
                seen.add(kind)
                start.wrote(line, now)
            case 1:
                done = rng.randrange(1, 100)
                sign, bar = (now, done) if done > bar else (sign, bar)
                start.wrote(f"bar: {done}/1000 [{now}]", now)
            case _:
                cpu += rng.choice((0.0, 100.0))
                grows = rng.choice((0, 0, 0, 1))
                sign = now if grows and size else sign  # the first look only tells how much there is
                size += grows if size else 1
                start.looked(Look(cpu=cpu, gpu=size), now)
        assert start.at == sign
        assert sign + STALL <= start.ends_at <= sign + 2 * STALL
