"""Overload of a real vLLM beside direct access, briefly: properties that hold on any machine, however busy."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.rivals.runs import WEIR, row
from tests.vllm.conftest import Place
from tests.vllm.overload import engine, measure, overload

pytestmark = pytest.mark.vllm
UNEXPLAINED = {"cut", "unanswered", "upstream", "bug"}


def test_overload_keeps_people_waiting_without_weir_and_not_with_it(place: Place, tmp_path: Path) -> None:
    place.close()  # one vLLM at a time: there may be two cores
    shares = {}
    with engine(tmp_path) as vllm:
        scenario = overload(vllm, 15.0, tmp_path)
        assert scenario.rate > 0.0
        for rival in ("direct", WEIR):
            run, hits = measure(vllm, rival, scenario, tmp_path)
            outcomes = {result.outcome for result in run.results}
            print(rival, row(run, hits), row(run, hits, "interactive"), outcomes)
            assert not UNEXPLAINED & outcomes
            shares[rival] = row(run, hits, "interactive").share
    assert shares[WEIR] >= 0.8
    # The rate is twice what the engine could do a minute before; where that was little, it may not be overloaded now.
    assert shares[WEIR] >= min(0.9, 3 * shares["direct"])
