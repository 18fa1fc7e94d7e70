"""Default token of sidecars, where the policy names no file: beside the policy, or in memory for the demo's."""

from __future__ import annotations

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
from gateway.serve.policy_file import TOKEN_FILE, OwnToken
from tests.serve.test_processes import POLICY, processes

HEARS = Configuration(Policy(fleet=FleetPolicy(sidecars=SidecarsPolicy())))


def test_it_is_made_once_for_its_user_alone_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    own = OwnToken(tmp_path / "policy.yaml", said.append, own=False)
    token = own.complete(HEARS).sidecar_token
    assert own.complete(HEARS).sidecar_token == token == (tmp_path / TOKEN_FILE).read_text().strip()
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
    file = tmp_path / TOKEN_FILE
    assert said == [f"sidecars show a token: {file} was made; a sidecar on this machine names it: token_file: {file}"]
    again = OwnToken(tmp_path / "policy.yaml", said.append, own=False)
    assert again.complete(HEARS).sidecar_token == token, "a restart does not lock its sidecars out"
    assert said[1] == f"sidecars show a token: {file} is theirs"


def test_what_the_policy_says_goes_first(tmp_path: Path) -> None:
    for demo in (False, True):
        own = OwnToken(tmp_path / "policy.yaml", print, own=demo)
        assert own.complete(Configuration(HEARS.policy, {}, "of the policy")).sidecar_token == "of the policy"  # noqa: S105 # a test's own
    assert OwnToken(tmp_path / "p.yaml", print, own=False).complete(Configuration()) == Configuration()
    assert not list(tmp_path.iterdir())


def test_one_that_others_can_read_or_that_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    own = OwnToken(tmp_path / "policy.yaml", print, own=False)
    file = tmp_path / TOKEN_FILE
    good = "0123456789abcdef0123"
    file.write_text(good)
    file.chmod(0o644)
    with pytest.raises(LoadError, match="expected a file of this user's alone: chmod 600"):
        own.complete(HEARS)
    file.chmod(0o600)
    assert own.complete(HEARS).sidecar_token == good
    file.write_text("short")
    with pytest.raises(LoadError, match="expected one token of at least 16 visible ASCII characters"):
        own.complete(HEARS)
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(LoadError, match="name a token_file"):
        own.complete(HEARS)


def test_where_it_cannot_be_made_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    own = OwnToken(tmp_path / "absent" / "policy.yaml", said.append, own=False)
    assert own.complete(HEARS) == own.complete(HEARS) == HEARS, "the gateway starts, and hears no sidecar"
    assert len(said) == 1
    with pytest.raises(LoadError, match="No such file or directory: name a token_file"):
        OwnToken(tmp_path / "absent" / "policy.yaml", said.append, own=True).complete(HEARS)
    assert "(No such file or directory): no sidecar is heard; name a token_file" in said[0]


def test_in_a_cluster_it_is_not_made_for_one_member(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = ClusterPolicy(url="valkey://10.0.0.5:6379/0", name="prod", token_file="t")  # noqa: S106 # a file's name
    of_a_cluster = Configuration(msgspec.structs.replace(HEARS.policy, cluster=cluster))
    own = OwnToken(tmp_path / "policy.yaml", said.append, own=False)
    assert own.complete(of_a_cluster) == own.complete(of_a_cluster) == of_a_cluster
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
