"""Cost of large or unfinished bodies to others: the event loop's stall, another tenant's latency, memory.

    python -m loadtest.lab.cost.bodies [--tree FOLDER] [--connections 1000]

One `gateway serve` over an engine that costs almost nothing. *Stall*: while a client sends bodies of 1 MiB of one kind,
another asks for /health all the time; its longest wait is the time in which nothing else ran. *Flood*: one tenant sends
bodies of 16 MiB that are refused, as fast as it can, beside the small calls of another. *Memory*: connections that send
1 MiB of a body and no end, from many addresses; the process's resident memory before and with them. Each has an idle
gateway as its baseline. With `--tree` another checkout's gateway is measured in the same run, too.

The clients are threads of this process, on core 1 where there are two; the gateway is on core 0.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loadtest.clients.stub import serve_stub
from loadtest.lab.cost.overhead import ENGINE_PORT, memory
from loadtest.processes import Child, ChildError, answers

PORT = 19395
MIB = 1024**2
STALLS, FLOOD, IDLE = 15, 6.0, 4.0  # bodies of each kind; seconds
KEYS = ("noisy", "quiet")
SETTLED = 10  # looks at the memory in which it has not grown
FIRST_BYTES = MIB  # of each unfinished body


def policy() -> str:
    tenants = [f"{key}: {{keys: [{hashlib.sha256(key.encode()).hexdigest()}]}}" for key in KEYS]
    return (
        f"tenants: {{anonymous: {{}}, {', '.join(tenants)}}}\nserver: {{max_connections: 20k}}\n"
        "timeouts: {body: 10m, headers: 10m}\n"
    )


def _filled(head: str, one: str, tail: str, size: int, most: int) -> bytes:
    number = min(most, (size - len(head) - len(tail)) // (len(one) + 1))
    return (head + ",".join([one] * number) + tail).encode().ljust(size)


def kinds(size: int, most: int) -> dict[str, tuple[str, bytes]]:
    """Route and body of each kind, of so many bytes and of at most so many values."""
    chat = '{"model":"nobody","messages":[{"role":"user","content":'
    message = '{"model":"nobody","max_tokens":1,"messages":[{"role":"user","content":"x"}],"system":['
    nested = "[" * 60 + "]" * 60
    text = "word, " * (size // 6 - 50)
    return {
        "numbers": ("/v1/chat/completions", _filled(chat + "[", "0", "]}]}", size, most)),
        "empty strings": ("/v1/chat/completions", _filled(chat + "[", '""', "]}]}", size, most)),
        "parts": ("/v1/chat/completions", _filled(chat + "[", '{"text":""}', "]}]}", size, most // 4)),
        "documents": (
            "/v1/rerank",
            _filled('{"model":"nobody","query":"q","documents":{"a":[', '""', "]}}", size, most),
        ),
        "system parts": ("/v1/messages", _filled(message, '{"text":""}', "]}", size, most // 4)),
        "token ids": ("/v1/completions", _filled('{"model":"nobody","prompt":[', "1", "]}", size, most)),
        "nested": ("/v1/completions", _filled('{"model":"nobody","x":[', nested, '],"prompt":"x"}', size, most // 120)),
        "quotes": ("/v1/completions", b'"' * size),
        "text": ("/v1/completions", f'{{"model":"nobody","prompt":"{text}"}}'.encode()),
        "image": ("/v1/chat/completions", _image(size)),
    }


def _image(size: int) -> bytes:
    head = b'{"model":"nobody","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,'
    return head + b"A" * (size - 300) + b'"}}]}]}'


def post(path: str, body: bytes, key: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


class Client:
    """One blocking connection, opened again where the gateway has closed it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def ask(self, message: bytes) -> int:
        """The status of the answer; 0 where the connection broke."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", PORT), timeout=60)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # refused before all of it was sent: the answer is there all the same
            self._socket.sendall(message)
        try:
            head = self._socket.recv(65536)
        except OSError:
            head = b""
        if not head or b"connection: close" in head:
            self.close()
        return int(head[9:12]) if head else 0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def waits(message: bytes, going_on: Callable[[], bool], pause: float = 0.001) -> list[float]:
    """Seconds that each of one client's requests took, one after the other, in ascending order."""
    client = Client()
    took: list[float] = []
    while going_on() or len(took) < 2:
        began = time.perf_counter()
        client.ask(message)
        took.append(time.perf_counter() - began)
        time.sleep(pause)
    client.close()
    return sorted(took)


def beside(work: Callable[[], None], message: bytes) -> list[float]:
    """`waits` for as long as `work` goes on in a thread."""
    worker = threading.Thread(target=work)
    worker.start()
    took = waits(message, worker.is_alive)
    worker.join()
    return took


def lasting(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() < until


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SMALL = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1}'


def stall() -> Iterator[tuple[str, str]]:
    """The longest wait beside each of some bodies of a kind: the median of them, and the longest of all. A machine that
    has other work shows in the second, and in what an idle gateway has."""
    idle = [waits(HEALTH, lasting(0.05))[-1] for _ in range(STALLS)]
    yield "stall, idle", _longest(idle)
    for most in (MIB, 90_000):
        for name, (path, body) in kinds(MIB, most).items():
            client, message, statuses = Client(), post(path, body, KEYS[0]), [0]

            def send(client: Client = client, message: bytes = message, statuses: list[int] = statuses) -> None:
                statuses[0] = client.ask(message)

            longest = [beside(send, HEALTH)[-1] for _ in range(STALLS)]
            client.close()
            what = "full" if most == MIB else "90k values"
            yield f"stall, {name}, {what}", f"{_longest(longest)}   {statuses[0]}"


def _longest(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:7.1f} ms {max(times) * 1e3:7.1f} ms"


def flood() -> Iterator[tuple[str, str]]:
    """Of the small calls of one tenant: the median, the 99th percentile, the longest."""
    small = post("/v1/chat/completions", SMALL, KEYS[1])
    idle = waits(small, lasting(IDLE))
    yield "flood, none", _told(idle)
    large = kinds(16 * MIB, 90_000)
    full = kinds(16 * MIB, 16 * MIB)
    for name, (path, body) in {"numbers, full": full["numbers"], "text": full["text"], "image": large["image"]}.items():
        message, sent = post(path, body, KEYS[0]), [0]

        def send(message: bytes = message, sent: list[int] = sent) -> None:
            client, going_on = Client(), lasting(FLOOD)
            while going_on():
                client.ask(message)
                sent[0] += 1
            client.close()

        took = beside(send, small)
        ratio = took[len(took) * 99 // 100] / idle[len(idle) * 99 // 100]
        yield f"flood, {name}", f"{_told(took)}   {sent[0]} bodies   p99 {ratio:.1f} x"


def _told(took: list[float]) -> str:
    return " ".join(f"{took[len(took) * part // 1000] * 1e3:7.1f} ms" for part in (500, 990, 999))


def unfinished(pid: int, connections: int) -> Iterator[tuple[str, str]]:
    """Resident memory before, with so many unfinished bodies, and after them."""
    before = memory(pid)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {16 * MIB}\r\n\r\n".encode()
    message = memoryview(head + b" " * FIRST_BYTES)
    sockets: list[socket.socket] = []
    for number in range(connections):
        made = socket.socket()
        made.bind((f"127.0.{1 + number // 200 % 200}.{1 + number % 200}", 0))
        made.settimeout(30)
        sockets.append(made)
        with contextlib.suppress(OSError):  # refused, and gone before all of it was sent
            made.connect(("127.0.0.1", PORT))
            made.sendall(message)
    seen = [memory(pid)]
    while len(seen) < SETTLED or seen[-1] > seen[-SETTLED]:  # what the kernel still has is on its way
        time.sleep(0.1)
        seen.append(memory(pid))
    for each in sockets:
        each.close()
    answers(f"http://127.0.0.1:{PORT}/health")
    time.sleep(1.0)
    told = f"{before / MIB:7.0f} MiB {max(seen) / MIB:7.0f} MiB {memory(pid) / MIB:7.0f} MiB"
    yield f"memory, {connections} connections", told


@contextlib.contextmanager
def gateway(tree: Path, folder: Path) -> Iterator[int]:
    """Its process id."""
    file = folder / "policy.yaml"
    file.write_text(policy())
    command = [
        *("env", "-C", str(tree), "taskset", "-c", "0", sys.executable, "-m", "gateway.cli", "serve"),
        *("--engine", f"http://127.0.0.1:{ENGINE_PORT}", "--policy", str(file)),
        *("--listen", f"127.0.0.1:{PORT}", "--control", "127.0.0.1:0", "--log", "none"),
    ]
    with Child("gateway", command, folder / "output") as child:
        child.wait(lambda: answers(f"http://127.0.0.1:{PORT}/health"), 60.0, "an answer", every=0.1)
        yield child.pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="another checkout, whose gateway is measured first")
    parser.add_argument("--connections", type=int, default=1000, help="unfinished bodies (default: 1000)")
    parser.add_argument("--only", choices=("stall", "flood", "memory"), help="one of the three")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.setswitchinterval(0.0001)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    trees = {**({"baseline": args.tree.resolve()} if args.tree else {}), "this tree": Path.cwd()}
    with serve_stub(ENGINE_PORT):
        for tree, folder in trees.items():
            print(tree, flush=True)
            for name in ("stall", "flood", "memory"):
                if args.only not in (None, name):
                    continue
                with tempfile.TemporaryDirectory(prefix="bodies-") as files:
                    try:
                        with gateway(folder, Path(files)) as pid:
                            rows = {"stall": stall, "flood": flood}.get(name, lambda: unfinished(pid, args.connections))
                            for what, told in rows():
                                print(f"  {what:36}{told}", flush=True)
                    except ChildError as error:
                        sys.exit(f"bodies: {error}")


if __name__ == "__main__":
    main()
