"""Comparison with direct access, briefly: properties that hold on any machine, however busy."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from loadtest.lab.vllm.comparison import Comparison, arguments
from tests.vllm.conftest import Place

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
UNEXPLAINED = {"cut", "unanswered", "upstream", "bug"}


def test_overload_keeps_people_waiting_without_weir_and_not_with_it(place: Place, tmp_path: Path) -> None:
    place.close()  # one vLLM at a time: there may be two cores
    given = arguments(["--seconds", "20", "--sides", "direct,weir"])
    console = Console()
    direct, weir = Comparison(given, tmp_path, console, Progress(console=console, disable=True)).run()
    shares = {}
    for side in (direct, weir):
        for name, counted in side.kinds.items():
            print(side.name, name, f"{counted.share:.1%}", dict(counted.ends), f"lag {side.lag:.3f} s")
            assert counted.ends.total() == counted.offered > 0
            assert not UNEXPLAINED & counted.ends.keys()
        shares[side.name] = side.kinds["interactive"].share
    assert shares["weir"] >= 0.8
    # The rate is twice what the engine could do a minute before; where that was little, it may not be overloaded now.
    assert shares["weir"] >= min(0.9, 3 * shares["direct"])
    log = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    ended = Counter(line["request_id"] for line in log if "request_id" in line)
    assert set(ended.values()) == {1}
    assert len(ended) == sum(counted.offered for counted in weir.kinds.values())
