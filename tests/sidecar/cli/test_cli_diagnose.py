"""`sidecar diagnose`, and what `sidecar logs` says after a failure."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.cli.diagnose import PIECE, TAIL, diagnosed
from sidecar.cli.files import File

BLOCKS = "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (600)."
SECOND = "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."


def test_the_cause_as_words_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    file.write_text(f"INFO 1\n{BLOCKS}\n{SECOND}\n")
    assert main(("diagnose", str(file), "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["line"]) == ("mamba_blocks", BLOCKS)
    assert found["numbers"] == {"seqs": 1024, "blocks": 600}
    assert main(("diagnose", str(file))) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [f"mamba_blocks: {BLOCKS}", "seqs 1024, blocks 600"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BLOCKS.encode())))
    assert main(("diagnose", "-", "--json")) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "mamba_blocks"


@pytest.mark.parametrize("output", [b"", b"INFO all is well\n", bytes(range(256)) * 1000, b"\xff" * 200_000])
def test_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str], output: bytes) -> None:
    file = tmp_path / "log"
    file.write_bytes(output)
    assert main(("diagnose", str(file), "--json")) == 0
    assert json.loads(capsys.readouterr().out) == {
        "kind": "none",
        "line": "",
        "advice": "",
        "numbers": {},
        "phase": "",
    }
    assert main(("diagnose", str(file))) == 0
    assert capsys.readouterr().out == "none: the output tells of no failure\n"


def test_a_file_of_a_gibibyte_is_read_from_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    with file.open("wb") as made:
        made.truncate(1 << 30)
        made.seek(0, os.SEEK_END)
        made.write(f"\n{BLOCKS}\n".encode())
    assert main(("diagnose", str(file), "--json")) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "mamba_blocks"


@pytest.mark.slow
def test_memory_is_bounded_whatever_comes() -> None:
    class Endless(io.RawIOBase):
        left = 3 * TAIL

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size == PIECE
            self.left -= PIECE
            return b"x" * PIECE if self.left > 0 else b""

    assert diagnosed(Endless()).kind == "none"  # type: ignore[arg-type] # of a file it needs readline alone


def test_logs_end_with_the_diagnosis_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sidecar.yaml").write_text("models: {a: {model_path: m}}\n")
    said = {"text": f"INFO 1\n{BLOCKS}\n{SECOND}\n"}
    monkeypatch.setattr(File, "ask", lambda _, path: said["text"].encode())
    assert main(("logs", "a")) == 0
    out, err = capsys.readouterr()
    assert out == said["text"]
    assert err.startswith(f"sidecar: mamba_blocks: {BLOCKS}\n")
    said["text"] = "INFO 1\n"
    assert main(("logs", "a")) == 0
    assert capsys.readouterr() == ("INFO 1\n", "")


def test_a_file_that_cannot_be_read_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("diagnose", str(tmp_path / "gone"))) == 2
    assert capsys.readouterr().err == f"sidecar: {tmp_path / 'gone'}: No such file or directory\n"
