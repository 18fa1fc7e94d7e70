"""HTTP front of the simulated engine: it holds requests before the scheduler does, where the profile says so."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import ProfileFile, profiles, text_of
from loadtest.load.prompts import body_of, message
from loadtest.simulate import vtime
from loadtest.simulate.memory_engine import MemoryEngine

CHAT = b"/v1/chat/completions"
BODY = body_of(message(b"user", b"x" * 80), 1)
PROFILE = msgspec.structs.replace(profiles()["cpu-tiny"], base=0.001, jitter=0.0, front=0.01, delay=0.1)


class Answer:
    """When an answer came, and how it ended."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.began = -1.0
        self.ended = ""

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self.began = self.loop.time()

    def data(self, data: bytes) -> None:
        pass

    def end(self) -> None:
        self.ended = "end"

    def failed(self, kind: Literal["reset", "truncated"], message: str) -> None:
        self.ended = kind


def test_in_virtual_time_requests_pass_one_after_the_other() -> None:
    async def main() -> None:
        engine, answers = MemoryEngine(engine_config(PROFILE)), [Answer() for _ in range(3)]
        for answer in answers:
            engine.post(CHAT, BODY, answer)
        assert engine.reading() == (0.0, 0, 0)
        await asyncio.sleep(1.0)
        assert [answer.began for answer in answers] == pytest.approx([0.111, 0.121, 0.131], abs=0.001)
        gone, dead = Answer(), Answer()
        engine.post(CHAT, BODY, gone)()
        engine.post(CHAT, BODY, dead)
        assert engine.reading() == (0.0, 0, 0)
        engine.die()
        engine.recover()
        await asyncio.sleep(1.0)
        assert (gone.ended, dead.ended) == ("", "reset")
        assert engine.engine.stats.prompt_tokens == 0, "what was on its way does not reach the next engine"

    vtime.run(main())


@pytest.mark.slow
def test_in_real_time_a_client_may_leave_and_the_engine_may_die_meanwhile(
    sim: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    # A client leaves within it, although the machine may stand still.
    file.write_text(text_of(ProfileFile(profile=msgspec.structs.replace(PROFILE, delay=4.0))))
    server = sim(profile=str(file), speed=1.0)

    def send() -> socket.socket:
        sock: socket.socket = server.raw()
        body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 2}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        return sock

    with send() as left, send() as answered:
        server.until(lambda it: sum(one.current is not None for one in it.connections) == 2)
        left.close()
        assert answered.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.do(lambda it: (it.engine.scheduler.waiting, it.engine.stats.generation_tokens)) == (0, 2)
    with send() as dead:
        server.until(lambda it: sum(one.current is not None for one in it.connections) == 1)
        server.do(lambda it: it.die())
        assert dead.recv(65536).startswith(b"HTTP/1.1 500")
