"""`sidecar check`: what it prints, where, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import __version__
from sidecar.cli import COMMANDS, main
from sidecar.core.config import decode

EXAMPLE = Path(__file__).parents[2] / "sidecar" / "example.yaml"


class Ran:
    """What `main` did: its status and its two outputs."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        try:
            status = main(argv)
        except SystemExit as end:
            status = int(str(end.code))
        out, err = self._capsys.readouterr()
        return status, out, err


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    return Ran(capsys)


def test_the_example_is_good(ran: Ran) -> None:
    assert ran("check", str(EXAMPLE)) == (0, f"{EXAMPLE}: ok\n", "")


def test_the_file_in_full_is_a_file(ran: Ran) -> None:
    status, out, err = ran("check", str(EXAMPLE), "--explain")
    assert (status, err) == (0, "")
    assert decode(out.encode()) == decode(EXAMPLE.read_bytes())
    assert "load_stall: 5m" in out


def test_every_mistake_of_every_file_is_a_line(ran: Ran, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("models:\n  a: {model_path: /m, sleep: {level: 3}}\ngpus: none\n")
    absent = tmp_path / "absent.yaml"
    status, out, err = ran("check", str(bad), str(absent), str(EXAMPLE))
    assert (status, out) == (2, f"{EXAMPLE}: ok\n")
    assert err.splitlines() == [
        f"sidecar: {bad}:2: models.a.sleep.level: found '3', expected 1 or 2",
        f"sidecar: {bad}:3: gpus: found 'none', expected all or a list",
        f"sidecar: {absent}: No such file or directory",
    ]


def test_the_version(ran: Ran) -> None:
    assert ran("--version") == (0, f"weir {__version__}\n", "")


def test_help_teaches_by_example(ran: Ran) -> None:
    status, out, _ = ran("--help")
    assert status == 0
    assert "sidecar check sidecar.yaml" in out
    smallest = out[out.index("  models:") :]
    assert list(decode(smallest.encode()).models) == ["llama-3-8b"]
    assert ran("check", "--help")[1].count("sidecar check ") >= 4


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), f"sidecar: the following arguments are required: {COMMANDS} (see "),
        (("check",), "sidecar check: the following arguments are required: FILE (see sidecar check --help)"),
        (("start",), f"sidecar: argument {COMMANDS}: invalid choice: 'start' "),
        (("check", "x", "--expl"), "sidecar: unrecognized arguments: --expl (see sidecar --help)"),
    ],
)
def test_a_bad_command_line_is_one_line(ran: Ran, argv: tuple[str, ...], line: str) -> None:
    status, out, err = ran(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)
