"""Engine processes under the manager: they serve, fail, hang and vanish, and each is reported."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.shared.files.units import GIB
from gateway.shared.protocol import SOCKETS_MARK
from sidecar.core.addresses import SOCKETS, TRANSFER_PORTS
from sidecar.core.config import decode
from sidecar.core.engine_records import EngineFacts, EngineFailed
from sidecar.core.inventory import Size
from sidecar.core.vllm import Completion
from sidecar.gpus.simulated import SimulatedGPUs
from sidecar.process import vllm_engine
from sidecar.process.engine import VllmEngines
from sidecar.process.process_family import marker_of
from sidecar.residency.machine import Engine, Engines
from tests.sidecar.laid_out import lay_out
from tests.sidecar.nothing_left import gone, nothing_left

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

WITHIN = 60.0  # seconds that any of these may take on a busy machine
# What stands in for a vLLM's interpreter: it is started as `python -m vllm... --model ...`, and it is this program.
PROGRAM = """#!{python} -ISu
import os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
def given(flag): return sys.argv[sys.argv.index(flag) + 1]
{body}
"""
# An API server of its own small kind. `answers` in its folder overrules what it says: JSON, path to status and body;
# status 0: no answer; below 100: it comes once the server has run for so many seconds of CPU time.
SERVES = """
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
METRICS = "".join("vllm:" + name + '{engine="0"} 0.0\\n' for name in
                  ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))
BODY = {"/health": "", "/metrics": METRICS, "/version": '{"version":"0.9.0"}', "/is_sleeping": '{"is_sleeping":false}',
        "/v1/models": '{"data":[{"id":"' + given("--served-model-name") + '","max_model_len":99}]}', "/wake_up": "",
        "/v1/completions": '{"choices":[{"text":"x"}]}'}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        answers = json.load(open(folder + "/answers")) if os.path.exists(folder + "/answers") else {}
        status, body = answers.get(path, (200, BODY.get(path, "")))
        if not status:
            return
        if status < 100:  # of its first answer: seconds of CPU time that it computes first
            while time.process_time() < status:
                pass
            status = 200
        if path == "/metrics" and body is not METRICS:
            body = METRICS + body
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
    do_POST = do_GET
HTTPServer(("127.0.0.1", int(given("--port"))), Handler).serve_forever()
"""


def answers(folder: Path, **said: tuple[int, str]) -> None:
    """What SERVES says from now on: `is_sleeping=(200, "...")`."""
    named = {f"/{name.replace('__', '/')}": answer for name, answer in said.items()}
    (folder / "new").write_bytes(msgspec.json.encode(named))
    (folder / "new").rename(folder / "answers")


def sleep_state(name: str) -> str:
    return f'vllm:engine_sleep_state{{sleep_state="{name}"}} 1.0\n'


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WITHIN):
            await scenario()

    asyncio.run(bounded())


def vllm(folder: Path, body: str) -> str:
    """The `engine:` of a file whose vLLM is `body`."""
    program = folder / "python"
    program.write_text(PROGRAM.format(python=sys.executable, body=body))
    program.chmod(0o755)
    return f"{{python: {program}}}"


def free_ports(count: int = 51) -> str:
    """Ports in a row that are free, below those that the system gives out by itself to others at any time."""
    for _ in range(100):
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"{first}-{first + count - 1}"
    raise AssertionError("no ports are free")


class Box:
    """The engines of a machine, and what was said of them to its operator."""

    def __init__(
        self,
        folder: Path,
        engine: str,
        *,
        models: str = "m: {model_path: x}",
        pool: str | None = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.said: list[str] = []
        where = "" if pool is None else f"engine_addresses: {pool or free_ports()}\n"
        text = f"engine: {engine}\n{where}models:\n  " + models.replace("\n", "\n  ")
        self.engines = VllmEngines(
            decode(text.encode()),
            folder,
            sidecar=f"test-{os.getpid()}",
            clock=time.monotonic,
            environment=dict(os.environ, **(variables or {})),
            say=self.said.append,
        )

    async def start(self, profile: str = "m", size: Size | None = None) -> Engine:
        return await self.engines.start(profile, (0,), size or Size(share=0.5))

    async def failed(self, doing: Callable[[], Awaitable[object]]) -> EngineFailed:
        with pytest.raises(EngineFailed) as caught:
            await doing()
        return caught.value


def pid_of(engine: Engine) -> int:
    return engine.record(level=0, told=EngineFacts()).process.pid


def words_of(engine: Engine) -> list[str]:
    return Path(f"/proc/{pid_of(engine)}/cmdline").read_text().split("\0")[:-1]


async def first_line(engine: Engine) -> str:
    while not (lines := engine.lines(9)):
        await asyncio.sleep(0.01)
    return lines[0]


# -- one that serves --------------------------------------------------------------------------------------------------


def test_the_life_of_an_engine(tmp_path: Path) -> None:
    """Started on a simulated GPU, asleep at both levels and awake again, left, taken over, ended."""
    folder = tmp_path / "gpus"
    lay_out(folder, [80 * GIB])
    gpus = SimulatedGPUs(folder)

    async def scenario() -> None:
        variables = {"WEIR_SIMULATED_GPUS": str(folder), "WEIR_SIMULATED_SPEED": "50"}
        flags = "{max-num-seqs: 64, scheduling-policy: priority}"
        models = f"m: {{model_path: x, gpu_memory: 30%, served_name: some/Model, flags: {flags}}}"
        box = Box(tmp_path, "{simulated: h100-8b}", models=models, pool=f"unix:{tmp_path}/s", variables=variables)
        engines: Engines = box.engines
        size = await engines.sizing.size("m", 80 * GIB, 1, None, None, unified=False)
        assert (size.claim, size.start_needs, size.residue, size.host) == (24 * GIB, 24 * GIB, GIB, 12 * GIB)
        engine = await engines.start("m", (0,), size)

        def held() -> int:
            return engine.held(gpus.snapshot()[0].processes)

        told = await engine.ready()
        assert (told.max_concurrency, engine.gpus, engine.url) == (64, (0,), f"unix://{tmp_path}/s/m.sock")
        assert told.priorities
        assert told.kv_tokens
        assert told.context_length
        assert told.canary is not None
        assert held() == size.claim
        assert await engine.busy() == 0
        for level in (1, 2):
            await engine.sleep(level)  # type: ignore[arg-type] # of a tuple of two literals mypy makes int
            assert await engine.awake() == level
            assert held() == size.residue
            await engine.alive()
            await engine.wake(level, told)  # type: ignore[arg-type] # as above
            assert await engine.awake() == 0
            assert held() == size.claim
        await engine.sleep(2)
        other = msgspec.structs.replace(told, canary=Completion("other words"))
        wrong = await box.failed(lambda: engine.wake(2, other))
        assert re.search("did not wake from level 2.*weights are not what they were.*'other words' before", str(wrong))
        assert wrong.wrong
        assert engine.host_held() > 10 * 1024**2, "an interpreter has more than that"
        await engine.sleep(1)

        record = engine.record(level=1, told=told)
        await engine.leave()
        record = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
        engine = await engines.adopt("m", record)
        assert await engine.awake() == 1
        await engine.wake(1, record.told)
        assert engine.lines(1)[0].startswith("ready unix://")
        assert engine.record(level=1, told=told) == record

        ended = asyncio.create_task(engine.ended())
        await engine.stop()
        assert "exit status 0" in await ended
        assert held() == 0
        assert list((tmp_path / "s").glob("*.sock")) == []
        assert gone(record.process.pid)
        assert "startup complete" in (tmp_path / "sidecar-logs" / "m.log").read_text()
        await engine.stop()  # again
        assert str(await box.failed(lambda: engines.adopt("m", record))) == (
            f"{record.process.engine}: process {record.process.pid} has ended"
        )
        assert box.said == []

    run(scenario)


@pytest.mark.parametrize("status", [400, 501])
def test_a_model_that_only_pools_serves_without_a_canary(tmp_path: Path, status: int) -> None:
    async def scenario() -> None:
        answers(tmp_path, v1__completions=(status, "no"))
        box = Box(tmp_path, vllm(tmp_path, SERVES), models="m: {model_path: x, served_name: bge}")
        engine = await box.start()
        assert await engine.ready() == EngineFacts(context_length=99)
        await engine.alive()
        assert len(box.said) == 1
        assert f"m serves, and was not warmed up: /v1/completions: it answered {status}" in box.said[0]
        await engine.stop()

    run(scenario)


def a_probe_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on; longer all the same than a busy machine holds up an engine that computes, or is about to answer."""
    monkeypatch.setattr(vllm_engine, "LIVENESS", 8.0)
    monkeypatch.setattr(vllm_engine, "COMPUTES", 0.01 / 4)  # a busy machine leaves little to it


@pytest.mark.parametrize("computes", [True, False])
def test_an_engine_that_answers_late_hangs_unless_it_computes(
    tmp_path: Path, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is compiled, or a CPU reads a long prompt: one step takes longer than a probe."""

    async def scenario() -> None:
        engine = await Box(tmp_path, vllm(tmp_path, SERVES), models="m: {model_path: x, sleep: {level: 1}}").start()
        await engine.ready()
        await engine.alive()
        a_probe_is_short(monkeypatch)
        if computes:
            answers(tmp_path, is_sleeping=(5, '{"is_sleeping":false}'))
            began = time.monotonic()
            await engine.alive()
            assert time.monotonic() - began > vllm_engine.LIVENESS / 2, "it did not come late"
        else:
            os.kill(pid_of(engine), signal.SIGSTOP)
            with pytest.raises(EngineFailed, match="it hangs or is dead"):
                await engine.alive()
        await engine.stop()

    run(scenario)


@pytest.mark.parametrize("asked", ["is_sleeping", "metrics"])
def test_one_that_computes_is_not_ended_as_it_is_taken_over_or_looked_at(
    tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, SERVES), models="m: {model_path: x, sleep: {level: 1}}")
        engine = await box.start()
        record = engine.record(level=0, told=await engine.ready())
        await engine.leave()
        engine = await box.engines.adopt("m", record)
        a_probe_is_short(monkeypatch)
        answers(tmp_path, **{asked: (5, '{"is_sleeping":false}' if asked == "is_sleeping" else "")})
        assert (await engine.awake(), await engine.busy()) == (0, 0)
        await engine.stop()

    run(scenario)


def test_a_log_that_cannot_be_written_keeps_nothing_from_being_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "sidecar-logs").write_text("a file where the folder should be")
        box = Box(tmp_path, vllm(tmp_path, "print('here')\n" + SERVES))
        engine = await box.start()
        assert (await engine.ready()).canary == Completion("x")
        assert await first_line(engine) == "here"
        assert any("cannot take the engine's output" in line for line in box.said)
        await engine.stop()

    run(scenario)


# -- one that fails ---------------------------------------------------------------------------------------------------

MEMORY = """
print("(EngineCore_0 pid=7) ERROR 11-21 16:00:00 [core.py:700] ValueError: Free memory on device (3.1/79.2 GiB) on "
      "startup is less than desired GPU memory utilization (0.9, 71.3 GiB).")
print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
sys.exit(1)
"""
FAILS = [
    (MEMORY, "exit status 1; it said: ValueError: Free memory on device (3.1/79.2 GiB)", True),
    ("raise KeyError('rope_theta')", "exit status 1; it said: KeyError: 'rope_theta'", False),
    ("print('torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB.'); sys.exit(1)", "torch.OutOfMemoryError", True),
    ("print('loading'); os.kill(os.getpid(), 9)", "it was ended by SIGKILL; it said: loading", False),
    ("sys.exit(0)", "it ended with exit status 0 and had said nothing", False),
    ("print('\\x1b[31mx: error: argument --dtype: \\x07no\\x1b[0m'); sys.exit(2)", "status 2; it said: x: error: argument --dtype:  no", False),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("body", "message", "memory"), FAILS, ids=[message[-20:] for _, message, _ in FAILS])
def test_why_a_start_failed_is_what_the_engine_said(tmp_path: Path, body: str, message: str, memory: bool) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, body))
        engine = await box.start()
        error = await box.failed(engine.ready)
        assert str(error).startswith("it did not get ready: ")
        assert message in str(error)
        assert error.out_of_memory is memory
        assert message[-20:] in str(await box.failed(engine.alive))
        await engine.stop()

    run(scenario)


def test_one_that_makes_no_progress_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, "print('Loading weights', flush=True); time.sleep(99)"),
                  models="m: {model_path: x, load_stall: 2s, load_timeout: 2s}")  # fmt: skip
        engine = await box.start()
        assert await first_line(engine) == "Loading weights"
        error = str(await box.failed(engine.ready))
        assert re.search(r"not ready after .* without progress .*wrote 'Loading weights'\): /health: nobody", error)
        await engine.stop()

    run(scenario)


WAITS = """
while not os.path.exists(folder + "/downloaded"): time.sleep(0.05)
"""


@pytest.mark.parametrize("where", ["hub", "downloads"])
def test_one_that_waits_for_another_ones_download_of_its_model_gets_on(tmp_path: Path, where: str) -> None:
    async def scenario() -> None:
        flags = ", flags: {download-dir: downloads}" if where == "downloads" else ""
        box = Box(tmp_path, vllm(tmp_path, WAITS + SERVES),
                  models=f"m: {{model_path: some/Model, load_stall: 2s{flags}}}",
                  variables={"HF_HUB_CACHE": str(tmp_path / "hub")})  # fmt: skip
        engine = await box.start()
        ready = asyncio.ensure_future(engine.ready())
        blobs = tmp_path / where / "models--some--Model" / "blobs"
        blobs.mkdir(parents=True)
        ends = time.monotonic() + 6.0  # three stalls
        while not ready.done():  # also while it starts at last, which takes a busy machine longer than a stall
            (blobs / secrets.token_hex(8)).write_bytes(b"x" * 100_000)
            if time.monotonic() > ends:
                (tmp_path / "downloaded").touch()
            await asyncio.sleep(0.1)
        await ready
        await engine.stop()

    run(scenario)


def test_one_that_dies_while_it_is_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        body = SERVES.replace("    def do_GET(self):", "    def do_GET(self):\n        if 'sleep?' in self.path:"
                              "\n            print('CUDA error: out of memory', flush=True); os._exit(3)")  # fmt: skip
        box = Box(tmp_path, vllm(tmp_path, body))
        engine = await box.start()
        await engine.ready()
        error = await box.failed(lambda: engine.sleep(1))
        assert str(error) == (
            "it did not go to sleep at level 1: it ended with exit status 3; it said: CUDA error: out of memory"
        )
        assert not error.out_of_memory, "no memory is wanted to go to sleep"
        await engine.stop()

    run(scenario)


def test_one_that_was_not_started_to_sleep(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, SERVES), models="m: {model_path: x, sleep: null}")
        engine = await box.start()
        assert (await engine.ready()).canary is None
        assert "its profile has no sleep" in str(await box.failed(lambda: engine.sleep(1)))
        assert await engine.awake() == 0
        await engine.stop()

    run(scenario)


ASLEEP = (200, '{"is_sleeping":true}')


def test_how_deep_an_engine_sleeps_is_what_it_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, SERVES))
        engine = await box.start()
        told = await engine.ready()
        assert await engine.awake() == 0
        for state, level in (("weights_offloaded", 1), ("discard_all", 2)):
            answers(tmp_path, is_sleeping=ASLEEP, metrics=(200, sleep_state(state)))
            assert await engine.awake() == level
        answers(tmp_path, is_sleeping=ASLEEP, metrics=(200, "vllm:engine_sleep_state 0.0\n"))
        assert "it is paused, which frees nothing" in str(await box.failed(engine.awake))
        answers(tmp_path, is_sleeping=ASLEEP)  # an old one
        assert await engine.awake() == 2, "to wake so is right for both levels"
        assert "it says that it is awake, and that it sleeps" in str(await box.failed(lambda: engine.wake(1, told)))
        record = engine.record(level=1, told=told)
        await engine.leave()
        engine = await box.engines.adopt("m", record)
        assert await engine.awake() == 1, "as the one before left it"
        await engine.stop()

    run(scenario)


def test_a_sleep_whose_answer_was_lost_counts_if_it_sleeps(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, SERVES))
        engine = await box.start()
        await engine.ready()
        answers(tmp_path, sleep=(0, ""), is_sleeping=ASLEEP, metrics=(200, sleep_state("discard_all")))
        await engine.sleep(2)
        wrong = str(await box.failed(lambda: engine.sleep(1)))
        assert "it did not go to sleep at level 1: /sleep?level=1&mode=wait: the connection ended before the" in wrong
        answers(tmp_path, sleep=(500, "no"))
        assert "/sleep?level=1&mode=wait: it answered 500: 'no'" in str(await box.failed(lambda: engine.sleep(1)))
        await engine.stop()

    run(scenario)


def test_metrics_that_cannot_be_read_fail_a_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        answers(tmp_path, metrics=(200, "vllm:num_requests_running x\n"))
        box = Box(tmp_path, vllm(tmp_path, SERVES))
        engine = await box.start()
        error = str(await box.failed(engine.ready))
        assert "it did not get ready: /metrics: cannot read the answer" in error
        assert "it does not say how busy it is" in str(await box.failed(engine.busy))
        await engine.stop()

    run(scenario)


def test_the_size_of_the_cache_is_what_the_smallest_worker_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        said = "".join(
            f"print('(Worker_TP{n} pid=1) INFO x] Available KV cache memory: {n + 1.5} GiB')\n" for n in (1, 0)
        )
        box = Box(tmp_path, vllm(tmp_path, said + SERVES))
        engine = await box.start()
        while len(engine.lines(9)) < 2:  # what an engine says is read a moment after it is written
            await asyncio.sleep(0.01)
        assert (await engine.ready()).kv_bytes == 1.5 * GIB
        await engine.stop()

    run(scenario)


# -- what it is told --------------------------------------------------------------------------------------------------


REFUSES = """
if "--uds" in sys.argv:
    sys.exit("vllm serve: error: unrecognized arguments: --uds /x")
"""


def test_an_older_vllm_refuses_a_socket_and_ports_are_advised(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, REFUSES + SERVES), pool=None)
        engine = await box.start()
        error = await box.failed(engine.ready)
        await engine.stop()
        assert error.found is not None
        assert (error.found.kind, error.found.refused_arguments) == ("bad_flag", True)
        assert "`engine_addresses`" in error.found.advice

    run(scenario)


def test_engines_listen_where_nobody_else_can_go_unless_told_otherwise(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, "{simulated: h100-8b}", models="m: {model_path: x, sleep: null}", pool=None)
        engine = await box.start()
        folder = tmp_path / SOCKETS
        assert engine.url == f"unix://{folder}/m.sock"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / SOCKETS_MARK).is_file(), "by which gateways know it"
        while not (words := words_of(engine)):  # the kernel shows them a moment after the program runs
            await asyncio.sleep(0.01)
        assert "--uds" in words
        await engine.stop()
        assert box.said == []
        folder.chmod(0o755)
        await (await box.start()).stop()
        assert box.said == [f"{folder} is open to other users, so gateways do not send calls there: chmod 700 {folder}"]

    run(scenario)


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, "{simulated: h100-8b}", pool=None)
        stranger = os.geteuid() + 1
        monkeypatch.setattr("sidecar.process.engine.os.geteuid", lambda: stranger)
        assert "belongs to another user: give engine_addresses a folder of this one's" in str(
            await box.failed(box.start)
        )

    run(scenario)


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, "{python: nowhere/python}")
        assert "nowhere/python could not be started: " in str(await box.failed(box.start))

    run(scenario)


def test_settings_change_with_what_is_started_and_with_nothing_else(tmp_path: Path) -> None:
    def settings(models: str, pool: str = "8100-8199", engine: str = "{python: p}", **variables: str) -> str:
        box = Box(tmp_path, engine, models=f"m: {{model_path: x{models}}}", pool=pool, variables=variables)
        return box.engines.settings("m")

    same = [
        settings(""),
        settings(", sleep: {after: 5m}, stop_after: 9m, max_starvation: 9s, load_stall: 9m, warmup: {requests: 9}"),
        settings("", pool="9100-9199"),
        settings("", HOME="/elsewhere"),
    ]
    others = [
        settings(", flags: {seed: 1}"),
        settings(", environment: {TZ: UTC}"),
        settings(", sleep: null"),
        settings(", gpu_memory: 40%"),
        settings(", gpus: [1]"),
        settings("", pool="unix:/run/x"),
        settings("", engine="{python: q}"),
        settings("", engine="{simulated: h100-8b}"),
    ]
    assert len(set(same)) == 1
    assert len({*same, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("device", "digest"), [("gpu", "14fbc8d38f99693c7d2e338b0e05680d"), ("cpu", "3a611e700affe910747f50ba61704c53")]
)
def test_settings_are_those_of_earlier_versions(tmp_path: Path, device: str, digest: str) -> None:
    """Another digest ends all engines at an upgrade, and forgets their measured sizes."""
    box = Box(tmp_path, f"{{python: p, device: {device}}}", pool="8100-8199")
    assert box.engines.settings("m") == digest


# -- where it listens -------------------------------------------------------------------------------------------------


def test_engines_that_exchange_kv_caches_have_a_side_channel_each(tmp_path: Path) -> None:
    said = "print(os.environ['VLLM_NIXL_SIDE_CHANNEL_PORT'], flush=True); time.sleep(99)"

    async def scenario() -> None:
        fields = "{model_path: x, sleep: null, kv_transfer: both}"
        box = Box(tmp_path, vllm(tmp_path, said), models=f"m: {fields}\nn: {fields}\no: {fields}")
        first, second = await box.start("m"), await box.start("n")
        ports = [int(await first_line(engine)) for engine in (first, second)]
        assert ports[0] != ports[1]
        assert set(ports) <= set(TRANSFER_PORTS)
        record = second.record(level=0, told=EngineFacts())
        await second.leave()
        record = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
        await first.stop()
        with pytest.raises(EngineFailed):
            await box.engines.adopt("n", record)  # it answers nothing, and is ended
        third = await box.start("o")
        assert int(await first_line(third)) == min(ports), "both are free again"
        await third.stop()

    run(scenario)


def test_every_engine_has_a_port_of_its_own_and_gives_it_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        models = "\n".join(f"{name}: {{model_path: x}}" for name in "ab")
        box = Box(tmp_path, vllm(tmp_path, "time.sleep(99)"), models=models, pool=free_ports(2))
        first, second = await box.start("a"), await box.start("b")
        assert first.url != second.url, "neither listens yet"
        assert "no free port on 127.0.0.1" in str(await box.failed(lambda: box.start("a")))
        await first.stop()
        third = await box.start("a")
        assert third.url == first.url
        assert (
            third.record(level=0, told=EngineFacts()).process.engine
            != first.record(level=0, told=EngineFacts()).process.engine
        )
        await third.stop()
        await second.stop()

    run(scenario)


def test_what_is_in_the_way_of_a_socket_is_not_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, SERVES), pool=f"unix:{tmp_path}")
        (tmp_path / "m.sock").write_text("precious")
        assert "is no socket: it was not removed" in str(await box.failed(box.start))
        assert (tmp_path / "m.sock").read_text() == "precious"

    run(scenario)


# -- what an earlier sidecar left -------------------------------------------------------------------------------------


def test_what_cannot_be_taken_over_is_ended_or_handed_out_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        program = vllm(tmp_path, SERVES)
        box = Box(tmp_path, program)
        engine = await box.start()
        told = await engine.ready()
        record = engine.record(level=0, told=told)
        await engine.leave()

        changed = Box(tmp_path, program, models="m: {model_path: y, served_name: z}")
        engine = await changed.engines.adopt("m", record)
        assert engine.record(level=0, told=told).settings != changed.engines.settings("m")
        await engine.leave()
        absent = Box(tmp_path, program, models="n: {model_path: x}")
        engine = await absent.engines.adopt("m", record)
        assert "no profile m any more" in str(await absent.failed(lambda: engine.wake(1, told)))
        await engine.leave()

        answers(tmp_path, v1__models=(200, '{"data":[{"id":"other"}]}'))
        other = await absent.engines.adopt("m", record)
        await other.leave()
        answers(tmp_path, health=(503, ""))
        sick = str(await box.failed(lambda: box.engines.adopt("m", record)))
        assert "it does not answer: /health: it answered 503" in sick
        assert gone(record.process.pid)

        answers(tmp_path)
        engine = await box.start()
        record = engine.record(level=0, told=await engine.ready())
        await engine.leave()
        answers(tmp_path, v1__models=(200, '{"data":[{"id":"other"}]}'))
        assert str(await box.failed(lambda: box.engines.adopt("m", record))) == "it serves other, not m"
        assert gone(record.process.pid)

    run(scenario)


def test_what_is_left_of_an_earlier_sidecar_is_swept_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        models = "\n".join(f"{name}: {{model_path: x}}" for name in "ab")
        box = Box(tmp_path, vllm(tmp_path, "time.sleep(99)"), models=models)
        kept, left = await box.start("a"), await box.start("b")
        while not marker_of(pid_of(left)):  # the kernel shows an environment a moment after the program runs
            await asyncio.sleep(0.01)
        await box.engines.sweep([kept.record(level=0, told=EngineFacts()).process.engine])
        assert "it was ended by SIGKILL" in await left.ended()
        assert not gone(pid_of(kept))
        for engine in (kept, left):
            await engine.stop()
        assert box.said == []

    run(scenario)


FORKS = """
import subprocess
# A child; without a parent that lives one in a session of its own, and one without the marker; one without all that.
# They write at the same time, so each its line in one piece: `print` writes the end of a line by itself.
NAP = [sys.executable, "-ISu", "-c", "import os, time; os.write(1, b'%d' % os.getpid() + bytes([10])); time.sleep(99)"]
def orphan(how):
    subprocess.run([sys.executable, "-ISc", f"import subprocess, sys; subprocess.Popen(sys.argv[1:], {how})", *NAP])
subprocess.Popen(NAP)
orphan("start_new_session=True")
orphan("env={}")
subprocess.Popen(NAP, env={}, start_new_session=True)
time.sleep(99)
"""


def test_what_is_held_is_that_of_all_its_processes_and_of_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        box = Box(tmp_path, vllm(tmp_path, FORKS))
        engine = await box.start()
        while len(engine.lines(9)) < 4:
            await asyncio.sleep(0.01)
        family = [pid_of(engine), *map(int, engine.lines(9))]
        others = {os.getpid(): 100, os.getppid(): 100, 2**22 + 1: 100}
        assert engine.held(dict.fromkeys(family, 1) | others) == 5
        await engine.stop()
        assert engine.held(dict.fromkeys(family, 1) | others) == 0

    run(scenario)


async def cancelled(doing: Coroutine[Any, Any, object], begun: Callable[[], bool]) -> None:
    """Cancel it once it has begun, and wait for its end."""
    task = asyncio.ensure_future(doing)
    while not begun():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_is_cancelled_meanwhile_leaves_the_engine_as_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        program = vllm(tmp_path, "print('up')\ntime.sleep(99)")
        box = Box(tmp_path, program)
        engine = await box.start()
        await cancelled(engine.ready(), lambda: bool(engine.lines(1)))
        record = engine.record(level=0, told=EngineFacts())
        await engine.leave()
        looks = itertools.count()
        await cancelled(box.engines.adopt("m", record), lambda: next(looks) == 1)
        assert len(asyncio.all_tasks()) == 1, "it is watched no more"
        assert not gone(record.process.pid)
        engine = await Box(tmp_path, program, models="n: {model_path: x}").engines.adopt("m", record)
        await engine.stop()

    run(scenario)
