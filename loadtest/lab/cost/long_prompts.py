"""Cost of prompts of 100,000 tokens: the gateway's CPU per call, and what streams beside them notice.

    python -m loadtest.lab.cost.long_prompts [--size 500] [--rate 100] [--seconds 10] [--tree FOLDER]

One `gateway serve` over an engine that costs almost nothing. Twenty streams get a token every 20 ms through the
gateway, and twenty more from the engine itself. *Without*: they are alone. *With*: bodies of `--size` kB arrive at
`--rate` a second beside them, chats of many messages as coding agents send them; those go through the gateway. The time
between two tokens of a stream is measured at its client. What clients, engine and machine add to it is in the streams
of the engine itself; the stall is what those through the gateway have beyond them. With `--tree` another checkout's
gateway comes first.

The CPU per call is that of the gateway's process with all its threads, less what the streams alone took; beside it is
the time in which its threads were ready to run and had no core. The clients are threads of this process, on core 1
where there are two, and so is the engine; the gateway is on core 0.
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
from typing import Any

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


class Stream:
    """One stream, read by its client. `gaps`: seconds between its tokens."""

    def __init__(self, port: int, message: bytes, gaps: list[float]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.sendall(message)
        self._gaps = gaps
        self._last = 0.0

    def read(self) -> bool:
        """Whether it goes on."""
        data = self.socket.recv(65536)
        now = time.perf_counter()
        if self._last and data:
            self._gaps.append(now - self._last)
        self._last = now
        return bool(data) and b"[DONE]" not in data


def streams(seconds: float) -> tuple[list[float], list[float]]:
    """Seconds between two tokens, of all streams through the gateway, and of all of the engine itself; in ascending
    order."""
    asked: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": int(seconds / INTERVAL)}
    asked["messages"] = [{"role": "user", "content": "x"}]
    message = post("/v1/chat/completions", json.dumps(asked).encode(), "quiet")
    waiting = selectors.DefaultSelector()
    through: list[float] = []
    direct: list[float] = []
    for port, gaps in ((PORT, through), (ENGINE_PORT, direct)) * STREAMS:
        stream = Stream(port, message, gaps)
        waiting.register(stream.socket, selectors.EVENT_READ, stream)
    while waiting.get_map():
        for key, _ in waiting.select():
            if not key.data.read():
                waiting.unregister(key.fileobj)
                key.data.socket.close()
    return sorted(through), sorted(direct)


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


def p99(gaps: list[float]) -> float:
    return gaps[len(gaps) * 99 // 100] * 1e3


def told(gaps: list[float]) -> str:
    return f"{gaps[len(gaps) // 2] * 1e3:6.1f} {p99(gaps):6.1f} {gaps[-1] * 1e3:6.1f}"


def ready(pid: int) -> float:
    """Seconds in which threads of the process could have run and had no core."""
    waits = [path.read_text().split()[1] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, waits)) / 1e9


def measure(pid: int, size: int, rate: float, seconds: float) -> None:
    print(f"  {'ms between tokens, p50, p99, longest':42}{'through the gateway':>22}{'of the engine itself':>24}")
    began = cpu_seconds(pid)
    alone = streams(seconds)
    idle = cpu_seconds(pid) - began
    print(f"  {'without':42}{told(alone[0]):>22}{told(alone[1]):>24}", flush=True)
    senders = Senders(size, rate)
    began, waited, at = cpu_seconds(pid), ready(pid), time.monotonic()
    senders.start()
    beside = streams(seconds)
    senders.join()
    took, used, waited = time.monotonic() - at, cpu_seconds(pid) - began, ready(pid) - waited
    calls = max(1, len(senders.statuses))
    answered = senders.statuses.count(200)
    stall = p99(beside[0]) - max(p99(alone[0]), p99(beside[1]))
    print(f"  {'with':42}{told(beside[0]):>22}{told(beside[1]):>24}")
    print(f"  calls             {calls}, {answered} of them answered, {calls / took:.0f} a second of {rate:.0f}")
    print(f"  CPU per call      {(used - idle * took / seconds) / calls * 1e3:6.2f} ms (target {CPU_TARGET:g})")
    print(f"  no core per call  {waited / calls * 1e3:6.2f} ms")
    print(f"  p99 beyond both   {stall:6.1f} ms (target {STALL_TARGET:g})", flush=True)


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
