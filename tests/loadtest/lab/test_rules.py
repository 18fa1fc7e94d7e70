"""The table of Weir beside the rules of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.figures.rules import COLUMNS, main, row
from loadtest.simulate.simulated_client import Try


def answered(first: float, end: float) -> Try:
    return Try("default", 1, 1.0, 1.0, first_token=1.0 + first, finished=1.0 + end, outcome="ok", prompt_tokens=100,
               cached_tokens=25)  # fmt: skip


def test_a_row_counts_what_was_late_and_what_was_refused() -> None:
    refused = Try("default", 1, 1.0, 1.0, outcome="queue_full")
    shown = row([answered(1.0, 2.0), answered(11.0, 312.0), refused])
    assert shown == ["25 %", "6.00", "11.00", "11.00", "11.00", "157.00", "1", "1"]
    assert row([refused]) == ["", "", "", "", "", "", "0", "1"]
    assert len(shown) == len(COLUMNS) - 2, "without the rule and the CPU"


def test_a_trace_is_shown_for_the_rules_that_were_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:00:{second:02}.0,100,4\n" for second in range(10)]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    assert main(["trace", "--trace", str(file), "--speed", "2", "--seconds", "3", "--rules", "weir,lpwl"]) == 0
    shown = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [line[1].strip() for line in shown] == ["weir", "lpwl"]
    assert [line[8].strip() for line in shown] == ["6", "6"]


@pytest.mark.slow
def test_a_hundred_first_prompts_of_agents_at_once_are_all_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By Weir with no policy, on four idle engines: its class for long prompts has no bound for the whole fleet."""
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:00:00.0,18000,200\n" * 100)
    assert main(["trace", "--trace", str(file), "--seconds", "3", "--rules", "weir,cache_aware"]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    refused, mean = {row[1].strip(): row[9].strip() for row in rows}, {row[1].strip(): float(row[3]) for row in rows}
    assert refused == {"weir": "0", "cache_aware": "0"}
    assert mean["weir"] < 1.1 * mean["cache_aware"], "in virtual time: the same in each run"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["agents-tight", "--rules", "weir,nginx"], "'nginx' is not one of weir, direct"),
        (["trace"], "the load `trace` and --trace FILE go together"),
        (["agents-tight", "--trace", "x"], "the load `trace` and --trace FILE go together"),
    ],
)
def test_mistakes_are_told(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert said in capsys.readouterr().err
