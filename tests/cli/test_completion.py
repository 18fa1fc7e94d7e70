"""Shell completion: what a shell offers after it has read the printed script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.cli import main as gateway
from gateway.cli.commands import COMMANDS
from gateway.shared.completion import SHELLS
from sidecar.cli import main as sidecar
from sidecar.cli.commands import COMMANDS as SIDECAR_COMMANDS

PROGRAMS = {"gateway": (gateway, COMMANDS), "sidecar": (sidecar, SIDECAR_COMMANDS)}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def printed(program: str, shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> Path:
    assert PROGRAMS[program][0](["completion", shell]) == 0
    file = folder / f"{program}.{shell}"
    file.write_text(capsys.readouterr().out)
    return file


def offered(program: str, script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    line = f"""
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${{#COMP_LINE}}
        _shtab_{program} {program} "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    argv = ["bash", "-c", line, "bash", str(script), program, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True, cwd=script.parent).stdout.split()


def test_bash_offers_every_command(program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = printed(program, "bash", capsys, tmp_path)
    assert set(offered(program, script, "")) >= set(PROGRAMS[program][1])


def test_bash_offers_flags_choices_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = printed("gateway", "bash", capsys, tmp_path)
    (tmp_path / "mine.yaml").touch()
    assert offered("gateway", script, "serve", "--poli") == ["--policy"]
    assert offered("gateway", script, "completion", "z") == ["zsh"]
    assert offered("gateway", script, "serve", "--policy", "min") == ["mine.yaml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_the_script(
    program: str, shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = printed(program, shell, capsys, tmp_path)
    assert script.stat().st_size > 1000
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    read = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")
