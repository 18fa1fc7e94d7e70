"""Permissions of secret files: reported by `check` and `serve`, refused where everybody may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import cli
from gateway.cli import serve
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.decider.file_modes import unwise_of
from gateway.decider.loading import load
from gateway.shared.certificate import Certificate
from gateway.shared.files.checked import InvalidFile

SECRET = "a-secret-that-is-long-enough"  # noqa: S105 # a test's own
POLICY = """\
keys_file: keys.txt
tenants: {anonymous: {}}
fleet:
  engines: [{url: "http://127.0.0.1:9", api_key_file: engine.key}]
  sidecars: {token_file: sidecar.token}
routing: {cache_secret_file: salt}
"""
FIELDS = {
    "keys.txt": "keys_file",
    "engine.key": "fleet.engines[0].api_key_file",
    "sidecar.token": "fleet.sidecars.token_file",
    "salt": "routing.cache_secret_file",
}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy with every file of secrets that there can be, each for its owner alone."""
    for name in FIELDS:
        (tmp_path / name).write_text("" if name == "keys.txt" else SECRET)
        (tmp_path / name).chmod(0o600)
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


def test_every_file_of_a_policy_is_looked_at(policy: Path) -> None:
    assert unwise_of(decode(policy.read_bytes(), "p"), policy.parent) == []
    assert unwise_of(Policy(), policy.parent) == []
    for name in FIELDS:
        (policy.parent / name).chmod(0o660)
    found = unwise_of(decode(policy.read_bytes(), "p"), policy.parent)
    assert len(found) == len(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_file_that_everybody_may_write_to_is_not_used(
    policy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load(policy, Path.read_bytes)
    (policy.parent / name).chmod(0o602)
    with pytest.raises(InvalidFile, match=rf"{name}: everybody on this machine may write to it"):
        load(policy, Path.read_bytes)
    assert cli.main(["check", str(policy)]) == 2
    told = capsys.readouterr().err
    assert f": {FIELDS[name]}: found " in told
    assert f"chmod o-w {policy.parent / name}, expected" in told


@pytest.mark.parametrize("name", FIELDS)
def test_check_tells_of_a_file_that_everybody_may_read(
    policy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(policy)]) == 0
    before = capsys.readouterr().err
    assert "everybody" not in before
    (policy.parent / name).chmod(0o644)
    assert cli.main(["check", str(policy)]) == 0
    told = set(capsys.readouterr().err.splitlines()) - set(before.splitlines())
    (line,) = [line for line in told if "warning: " in line]
    assert f"warning: {FIELDS[name]}: everybody on this machine may read it" in line


def test_serve_tells_of_each(policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "run", lambda options: 0)
    token, key = policy.parent / "token", policy.parent / "tls.key"
    for file in (token, key):
        file.write_text(SECRET)
    flags = ["--admin-token-file", str(token), "--tls-cert", "cert.pem", "--tls-key", str(key)]
    for mode, lines in ((0o600, 0), (0o644, 3)):
        for file in (token, key, policy.parent / "engine.key"):
            file.chmod(mode)
        assert cli.main(["serve", "--policy", str(policy), *flags]) == 0
        told = capsys.readouterr().err
        assert (
            told.count('"level":"warning","event":"configuration"')
            == told.count("everybody on this machine may read it")
            == lines
        )
    token.chmod(0o606)
    assert cli.main(["serve", "--policy", str(policy), *flags]) == 2
    assert f"--admin-token-file {token}: everybody on this machine may write" in capsys.readouterr().err


def test_a_private_key_that_everybody_may_write_to_is_not_used(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.touch()
    chain.chmod(0o602)
    with pytest.raises(ValueError, match="everybody on this machine may write to it"):
        Certificate(chain).context(Path.read_bytes)


def test_a_storage_that_everybody_may_write_to_or_that_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "p.yaml", tmp_path / "kept"
    file.write_text("storage: kept\n")
    assert cli.main(["check", "--strict", str(file)]) == 0  # it is made at the start
    folder.mkdir(mode=0o700)
    assert cli.main(["check", "--strict", str(file)]) == 0
    folder.chmod(0o777)
    assert cli.main(["check", "--strict", str(file)]) == 2
    assert "storage: everybody on this machine may write there" in capsys.readouterr().err
    for name, said in (("none/kept", "is not there, or is no folder"), ("p.yaml", "it is no folder")):
        file.write_text(f"storage: {name}\n")
        assert cli.main(["check", str(file)]) == 2, "`gateway serve` would not start"
        told = capsys.readouterr().err
        assert f"{file}:1:1: storage: it " in told
        assert said in told
        assert cli.main(["check", "--no-files", str(file)]) == 0
