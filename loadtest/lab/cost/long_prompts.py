"""Cost of prompts of 100,000 tokens: the gateway's CPU per call, and what streams beside them notice.

    python -m loadtest.lab.cost.long_prompts [--size 500] [--rate 100] [--seconds 10] [--tree FOLDER]

One `gateway serve` over an engine that costs almost nothing. Twenty streams get a token every 20 ms. *Without*: they
are alone. *With*: bodies of `--size` kB arrive at `--rate` a second beside them, chats of many messages as coding
agents send them. The time between two tokens of a stream is measured at its client. The CPU per call is that of the
gateway's process with all its threads, less what the streams alone took. With `--tree` another checkout's gateway comes
first.

The clients are threads of this process, on core 1 where there are two; the gateway is on core 0. What else runs on the
machine shows in the row without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

from loadtest.clients.stub import INTERVAL, serve_stub
from loadtest.lab.cost.bodies import PORT, Client, gateway, post
from loadtest.lab.cost.overhead import ENGINE_PORT, cpu_seconds
from loadtest.processes import ChildError

STREAMS = 20
SENDERS = 8
WORDS = (
    'def deploy(self, "name"):\n',
    "        return value\n",
    "the river is level ",
    "C:\\temp ",
    "naïve ",
    "{x: 1}, ",
)
CPU_TARGET, STALL_TARGET = 5.0, 10.0  # milliseconds: of CPU a call, and of p99 between tokens beyond that without


def body(size: int, seed: int) -> bytes:
    """A chat of an agent, of `size` bytes: a long system prompt, and turns of about 8 kB."""
    rng = random.Random(seed)  # noqa: S311 # a test's text

    def text(length: int) -> str:
        return "".join([rng.choice(WORDS) for _ in range(length // 19)])

    messages = [{"role": "system", "content": f"{seed} {text(size // 10)}"}]
    while sum(len(each["content"]) for each in messages) < size * 0.88:
        messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": text(8_000)})
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 10}).encode()


def streams(seconds: float) -> list[float]:
    """Seconds between two tokens, of all streams, in ascending order."""
    asked: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": int(seconds / INTERVAL)}
    asked["messages"] = [{"role": "user", "content": "x"}]
    message = post("/v1/chat/completions", json.dumps(asked).encode(), "quiet")
    waiting = selectors.DefaultSelector()
    gaps: list[float] = []
    for _ in range(STREAMS):
        made = socket.create_connection(("127.0.0.1", PORT), timeout=60)
        made.sendall(message)
        waiting.register(made, selectors.EVENT_READ, [0.0])
    while waiting.get_map():
        for key, _ in waiting.select():
            last: list[float] = key.data
            connection = cast("socket.socket", key.fileobj)
            data = connection.recv(65536)
            now = time.perf_counter()
            if last[0] and data:
                gaps.append(now - last[0])
            last[0] = now
            if not data or b"[DONE]" in data:
                waiting.unregister(connection)
                connection.close()
    return sorted(gaps)


class Senders:
    """Long calls at `rate` a second, until `over`; of each, what it was answered."""

    def __init__(self, size: int, rate: float) -> None:
        self._messages = [post("/v1/chat/completions", body(size, seed), "noisy") for seed in range(SENDERS)]
        self._due = time.monotonic()
        self._every = 1.0 / rate
        self._lock = threading.Lock()
        self.statuses: list[int] = []
        self.over = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(each,)) for each in self._messages]

    def start(self) -> None:
        self._due = time.monotonic()
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _send(self, message: bytes) -> None:
        client = Client()
        while not self.over.is_set():
            with self._lock:
                due, self._due = self._due, self._due + self._every
            if self.over.wait(max(0.0, due - time.monotonic())):
                break
            self.statuses.append(client.ask(message))
        client.close()


def told(gaps: list[float]) -> str:
    p50, p99, most = (gaps[min(len(gaps) - 1, len(gaps) * part // 1000)] * 1e3 for part in (500, 990, 1000))
    return f"{p50:6.1f} {p99:6.1f} {most:6.1f} ms between tokens (p50, p99, longest)"


def measure(pid: int, size: int, rate: float, seconds: float) -> None:
    began = cpu_seconds(pid)
    alone = streams(seconds)
    idle = cpu_seconds(pid) - began
    print(f"  without        {told(alone)}", flush=True)
    senders = Senders(size, rate)
    began, at = cpu_seconds(pid), time.monotonic()
    senders.start()
    with_them = streams(seconds)
    senders.join()
    took, used = time.monotonic() - at, cpu_seconds(pid) - began
    calls = len(senders.statuses)
    answered = senders.statuses.count(200)
    p99 = len(alone) * 99 // 100, len(with_them) * 99 // 100
    more = (with_them[p99[1]] - alone[p99[0]]) * 1e3
    print(f"  with           {told(with_them)}")
    print(f"  calls          {calls}, {answered} of them answered, {calls / took:.0f} a second of {rate:.0f}")
    print(f"  CPU per call   {(used - idle * took / seconds) / max(1, calls) * 1e3:6.2f} ms (target {CPU_TARGET:g})")
    print(f"  p99 with - without {more:6.1f} ms (target {STALL_TARGET:g})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=500, metavar="KB", help="of each body (default: 500)")
    parser.add_argument("--rate", type=float, default=100.0, metavar="N", help="bodies a second (default: 100)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each part (default: 10)")
    parser.add_argument("--tree", type=Path, help="another checkout, whose gateway is measured first")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.setswitchinterval(0.0001)
    trees = {**({"baseline": args.tree.resolve()} if args.tree else {}), "this tree": Path.cwd()}
    with serve_stub(ENGINE_PORT):
        for tree, folder in trees.items():
            print(f"{tree}: bodies of {len(body(args.size * 1000, 0)) / 1000:.0f} kB", flush=True)
            with tempfile.TemporaryDirectory(prefix="long-prompts-") as files:
                try:
                    with gateway(folder, Path(files)) as pid:
                        measure(pid, args.size * 1000, args.rate, args.seconds)
                except ChildError as error:
                    sys.exit(f"long_prompts: {error}")


if __name__ == "__main__":
    main()
