"""Bench sessions: the target that an SLO applies to, and the results of an interrupted run."""

from __future__ import annotations

import io
import ssl
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.bench.options import Bench, Contender
from loadtest.bench.run import Ran
from loadtest.bench.session import BenchSession, Taken, cut, in_turn
from loadtest.load.scenario import Scenario
from loadtest.load.slo import parse_slo
from loadtest.report.records import RequestResult, Window

WEIR = Contender(name="weir")
DIRECT = Contender(name="direct", before="direct", compared=True)


def session() -> BenchSession:
    scenario = Scenario(duration=10.0, warmup=2.0, slo=parse_slo("e2e.p90<1s"))
    bench = Bench(
        scenario=scenario, source="s", folder=Path(), keys={}, contenders=(WEIR, DIRECT), fleet=None,
        tls=ssl.create_default_context(), repeat=2, drain=1.0, find_capacity=False, named_model=False,
        out=None, force=False,
    )  # fmt: skip
    return BenchSession(bench, Path(), lambda title: lambda done, said: None, Console(file=io.StringIO()))


def taken(own: BenchSession, contender: Contender, repeat: int, outcome: str, *, stopped: bool = False) -> Taken:
    """Eight requests, one a second."""
    seconds = 4.5 if stopped else 10.5
    results = [
        RequestResult(n, contender.name, repeat, float(n), "chat", "default", "", sent=n + 1e-4, finished=n + 0.5,
               status=200, outcome=outcome)
        for n in range(int(seconds))
    ]  # fmt: skip
    ran = Ran(results=results, samples=[], stopped=stopped, seconds=seconds, problem="", cpu=1.0, connections=1)
    return Taken(contender, own.bench.scenario, own.bench.scenario.rate, ran)


@pytest.mark.parametrize(("weir", "direct", "missed"), [("ok", "upstream", 0), ("upstream", "ok", 1)])
def test_slos_are_not_held_against_baselines(weir: str, direct: str, missed: int) -> None:
    own = session()
    own.taken += [taken(own, WEIR, 0, weir), taken(own, DIRECT, 0, direct)]
    runs = own.runs()
    assert [run.name for run in runs] == ["weir", "direct"]
    assert len(own.missed(runs)) == missed


def test_a_repeat_that_was_broken_off_is_left_out_where_there_is_a_whole_one() -> None:
    own = session()
    own.taken += [taken(own, WEIR, 0, "ok"), taken(own, WEIR, 1, "interrupted", stopped=True)]
    (run,) = own.runs()
    assert {result.repeat for result in run.results} == {0}
    assert run.window == own.bench.scenario.window
    own.taken[:] = own.taken[1:]
    (run,) = own.runs()
    assert run.window == Window(duration=4.5, warmup=2.0)


def test_a_window_that_was_cut() -> None:
    window = Window(duration=10.0, warmup=2.0, cooldown=1.0)
    assert cut(window, 9.5) == window
    assert cut(window, 8.0) == Window(duration=8.0, warmup=2.0)
    assert cut(window, 1.5) == Window(duration=1.5)


def test_every_other_order_is_turned_round() -> None:
    assert [in_turn((WEIR, DIRECT), repeat) for repeat in range(3)] == [[WEIR, DIRECT], [DIRECT, WEIR], [WEIR, DIRECT]]
