"""The loads and the table of `make rivals`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from loadtest.lab.rivals import loads
from loadtest.lab.rivals.__main__ import main, shown
from loadtest.lab.rivals.loads import LOADS, Goal, RivalLoad
from loadtest.lab.rivals.runs import in_virtual_time, medians, row, verdict
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.scenario import Scenario
from loadtest.report.records import RequestResult, Run, Slo, Window


def result(first: float, end: float, outcome: str = "ok", class_name: str = "default") -> RequestResult:
    return RequestResult(0, "weir", 0, 1.0, "chat", class_name, "", 1.0, 1.0 + first, 1.0 + first,
                         finished=1.0 + end, status=200, outcome=outcome, prompt_tokens=90, completion_tokens=10,
                         gaps=(end - first,))  # fmt: skip


def run(*results: RequestResult) -> Run:
    return Run(name="weir", rate=1.0, window=Window(duration=10.0), slos=[Slo(ttft=4.0)], results=results)


def test_a_row_counts_what_was_late_and_what_was_refused() -> None:
    found = row(run(result(1.0, 2.0), result(3.0, 5.0), result(5.0, 7.0), result(0.0, 0.0, "queue_full")), 0.25)
    assert (found["hits"], found["mean"], found["p50"], found["e2e"]) == (0.25, 3.0, 3.0, pytest.approx(14 / 3))
    assert (found["in_time"], found["refused"]) == (2, 1)
    assert found["goodput"] == 2 * 100 / 10.0, "tokens of those in time, over the measured part"


def test_a_class_has_figures_of_its_own() -> None:
    both = run(result(1.0, 2.0), result(3.0, 5.0, class_name="interactive"))
    assert [row(both, 0.0, name)["mean"] for name in ("", "default", "interactive")] == [2.0, 1.0, 3.0]
    load = RivalLoad(scenario=Scenario(), goals=(Goal("mean", 0.5, class_name="interactive"),))
    table, said = shown("load", {"weir": [(both, 0.0)], "vllm-router": [(both, 0.0)]}, load, "vllm-router")
    assert list(table.columns[0].cells) == ["weir", "  interactive", "vllm-router", "  interactive"]
    assert said == ["interactive: mean 3 beside 3 (1.00x), wanted at most 0.5x: MISSED"]


def test_rounds_are_medians_and_the_sum_of_what_was_refused() -> None:
    rows = [row(run(result(first, 9.0), result(0.0, 0.0, "queue_full")), 0.5) for first in (1.0, 2.0, 6.0)]
    assert (medians(rows)["mean"], medians(rows)["refused"]) == (2.0, 3)


@pytest.mark.parametrize(
    ("goal", "kept"),
    [
        (Goal("mean", 0.6), False),
        (Goal("mean", 1.0), True),
        (Goal("hits", 0.0, 0.7), False),
        (Goal("hits", 1.0), True),
        (Goal("p50", 1.0, 0.0005), True),
    ],
)
def test_a_goal_is_a_bound_from_above_or_of_what_is_good_from_below(goal: Goal, kept: bool) -> None:
    one = row(run(result(1.0, 2.0)), 0.5)
    assert verdict(goal, one, one)[0] is kept


@pytest.mark.slow
def test_shares_of_the_capacity_are_rates_and_a_trace_gives_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "SATURATED", (5.0, 15.0))  # long enough for this comparison
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:00:00.0,700,4\n" * 20_000)
    load = LOADS["chats-0.6"].replayed(file)
    capacity = load.capacity()
    assert capacity > 2 * LOADS["chats-0.6"].capacity(), "answers of four tokens"
    assert load.at(capacity, 40.0).rate == pytest.approx(0.6 * capacity)
    assert LOADS["agents-tight"].at(0.0, 40.0) == LOADS["agents-tight"].scenario


def test_turns_of_a_trace_are_sent_a_pause_after_their_answers(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = '{"timestamp":0,"input_length":%d,"output_length":4,"hash_ids":%s}\n'
    file.write_text(
        "".join(row % (512 * len(name), [*name]) for one in range(20) for name in ((one,), (one, one + 50)))
    )
    load = LOADS["prompts-0.5"].replayed(file, 3.0)
    scenario = msgspec.structs.replace(load.scenario, arrivals=Arrivals(closed=Closed(clients=2)))
    run, hits = in_virtual_time(load, "weir", scenario, tmp_path)
    firsts = {result.index: result.finished for result in run.results if result.index % 2 == 0}
    seconds = [result.at - firsts[result.index - 1] for result in run.results if result.index % 2]
    assert len(firsts) == len(seconds) == 20
    assert min(seconds) > 0.0
    assert fmean(seconds) == pytest.approx(3.0, rel=0.6)
    assert hits > 0.25, "second turns begin with their firsts"


def test_rules_are_compared_in_virtual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--only", "idle", "--rivals", "weir,lpwl", "--rounds", "2", "--out", str(tmp_path)]
    assert main(["--virtual", *flags]) == 0
    page = (tmp_path / "idle" / "report.html").read_text()
    assert "Load test: weir, lpwl" in page
    assert "<svg" in page
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [(one[0], one[7], one[9]) for one in rows] == [(name, "200", "0") for name in ("weir", "lpwl", "direct")]
    assert "p50" in out


@pytest.mark.slow
@pytest.mark.parametrize("calls", [24, 100])
def test_first_prompts_of_agents_at_once_are_all_answered_and_wait_for_nothing_but_engines(
    calls: int, tmp_path: Path
) -> None:
    """By Weir with no policy, on four idle engines: its class for long prompts has no bound for the whole fleet."""
    load = LOADS["burst"]
    scenario = msgspec.structs.replace(load.scenario, arrivals=Arrivals(closed=Closed(clients=calls, rounds=1)))
    weir, others = (row(*in_virtual_time(load, name, scenario, tmp_path)) for name in ("weir", "cache_aware"))
    assert (weir["refused"], others["refused"], weir["in_time"]) == (0, 0, others["in_time"])
    assert weir["mean"] < 1.1 * others["mean"], "in virtual time: the same in each run"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--virtual", "--rivals", "weir,nginx"], "'nginx' is not one of weir, direct"),
        (["--rivals", "weir,nginx"], "'nginx' is not one of direct, round_robin, vllm-router"),
        (["--only", "agents"], "'agents' is not one of agents-tight"),
        (["--rounds", "0"], "from 1 to 100"),
    ],
)
def test_mistakes_are_told(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert said in capsys.readouterr().err
