"""GET /fleet: the engines' state, for a load balancer above the gateway."""

from __future__ import annotations

import asyncio

import pytest

from gateway.control.view import COST, PROMPT
from gateway.core.engines.breaker import BreakerState, Ending
from gateway.core.policy.policy import Policy
from gateway.core.request.outcome import Refused
from gateway.shared.vllm.answers import EngineSample
from tests.calls import a_call
from tests.control.parts import Parts, play


def test_it_tells_what_is_known_and_promised() -> None:
    async def scene(gateway: Parts) -> None:
        now = asyncio.get_running_loop().time()
        engine = gateway.up("e1")
        sample = EngineSample(running=2, waiting=0, kv_usage=0.1, capacity_tokens=10_000)
        engine.sampled(sample, now - 0.5)
        hold = engine.hold(3000, 2000, now)
        view = (await gateway.get("/fleet")).json()
        first, second = view["engines"]
        assert (first["up"], first["running"], first["sample_age_s"], first["models"]) == (False, None, None, [])
        assert (first["state"], first["checked_s"], first["last_error"]) == ("not asked yet", None, None)
        assert 0.5 <= second.pop("sample_age_s") < 30
        assert 0.0 <= second.pop("checked_s") < 30
        assert second == {
            "id": "e1",
            "name": "e1",
            "alias": "engine-2",
            "outage_s": None,
            "url": "http://127.0.0.1:2",
            "up": True,
            "draining": False,
            "breaker": "closed",
            "state": "up",
            "last_error": None,
            "last_error_s": None,
            "models": ["m"],
            "capacity_tokens": 10_000,
            "budget_tokens": 8000,
            "held_tokens": 3000,
            "trim": 1.0,
            "in_flight": 1,
            "slots": 256,
            "prefill_rate": 10_000.0,
            "tpot_s": 0.03,
            "running": 2,
            "waiting": 0,
            "kv_usage": 0.1,
        }
        (model,) = view["models"]
        spare = 8000 - 3000 - engine.ledger.excess
        # 2,000 prompt tokens ahead and 500 of its own.
        assert model.pop("predicted_ttft_s") == pytest.approx(engine.speed.tpot + 2500 / 10_000, abs=0.001)
        assert model == {
            "id": "m",
            "max_model_len": 4096,
            "mode": "normal",
            "engines": ["e1"],
            "headroom_calls": spare // COST,
            "engines_wanted": 0,
            "spare_tokens": spare,
            "queued_calls": 0,
            "queued_tokens": 0,
            "wait_s": 0.0,
            "wait_s_by_class": dict.fromkeys(Policy().classes, 0.0),
        }
        assert view["queues"] == []
        assert view["running"] == dict.fromkeys(Policy().classes, 0)
        assert view["draining"] is False
        hold.release()

    play(scene)


def test_the_best_engine_s_prediction_and_everyone_s_room() -> None:
    async def scene(gateway: Parts) -> None:
        now = asyncio.get_running_loop().time()
        busy, idle = gateway.up("e0"), gateway.up("e1")
        hold = busy.hold(50_000, 20_000, now)
        (model,) = (await gateway.get("/fleet")).json()["models"]
        assert model["predicted_ttft_s"] == idle.speed.tpot + PROMPT / 10_000
        assert model["headroom_calls"] == (80_000 - 50_000) // COST + 80_000 // COST
        idle.ledger.slots = 3
        (model,) = (await gateway.get("/fleet")).json()["models"]
        assert model["headroom_calls"] == 30 + 3
        busy.ledger.slots = 0  # what was learned may be below what is in flight
        (model,) = (await gateway.get("/fleet")).json()["models"]
        assert model["headroom_calls"] == 3
        hold.release()

    play(scene)


def test_an_engine_that_reads_for_others_is_told_only_where_nobody_else_is_up() -> None:
    async def scene(gateway: Parts) -> None:
        for name, role in (("e0", "prefill"), ("e1", "decode")):
            gateway.dispatch.fleet.take_role(gateway.up(name), "kv", role)
        gateway.dispatch.control.workload.open("m", asyncio.get_running_loop().time() - 10.0)
        (model,) = (await gateway.get("/fleet")).json()["models"]
        assert (model["engines"], model["engines_wanted"]) == (["e1"], 1)
        gateway.dispatch.fleet.engines["e1"].down()
        (model,) = (await gateway.get("/fleet")).json()["models"]
        assert model["engines"] == ["e0"]

    play(scene)


@pytest.mark.parametrize("closed", ["down", "draining", "breaker"])
def test_an_engine_that_gets_no_calls_is_no_room(closed: str) -> None:
    async def scene(gateway: Parts) -> None:
        now = asyncio.get_running_loop().time()
        engine = gateway.up("e0")
        if closed == "down":
            engine.down()
        elif closed == "draining":
            engine.draining = True
        else:
            for _ in range(Policy().breaker.failures):
                engine.breaker.ended(engine.breaker.sent(now), Ending.FAILURE, now)
        view = (await gateway.get("/fleet")).json()
        (model,) = view["models"]
        assert (model["engines"], model["predicted_ttft_s"], model["headroom_calls"]) == ([], None, 0)
        assert model["spare_tokens"] == 0
        told = view["engines"][0]
        assert (told["up"], told["draining"], told["breaker"]) == (
            closed != "down",
            closed == "draining",
            "open" if closed == "breaker" else "closed",
        )

    play(scene)


def test_looking_does_not_move_a_breaker() -> None:
    async def scene(gateway: Parts) -> None:
        long_ago = asyncio.get_running_loop().time() - 100.0
        breaker = gateway.up("e0").breaker
        for _ in range(Policy().breaker.failures):
            breaker.ended(breaker.sent(long_ago), Ending.FAILURE, long_ago)
        assert (await gateway.get("/fleet")).json()["engines"][0]["breaker"] == "open"
        assert breaker.state is BreakerState.OPEN

    play(scene)


def test_waits_follow_the_queue_and_its_order() -> None:
    async def scene(gateway: Parts) -> None:
        loop = asyncio.get_running_loop()
        engine = gateway.up("e1")
        engine.ledger.slots = 1
        now = loop.time()

        async def waits(name: str) -> None:
            call = a_call(class_name=name, tenant="acme", deadline=now + 1000.0, prompt_tokens=10_000, output_tokens=0)
            with pytest.raises(Refused):  # at the drain that ends the scene
                await gateway.dispatch.enter(call, frozenset())

        with await gateway.dispatch.ask(a_call(deadline=now + 1000.0, prompt_tokens=100)):
            drain = gateway.dispatch.traffic["m"].drain
            drain.taken(1_000_000)
            drain.returned("default", 1_000_000, 1.0, loop.time())
            drain.advance(loop.time() + 1.0)
            waiting = [asyncio.ensure_future(waits("batch")) for _ in range(4)]
            await asyncio.sleep(0)
            view = (await gateway.get("/fleet")).json()
            (model,) = view["models"]
            assert (model["queued_calls"], model["queued_tokens"]) == (4, 40_000)
            assert model["wait_s"] > 0
            by_class = model["wait_s_by_class"]
            assert by_class["batch"] > by_class["interactive"] >= 0.0, "interactive goes before most of batch's work"
            # Nobody of `default` waits, who has had everything: four fifths go on being theirs, by weight.
            assert by_class["batch"] > 5 * 40_000 / 1_000_000, "one more call of its tenant goes after its others"
            assert {"model": "m", "class": "batch", "calls": 4, "tokens": 40_000} in view["queues"]
            assert view["running"]["default"] == 1
            gateway.dispatch.refuse_waiting()
            await asyncio.gather(*waiting)

    play(scene)


def test_the_mode_is_told() -> None:
    async def scene(gateway: Parts) -> None:
        loop = asyncio.get_running_loop()
        engine = gateway.up("e1")
        with await gateway.dispatch.ask(a_call(deadline=loop.time() + 1000.0, prompt_tokens=100)):
            engine.sampled(EngineSample(running=2, waiting=50, kv_usage=0.5), loop.time())
            gateway.dispatch.traffic["m"].step([engine], loop.time())
            (model,) = (await gateway.get("/fleet")).json()["models"]
            assert model["mode"] == "tight"

    play(scene)
