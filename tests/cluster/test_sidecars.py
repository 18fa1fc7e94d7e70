"""A sidecar and a cluster: it is given one member's address, and the leader knows its models."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from loadtest.processes import Child, get, until
from tests.cluster.site import Machine, Site, site
from tests.e2e.children import post
from tests.sidecar.laid_out import lay_out

pytestmark = pytest.mark.slow
GIB = 1024**3
FLEX = {"service_tier": "flex"}  # of a class with the time to wait until a model is awake
SHOWN = "report-token-of-sixteen-characters"
SIDECAR = """\
id: box
gateways: ["%s"]
token_file: report
listen: 127.0.0.1:0
engine_addresses: unix:%s
engine: {simulated: h100-8b}
gpus: all
models:
  one: {model_path: /m/one, gpu_memory: 45%%}
"""


class RunningSidecar:
    """A sidecar of one model on one simulated GPU, whose file names one gateway."""

    def __init__(self, folder: Path, gateway: str) -> None:
        folder.mkdir()
        self._sockets = tempfile.mkdtemp(prefix="weir-")  # a socket's path is short
        (folder / "report").write_text(SHOWN)
        (folder / "report").chmod(0o600)
        (folder / "sidecar.yaml").write_text(SIDECAR % (gateway, Path(self._sockets) / "run"))
        lay_out(folder / "gpus", [80 * GIB])
        argv = [sys.executable, "-m", "sidecar.cli", "serve", "--config", str(folder / "sidecar.yaml"),
                "--gpus-from", str(folder / "gpus"), "--end-engines"]  # fmt: skip
        env = {**os.environ, "WEIR_SIMULATED_SPEED": "20"}
        self.child = Child("sidecar", argv, folder / "sidecar.log", env=env)
        self.control = self.child.line(r"^control API (http://\S+)", 60.0)

    def gateways(self) -> dict[str, Any]:
        """Whether each gateway takes its reports, by URL."""
        found = json.loads(get(f"{self.control}/status", token=SHOWN)[1])["gateways"]
        return {each["url"]: each["taken"] for each in found}

    def close(self) -> None:
        self.child.stop()
        shutil.rmtree(self._sockets, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Site, Machine, Machine, RunningSidecar]]:
    """Two machines, the leader first, and a sidecar that is given the leader's address alone."""
    with site(tmp_path) as made:
        for _ in range(2):
            made.machine(sidecars=SHOWN)
        leader = made.leader()
        (other,) = made.others(leader)
        assert until(lambda: leader.cluster().get("candidates") == [other.member], 60.0) is not None, leader.output
        running = RunningSidecar(tmp_path / "sidecar", leader.gateway.control)
        try:
            yield made, leader, other, running
            assert "Traceback" not in running.child.output(), running.child.output()
        finally:
            running.close()


def models(machine: Machine) -> list[str]:
    found = json.loads(get(f"{machine.gateway.url}/v1/models")[1])["data"]
    return sorted(each["id"] for each in found)


@pytest.mark.parametrize("number", [SIGKILL, SIGSTOP])
def test_a_sidecar_that_knew_one_member_is_heard_by_the_next_leader(
    cluster: tuple[Site, Machine, Machine, RunningSidecar], number: Signals
) -> None:
    _, leader, other, sidecar = cluster
    both = {each.gateway.control: True for each in (leader, other)}
    assert until(lambda: sidecar.gateways() == both, 60.0) is not None, sidecar.child.output()
    leader.signal(number)
    assert until(other.grants, 60.0) is not None, other.output
    chat = {"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | FLEX
    status, _, body = post(f"{other.gateway.url}/v1/chat/completions", chat)
    assert status == 200, body
    assert "one" in models(other)
    only_other = {leader.gateway.control: False, other.gateway.control: True}
    assert until(lambda: sidecar.gateways() == only_other, 60.0) is not None, sidecar.child.output()


def test_a_member_that_leaves_is_reported_to_no_longer_and_a_new_one_is(
    cluster: tuple[Site, Machine, Machine, RunningSidecar],
) -> None:
    made, leader, other, sidecar = cluster
    assert until(lambda: len(sidecar.gateways()) == 2, 60.0) is not None, sidecar.child.output()
    assert other.gateway.child.stop(60.0) == 0, other.output
    assert until(lambda: list(sidecar.gateways()) == [leader.gateway.control], 60.0) is not None, sidecar.child.output()
    third = made.machine(sidecars=SHOWN)
    there = {each.gateway.control: True for each in (leader, third)}
    assert until(lambda: sidecar.gateways() == there, 60.0) is not None, sidecar.child.output()
