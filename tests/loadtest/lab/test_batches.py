"""Figure of batch work beside people: its row on a trace of its own, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.figures import batches


@pytest.mark.slow
def test_the_row_of_a_small_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "small.csv"
    sizes = "600,40", "900,200"
    rows = [f"2023-11-16 18:{15 + n // 60}:{n % 60:02}.5,{sizes[n % 2]}" for n in range(300)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    monkeypatch.setattr(batches, "WARM", 5.0)
    monkeypatch.setattr(batches, "SATURATED", 20.0)
    assert batches.main([str(trace), "--seeds", "1"]) == 0
    assert "seed 1" in capsys.readouterr().out


def test_without_a_trace_it_says_where_one_can_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("WEIR_TRACES", raising=False)
    with pytest.raises(SystemExit) as left:
        batches.main([])
    assert left.value.code == 2
    assert "no trace: name a file, or a folder in WEIR_TRACES" in capsys.readouterr().err
    assert batches.main([str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err
