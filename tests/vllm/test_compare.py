"""Overload of a real vLLM beside direct access, briefly: properties that hold on any machine, however busy."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.rivals.runs import WEIR, row
from tests.vllm.overload import engine, measure, overload

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("alone")]
UNEXPLAINED = {"cut", "unanswered", "upstream", "bug"}


def test_overload_keeps_people_waiting_without_weir_and_not_with_it(tmp_path: Path) -> None:
    shares = {}
    with engine(tmp_path) as vllm:
        scenario = overload(vllm, 15.0, tmp_path)
        assert scenario.rate > 0.0
        for rival in ("direct", WEIR):
            run, hits = measure(vllm, rival, scenario, tmp_path)
            outcomes = {result.outcome for result in run.results}
            print(rival, row(run, hits), row(run, hits, "interactive"), outcomes)
            assert not UNEXPLAINED & outcomes
            shares[rival] = row(run, hits, "interactive")["share"]
    # The rate is twice what the engine could do a minute before. Where others have left its processor since, it may not
    # be overloaded now.
    assert shares[WEIR] >= min(0.9, max(0.5, 3 * shares["direct"], shares["direct"] + 0.25))
