"""Control client of `gateway top` against servers that are no gateway, or answer badly, by a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from gateway.top.control_client import ControlClient, NoAnswer, Unfit
from gateway.top.sample import Sample
from tests.top.samples import fleet

TOKEN = "0123456789abcdef"  # noqa: S105 # a test's own
SUMMARY = b'{"gateway": "1.0", "policy": {"version": 1}}'


def answer(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


def asked(said: Callable[[str], bytes], token: str | None = None, *, times: int = 1, **bounds: Any) -> Sample:
    """What becomes of asking somebody who answers a path so; empty: who hangs up. The last sample of so many."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                while (await reader.readline()).strip():
                    pass
                told = said(line.split()[1].decode())
                writer.write(told)
                if not told:
                    return
        finally:
            writer.close()

    async def main() -> Sample:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            client = ControlClient(url, token, lambda: 7.0, **bounds)
            try:
                return [await client.sample() for _ in range(times)][-1]
            finally:
                await client.aclose()

    return run(main())


def run(work: Coroutine[Any, Any, Sample]) -> Sample:
    return asyncio.run(asyncio.wait_for(work, 10))


@pytest.mark.parametrize(
    ("said", "token", "kind", "why"),
    [
        (answer(b"", "401 Unauthorized"), None, Unfit, "it wants its admin token: give --token-file"),
        (answer(b"", "401 Unauthorized"), TOKEN, Unfit, "it refuses the token"),
        (answer(b"", "403 Forbidden"), TOKEN, Unfit, "not a key of its users"),
        (answer(b"", "421 Misdirected Request"), None, Unfit, "only to loopback names"),
        (answer(b"", "404 Not Found"), None, Unfit, "not the control port of a gateway: it answers 404 to /summary"),
        (answer(b"", "302 Found", "location: /else\r\n"), None, Unfit, "it answers 302 to /summary"),
        (answer(b"<html>"), None, Unfit, "not the control port of a gateway of this version"),
        (answer(b"{}"), None, Unfit, "missing required field `gateway`"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", None, Unfit, "not the control port of a gateway: "),
        (answer(b"", "503 Service Unavailable"), None, NoAnswer, "it answers 503 to /summary"),
        (b"", None, NoAnswer, "it hung up"),
    ],
)
def test_what_is_told(said: bytes, token: str | None, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        asked(lambda _: said, token)


def test_nobody_is_there() -> None:
    with pytest.raises(NoAnswer, match="no connection"):
        run(ControlClient("http://127.0.0.1:9", None, lambda: 0.0).sample())


def test_an_answer_without_end_is_not_read_to_it() -> None:
    with pytest.raises(Unfit, match="/summary answers with more than 1000 bytes"):
        asked(lambda _: answer(b" " * 1001), most=1000)


def test_who_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s"):
        asked(lambda _: b"HTTP/1.1 200 OK\r\n", within=0.1)


def test_the_policy_is_asked_for_only_where_it_is_another() -> None:
    paths: list[str] = []
    answers = {
        "/summary": SUMMARY,
        "/policy?format=json": b'{"policy": {"classes": {"a": {"ttft": "2s"}}}}',
        "/metrics": b"weir_connections 1.0\n",
        "/calls": b'{"total": 0, "calls": []}',
    }

    def said(path: str) -> bytes:
        paths.append(path)
        return answer(answers[path] if path in answers else msgspec.json.encode(fleet()))

    last = asked(said, times=2)
    assert (last.point.at, last.targets, last.fleet) == (7.0, {"a": 2.0}, fleet())
    assert paths == ["/summary", "/policy?format=json", "/metrics", "/fleet", "/calls", "/summary", *paths[2:5]]
