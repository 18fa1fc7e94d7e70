"""Prompts read on one engine and answered by another, over simulated engines with real sockets; each half that fails.

Whatever fails before the first engine's answer means that the call's own engine reads the prompt. Nothing stays held.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest
import uvloop

from gateway.core.engines import transfer
from gateway.core.policy.policy import Policy, Routing, Timeouts
from gateway.core.request.record import PrefillNote, Record
from gateway.serve.assembly import Gateway
from gateway.shared.protocol import Role
from loadtest.engine.api import side_channel
from loadtest.engine.config import sim_config
from loadtest.engine.faults import Faults
from loadtest.engine.kv_transfer import OnFailure
from loadtest.engine.server import SimServer
from tests.faults.scripted import Answer, ask, gateway_over, port_of, settled

pytestmark = pytest.mark.slow  # sockets and seconds

LONG = "word " * 600
SPEED = 20.0  # of the engines
PATIENT = 60.0  # seconds, more than a machine stands still
Body = Callable[[Gateway, SimServer, SimServer], Awaitable[None]]


def scenario(
    body: Body,
    *,
    roles: tuple[Role, Role] = ("prefill", "decode"),
    on_failure: OnFailure = "fail",
    within: float = 60.0,
) -> None:
    """Run `body` over an engine that reads fast and one that reads slowly. At the end nothing is held anywhere.

    `within`: seconds for the first byte of an engine, and for each next one."""
    timeouts = Timeouts(first_byte=within, stall=within)
    policy = Policy(timeouts=timeouts, routing=Routing(slow_start=0.0, hold_unserved=0.0))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = [
                SimServer(sim_config(models=("m",), speed=SPEED, kv_transfer=True, on_kv_failure=on_failure))
                for _ in roles
            ]
            urls = [await stack.enter_async_context(server) for server in servers]
            gateway = await stack.enter_async_context(gateway_over(urls, policy))
            problems: list[str] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
            for engine, role, rate in zip(gateway.fleet, roles, (50_000.0, 1000.0), strict=True):
                engine.transfers.group, engine.transfers.role = "kv", role
                engine.speed.prefill_rate = rate
                gateway.fleet.has_models(engine, engine.models.values())
            await body(gateway, *servers)
            await settled(gateway)
            for engine in gateway.fleet:
                assert engine.ledger.used.get("default", [0, 0]) == [0, 0]
            await until(
                lambda: not any(server.engine.scheduler.blocks.used or server.transfers.fetching for server in servers)
            )
            assert problems == []

    uvloop.run(main())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still makes no engine that reads too late."""
    monkeypatch.setattr(transfer, "LEAST_WITHIN", PATIENT)


def kept_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt is freed before it is fetched, though the machine stands still."""
    monkeypatch.setattr(side_channel, "KEPT", PATIENT * SPEED)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def post(path: str, fields: dict[str, object]) -> bytes:
    body = json.dumps({"model": "m"} | fields).encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        len(body),
        body,
    )


def chat(text: str = LONG, **more: object) -> bytes:
    return post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 6} | more)


def place(answer: Answer) -> dict[str, str]:
    """The header that says where the prompt was read."""
    where, *rest = answer.headers["x-weir-prefill"].split("; ")
    return {"where": where} | dict(word.split("=") for word in rest)


def records(gateway: Gateway) -> list[Record]:
    """Records of calls that end from now on."""
    found: list[Record] = []
    observe = gateway.pipeline.endings.observe

    def seen(record: Record) -> None:
        found.append(msgspec.structs.replace(record))
        observe(record)

    gateway.pipeline.endings.observe = seen
    return found


MESSAGES = [{"role": "user", "content": LONG}]
ROUTES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 6, "min_tokens": 3},
    "/v1/completions": {"prompt": LONG, "max_tokens": 6},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 6},
    "/v1/responses": {"input": LONG, "max_output_tokens": 6},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_prompt_read_elsewhere_gives_the_answer_of_one_engine(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        said = await ask(port_of(gateway), post(path, ROUTES[path] | {"stream": stream}))
        assert said.status == 200, said.body
        assert place(said) | {"here_ms": "", "there_ms": ""} == {
            "where": "there", "engine": "engine-1", "reason": "sooner", "here_ms": "", "there_ms": "",
        }  # fmt: skip
        assert (reader.engine.kept.fetched, writer.engine.stats.prompt_tokens > 0) == (1, True)
        for engine in gateway.fleet:
            engine.transfers.group = ""
        alone = await ask(port_of(gateway), post(path, ROUTES[path] | {"stream": stream}))
        assert "x-weir-prefill" not in alone.headers
        assert words(said.body) == words(alone.body) != set()

    kept_long(monkeypatch)
    scenario(body)


def words(body: bytes) -> set[bytes]:
    """Words of an answer that do not differ between two calls."""
    return {word for word in body.replace(b'"', b" ").split() if word.isalpha()} - {b"true", b"false", b"null"}


@pytest.mark.parametrize(
    ("faults", "failure"),
    [
        (Faults(transfer="none"), "unreadable"),
        (Faults(transfer="garbage"), "unreadable"),
        (Faults(transfer="another"), "unreadable"),
        (Faults(transfer="stale"), "fetch"),
        (Faults(errors=1.0, status=500), "500"),
        (Faults(errors=1.0, status=429), "429"),
        (Faults(errors=1.0, status=400), "400"),
        (Faults(hang=True), "timeout"),
    ],
)
def test_a_failure_of_the_first_half_means_here_with_the_reason(
    faults: Faults, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        found = records(gateway)
        reader.set_faults(faults)
        said = await ask(port_of(gateway), chat())
        assert (said.status, place(said)["where"], place(said)["failure"]) == (200, "here", failure)
        note = found[0].prefill
        assert isinstance(note, PrefillNote)
        assert (note.is_there, note.failure, note.reason, note.there < note.here) == (False, failure, "sooner", True)
        again = await ask(port_of(gateway), chat("other " * 600))
        shunned = {"where": "here", "reason": "no_engine"}
        assert again.status == 200
        if failure == "400":
            assert place(again)["failure"] == "400", "the request may be at fault, so the engine is asked again"
        elif failure != "fetch":
            assert {name: place(again)[name] for name in shunned} == shunned

    if failure == "timeout":
        monkeypatch.setattr(transfer, "LEAST_WITHIN", 1.0)
    scenario(body, within=5.0 if failure == "timeout" else 60.0)


def test_an_engine_that_is_gone_is_down_and_the_prompt_is_read_here() -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        await reader.stop()
        said = await ask(port_of(gateway), chat(stream=True))
        assert (said.status, place(said)["failure"]) == (200, "connect")
        await until(lambda: [engine.health.up for engine in gateway.fleet] == [False, True])

    scenario(body)


def test_an_engine_that_recomputes_answers_though_it_cannot_fetch() -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        reader.set_faults(Faults(transfer="stale"))
        said = await ask(port_of(gateway), chat(stream=True))
        assert (said.status, place(said)["where"]) == (200, "there")
        assert said.body.count(b"[DONE]") == 1

    scenario(body, on_failure="recompute")


def test_an_engine_that_is_told_of_no_place_to_fetch_from_says_so() -> None:
    async def main() -> None:
        config = sim_config(models=("m",), speed=SPEED, kv_transfer=True, on_kv_failure="fail")
        async with SimServer(config) as url, asyncio.timeout(60):
            params = {"do_remote_prefill": True, "remote_engine_id": "e"}
            assert (await ask(int(url.rpartition(":")[2]), chat(kv_transfer_params=params))).status == 500

    uvloop.run(main())


@pytest.mark.parametrize("stage", ["reading", "fetching", "writing"])
def test_a_client_that_leaves_cancels_both_halves(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        (reader if stage == "reading" else writer).set_faults(Faults(hang=stage != "fetching"))
        _, out = await asyncio.open_connection("127.0.0.1", port_of(gateway))
        out.write(chat())
        busy = {
            "reading": reader.engine.unfinished,
            "fetching": lambda: writer.transfers.fetching,
            "writing": writer.engine.unfinished,
        }[stage]
        await until(busy)
        held = [1, 1] if stage == "reading" else [0, 1]
        await until(lambda: [engine.ledger.in_flight for engine in gateway.fleet] == held)
        out.transport.abort()
        await settled(gateway)
        await until(lambda: not (reader.engine.unfinished() or writer.engine.unfinished() or writer.transfers.fetching))
        writer.set_faults(Faults())

    if stage == "fetching":
        kept_long(monkeypatch)
        monkeypatch.setattr(side_channel, "transfer_seconds", lambda tokens: 1000.0)
    scenario(body)


def test_a_prompt_that_nobody_fetches_is_freed_after_its_time() -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        kept, clock, freed = reader.engine.kept, asyncio.get_running_loop().time, list[float]()
        expire = kept.expire

        def expires(request_id: str) -> None:
            expire(request_id)
            freed.append(clock())

        kept.expire = expires  # type: ignore[method-assign] # to know when: a busy machine may look after it
        began = clock()
        await writer.stop()
        said = await ask(port_of(gateway), chat())
        assert (said.status, said.headers["x-weir-engine"]) == (200, "engine-1"), "nobody else is left"
        assert gateway.decider.up, "balancers send calls on"
        await until(lambda: freed)
        assert freed[0] - began >= side_channel.KEPT / SPEED
        assert (len(kept), kept.fetched, kept.expired) == (0, 0, 1)

    scenario(body)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (chat("short"), "short"),
        (chat(n=2), None),
        (post("/v1/completions", {"prompt": [LONG, LONG], "max_tokens": 3}), None),
        (post("/v1/embeddings", {"input": LONG}), None),
        (post("/v1/completions", {"prompt": LONG, "max_tokens": 3, "echo": True}), "sooner"),
    ],
)
def test_calls_that_one_engine_does_alone(sent: bytes, reason: str | None) -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        said = await ask(port_of(gateway), sent)
        assert said.status == 200, said.body
        assert (
            (place(said)["where"], place(said)["reason"]) == ("here", reason)
            if reason
            else ("x-weir-prefill" not in said.headers)
        )
        assert reader.engine.stats.prompt_tokens == 0

    scenario(body)


def test_an_engine_that_reads_answers_what_the_other_has_no_room_for() -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        slots = [engine.ledger for engine in gateway.fleet][1]
        before, slots.slots = slots.slots, 0
        said = await ask(port_of(gateway), chat(stream=True))
        assert (said.status, said.headers["x-weir-engine"]) == (200, "engine-1")
        assert (reader.engine.kept.fetched, writer.engine.stats.prompt_tokens) == (0, 0)
        slots.slots = before
        assert (await ask(port_of(gateway), chat("short"))).headers["x-weir-engine"] == "engine-2"

    scenario(body)


def test_a_prefill_engine_answers_no_call_while_another_has_room_and_a_client_names_no_blocks() -> None:
    async def body(gateway: Gateway, reader: SimServer, writer: SimServer) -> None:
        refused = await ask(port_of(gateway), chat(kv_transfer_params={"do_remote_prefill": True}))
        assert refused.status == 400
        for number in range(8):
            said = await ask(port_of(gateway), chat(f"{number}"))
            assert said.headers["x-weir-engine"] == "engine-2"
        assert reader.engine.stats.generation_tokens == 0

    scenario(body)
