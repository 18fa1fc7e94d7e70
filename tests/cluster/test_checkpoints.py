"""Checkpoints of a cluster, in a real Valkey: what the leader has learned is there for the next one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from gateway.core.cluster.election import Turn
from gateway.serve.cluster import store as module
from gateway.serve.cluster.store import CheckpointStore, StoreError, opened
from loadtest.processes import free_port, until
from tests.cluster.site import Machine, Site, known, site
from tests.cluster.test_cluster import took_over
from tests.cluster.test_store import of
from tests.cluster.valkey import Valkey
from tests.e2e.children import Call
from tests.programs import VALKEY, required

pytestmark = pytest.mark.slow

CALLS = 12
KEY = "weir:{prod}:checkpoint"
LIMITED = "limits: {per_tenant: {requests: {rate: 12/h, burst: 12}}}\n"


def checkpoints_of(url: str, me: str, cluster: str = "prod") -> CheckpointStore:
    return CheckpointStore(opened(url, None), cluster, me)


def test_only_the_leader_saves_and_the_age_is_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(url: str) -> None:
        a, b, store = checkpoints_of(url, "a:1"), checkpoints_of(url, "b:1"), of(url, "a:1")
        assert await a.load() == (b"", 0.0)
        view, _ = await store.turn(Turn(number=1, known=0, candidacy=2, term=0, seen=frozenset()))
        assert view.leader is not None
        epoch = view.leader.epoch
        await b.save(b"of another", epoch)
        await a.save(b"of another epoch", epoch + 1)
        assert await a.load() == (b"", 0.0)
        await a.save(bytes(range(256)), epoch)
        monkeypatch.setattr(module, "KEPT", module.KEPT + 30.0)  # as if it had been kept 30 s ago
        state, passed = await b.load()
        assert state == bytes(range(256))
        assert 30.0 <= passed < 60.0
        for each in (a, b, store):
            await each.aclose()

    required(VALKEY)
    monkeypatch.setattr(module, "TTL", 3600.0)  # the term outlasts the test, however slow the machine is
    for limit in ("WITHIN", "STATE_WITHIN"):
        monkeypatch.setattr(module, limit, 60.0)
    with Valkey(tmp_path / "valkey.log", free_port()) as server:
        asyncio.run(main(server.url))
    with pytest.raises(StoreError):
        asyncio.run(checkpoints_of(server.url, "a:1").load())


@pytest.fixture
def two(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Two machines whose tenants have a limit."""
    with site(tmp_path) as made:
        for _ in range(2):
            made.machine(policy=LIMITED)
        known(made)
        yield made


def used_up(machine: Machine) -> None:
    calls = [Call(machine.gateway.url, stream=True, max_tokens=64) for _ in range(CALLS)]
    assert [call.read()[0] for call in calls] == [200] * CALLS
    assert refused(machine)
    assert until(machine.gateway.idle, 60.0) is not None, "then the last stream has taught it too"


def refused(machine: Machine) -> bool:
    return Call(machine.gateway.url, stream=False).read()[0] == 429


def learned(machine: Machine) -> dict[str, Any]:
    (engine,) = machine.gateway.fleet()["engines"]
    return {name: engine[name] for name in ("prefill_rate", "tpot_s")}


def saved(site: Site, machine: Machine) -> None:
    """Wait until the store has a checkpoint of later than now."""
    asks = redis.Redis(port=site.store.port)
    for _ in range(2):  # the first may have been taken before
        before = asks.get(KEY)
        refused(machine)  # else nothing has changed, and nothing is saved
        assert until(lambda: asks.get(KEY) != before, 60.0) is not None  # noqa: B023 # asked at once
    asks.close()


def test_a_machine_that_dies_leaves_levels_and_rates_to_the_next(two: Site) -> None:
    leader = two.leader()
    (other,) = two.others(leader)
    fresh = learned(other)
    used_up(leader)
    saved(two, leader)
    before = learned(leader)
    assert before["tpot_s"] != fresh["tpot_s"] == learned(other)["tpot_s"]
    leader.signal(signal.SIGKILL)
    took_over(other)
    assert refused(other)
    assert learned(other) == before


def hits(machine: Machine) -> float:
    """Prompt tokens that were expected to be cached, of one more call."""
    gateway = machine.gateway
    calls, before = gateway.total("weir_requests_total"), gateway.total("weir_affinity_tokens_total")
    body = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "a long beginning " * 500}]}
    assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60.0).status_code == 200
    assert until(lambda: gateway.total("weir_requests_total") == calls + 1, 60.0) is not None
    return gateway.total("weir_affinity_tokens_total") - before


def test_prefix_hits_go_on_after_a_machine_has_died(tmp_path: Path) -> None:
    with site(tmp_path) as made:
        for _ in range(2):
            made.machine()
        known(made)
        leader = made.leader()
        (other,) = made.others(leader)
        first, second = hits(leader), hits(leader)
        assert first == 0 < second
        saved(made, leader)
        leader.signal(signal.SIGKILL)
        took_over(other)
        assert hits(other) == pytest.approx(second, rel=0.02)  # prompts are estimated by what was learned


def test_a_state_that_is_none_is_told_and_left_out(two: Site) -> None:
    leader = two.leader()
    (other,) = two.others(leader)
    used_up(leader)
    saved(two, leader)
    leader.signal(signal.SIGKILL)
    with redis.Redis(port=two.store.port) as asks:
        asks.set(KEY, b"no such thing", px=3_600_000)
    took_over(other)
    assert until(lambda: "has learned is left out: it is no checkpoint" in other.output, 60.0) is not None, other.output
    assert not refused(other)
