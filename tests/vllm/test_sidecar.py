"""Gateway and sidecar before a real vLLM: models started on demand, put to sleep, killed, hung, taken over.

Two models of one machine without a GPU. Sleeping frees no memory there (vLLM has the whole state machine all the same),
so what is proved is that no call is lost on the way, whatever happens to whom.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtest.processes import Child, Gateway, free_port, get, until
from sidecar.process import process_family
from tests.beside import beside
from tests.vllm.conftest import PATIENCE
from tests.vllm.real_vllm import CONTEXT, ENVIRONMENT, model, venv

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

POLICY = """
classes:
  default: {deadline: 5m}
fleet: {sidecars: {copies: 1s}}  # with the token that the gateway makes
"""
FILE = """
id: test-%(pid)s
listen: 127.0.0.1:%(listen)s
gateways: ["%(gateway)s"]
token_file: sidecar.token
engine: {python: %(python)s, device: cpu}
models:
  one: &tiny
    model_path: %(model)s
    context_length: %(context)s
    load_timeout: 5m
    sleep: {level: 1, after: 1h}
    gpu_memory: {kv: 1GiB}
    flags: {dtype: bfloat16, enforce-eager: true, max-num-seqs: 16}
    environment: {HF_HUB_OFFLINE: "1", TRANSFORMERS_OFFLINE: "1"}
  three:
    model_path: %(copied)s
    context_length: %(context)s
    load_timeout: 5m
    gpu_memory: {kv: 1GiB}
    flags: {dtype: bfloat16, enforce-eager: true, max-num-seqs: 16}
    environment: {HF_HUB_OFFLINE: "1", TRANSFORMERS_OFFLINE: "1"}
  two:
    model_path: %(model)s
    context_length: %(context)s
    load_timeout: 5m
    sleep: {level: 2, after: 6s}
    gpu_memory: {kv: 1GiB}
    flags: {dtype: bfloat16, enforce-eager: true, max-num-seqs: 16}
    environment: {HF_HUB_OFFLINE: "1", TRANSFORMERS_OFFLINE: "1"}
"""


class Machine:
    """A gateway, and `sidecar serve` with the file beside it, which may be started again."""

    def __init__(self, folder: Path, gateway: Gateway, scratch: str) -> None:
        self.gateway = gateway
        self.listen = free_port()
        self.id = f"test-{os.getpid()}"
        self.file = folder / "sidecar.yaml"
        self.file.write_text(
            FILE
            % {
                "pid": os.getpid(),
                "listen": self.listen,
                "gateway": gateway.control,
                "python": venv() / "bin" / "python",
                "model": model(),
                "copied": folder / "models" / "three",
                "context": CONTEXT,
            }
        )
        self._environment = {**os.environ, **ENVIRONMENT, "TMPDIR": scratch}
        self._folder = folder
        self._starts = 0
        self.child = self.start()
        self.child.says("takes reports", PATIENCE)  # before that the gateway knows no model

    def start(self) -> Child:
        self._starts += 1
        log = self._folder / f"sidecar-{self._starts}.log"
        argv = [sys.executable, "-m", "sidecar.cli", "serve", "--config", str(self.file)]
        self.child = Child("sidecar", argv, log, env=self._environment)
        self.child.says("control API", PATIENCE)
        return self.child

    def end(self) -> None:
        self.child.stop()

    def command(self, *arguments: str, status: int = 0) -> str:
        """What another command says that exits with `status`."""
        log = self._folder / "command.log"
        argv = [sys.executable, "-m", "sidecar.cli", *arguments, "--config", str(self.file)]
        with Child("command", argv, log, env=self._environment) as child:
            assert child.process.wait(PATIENCE) == status, child.output()
            return child.output()

    def profile(self, name: str) -> Any:
        token = (self.file.parent / "sidecar.token").read_text().strip()
        status = json.loads(get(f"http://127.0.0.1:{self.listen}/status", token=token)[1])
        return next(each for each in status["models"] if each["profile"] == name)

    def until(self, name: str, state: str) -> float:
        took = until(lambda: self.profile(name)["state"] == state, PATIENCE, every=0.1)
        assert took is not None, (name, state, self.profile(name), self.child.output())
        return took

    def save(self, text: str, told: str) -> None:
        """Save the file, and wait until the sidecar's log tells `told` of it."""
        before = self.child.output().count(told)
        self.file.write_text(text)
        took = until(lambda: self.child.output().count(told) > before, PATIENCE, every=0.1)
        assert took is not None, (told, self.child.output())

    def places(self, number: int) -> None:
        """Save how many calls `one` may run at a time, and wait until it counts."""
        text = re.sub(r"max-num-seqs: \d+", f"max-num-seqs: {number}", self.file.read_text(), count=1)
        self.save(text, "settings that need another engine")

    def processes(self, profile: str = "") -> list[int]:
        """The pids of the engines of this sidecar, or of one profile's."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        marked = {pid: process_family.marker_of(pid) or "" for pid in pids}
        return [pid for pid, mark in marked.items() if mark.startswith(f"{self.id}-") and f"/{profile}" in mark]

    def core(self, profile: str) -> int:
        """The pid of the EngineCore of a profile's engine."""
        pids = self.processes(profile)
        (core,) = [pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return core

    def ask(self, name: str, tokens: int = 8) -> str:
        """The answer to one call through the gateway; the client does not retry."""
        with openai.OpenAI(
            base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:
            messages = [{"role": "user", "content": "what is it?"}]
            answer = client.chat.completions.create(
                model=name,
                messages=messages,  # type: ignore[arg-type] # a literal, which the client's types take for wider
                max_tokens=tokens,
                extra_body={"ignore_eos": True},  # invented weights end an answer when it pleases them
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens > 0
            return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def machine(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine of all tests here: an engine that one has started serves the next."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "policy.yaml").write_text(POLICY)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-"))
        gateway = Gateway(folder / "gateway.log", "--policy", str(folder / "policy.yaml"), ready=False)
        stack.enter_context(gateway)
        running = Machine(folder, gateway, scratch)
        stack.callback(running.end)
        stack.callback(running.command, "stop", "--all")
        yield running


def test_two_models_of_one_machine(machine: Machine) -> None:
    # Stopped: the call is held while the engine starts.
    began = time.monotonic()
    machine.ask("one")
    print(f"cold start and answer: {time.monotonic() - began:.1f} s")
    machine.ask("two")

    # Idle: it goes to sleep; a call that comes then is held, it wakes, and answers.
    machine.until("two", "sleeping")
    began = time.monotonic()
    machine.ask("two")
    print(f"asleep at level 2, wake and answer: {time.monotonic() - began:.2f} s")

    # EngineCore is killed: another one, and the call is answered.
    os.kill(machine.core("one"), signal.SIGKILL)
    machine.until("one", "error")
    began = time.monotonic()
    machine.ask("one")
    print(f"after EngineCore was killed, start and answer: {time.monotonic() - began:.1f} s")

    # The sidecar is killed while a call runs, and started again: no call is lost, no engine started.
    url = machine.profile("one")["url"]
    with beside(lambda: machine.ask("one", 1500)) as (answer,):
        assert until(lambda: machine.gateway.fleet()["engines"] and not machine.gateway.idle(), PATIENCE) is not None
        machine.child.kill()
        assert machine.ask("one")
        machine.start()
        assert machine.profile("one")["state"] == "running"
        assert machine.profile("one")["url"] == url
        assert machine.ask("one")
    assert answer.result()
    machine.command("stop", "two")


def test_an_edited_file_restarts_what_it_must_and_loses_no_call(machine: Machine) -> None:
    machine.ask("one")
    engine = machine.processes("one")

    # Aliases and times restart nothing; a call by the alias reaches an engine that never heard of it.
    text = machine.file.read_text()
    text = text.replace("  one: &tiny\n", "  one: &tiny\n    aliases: [uno]\n    stop_after: 2h\n")
    machine.save(text, "changed, without a restart: one")
    machine.ask("uno")
    assert machine.processes("one") == engine

    # Another flag: the call that runs ends on the old engine, the next one starts the new engine.
    with beside(lambda: machine.ask("one", 1500)) as (answer,):
        assert until(lambda: not machine.gateway.idle(), PATIENCE) is not None
        machine.places(1)
    assert answer.result()
    machine.until("one", "stopped")
    machine.ask("uno")
    assert not set(machine.processes("one")) & set(engine)


COPY = """\
  one-more:
    served_name: one
    model_path: %s
    context_length: %s
    load_timeout: 5m
    sleep: {level: 1, after: 5s}
    gpu_memory: {kv: 1GiB}
    flags: {dtype: bfloat16, enforce-eager: true, max-num-seqs: 1, disable-uvicorn-access-log: false}
    environment: {HF_HUB_OFFLINE: "1", TRANSFORMERS_OFFLINE: "1"}
"""


def test_a_copy_is_woken_while_calls_wait(machine: Machine) -> None:
    """A second engine of `one`, which runs one call at a time. Callers ask until the copy is awake, so that some wait
    whatever the machine's speed is, and once more, so that both engines serve."""
    machine.ask("one")
    machine.save(machine.file.read_text() + COPY % (model(), CONTEXT), "one-more")
    began = time.monotonic()
    assert "one-more: running" in machine.command("ensure", "one-more")
    print(f"ensure of a copy: {time.monotonic() - began:.1f} s")
    machine.until("one-more", "sleeping")

    answers: list[str] = []
    awake = threading.Event()
    asked = itertools.count()

    def ask_on() -> None:
        last = False
        while not last:
            last = awake.is_set()
            next(asked)
            answers.append(machine.ask("one", 800))

    with beside(*[ask_on] * 8):
        try:
            print(f"overloaded, the copy was awake after {machine.until('one-more', 'running'):.1f} s")
            assert machine.profile("one-more")["copy"]
        finally:
            awake.set()
    assert len(answers) == next(asked)
    served = (machine.file.parent / "sidecar-logs" / "one-more.log").read_text().count("POST /v1/chat/completions")
    print(f"calls of the copy: {served} of {len(answers)}")
    assert served >= 2
    assert machine.until("one-more", "sleeping") >= 0.0
    assert machine.profile("one")["state"] == "running"
    assert machine.ask("one")
    machine.command("stop", "one-more")
    machine.command("stop", "one")


def test_a_model_whose_files_come_later_is_had_ready_and_switched_off(machine: Machine) -> None:
    shutil.copytree(model(), machine.file.parent / "models" / "three")
    began = time.monotonic()
    assert "three: running" in machine.command("ensure", "three")
    print(f"ensure of a model whose files came later: {time.monotonic() - began:.1f} s")
    assert machine.ask("three")

    # Its log has no line for a request: most are asked of it all the time.
    written = (machine.file.parent / "sidecar-logs" / "three.log").read_text()
    assert "Application startup complete" in written
    assert "HTTP/1.1" not in written

    # Off: refused for good, over a restart of the sidecar, until it is on.
    with beside(lambda: machine.ask("three", 300)):
        assert until(lambda: not machine.gateway.idle(), PATIENCE) is not None
        assert "three: stopped" in machine.command("off", "three")
    assert not machine.processes("three")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as refused:
            machine.ask("three")
        assert refused.value.response.headers["x-weir-reason"] == "model_off"
        assert "retry-after" not in refused.value.response.headers
        assert "three is off" in machine.command("ensure", "three", status=1)
        machine.child.kill()
        machine.start()
    machine.command("on", "three")
    assert machine.ask("three")

    # EngineCore hangs: /health says 200 all the same.
    os.kill(machine.core("three"), signal.SIGSTOP)
    print(f"a hung EngineCore was found after {machine.until('three', 'error'):.1f} s")


def test_a_sidecar_that_ends_leaves_no_engine(machine: Machine) -> None:
    machine.ask("three")
    assert machine.processes()
    assert "three" in machine.command("stop", "--all")
    assert until(lambda: not machine.child.alive, PATIENCE) is not None
    assert not machine.processes()
    machine.start()
