"""`--engine demo`, as `make run` starts it: four models that take turns on two GPUs, and nothing left in the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from gateway.serve.sidecar_process import GPUS, MODELS, TRUE
from loadtest.processes import Gateway, get, until
from sidecar.sizing.memory import LITTLE

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

pytestmark = pytest.mark.slow


class Demo:
    """A running gateway with its sidecar."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.file = gateway.child.line(r"status --watch --config (\S+)$", 60.0)
        self.folder = Path(self.file).parent

    def status(self) -> dict[str, Any]:
        argv = [sys.executable, "-m", "sidecar.cli", "status", "--json", "--config", self.file]
        told = subprocess.run(argv, check=True, capture_output=True, timeout=60, cwd=ROOT).stdout
        status: dict[str, Any] = json.loads(told)
        return status

    def states(self) -> dict[str, str]:
        return {model["profile"]: model["state"] for model in self.status()["models"]}

    def processes(self) -> dict[int, str]:
        """The command lines, by pid, of all that were started for it and still run."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(word.startswith(f"{self.folder}/") for word in words):
                found[int(entry.name)] = " ".join(words)
        return found

    def end(self) -> dict[int, str]:
        """End what still runs after a while, and say what it was; nothing is left of it."""
        until(lambda: not self.processes(), 60)
        left = self.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)  # of a gateway that was killed
        return left


@pytest.fixture(params=[(), ("--workers", "2")], ids=["one process", "two relays"])
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Demo]:
    monkeypatch.setenv("WEIR_SIMULATED_SPEED", "10")
    policy = str(ROOT / "policies" / "demo.yaml")
    with Gateway(tmp_path / "log", "--policy", policy, "--engine", "demo", "--log", "none", *request.param) as gateway:
        running = Demo(gateway)
        yield running
    assert running.end() == {}
    assert "Traceback" not in gateway.child.output()


def test_four_models_in_turn(demo: Demo) -> None:
    assert {card["id"] for card in json.loads(get(f"{demo.gateway.url}/v1/models")[1])["data"]} == set(MODELS)
    assert demo.states() == dict.fromkeys(MODELS, "stopped")
    with OpenAI(base_url=f"{demo.gateway.url}/v1", api_key="none", max_retries=0) as client:

        def ask(model: str) -> None:
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=4
            )
            assert answer.model == model
            assert answer.choices[0].message.content

        llama, mistral, qwen, phi = MODELS
        ask(llama)
        ask(mistral)
        assert demo.states() == {llama: "running", mistral: "running", qwen: "stopped", phi: "stopped"}
        ask(qwen)
        assert demo.states() == {llama: "sleeping", mistral: "running", qwen: "running", phi: "stopped"}
        ask(phi)
        assert demo.states() == {llama: "sleeping", mistral: "running", qwen: "running", phi: "running"}
        before = set(demo.processes())
        ask(llama)
        assert demo.states() == {llama: "running", mistral: "running", qwen: "sleeping", phi: "running"}
        assert set(demo.processes()) == before, "it was woken, not started again"
    said = demo.gateway.child.output()
    assert re.findall(r"([\w.-]+) failed for memory; the next start claims", said) == [phi], "once, and it fitted then"
    assert "2.15 GiB KV cache is needed, which is larger than the available KV cache memory (1.31 GiB)" in said
    large, small, residue = 0.55 * GPUS[0], sum(TRUE.values()) + LITTLE, GIB
    full = [pytest.approx(large, abs=2), pytest.approx(large + small + residue, abs=16 << 20)]  # vLLM tells 0.01 GiB

    def used() -> list[int]:
        return sorted(gpu["used"] for gpu in demo.status()["gpus"])

    # The GPUs are read once in a while, so the last reading may be from before the last wake.
    assert until(lambda: used() == full, 60) is not None, used()
    assert len(demo.processes()) == 5
    assert demo.gateway.child.process.poll() is None
    demo.gateway.child.process.send_signal(signal.SIGINT)
    assert demo.gateway.child.process.wait(60) == 0
    assert demo.processes() == {}
    assert not demo.folder.exists()


def test_a_gateway_that_is_killed_leaves_nothing_that_runs(demo: Demo) -> None:
    body = {"model": MODELS[3], "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
    assert httpx.post(f"{demo.gateway.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert len(demo.processes()) == 2
    demo.gateway.child.process.kill()
    assert until(lambda: not demo.processes(), 60) is not None, demo.processes()


def test_engines_of_a_sidecar_that_was_killed_end_with_the_gateway(demo: Demo) -> None:
    body = {"model": MODELS[3], "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
    assert httpx.post(f"{demo.gateway.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    os.kill(demo.status()["pid"], signal.SIGKILL)
    demo.gateway.child.process.send_signal(signal.SIGTERM)
    assert demo.gateway.child.process.wait(60) == 0
    assert demo.processes() == {}
    assert not demo.folder.exists()


def test_the_announcement_works_as_printed(demo: Demo) -> None:
    said = demo.gateway.child.output()
    assert f"models {' '.join(sorted(MODELS))}" in said
    commands = re.findall(r"^curl .*\\\n.*$", said, re.MULTILINE)
    assert [json.loads(re.search(r"'(\{.*\})'", command)[1])["model"] for command in commands] == [  # type: ignore[index]
        *MODELS,
        MODELS[0],
    ]
    told = subprocess.run(["bash", "-c", commands[3]], check=True, capture_output=True, text=True, timeout=60)  # noqa: S607
    assert told.stdout.rstrip().endswith("data: [DONE]")
