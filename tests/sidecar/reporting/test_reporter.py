"""Reports over real sockets: their times and targets, the effect of answers, and independence of the gateways."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gateway.shared import protocol
from loadtest.processes import free_port
from sidecar.core.addresses import Address
from sidecar.core.config import RelaySettings
from sidecar.reporting import gateway_link, reporter
from sidecar.reporting.gateway_link import Reporting
from sidecar.reporting.reporter import Reporter
from sidecar.residency.manager import Manager
from tests.certificates import made
from tests.sidecar.parts import opened
from tests.sidecar.scripted import Scripted, answer, play

BOOT = "b00t"
TOKEN = "0123456789abcdef"  # noqa: S105 # a test's own


def demand(boot: str = BOOT, **of_a: int) -> bytes:
    told = protocol.DemandReport(gateway="g", boot=boot, sequence=1, demands=(protocol.Demand(profile="a", **of_a),))
    return answer(protocol.encode(told), 200, b"connection: close")


def reports(gateway: Scripted) -> list[protocol.CapacityReport]:
    return [protocol.capacity_report(body) for _, _, body in gateway.asked]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def reporting(
    manager: Manager,
    *urls: str,
    lines: list[str] | None = None,
    listen: str = "127.0.0.1:8002",
    relay: RelaySettings | None = None,
) -> Reporter:
    say = (lambda _: None) if lines is None else lines.append
    control = Address.parse(listen)
    assert control is not None
    settings = Reporting(sidecar="box", boot=BOOT, listen=control, relay=relay, token=TOKEN, say=say)
    found = Reporter(manager, urls, settings)
    found.start()
    return found


def test_another_token_and_other_authorities_count_from_the_next_report_on(tmp_path: Path) -> None:
    context = made(tmp_path)

    async def scene() -> None:
        gateway = Scripted(demand())
        server = await asyncio.start_server(gateway._connection, "127.0.0.1", 0, ssl=context)
        async with opened(tmp_path) as manager:
            told = reporting(manager, f"https://localhost:{server.sockets[0].getsockname()[1]}")
            await until(lambda: told.gateways()[0].taken is False)
            assert "certificate verify failed" in told.gateways()[0].error
            told.go_by(TOKEN[::-1], (tmp_path / "localhost.pem").read_text())
            await until(lambda: told.gateways()[0].taken is True)
            assert gateway.headers["authorization"] == f"Bearer {TOKEN[::-1]}"
            await told.aclose()
        server.close()

    play(scene)


def test_a_connection_by_authorities_of_before_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_link, "EVERY", 0.02)
    context, there, came = made(tmp_path), set[asyncio.StreamWriter](), 0
    authorities = (tmp_path / "localhost.pem").read_text()
    kept = answer(demand().partition(b"\r\n\r\n")[2])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        there.add(writer)
        came += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
                writer.write(kept)
        except (asyncio.IncompleteReadError, ConnectionError):
            there.discard(writer)
            writer.close()

    async def scene() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with opened(tmp_path) as manager:
            told = reporting(manager, f"https://localhost:{server.sockets[0].getsockname()[1]}")
            for number in range(1, 4):
                told.go_by(TOKEN, authorities + "\n" * number)
                await until(lambda: came == number and len(there) == 1)  # noqa: B023 # it is over before the next
                assert told.gateways()[0].failures <= 1
            await told.aclose()
        server.close()

    play(scene)


def test_the_first_report_and_every_change_go_at_once_and_answers_are_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_link, "EVERY", 3600.0)  # what goes sooner goes because of a change

    async def scene() -> None:
        async with Scripted(demand(in_flight=3, waiting=1)) as gateway, opened(tmp_path) as manager:
            told = reporting(manager, gateway.origin + "/")
            await until(lambda: manager.requests_active("a") == 3)
            first = reports(gateway)[0]
            assert gateway.asked[0][:2] == ("POST", "/sidecars/report")
            assert gateway.headers["authorization"] == f"Bearer {TOKEN}"
            assert (first.sidecar, first.boot, first.control) == ("box", BOOT, "http://127.0.0.1:8002")
            assert [model.model for model in first.models] == ["org/A", "b", "big"]
            await asyncio.sleep(2 * gateway_link.GAP)
            seen = len(gateway.asked)
            manager.changed.set()
            await until(lambda: len(gateway.asked) > seen)
            began = asyncio.get_running_loop().time()
            for _ in range(40):
                manager.changed.set()
                await asyncio.sleep(gateway_link.GAP / 10)
            took = asyncio.get_running_loop().time() - began
            assert seen + 2 <= len(gateway.asked) <= seen + 3 + took / gateway_link.GAP
            count = len(gateway.asked)
            await told.aclose()
            assert count + 1 <= len(gateway.asked) <= count + 2, "the last word, and one that was under way"
            numbers = [report.sequence for report in reports(gateway)]
            assert numbers == sorted(set(numbers))

    play(scene)


def test_an_answer_to_an_earlier_start_says_nothing_of_this_one(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Scripted(demand("another", in_flight=3)) as gateway, opened(tmp_path) as manager:
            told = reporting(manager, gateway.origin)
            await until(lambda: told.gateways()[0].taken is True)
            assert manager.requests_active("a") == 0
            await told.aclose()

    play(scene)


@pytest.mark.slow  # it waits twice for what hangs
def test_one_that_hangs_or_is_gone_delays_no_other_and_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_link, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(gateway_link, "LAST_PAUSE", 0.04)
    gone = f"http://127.0.0.1:{free_port()}"
    lines: list[str] = []

    async def scene() -> None:
        async with Scripted(demand(in_flight=1)) as good, Scripted(None) as hangs, opened(tmp_path) as manager:
            good.targets["/sidecars/report"] = [answer(b"{}", 401), demand(in_flight=1)]
            told = reporting(manager, gone, hangs.origin, good.origin, lines=lines)
            await until(lambda: manager.requests_active("a") == 1)
            await until(lambda: told.gateways()[0].failures > 4 and told.gateways()[1].failures > 1)
            assert [gateway.taken for gateway in told.gateways()] == [False, False, True]
            hangs.rest = demand()
            await until(lambda: told.gateways()[1].taken is True)
            await told.aclose()

    play(scene)
    about = {url: [line for line in lines if url in line] for url in (gone,)}
    assert len(about[gone]) == 1
    assert about[gone][0].endswith("does not take reports: nobody listens there")
    others = [re.sub(r"after \S+ s", "soon", re.sub(r"http://\S+", "URL", line)) for line in lines if gone not in line]
    assert others == [
        "gateway URL does not take reports: it refuses the token: both sides must be given the same",
        "gateway URL takes reports again, soon",
        "gateway URL does not take reports: no whole answer within 3 s",
        "gateway URL takes reports again, soon",
    ]


def test_an_answer_without_end_or_sense_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_BYTES", 100_000)
    lines: list[str] = []

    async def scene() -> None:
        said = answer(b'{"gateway": 1}')
        async with Scripted(said) as senseless, Scripted(b"HTTP/1.1 200 X\r\n\r\n") as endless:
            endless.endless = b"x" * 10_000
            async with opened(tmp_path) as manager:
                told = reporting(manager, senseless.origin, endless.origin, lines=lines)
                await until(lambda: len(lines) == 2)
                await told.aclose()

    play(scene)
    assert "its answer cannot be read: Expected `str`, got `int` - at `$.gateway`" in "\n".join(lines)
    assert "its answer has more than 100000 bytes" in "\n".join(lines)


def test_answers_that_differ_in_what_they_quote_alone_are_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_link, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(gateway_link, "LAST_PAUSE", 0.01)
    lines: list[str] = []

    async def scene() -> None:
        pages = [answer(b"request %d" % number, 502) for number in range(20)]
        async with Scripted(demand()) as proxy, opened(tmp_path) as manager:
            proxy.targets["/sidecars/report"] = [*pages, answer(b"", 401), demand()]
            told = reporting(manager, proxy.origin, lines=lines)
            await until(lambda: told.gateways()[0].failures == 20)
            assert told.gateways()[0].error == "it answered 502: 'request 19'"
            await until(lambda: told.gateways()[0].taken is True)
            await told.aclose()

    play(scene)
    assert [re.sub(r".* does not take reports: |after.*", "", line) for line in lines[:2]] == [
        "it answered 502: 'request 0'",
        "it refuses the token: both sides must be given the same",
    ]
    assert len(lines) == 3


def test_another_cause_is_told_also_where_it_begins_with_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_link, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(gateway_link, "LAST_PAUSE", 0.01)
    lines: list[str] = []

    async def scene() -> None:
        async with Scripted(demand()) as gateway, opened(tmp_path) as manager:
            gateway.targets["/sidecars/report"] = [b"", b"", b"", b"no HTTP\r\n\r\n", demand()]
            told = reporting(manager, gateway.origin, lines=lines)
            await until(lambda: told.gateways()[0].taken is True)
            await told.aclose()

    play(scene)
    causes = [line.partition("the connection failed: ")[2] for line in lines[:2]]
    assert len(set(causes)) == 2, lines
    assert all(causes), lines


def test_each_gateway_is_told_an_address_that_it_can_reach(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Scripted(demand()) as gateway, opened(tmp_path) as manager:
            told = reporting(manager, gateway.origin, listen="0.0.0.0:8002")
            await until(lambda: bool(gateway.asked))
            assert reports(gateway)[0].control == "http://127.0.0.1:8002"
            await told.aclose()

    play(scene)


def test_a_report_is_what_a_gateway_decodes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(tmp_path) as manager:
            manager.orders.ensure("big")
            report = manager.report("box", BOOT, "http://127.0.0.1:1")
            assert protocol.capacity_report(msgspec.json.encode(report)) == report

    play(scene)


@pytest.mark.slow
def test_engines_end_only_when_gateways_have_let_go_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_link, "EVERY", 0.1)

    async def scene() -> None:
        async with Scripted(demand(in_flight=1)) as gateway, opened(tmp_path) as manager:
            told = reporting(manager, gateway.origin)
            await until(lambda: manager.requests_active("a") == 1)
            withdrawing = asyncio.ensure_future(told.withdraw(60.0))
            await until(lambda: len(gateway.asked) > 3)
            assert not withdrawing.done()
            assert {model.why for model in reports(gateway)[-1].models} == {"draining"}
            gateway.rest = demand()
            await withdrawing
            assert manager.requests_active("a") == 0
            gateway.rest = demand(in_flight=1)
            await until(lambda: manager.requests_active("a") == 1)
            await told.withdraw(0.05)  # one that never lets go is not waited for
            await told.aclose()

    play(scene)
    running = protocol.ModelReport(profile="a", model="a", state="running", url="http://e", ready_in=0.0)
    ending = reporter._ending(running)
    assert (ending.state, ending.pending, ending.ready_in) == ("running", "stop", None)


def test_https_wants_a_certificate_that_the_machine_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = made(tmp_path)

    async def scene() -> None:
        async with Scripted(demand(in_flight=1)) as gateway, opened(tmp_path) as manager:
            server = await asyncio.start_server(gateway._connection, "127.0.0.1", 0, ssl=context)
            url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
            untrusting = reporting(manager, url)
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "localhost.pem"))
            trusting = reporting(manager, url)
            await until(lambda: manager.requests_active("a") == 1 and untrusting.gateways()[0].taken is False)
            assert "certificate verify failed" in untrusting.gateways()[0].error
            await trusting.aclose()
            await untrusting.aclose()
            server.close()

    play(scene)
