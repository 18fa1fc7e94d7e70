"""`gateway init` and `sidecar init`: valid starter files, which never overwrite another file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

import gateway
import sidecar
from gateway import cli
from gateway.cli import init, parser_for
from gateway.core.policy.file import decode
from gateway.core.policy.schema import schema_text
from sidecar import cli as sidecar_cli
from sidecar.cli.init import FILES
from sidecar.core.config import decode as decode_sidecar


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", init.names())
def test_every_shipped_policy_can_be_begun_with(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.main(["init", name, "--out", "mine.yaml"]) == 0
    told = capsys.readouterr().out
    text = (here / "mine.yaml").read_text()
    assert "policies/" not in text, "it names a file that an installation does not have"
    assert text.startswith("# yaml-language-server: $schema=mine.schema.json\n")
    assert (here / "mine.schema.json").read_text() == schema_text()
    assert "gateway serve --policy mine.yaml" in text
    assert decode(text.encode()) == decode((init.folder() / f"{name}.yaml").read_bytes())
    command = next(line.split("(")[0].split() for line in told.splitlines() if "gateway serve" in line)
    assert parser_for(command[1:]).parse_args(command[1:]).policy == Path("mine.yaml")
    assert cli.main(["init", name, "--out", "-"]) == 0
    assert capsys.readouterr().out.count("\n") == text.count("\n")


def test_what_to_do_next_is_of_the_policy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "one-machine"]) == 0
    told = capsys.readouterr().out
    assert "  sidecar init " in told
    assert "  gateway serve --policy policy.yaml --sidecar sidecar.yaml\n" in told
    assert "sim:2" not in told
    assert cli.main(["init", "demo", "--out", "demo.yaml"]) == 0
    assert "  gateway serve --policy demo.yaml --engine demo" in capsys.readouterr().out


def test_the_help_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [line.split()[0] for line in init.EXAMPLES.split("examples:")[0].splitlines() if line.startswith("  ")]
    assert sorted(listed) == init.names()


@pytest.mark.parametrize(
    ("main", "file"), [(cli.main, "policy.yaml"), (sidecar_cli.main, "sidecar.yaml")], ids=["gateway", "sidecar"]
)
def test_what_is_there_is_left_as_it_is(
    here: Path, capsys: pytest.CaptureFixture[str], main: object, file: str
) -> None:
    (here / file).write_text("mine")
    assert callable(main)
    assert main(["init"]) == 2
    assert f"{file} is there already and is left as it is; give another name: --out FILE" in capsys.readouterr().err
    assert main(["init", "--out", "no/such.yaml"]) == 2
    assert "no/such.yaml: No such file or directory" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in here.iterdir()] == [(file, "mine")]


def test_no_policy_of_that_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "best"]) == 2
    assert "there is no policy 'best'; there are batch-night, default," in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_a_sidecars_file_can_be_begun_with(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert sidecar_cli.main(["init", name]) == 0
    file = here / FILES[name]
    command = capsys.readouterr().out.splitlines()[-1].split(": ")[1].split()
    assert sidecar_cli.main(command[1:]) == 0
    if name != "pool":
        token = here / "sidecar.token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        secret = token.read_text()
        assert len(secret.strip()) >= 40
        assert decode_sidecar(file.read_bytes(), str(file)).token_file == token.name
        file.unlink()
        assert sidecar_cli.main(["init", name]) == 0
        assert token.read_text() == secret
    capsys.readouterr()
    assert sidecar_cli.main(["init", name, "--out", "-"]) == 0
    assert capsys.readouterr().out.startswith("# ")


def test_one_machine_waits_for_a_model_that_loads() -> None:
    policy = decode((init.folder() / "one-machine.yaml").read_bytes())
    assert policy.fleet.sidecars is not None
    for name, each in policy.classes.items():
        assert each.ttft is None, f"{name}: a call for a cold model would be refused for its first token"
        assert each.deadline >= 600
    assert policy.timeouts.first_byte >= 120


def test_both_commands_are_of_one_version() -> None:
    assert gateway.__version__ == sidecar.__version__
