"""Figure of predicted lengths: its rows on a trace of its own, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.figures import prediction


@pytest.mark.slow
def test_the_rows_of_a_small_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        f'{{"timestamp": {1000 * number}, "input_length": {600 if number % 2 else 900}, '
        f'"output_length": {10 if number % 2 else 300}, "hash_ids": [1, {number % 7 + 2}]}}\n'
        for number in range(400)
    ]
    trace = tmp_path / "small.jsonl"
    trace.write_text("".join(lines))
    assert prediction.main([str(trace), "--seconds", "90"]) == 2
    assert "expected more than 60 s" in capsys.readouterr().err
    monkeypatch.setattr(prediction, "WARM", 1.0)
    assert prediction.main([str(trace), "--seconds", "90"]) == 0
    told = capsys.readouterr().out
    for arm in prediction.ARMS:
        assert f"small: {arm}" in told
    assert "0.8, 90 s" in told


def test_without_a_trace_it_says_where_one_can_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("WEIR_TRACES", raising=False)
    with pytest.raises(SystemExit) as left:
        prediction.main([])
    assert left.value.code == 2
    assert "no trace: name a file, or a folder in WEIR_TRACES" in capsys.readouterr().err
    assert prediction.main([str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_calls_whose_prompts_continue_each_other_are_one_session(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": %s}\n'
    blocks = ([0, 1], [0, 2], [0, 1, 3], [0], [0, 1, 3, 4])
    trace.write_text("".join(row % (number, 512 * len(each), each) for number, each in enumerate(blocks)))
    rows = list(prediction.read(trace))
    calls = prediction.of_sessions(rows, prediction.plan(prediction.Workload(mix=(prediction.KIND,)), rows, 1))
    assert [call.fields[b"x-weir-session"] for call in calls] == [b"0", b"1", b"0", b"3", b"0"]
