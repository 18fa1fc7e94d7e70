"""Models that are remembered over a restart: what the file holds, and files that cannot be used."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.decider.known_models import KnownModels, file_for


def known(file: Path) -> tuple[KnownModels, list[str]]:
    said: list[str] = []
    return KnownModels(file, said.append), said


def test_names_are_there_again_and_are_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "policy.models.json"
    before, said = known(file)
    assert before.read() == frozenset()
    before.keep(frozenset({"b", "a"}))
    before.keep(frozenset({"b", "a"}))
    after, _ = known(file)
    assert after.read() == {"a", "b"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    assert said == []


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "models": [1]}', "\x80"])
def test_what_is_no_such_file_is_told_once_and_nothing_is_remembered(tmp_path: Path, text: str) -> None:
    file = tmp_path / "policy.models.json"
    file.write_bytes(text.encode("latin-1"))
    models, said = known(file)
    assert models.read() == models.read() == frozenset()
    assert len(said) == 1
    assert said[0].endswith(": no model is remembered")


def test_another_versions_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "policy.models.json"
    file.write_text('{"version": 2, "models": ["a"]}')
    assert known(file)[0].read() == frozenset()


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    models, said = known(tmp_path / "absent" / "policy.models.json")
    models.keep(frozenset({"a"}))
    models.keep(frozenset({"b"}))
    assert len(said) == 1
    assert "a restart forgets the models of sidecars" in said[0]


def test_the_file_is_in_the_services_own_folder_or_beside_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert file_for(Path("/etc/weir/policy.yaml")) == Path("/etc/weir/policy.models.json")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/weir:/var/lib/more")
    assert file_for(Path("/etc/weir/policy.yaml")) == Path("/var/lib/weir/policy.models.json")
