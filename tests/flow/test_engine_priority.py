"""The engine's own priority of a class: it goes before what waits inside an engine that runs priority scheduling."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.processes import Gateway
from tests.e2e.children import SimEngine
from tests.priority_order import BATCH, answered, policy

pytestmark = pytest.mark.slow  # processes and seconds


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
@pytest.mark.parametrize("scheduling", ["priority", "fcfs"])
def test_an_important_call_goes_before_what_waits_in_the_engine(
    tmp_path: Path, scheduling: str, words: tuple[str, ...]
) -> None:
    engine = SimEngine(tmp_path / "engine.log", "--scheduling-policy", scheduling, "--max-num-seqs", "1")
    try:
        file = policy(tmp_path, engine.url, scheduling)
        with Gateway(tmp_path / "gateway.log", "--policy", str(file), *words) as gateway:
            engine.faults(slow=20.0)  # the first batch call is not over before the last call is there
            ended = answered(gateway, engine.url, "sim", 120, all_there=engine.faults)
    finally:
        engine.child.stop()
    assert {status for _, status in ended} == {200}, "an engine without priorities is told none: it would refuse them"
    place = [name for name, _ in ended].index("interactive")
    # Of the last two, which end milliseconds apart, either thread may be the first to have its answer.
    assert place >= BATCH - 1 if scheduling == "fcfs" else place <= 1
