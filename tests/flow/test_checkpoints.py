"""Checkpoints of a decider with relays: what its successor goes on with, and what it does not count twice."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from gateway.core.checkpoint import BLOCK, CheckpointError, decoded, encoded
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Limit, Limits, RateLimit, TokenQuota
from gateway.core.policy.types import Rate
from gateway.core.request.outcome import Refused
from gateway.core.sidecars.sidecar import Member
from gateway.decider import checkpoint
from gateway.serve.assembly import Gateway
from gateway.serve.processes.deciding import SavedCheckpoint, read_state, write
from tests.calls import a_call
from tests.faults.scripted import gateway_over
from tests.flow.test_relays import ENGINES, Asking, Setting, run, until
from tests.over_frames import hub_of

THREE = Policy(limits=Limits(per_tenant=Limit(requests=RateLimit(rate=Rate(3, 3600.0)))))


def test_calls_that_waited_are_charged_once_and_those_that_ran_stay_charged() -> None:
    async def body(made: Setting) -> None:
        decider = await made.relay()
        calls = [Asking(made, decider, f"r{number}") for number in range(3)]
        await until(lambda: sum(each.granted.is_set() for each in calls) == 2 and list(made.hub.ungranted))
        state, changes = made.gateway.checkpoints.take(made.hub.ungranted), made.hub.changes
        assert changes == 3
        await made.dies()
        async with gateway_over(ENGINES, THREE) as after:
            after.checkpoints.restore(state, 0.5)
            next(iter(after.fleet)).ledger.slots = 2
            made.hub, made.dead = hub_of(after, 2, {1: os.getpid()}), False
            for each in calls:
                each.leave.set()
            await asyncio.gather(*[each.task for each in calls])
            with pytest.raises(Refused, match="limit"):
                await Asking(made, decider, "r4").task
            await made.hub.aclose()

    run(body, THREE)


def test_a_quota_counts_what_runs_over_a_deciders_death_at_what_it_really_used() -> None:
    quota = Policy(limits=Limits(quota=TokenQuota(day=10**6)), storage="k")

    def counts(gateway: Gateway) -> tuple[int, int]:
        window = gateway.limits.quotas.of("anonymous")[0]
        return window.used(gateway.clock()), window.reserved

    async def body(made: Setting) -> None:
        decider = await made.relay()
        ended = Asking(made, decider, "r0")
        await ended.granted.wait()
        await ended.end()
        calls = [Asking(made, decider, f"r{number}") for number in range(1, 4)]
        await until(lambda: sum(each.granted.is_set() for each in calls) == 2 and list(made.hub.ungranted))
        assert counts(made.gateway)[0] == 10
        each = counts(made.gateway)[1] // 3
        state = made.gateway.checkpoints.take(made.hub.ungranted)
        await made.dies()
        async with gateway_over(ENGINES, quota) as after:
            after.checkpoints.restore(state, 0.5)
            next(iter(after.fleet)).ledger.slots = 2
            made.hub, made.dead = hub_of(after, 2, {1: os.getpid()}), False
            await until(lambda: counts(after) == (10, 3 * each))
            for call in calls:
                call.leave.set()
            await asyncio.gather(*[call.task for call in calls])
            await until(lambda: counts(after) == (40, 0))
            await made.hub.aclose()

    run(body, quota)


def test_an_engine_that_a_sidecar_brings_later_goes_on_too() -> None:
    async def body(made: Setting) -> None:
        made.engine.speed.prefill_rate = 1234.0
        state = made.gateway.checkpoints.take()
        async with gateway_over([], None) as after:
            after.checkpoints.restore(state, 0.0)
            member = Member(
                id=made.engine.id, url=made.engine.url, sidecar="s", profile="p", served=("m",), open=True,
                kv_tokens=None, context_length=None, max_concurrency=None,
            )  # fmt: skip
            after.engines.join(member)
            assert after.fleet.engines[member.id].speed.prefill_rate == 1234.0

    run(body)


def test_an_engine_that_its_sidecar_puts_to_sleep_gets_no_calls_as_an_operators_drain_is_over() -> None:
    """The operator's drain dates from when this member led, and another member lifted it."""

    async def body(made: Setting) -> None:
        state = made.gateway.checkpoints.take()
        async with gateway_over([], None) as after:
            member = Member(
                id=made.engine.id, url=made.engine.url, sidecar="s", profile="p", served=("m",), open=True,
                kv_tokens=None, context_length=None, max_concurrency=None,
            )  # fmt: skip
            after.engines.join(member)
            engine = after.fleet.engines[member.id]
            after.engines.drain(engine, True)
            after.engines.update(msgspec.structs.replace(member, open=False))
            after.checkpoints.restore(state, 0.0)
            assert (engine.drained, engine.draining) == (False, True)
            after.engines.update(member)
            assert not engine.draining

    run(body)


@pytest.mark.parametrize(("key", "kept"), [(0, 1), (1, 0)])
def test_places_are_left_out_where_hashes_have_another_key(
    monkeypatch: pytest.MonkeyPatch, key: int, kept: int
) -> None:
    async def body(made: Setting) -> None:
        now = made.gateway.clock()
        made.gateway.dispatch.control.workload.open("m", now)[1].bookings["default"].book(a_call(), 5.0, now)
        state = made.gateway.checkpoints.take()
        async with gateway_over(ENGINES) as after:
            monkeypatch.setattr(checkpoint, "HASHES", checkpoint.HASHES + key)
            after.checkpoints.restore(state, 0.0)
            assert len(after.dispatch.traffic["m"].bookings["default"]) == kept

    run(body)


@pytest.mark.parametrize(("key", "hits"), [(0, 3), (1, 0)])
def test_hits_go_on_after_a_decider_has_died(monkeypatch: pytest.MonkeyPatch, key: int, hits: int) -> None:
    async def body(made: Setting) -> None:
        now = made.gateway.clock()
        made.engine.remember((1, 2, 3), 500, now)
        state = made.gateway.checkpoints.take()
        async with gateway_over(ENGINES) as after:
            monkeypatch.setattr(checkpoint, "HASHES", checkpoint.HASHES + key)
            after.checkpoints.restore(state, 0.5)
            assert after.fleet.engines[made.engine.id].cache.leading((1, 2, 3, 4)) == hits

    run(body)


def test_a_fleets_indexes_share_what_a_checkpoint_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(made: Setting) -> None:
        monkeypatch.setattr(checkpoint, "MOST_PREFIXES", 8)
        for engine in made.gateway.fleet:
            engine.remember(tuple(range(9)), 1000, 0.0)
        each = 8 // len(ENGINES)
        saved = decoded(made.gateway.checkpoints.take()).engines
        assert [len(engine.prefixes.blocks) // BLOCK for engine in saved] == [each] * len(ENGINES)

    run(body)


def test_what_cannot_be_read_changes_nothing() -> None:
    async def body(made: Setting) -> None:
        before = decoded(made.gateway.checkpoints.take())
        with pytest.raises(CheckpointError):
            made.gateway.checkpoints.restore(encoded(before)[:-1], 0.0)
        assert decoded(made.gateway.checkpoints.take()).engines == before.engines

    run(body)


def test_a_state_file_has_its_age_and_garbage_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "state"
    assert read_state(file, 9.0) == (b"", 0.0)
    write(file, SavedCheckpoint(5.0, b"abc"))
    assert read_state(file, 9.0) == (b"abc", 4.0)
    file.write_bytes(b"\xc1")
    assert read_state(file, 9.0) == (b"\xc1", 0.0)
