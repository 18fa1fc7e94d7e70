"""Rows about residency in real time: a gateway, a sidecar and its simulated engines as processes, with sockets.

What the sidecar costs while nothing happens, what passes between its report and a call at the engine, and what a call
that wakes a model waits for beyond the engine's own wake. Linux: processor time is read from /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from gateway.shared.protocol import REPORT_PATH, CapacityReport, ModelReport, encode
from loadtest.lab.residency.site import GIB
from loadtest.lab.rows import OnProgress, Row
from loadtest.processes import Child, ChildError, Gateway, get, until
from loadtest.report.stats import quantile
from sidecar.gpus.simulated import lay_out

NAMES = "abcd"
SPEED = "3"  # of the simulated engines: a start takes six seconds, far longer than a wake
IDLE = 30.0  # seconds
TRIES = 20
POLICY = "fleet: {sidecars: {}}\n"  # with the token that the gateway makes
SIDECAR = """
id: box
gateways: ["%s"]
token_file: sidecar.token
listen: 127.0.0.1:0
engine_addresses: unix:%s
engine: {simulated: h100-8b}
gpus: all
host_memory_for_sleep: 64GiB
models:
"""
MODELS = b'{"data":[{"id":"m","object":"model","max_model_len":8192}]}'
COMPLETION = b'{"object":"chat.completion","choices":[],"usage":{}}'
AWAKE = re.compile(r"^.*\ba is awake after ([0-9.]+) s", re.MULTILINE)


class SidecarUnderTest:
    """A sidecar with four models on a GPU for two, and its gateway. `ready` once it is; `with` ends both."""

    def __init__(self, folder: Path) -> None:
        (folder / "policy.yaml").write_text(POLICY)
        self.gateway = Gateway(folder / "gateway.log", "--policy", str(folder / "policy.yaml"), ready=False)
        lay_out(folder / "gpus", [80 * GIB])
        models = "".join(f"  {name}: {{model_path: /m/{name}, gpu_memory: 42%}}\n" for name in NAMES)
        (folder / "sidecar.yaml").write_text(SIDECAR % (self.gateway.control, folder / "engines") + models)
        arguments = ("--config", str(folder / "sidecar.yaml"), "--gpus-from", str(folder / "gpus"), "--end-engines")
        self.sidecar = Child(
            "sidecar",
            [sys.executable, "-m", "sidecar.cli", "serve", *arguments],
            folder / "sidecar.log",
            env={**os.environ, "WEIR_SIMULATED_SPEED": SPEED},
        )
        try:
            self.control = self.sidecar.line(r"^control API (http://\S+)", 30.0)
            self._token = _token(folder)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> SidecarUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.sidecar.stop(30.0)
        finally:
            self.gateway.child.stop()

    def models(self) -> dict[str, str]:
        """The state of each."""
        told = json.loads(get(f"{self.control}/status", token=self._token)[1])
        return {model["profile"]: f"{model['state']} {model['pending'] or ''}".strip() for model in told["models"]}

    def order(self, name: str, what: str) -> None:
        get(f"{self.control}/models/{name}/{what}", method="POST", token=self._token)

    def settled(self, name: str, state: str, within: float = 60.0) -> None:
        """Wait until it is in this state with nothing pending. Raises ChildError."""
        if until(lambda: self.models()[name] == state, within, every=0.05) is None:
            raise self.sidecar.failure(f"did not have {name} {state}: {self.models()}")

    def call(self, name: str) -> float:
        """Seconds of one call through the gateway, a token long. Raises ChildError."""
        began = time.monotonic()
        status, body = post(self.gateway.url, "/v1/chat/completions", chat(name))
        if status != 200:
            raise ChildError(f"a call of {name} was answered {status}: {body[:500]!r}")
        return time.monotonic() - began


def chat(model: str) -> bytes:
    """The body of a call for one token."""
    return json.dumps({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}).encode()


def post(url: str, path: str, body: bytes, token: str = "") -> tuple[int, bytes]:
    """One request on a connection of its own, that shows the token if there is one."""
    parts = urlsplit(url)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120.0)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def rows(progress: OnProgress) -> list[Row]:
    """All of them. Raises ChildError."""
    with tempfile.TemporaryDirectory(prefix="weir-residency-") as folder:
        with SidecarUnderTest(Path(folder)) as machine:
            found = [_wakes(machine, progress), _idle(machine, progress)]
        found.append(_decision(Path(folder), progress))
    return found


def _wakes(machine: SidecarUnderTest, progress: OnProgress) -> Row:
    for number, name in enumerate(NAMES):
        machine.order(name, "ensure")
        machine.settled(name, "running")
        progress("starting models", (number + 1) / len(NAMES))
    machine.order("a", "ensure")
    machine.settled("a", "running")
    warm = quantile([machine.call("a") for _ in range(TRIES)], 0.5)
    added = []
    for number in range(TRIES):
        machine.order("a", "sleep")
        machine.settled("a", "sleeping")
        waited = machine.call("a") - warm
        added.append(waited - float(AWAKE.findall(machine.sidecar.output())[-1]))
        progress("wakes", (number + 1) / TRIES)
    return Row(
        name="wake",
        what=f"a call that wakes its model, beyond the engine's own wake: p50, p95 of {TRIES} (processes)",
        value=f"{quantile(added, 0.5) * 1000:.0f} ms, {quantile(added, 0.95) * 1000:.0f} ms",
        baseline=f"the same call of a model that is awake takes {warm * 1000:.0f} ms",
        target="<= 150 ms",
        milestone="<= 150 ms",
        met=quantile(added, 0.5) <= 0.15,
    )


def _idle(machine: SidecarUnderTest, progress: OnProgress) -> Row:
    if sorted(machine.models().values()) != ["running", "running", "sleeping", "sleeping"]:
        raise machine.sidecar.failure(f"has not two models awake and two asleep: {machine.models()}")
    began, used = time.monotonic(), machine.sidecar.cpu()
    while time.monotonic() - began < IDLE:
        time.sleep(0.5)
        progress("idle", (time.monotonic() - began) / IDLE)
    share = (machine.sidecar.cpu() - used) / (time.monotonic() - began)
    return Row(
        name="idle",
        what=f"the sidecar's processor time with 2 models awake and 2 asleep, over {IDLE:g} s",
        value=f"{100 * share:.2f} % of a core",
        target="< 1 %",
        milestone="< 1 %",
        met=share < 0.01,
    )


# -- from a report to a call at the engine ----------------------------------------------------------------------------


class InstantEngine:
    """Answers every call at once, in a thread of its own; `came`: when each of them reached it. `with` runs it."""

    def __init__(self) -> None:
        self.came: list[float] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> InstantEngine:
        self._thread.start()
        self._listens.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        clients: set[asyncio.StreamWriter] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            clients.add(writer)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self._answer(reader, writer)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listens.set()
        await self._over.wait()
        server.close()
        for writer in clients:
            writer.close()
        await asyncio.sleep(0.1)  # for what they still do

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            self.came.append(time.monotonic())
        length = re.search(rb"content-length: *([0-9]+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]) if length else 0)
        body = MODELS if b" /v1/models " in head else b"" if head.startswith(b"GET") else COMPLETION
        lines = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(lines.encode() + body)


def _decision(folder: Path, progress: OnProgress) -> Row:
    took = []
    with ExitStack() as stack:
        engine = stack.enter_context(InstantEngine())
        gateway = Gateway(folder / "decision.log", "--policy", str(folder / "policy.yaml"), ready=False)
        stack.enter_context(gateway)
        token = _token(folder)
        for number in range(TRIES):
            asleep = ModelReport(profile="p", model="m", state="sleeping", pending="wake", url=engine.url, ready_in=1.0)
            _report(gateway, token, 2 * number, asleep)
            call = threading.Thread(target=post, args=(gateway.url, "/v1/chat/completions", chat("m")))
            call.start()
            time.sleep(0.3)
            if len(engine.came) > number:
                raise gateway.child.failure("sent a call to an engine that sleeps")
            began = time.monotonic()
            _report(
                gateway,
                token,
                2 * number + 1,
                ModelReport(profile="p", model="m", state="running", url=engine.url, ready_in=0.0),
            )
            call.join()
            took.append(engine.came[number] - began)
            progress("from report to call", (number + 1) / TRIES)
    return Row(
        name="report",
        what=f"from the sidecar's report that a model is awake to a held call at its engine: p50, longest of {TRIES}",
        value=f"{quantile(took, 0.5) * 1000:.1f} ms, {max(took) * 1000:.1f} ms",
        target="<= 50 ms",
        milestone="<= 50 ms (p50)",
        met=quantile(took, 0.5) <= 0.05,
    )


def _token(folder: Path) -> str:
    return (folder / "sidecar.token").read_text().strip()


def _report(gateway: Gateway, token: str, sequence: int, model: ModelReport) -> None:
    report = CapacityReport(
        sidecar="measured", boot="b", sequence=sequence, control="http://127.0.0.1:9", models=(model,)
    )
    status, body = post(gateway.control, REPORT_PATH, encode(report), token)
    if status != 200:
        raise gateway.child.failure(f"answered a report with {status}: {body[:500]!r}")
