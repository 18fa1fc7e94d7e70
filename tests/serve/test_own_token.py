"""Default token of sidecars, where the policy names no file: beside the policy, or in memory for the demo's."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from pathlib import Path

import httpx
import msgspec
import pytest

from gateway.core.policy.cluster import ClusterPolicy
from gateway.core.policy.policy import FleetPolicy, Policy, SidecarsPolicy
from gateway.decider.loading import Configuration, LoadError
from gateway.serve.policy_file import TOKEN_FILE, OwnToken, first_read
from gateway.serve.starting import StartError
from tests.serve.test_processes import POLICY, processes

HEARS = Configuration(Policy(fleet=FleetPolicy(sidecars=SidecarsPolicy())))


def completed(own: OwnToken) -> Configuration:
    return own.complete(HEARS, Path.read_bytes)


def test_it_is_made_once_for_its_user_alone_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    own = OwnToken(tmp_path / "policy.yaml", said.append, own=False)
    tokens = completed(own).sidecar_tokens
    assert completed(own).sidecar_tokens == tokens == ((tmp_path / TOKEN_FILE).read_text().strip(),)
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
    file = tmp_path / TOKEN_FILE
    assert said == [f"sidecars show a token: {file} was made; a sidecar on this machine names it: token_file: {file}"]
    again = OwnToken(tmp_path / "policy.yaml", said.append, own=False)
    assert completed(again).sidecar_tokens == tokens, "a restart does not lock its sidecars out"
    assert said[1] == f"sidecars show a token: {file} is theirs"


def test_what_the_policy_says_goes_first(tmp_path: Path) -> None:
    for demo in (False, True):
        own = OwnToken(tmp_path / "policy.yaml", print, own=demo)
        named = Configuration(HEARS.policy, {}, ("of the policy",))
        assert own.complete(named, Path.read_bytes) == named
    assert OwnToken(tmp_path / "p.yaml", print, own=False).complete(Configuration(), Path.read_bytes) == Configuration()
    assert not list(tmp_path.iterdir())


def test_one_that_others_can_read_or_that_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    own = OwnToken(tmp_path / "policy.yaml", print, own=False)
    file = tmp_path / TOKEN_FILE
    good = "0123456789abcdef0123"
    file.write_text(good)
    file.chmod(0o644)
    with pytest.raises(LoadError, match="expected a file of this user's alone: chmod 600"):
        completed(own)
    file.chmod(0o600)
    assert completed(own).sidecar_tokens == (good,)
    file.write_text("short")
    with pytest.raises(LoadError, match="a token is at least 16 visible ASCII characters"):
        completed(own)
    file.unlink()
    with pytest.raises(LoadError, match="No such file or directory"):  # sidecars have it: another one is not made
        completed(own)
    file.symlink_to("/etc/hostname")
    with pytest.raises(LoadError, match="name a token_file"):
        completed(own)


def test_where_it_cannot_be_made_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    own = OwnToken(tmp_path / "absent" / "policy.yaml", said.append, own=False)
    assert completed(own) == completed(own) == HEARS, "the gateway starts, and hears no sidecar"
    assert len(said) == 1
    with pytest.raises(LoadError, match="No such file or directory: name a token_file"):
        OwnToken(tmp_path / "absent" / "policy.yaml", said.append, own=True).complete(HEARS, Path.read_bytes)
    assert "(No such file or directory): no sidecar is heard; name a token_file" in said[0]


def test_in_a_cluster_it_is_not_made_for_one_member(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = ClusterPolicy(url="valkey://10.0.0.5:6379/0", name="prod", token_file="t")  # noqa: S106 # a file's name
    of_a_cluster = Configuration(msgspec.structs.replace(HEARS.policy, cluster=cluster))
    own = OwnToken(tmp_path / "policy.yaml", said.append, own=False)
    assert own.complete(of_a_cluster, Path.read_bytes) == own.complete(of_a_cluster, Path.read_bytes) == of_a_cluster
    assert not list(tmp_path.iterdir())
    assert len(said) == 1
    assert "no sidecar is heard; name one, with the same token for all members" in said[0]


@pytest.mark.slow
def test_a_decider_of_relays_makes_it_too_and_its_successor_uses_it(tmp_path: Path) -> None:
    with processes(tmp_path, policy=POLICY.replace("health: 20s", "health: 20s, sidecars: {}")) as made:
        token = (tmp_path / TOKEN_FILE).read_text().strip()
        report = f"{made.gateway.control}/sidecars/report"
        assert httpx.post(report, headers={"authorization": "Bearer another"}, timeout=60.0).status_code == 401
        shown = {"authorization": f"Bearer {token}"}
        assert httpx.post(report, headers=shown, timeout=60.0).status_code == 400, "it is heard, and is no report"
        pid = made.pid("decider")
        os.kill(pid, signal.SIGKILL)
        made.replaced("decider", pid)
        assert httpx.post(report, headers=shown, timeout=60.0).status_code == 400


@pytest.mark.parametrize("named", [True, False])
def test_its_file_is_watched_also_where_there_is_no_policy(tmp_path: Path, named: bool) -> None:
    """Else sidecars that read it anew would show a token that the gateway does not know."""
    policy, said = tmp_path / "policy.yaml", list[str]()
    policy.write_text("fleet: {sidecars: {}}\n")
    own = OwnToken(policy, said.append, own=not named)
    watched, before = first_read(policy if named else None, said.append, complete=own.complete, token=own.file)
    assert watched is not None
    applied: list[tuple[str, ...]] = []

    async def main() -> None:
        watched.start(lambda loaded: applied.append(loaded.sidecar_tokens))
        (tmp_path / TOKEN_FILE).write_text(f"{before.sidecar_tokens[0]}\nof-sixteen-characters\n")
        async with asyncio.timeout(60):
            while not applied:
                await asyncio.sleep(0.01)
        await watched.aclose()

    asyncio.run(main())
    assert applied == [(*before.sidecar_tokens, "of-sixteen-characters")]
    assert "version 2 is active" in said[-1]


def test_a_file_that_others_can_read_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("fleet: {sidecars: {}}\n")
    (tmp_path / TOKEN_FILE).write_text("0123456789abcdef0123")
    (tmp_path / TOKEN_FILE).chmod(0o644)
    own = OwnToken(tmp_path / "policy.yaml", print, own=False)
    with pytest.raises(StartError, match="expected a file of this user's alone: chmod 600"):
        first_read(tmp_path / "policy.yaml", print, complete=own.complete)
