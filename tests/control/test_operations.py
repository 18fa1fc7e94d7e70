"""Operations of the control port: /calls, /status, /drain and /engines/{id}/drain."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest

from gateway.control.calls import SHOWN, CallView, active_calls
from gateway.core.engines.engine import Engine
from gateway.core.policy.policy import Policy
from gateway.core.policy.routes import Mirror, ModelRoute, RouteMember
from gateway.core.request.record import Record
from gateway.relay.active_call import ActiveCall
from gateway.shared.files.file_status import FileStatus
from tests.calls import a_call
from tests.control.parts import Parts, play


def view(number: int, **fields: object) -> CallView:
    return CallView(**{  # type: ignore[arg-type] # a table of what differs
        "request_id": f"r{number}", "tenant": "acme", "class_name": "default", "model": "m", "engine": None,
        "state": "queued", "age_s": float(number), "deadline_s": 10.0, "held_tokens": 7, "attempts": 0,
    } | fields)  # fmt: skip


CALLS = [
    view(2),
    view(1, class_name="batch", state="running", engine="e0"),
    view(3, model="other/m:x", state="streaming"),
]


def test_a_call_in_full() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/calls")).json()["calls"] == [
            {
                "request_id": "r1",
                "tenant": "acme",
                "class": "batch",
                "model": "m",
                "engine": "e0",
                "state": "running",
                "age_s": 1.0,
                "deadline_s": 10.0,
                "held_tokens": 7,
                "attempts": 0,
            }
        ]

    play(scene, calls=lambda: CALLS[1:2])


@pytest.mark.parametrize("asked", ["/calls?class=batch", "/calls?state=lost", "/policy?format=json"])
def test_a_query_that_is_none_is_refused(asked: str) -> None:
    async def scene(gateway: Parts) -> None:
        refused = await gateway.get(asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_query")

    play(scene, calls=lambda: CALLS)


def test_calls_are_bounded() -> None:
    async def scene(gateway: Parts) -> None:
        told = (await gateway.get("/calls")).json()
        assert told["total"] == SHOWN + 500
        assert [call["request_id"] for call in told["calls"]] == [f"r{number}" for number in range(SHOWN)]

    play(scene, calls=lambda: map(view, reversed(range(SHOWN + 500))))


def test_the_status_has_what_the_first_page_shows_by_kind_and_name() -> None:
    async def scene(gateway: Parts) -> None:
        gateway.up("e0")
        found = (await gateway.get("/status")).json()
        kinds = {"gateway", "policy", "headline", "at", "classes", "models", "engines", "sidecars", "tenants", "limits"}
        assert set(found) == kinds | {"providers", "mirrors"}
        assert found["policy"]["version"] == 5
        assert found["engines"]["e0"]["state"] == "up"
        assert list(found["classes"]) == list(gateway.dispatch.policy.classes)
        assert found["sidecars"] == {}
        assert {name: mirror["model"] for name, mirror in found["mirrors"].items()} == {"support": "m1", "help": "m2"}

    mirrors = {"support": Mirror(model="m1", share=0.1), "help": Mirror(model="m2", share=0.1)}
    routes = {name: ModelRoute(members=(RouteMember(model="m"),), mirror=mirror) for name, mirror in mirrors.items()}
    play(scene, policy=Policy(models=routes), policy_status=lambda: FileStatus(version=5))


# -- the drain of the gateway -----------------------------------------------------------------------------------------


def test_drain_and_back() -> None:
    async def scene(gateway: Parts) -> None:
        gateway.up("e0")
        assert (await gateway.get("/drain")).json() == {
            "draining": False,
            "running_calls": 0,
            "queued_calls": 0,
            "draining_engines": [],
        }
        assert (await gateway.get("/readyz")).status_code == 200
        with await gateway.dispatch.ask(a_call(deadline=asyncio.get_running_loop().time() + 100.0)):
            answer = await gateway.post("/drain")
            assert (answer.status_code, answer.json()["draining"], answer.json()["running_calls"]) == (200, True, 1)
        ready = await gateway.get("/readyz")
        assert (ready.status_code, ready.text) == (503, "drained by an operator\n")
        assert (await gateway.get("/livez")).status_code == 200
        assert (await gateway.get("/fleet")).json()["draining"] is True
        assert (await gateway.get("/drain")).json()["draining"] is True
        with await gateway.dispatch.ask(a_call(deadline=asyncio.get_running_loop().time() + 100.0)):
            pass  # calls are still taken: only balancers are told
        answer = await gateway.ask("DELETE", "/drain")
        assert (answer.status_code, answer.json()["draining"]) == (200, False)
        assert (await gateway.get("/readyz")).status_code == 200

    play(scene)


def test_the_end_of_the_process_is_not_called_back() -> None:
    async def scene(gateway: Parts) -> None:
        await gateway.post("/drain")
        gateway.dispatch.refuse_waiting()
        answer = await gateway.ask("DELETE", "/drain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "shutting_down")
        assert (await gateway.get("/readyz")).text == "shutting down\n"
        assert (await gateway.post("/drain")).status_code == 200

    play(scene)


def test_whoever_is_told_to_drain_decides() -> None:
    asked = []

    async def scene(gateway: Parts) -> None:
        assert (await gateway.post("/drain")).status_code == 409
        assert (await gateway.ask("DELETE", "/drain")).status_code == 200

    play(scene, drain=asked.append)
    assert asked == [True, False]


# -- the drain of an engine -------------------------------------------------------------------------------------------


def test_an_engine_gets_no_new_calls_and_ends_those_it_has() -> None:
    async def scene(gateway: Parts) -> None:
        loop = asyncio.get_running_loop()
        engine = gateway.up("e0")
        call = a_call(deadline=loop.time() + 100.0)
        with await gateway.dispatch.ask(call):
            answer = await gateway.post("/engines/e0/drain")
            assert answer.json() == {"engine": "e0", "draining": True, "in_flight": 1}
            assert (await gateway.get("/drain")).json()["draining_engines"] == ["e0"]
            assert gateway.dispatch.at_once(call) is None
            assert engine.ledger.in_flight == 1
        assert (await gateway.get("/engines/e0/drain")).json() == {"engine": "e0", "draining": True, "in_flight": 0}
        answer = await gateway.ask("DELETE", "/engines/e0/drain")
        assert answer.json()["draining"] is False
        with await gateway.dispatch.ask(call) as grant:
            assert grant.engine is engine

    play(scene)


def test_what_waits_goes_when_an_engine_is_back() -> None:
    async def scene(gateway: Parts) -> None:
        loop = asyncio.get_running_loop()
        first = gateway.up("e0")
        gateway.up("e1")
        first.ledger.slots = 1
        await gateway.post("/engines/e1/drain")

        async def one() -> str:
            with await gateway.dispatch.ask(a_call(deadline=loop.time() + 100.0)) as grant:
                return grant.engine.id

        with await gateway.dispatch.ask(a_call(deadline=loop.time() + 100.0)):
            waiting = asyncio.ensure_future(one())
            await asyncio.sleep(0)
            assert not waiting.done()
            await gateway.ask("DELETE", "/engines/e1/drain")
            assert await asyncio.wait_for(waiting, 10.0) == "e1"

    play(scene)


@pytest.mark.parametrize("id", ["/run/vllm/b.sock", "10.0.0.11:8000", "h:1/a b"])
@pytest.mark.parametrize("safe", ["", "/:"])
def test_ids_are_addresses_and_paths(id: str, safe: str) -> None:

    async def scene(gateway: Parts) -> None:
        gateway.fleet.add(Engine(id, "unix:///run/vllm/b.sock", gateway.dispatch.policy))
        answer = await gateway.post(f"/engines/{quote(id, safe=safe)}/drain")
        assert (answer.status_code, answer.json()) == (200, {"engine": id, "draining": True, "in_flight": 0})

    play(scene)


@pytest.mark.parametrize("id", ["e9", "", "e0/drain", "%00"])
def test_an_engine_that_is_not_there(id: str) -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.post(f"/engines/{id}/drain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "engine_not_found")

    play(scene)


def test_an_engine_that_leaves_for_good_is_not_called_back() -> None:
    def refuses(engine: Engine, wanted: bool) -> None:
        engine.draining = True

    async def scene(gateway: Parts) -> None:
        assert (await gateway.post("/engines/e0/drain")).status_code == 200
        answer = await gateway.ask("DELETE", "/engines/e0/drain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "engine_retired")

    play(scene, drain_engine=refuses)


def test_a_running_call_names_its_engine_as_everything_else_does() -> None:
    live = [ActiveCall(Record(request_id=engine, route="/", engine=engine)) for engine in ("10.0.0.1:8000", "e2", "")]
    for each in live:
        each.call = a_call()
    found = [call.engine for call in active_calls(live, {"10.0.0.1:8000": "left"}, 1.0)]
    assert found == ["left", "e2", None]
