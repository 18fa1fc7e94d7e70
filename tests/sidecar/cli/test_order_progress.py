"""Progress of orders: when one is done, when it has failed, and in what words."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.shared.protocol import ModelReport
from sidecar.cli.orders import GRACE, Order, Progress, progress


def model(state: str = "stopped", pending: str | None = None, **fields: Any) -> ModelReport:
    return ModelReport(profile="m", model="m", state=state, pending=pending, **fields)  # type: ignore[arg-type]


def at(order: Order, model: ModelReport, calls: int = 0, *, after: float = GRACE) -> tuple[str, str]:
    """`done`, `failed` or `waits`, and the words."""
    found = progress(order, model, calls=calls, after=after)
    assert isinstance(found, Progress)
    assert found.ended or not found.failed
    return "failed" if found.failed else "done" if found.ended else "waits", found.words


def test_a_model_is_ready_once_it_runs_with_nothing_pending() -> None:
    assert at("ensure", model("running", ready_in=0.0)) == ("done", "running")
    assert at("ensure", model("starting", "start", ready_in=7.0))[0] == "waits"
    assert at("ensure", model("running", "drain", ready_in=7.0))[0] == "waits"
    assert at("ensure", model("starting", "start", ready_in=7.0))[1] == "starting, start under way, ready in 7.0 s"


def test_a_start_that_is_tried_again_is_waited_for_and_told() -> None:
    failing = model("error", ready_in=70.0, last_error="it ended with status 2")
    assert at("ensure", failing) == ("waits", "error, ready in 70 s: it ended with status 2")
    full = model(why="no_memory", message="every resident is busy")
    assert at("ensure", full) == ("waits", "stopped: every resident is busy")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"why": "off", "message": "m is off"}, "m is off"),
        ({"why": "error", "last_error": "no such folder"}, "no such folder"),
        ({"why": "error"}, "stopped"),
    ],
)
def test_what_cannot_be_had_fails_once_it_was_looked_at_again(fields: dict[str, str], words: str) -> None:
    assert at("ensure", model(**fields)) == ("failed", words)
    assert at("ensure", model(**fields), after=GRACE - 0.1)[0] == "waits", "it is being sized anew"


def test_sleep() -> None:
    assert at("sleep", model("sleeping", sleep_level=2)) == ("done", "sleeping at level 2")
    assert at("sleep", model("running", "drain"), 3) == ("waits", "running, drain under way, 3 calls under way")
    assert at("sleep", model("running", "sleep")) == ("waits", "running, sleep under way")
    assert at("sleep", model("running"))[1] == "it is running: its calls went on for too long, or it was wanted"
    assert at("sleep", model("error", last_error="x")) == ("failed", "it is error: x: x")
    assert at("sleep", model("stopped")) == ("failed", "it is stopped")


@pytest.mark.parametrize("order", ["stop", "off"])
def test_an_engine_has_ended_once_there_is_none(order: Order) -> None:
    assert at(order, model("stopped")) == ("done", "stopped")
    assert at(order, model("error", last_error="no such folder"))[0] == "done"
    assert at(order, model("running", "drain"), 1) == ("waits", "running, drain under way, 1 call under way")
    assert at(order, model("starting", "stop"))[0] == "waits"
    assert at(order, model("error", "stop"))[0] == "waits"
    for again in (model("running"), model("stopped", "start"), model("sleeping", "wake")):
        assert at(order, again)[0] == "failed"
    assert at(order, model("running"))[1] == "it is running: it was wanted again"


def test_on_is_done_at_once() -> None:
    assert at("on", model("stopped", ready_in=60.0)) == ("done", "stopped, ready in 60 s")
