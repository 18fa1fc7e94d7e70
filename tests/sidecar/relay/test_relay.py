"""Relay over real sockets: tokens, refusals, streams, cancels, engines that fail, TLS; nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from gateway.core.policy.policy import FleetPolicy, Policy, SidecarsPolicy
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.shared.protocol import CapacityReport, ModelReport, encode, ensured
from gateway.shared.tokens import AcceptedTokens
from gateway.upstream.client import Client, ClientSettings, EngineError, Reply, parse_origin
from gateway.upstream.trust import Trust
from sidecar.core.addresses import Address
from sidecar.core.config import RelaySettings
from sidecar.relay.relay import Relay, RelayedEngine
from tests.faults.scripted import DONE, EVENT, ScriptedEngine
from tests.wire.test_server_seats import made

TOKEN = "of-sixteen-characters"  # noqa: S105 # a test's own
CHAT = b"/v1/chat/completions"
LINES = b"content-type: application/json\r\n"
STREAM = json.dumps({"model": "m", "stream": True}).encode()


class Bed:
    """A relay to one engine, which is profile `a`, and a gateway's client for it."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.awake = True
        self.gone = False
        self.leaving = False
        self.ordered: list[str] = []
        self.relay = Relay(
            AcceptedTokens([TOKEN]),
            engine=lambda name: None if name != "a" or self.gone else RelayedEngine(engine.url, self.awake),
            ensure=self.ensure,
            log=lambda profile, lines: self.log[-lines:] if profile == "a" else None,
            leaving=lambda: self.leaving,
            say=lambda _: None,
        )
        self.url = ""
        self.log = ["INFO one", "ERROR two"]

    def ensure(self, profile: str) -> ModelReport | None:
        self.ordered.append(profile)
        return ModelReport(profile=profile, model="m", state="stopped") if profile == "a" else None

    def client(self, path: str = "/engines/a", token: str | None = TOKEN, trust: Trust | None = None) -> Client:
        return Client(parse_origin(self.url + path), ClientSettings(stall_timeout=60.0), api_key=token, trust=trust)

    async def raw(self, head: bytes) -> bytes:
        """The whole answer to some bytes; the connection ends with it."""
        host, _, port = self.url.partition("//")[2].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        async with asyncio.timeout(60):
            found = await reader.read()
        writer.close()
        return found


@contextlib.asynccontextmanager
async def bed(
    behaviour: str = "good", folder: Path = Path(), settings: RelaySettings | None = None
) -> AsyncIterator[Bed]:
    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    async with ScriptedEngine(behaviour).running() as engine:
        made = Bed(engine)
        try:
            found = await made.relay.start(settings or RelaySettings(listen=Address("127.0.0.1", 0)), folder)
            made.url = f"http{'s' if found.certificate_file else ''}://{found.listen}"
            yield made
        finally:
            await made.relay.aclose()
        async with asyncio.timeout(60):
            while engine.open:
                engine.closed.clear()
                await engine.closed.wait()
    assert seen == []


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene()

    asyncio.run(main())


async def whole(reply: Reply) -> bytes:
    try:
        return await reply.read(1 << 20)
    finally:
        reply.close()


async def outcomes(found: Bed, **wanted: int) -> None:
    """Wait until the relay has counted so many requests, and no others."""
    async with asyncio.timeout(60):
        while {name: count for name, count in found.relay.use.outcomes.items() if count} != wanted:
            await asyncio.sleep(0.001)


def test_a_stream_and_a_short_answer_pass_and_connections_are_kept() -> None:
    async def scene() -> None:
        async with bed() as found:
            client = found.client()
            for _ in range(3):
                reply = await client.send(b"POST", CHAT, LINES + b"x-request-id: r\r\n", STREAM, timeout=60.0)
                assert (reply.status, reply.headers[b"content-type"]) == (200, b"text/event-stream")
                body = await whole(reply)
                assert body.startswith(EVENT)
                assert body.endswith(DONE)
            reply = await client.send(b"POST", CHAT, LINES, b'{"model": "m"}', timeout=60.0)
            assert json.loads(await whole(reply))["usage"]["total_tokens"] == 10
            assert client.idle == 1
            head = found.engine.heads[0].lower()
            assert head.startswith(b"post /v1/chat/completions http/1.1\r\n")
            assert b"x-request-id: r\r\n" in head
            assert b"authorization" not in head, "an engine is not shown the order token"
            assert found.engine.open == 1
            await outcomes(found, answered=4)
            assert found.relay.use.connections == 1
            client.close()

    play(scene)


@pytest.mark.parametrize("token", [None, "another-of-16-chars", TOKEN[:-1], TOKEN + "x", ""])
def test_without_the_token_nothing_is_said_of_what_there_is(token: str | None) -> None:
    async def scene() -> None:
        async with bed() as found:
            shown = b"" if token is None else b"authorization: Bearer %b\r\n" % token.encode()
            answers = set()
            for path in (b"/engines/a/health", b"/engines/zzz/health", b"/models/a/ensure", b"/nothing"):
                answers.add(await found.raw(b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path, shown)))
            (one,) = answers
            assert one.startswith(b"HTTP/1.1 401 ")
            assert found.engine.open == 0
            assert found.ordered == []

    play(scene)


@pytest.mark.parametrize(
    "line",
    [
        b"POST /engines/a/sleep?level=1 HTTP/1.1",
        b"POST /engines/a/collective_rpc HTTP/1.1",
        b"POST /engines/a/v1/load_lora_adapter HTTP/1.1",
        b"POST http://x/engines/a/sleep HTTP/1.1",
        b"POST http://x/sleep HTTP/1.1",
        b"POST /engines/a/%2e%2e/sleep HTTP/1.1",
        b"POST /engines/a/v1/models/../../sleep HTTP/1.1",
        b"GET /engines/a/health/../is_sleeping HTTP/1.1",
        b"POST /engines/a//sleep HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
    ],
)
def test_no_other_path_reaches_an_engine(line: bytes) -> None:
    async def scene() -> None:
        async with bed() as found:
            head = b"%b\r\nhost: x\r\nauthorization: Bearer %b\r\nconnection: close\r\n\r\n" % (line, TOKEN.encode())
            assert (await found.raw(head)).startswith(b"HTTP/1.1 404 ")
            assert found.engine.open == 0

    play(scene)


def test_a_model_that_sleeps_or_is_gone_gets_no_calls() -> None:
    async def scene() -> None:
        async with bed() as found:
            client = found.client()
            found.awake = False
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            assert (reply.status, b"not_awake" in await whole(reply)) == (503, True)
            found.gone = True
            for path in (b"/health", b"/metrics"):
                reply = await client.send(b"GET", path, b"", b"", timeout=60.0)
                assert (reply.status, b"no_engine" in await whole(reply)) == (503, True)
            assert found.engine.requests == []
            await outcomes(found, refused=3)
            client.close()

    play(scene)


def test_a_gateway_reads_the_log_of_an_engine_on_another_machine() -> None:
    """Through the relay, with the order token, and never more than its bound."""

    async def scene() -> None:
        async with bed() as found:
            policy = Policy(fleet=FleetPolicy(sidecars=SidecarsPolicy()))
            gateway = Gateway(
                Configuration(policy, order_tokens=(TOKEN,)), (), None, random.Random(1), say=lambda _: None
            )
            models = tuple([ModelReport(profile=name, model=name, state="error") for name in ("a", "b")])
            report = CapacityReport(sidecar="gpu", boot="b", sequence=1, control=found.url, models=models)
            gateway.sidecars.report(encode(report), local=True)
            try:
                found.gone = True  # its start failed: that is when somebody reads its log
                assert await gateway.waking.read_log("gpu", "a", 1) == (200, b"ERROR two\n")
                assert await gateway.waking.read_log("gpu", "a", 200) == (200, b"INFO one\nERROR two\n")
                assert (await gateway.waking.read_log("gpu", "b", 1))[0] == 404
                found.log = [f"{number:04} " + "x" * 1000 for number in range(1000)]
                status, text = await gateway.waking.read_log("gpu", "a", 1000)
                assert (status, text[:3], text[-3:]) == (200, b"047", b"xx\n")
                assert 510 * 1024 < len(text) <= 512 * 1024
            finally:
                await gateway.aclose()
            for shown in (b"", b"authorization: Bearer not-the-order-token\r\n"):
                head = b"GET /models/a/logs?lines=5 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + shown + b"\r\n"
                assert (await found.raw(head)).startswith(b"HTTP/1.1 401 ")

    play(scene)


def test_the_order_is_taken_until_the_sidecar_ends() -> None:
    async def scene() -> None:
        async with bed() as found:
            client = found.client("")
            reply = await client.send(b"POST", b"/models/a/ensure", b"", b"", timeout=60.0)
            assert (reply.status, ensured(await whole(reply)).model.profile) == (200, "a")
            reply = await client.send(b"POST", b"/models/b/ensure", b"", b"", timeout=60.0)
            assert (reply.status, b"profile_not_found" in await whole(reply)) == (404, True)
            reply = await client.send(b"POST", b"/models/a/ensure", LINES, b'{"flags": 1}', timeout=60.0)
            assert (reply.status, b"request_too_large" in await whole(reply)) == (413, True), "orders have no body"
            found.leaving = True
            reply = await client.send(b"POST", b"/models/a/ensure", b"", b"", timeout=60.0)
            assert (reply.status, b"ending" in await whole(reply)) == (503, True)
            assert found.ordered == ["a", "b"]
            await outcomes(found, ordered=3)
            client.close()

    play(scene)


def test_a_gateway_that_leaves_has_the_engines_work_ended() -> None:
    async def scene() -> None:
        async with bed("stall") as found:
            client = found.client()
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            assert found.engine.open == 1
            found.engine.closed.clear()
            reply.close()
            async with asyncio.timeout(60):
                await found.engine.closed.wait()
            found.engine.behaviour = "hang"  # before the first byte
            task = asyncio.ensure_future(client.send(b"POST", CHAT, LINES, STREAM, timeout=60))
            async with asyncio.timeout(60):
                while len(found.engine.requests) < 2:
                    await asyncio.sleep(0.001)
            found.engine.closed.clear()
            task.cancel()
            async with asyncio.timeout(60):
                await found.engine.closed.wait()
            await outcomes(found, left=2)
            client.close()

    play(scene)


def test_an_engine_that_fails_is_a_502_and_one_that_fails_in_the_middle_a_broken_answer() -> None:
    async def scene() -> None:
        async with bed("die_before_headers") as found:
            client = found.client()
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            assert (reply.status, b"engine_failed" in await whole(reply)) == (502, True)
            found.engine.behaviour = "503"
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            assert (reply.status, b"scripted" in await whole(reply)) == (503, True)
            found.engine.behaviour = "die_mid_body"
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            with pytest.raises(EngineError, match="in the middle"):
                await whole(reply)
            await outcomes(found, failed=1, answered=1, broken=1)
            found.engine.stop()
            client.close()

    play(scene)


def test_a_gateway_that_does_not_read_holds_the_engine_up() -> None:
    async def scene() -> None:
        async with bed("endless") as found:
            client = found.client()
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            reply.pause()
            taken = 0

            def data(piece: bytes) -> None:
                nonlocal taken
                taken += len(piece)

            reply.relay(data, lambda _: None)
            before, same = -1, 0
            async with asyncio.timeout(60):
                while same < 5:  # nothing moves any more: all buffers on the way are full
                    await asyncio.sleep(0.05)
                    (transport,) = [each.transport for each in found.relay._server._shared.open]
                    now = transport.get_write_buffer_size()
                    before, same = now, same + 1 if now == before and now > 0 else 0
            assert now < 2 * 1024**2
            reply.resume()
            async with asyncio.timeout(60):
                while taken < 4 * 1024**2:
                    await asyncio.sleep(0.01)
            reply.close()
            client.close()

    play(scene)


def test_calls_may_end_before_the_relay_does_and_new_ones_are_refused() -> None:
    async def scene() -> None:
        async with bed("pause") as found:
            client = found.client()
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            ending = asyncio.ensure_future(found.relay.aclose(5.0))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="refused"):
                await found.client().send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            assert (await whole(reply)).endswith(DONE)
            await ending
            client.close()

    play(scene)


def test_over_tls_with_a_certificate_that_the_gateway_trusts(tmp_path: Path) -> None:
    made(tmp_path, "sidecars")
    settings = RelaySettings(listen=Address("127.0.0.1", 0), certificate_file="sidecars.pem", key_file="sidecars.key")

    async def scene() -> None:
        async with bed(folder=tmp_path, settings=settings) as found:
            ca = (tmp_path / "sidecars.pem").read_text()
            client = found.client(trust=Trust(ca=ca, name="localhost"))
            reply = await client.send(b"POST", CHAT, LINES, STREAM, timeout=60.0)
            assert (await whole(reply)).endswith(DONE)
            client.close()
            for trust, why in ((Trust(), "not trusted"), (Trust(ca=ca, name="other.example"), "another name")):
                with pytest.raises(EngineError, match=why):
                    await found.client(trust=trust).send(b"POST", CHAT, LINES, STREAM, timeout=60.0)

    play(scene)


def test_a_certificate_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    with pytest.raises(ssl.SSLError):
        Trust(ca="no certificate").context()

    async def scene() -> None:
        relay = Relay(
            AcceptedTokens([TOKEN]),
            engine=lambda _: None,
            ensure=lambda _: None,
            log=lambda *_: None,
            leaving=bool,
            say=lambda _: None,
        )
        with pytest.raises(ValueError, match=r"c\.pem"):
            await relay.start(RelaySettings(listen=Address("127.0.0.1", 0), certificate_file="c.pem"), tmp_path)
        await relay.aclose()

    play(scene)
