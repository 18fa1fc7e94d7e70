"""Client of a control port against servers that are no gateway, or answer badly, by a table."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.cli.control_client import NoAnswer, Unfit, ask
from gateway.cli.status import StatusView

TOKEN = "0123456789abcdef"  # noqa: S105 # a test's own
STATUS = b'{"at": 1.5, "gateway": {"version": "1.0"}, "policy": {"version": 1}, "headline": [], "more": 1}'


def answer(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


def asked(said: bytes, token: str | None = None, **bounds: Any) -> StatusView:
    """Ask somebody who answers so; empty: who hangs up."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (await reader.readline()).strip():
                pass
            writer.write(said)
            if said:
                await reader.read()  # until it is left
        finally:
            writer.close()

    async def main() -> StatusView:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            return await asyncio.wait_for(ask(url, "/status", token, StatusView, **bounds), 10)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "token", "kind", "why"),
    [
        (answer(b"", "401 Unauthorized"), None, Unfit, "it wants its admin token: give --token-file"),
        (answer(b"", "401 Unauthorized"), TOKEN, Unfit, "it refuses the token"),
        (answer(b"", "403 Forbidden"), TOKEN, Unfit, "not a key of its users"),
        (answer(b"", "421 Misdirected Request"), None, Unfit, "only to loopback names"),
        (answer(b"", "404 Not Found"), None, Unfit, "not the control port of a gateway: it answers 404 to /status"),
        (answer(b"", "302 Found", "location: /else\r\n"), None, Unfit, "it answers 302 to /status"),
        (answer(b"<html>"), None, Unfit, "not the control port of a gateway of this version"),
        (answer(b"{}"), None, Unfit, "missing required field `gateway`"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", None, Unfit, "not the control port of a gateway: "),
        (answer(b"", "503 Service Unavailable"), None, NoAnswer, "it answers 503 to /status"),
        (b"", None, NoAnswer, "it hung up"),
    ],
)
def test_what_is_told(said: bytes, token: str | None, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        asked(said, token)


def test_a_later_version_may_tell_more() -> None:
    assert asked(answer(STATUS)).gateway == {"version": "1.0"}


def test_nobody_is_there() -> None:
    with pytest.raises(NoAnswer, match="no connection"):
        asyncio.run(ask("http://127.0.0.1:9", "/status", None, StatusView))


def test_an_answer_without_end_is_not_read_to_it() -> None:
    with pytest.raises(Unfit, match="/status answers with more than 1000 bytes"):
        asked(answer(b" " * 1001), most=1000)


def test_who_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s"):
        asked(b"HTTP/1.1 200 OK\r\n", within=0.1)
