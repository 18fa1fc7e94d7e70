"""Copies over processes and sockets: two engines of one model on two simulated GPUs, and more calls than one takes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.processes import Child, free_port, get, until
from tests.beside import beside
from tests.e2e.children import post
from tests.sidecar.laid_out import lay_out

GIB = 1 << 30
POLICY = """
fleet: {poll: 100ms, health: 200ms, sidecars: {copies: 500ms}}
budget: {max_concurrency: 2}
classes: {default: {ttft: 3m, deadline: 5m}}
"""
SIDECAR = """
token_file: sidecar.token
listen: 127.0.0.1:PORT
engine: {simulated: l4-8b-fp8}
models:
  chat: {model_path: /m/chat, flags: {max-num-seqs: 4}}
  chat-2: {model_path: /m/chat, served_name: chat, flags: {max-num-seqs: 4}}
"""
CALL = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True}

pytestmark = pytest.mark.slow


@contextmanager
def load(url: str, callers: int) -> Iterator[list[int]]:
    """So many callers, each with one call after the other; the statuses of those that have ended."""
    over, statuses = threading.Event(), list[int]()

    def calls() -> None:
        while not over.is_set():
            statuses.append(post(f"{url}/v1/chat/completions", CALL)[0])

    with beside(*[calls] * callers):
        try:
            yield statuses
        finally:
            over.set()


def awake(control: str) -> list[str]:
    """Profiles whose engines may be given calls."""
    fleet = json.loads(get(f"{control}/fleet")[1])
    return [model["profile"] for model in fleet["sidecars"][0]["models"] if model["state"] == "running"]


def test_a_full_model_wakes_its_second_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "sidecar.yaml").write_text(SIDECAR.replace("PORT", str(free_port())))
    lay_out(tmp_path / "gpus", [24 * GIB, 24 * GIB])
    monkeypatch.setenv("WEIR_SIMULATED_GPUS", str(tmp_path / "gpus"))
    monkeypatch.setenv("WEIR_SIMULATED_SPEED", "20")
    argv = [
        *(sys.executable, "-m", "gateway.cli", "serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"),
        *("--policy", str(tmp_path / "policy.yaml"), "--sidecar", str(tmp_path / "sidecar.yaml"), "--log", "none"),
    ]
    with Child("gateway", argv, tmp_path / "output") as gateway:
        url, control = gateway.line(r"data port (\S+)", 60.0), gateway.line(r"control port (\S+)", 60.0)
        status, _, answer = post(f"{url}/v1/chat/completions", CALL)
        assert status == 200, answer
        assert awake(control) == ["chat"], "one is enough for one call"
        for order in ("ensure", "sleep"):  # it is known from then on how quickly it wakes
            argv = [sys.executable, "-m", "sidecar.cli", order, "chat-2", "--config", str(tmp_path / "sidecar.yaml")]
            subprocess.run(argv, check=True, timeout=60, capture_output=True)
        with load(url, 24) as statuses:
            assert until(lambda: awake(control) == ["chat", "chat-2"], 60.0) is not None, gateway.output()
            assert until(lambda: _busy(control) == [True, True], 60.0) is not None, "calls go to both"
        assert set(statuses) == {200}
        metrics = get(f"{control}/metrics")[1].decode()
        assert 'weir_copies_total{reason="waiting",result="woken"} 1.0' in metrics
        output = gateway.output()
        assert output.count("it is wanted as a copy") == 1
        assert output.count("chat: the copy chat") == 1
        assert "Traceback" not in output


def _busy(control: str) -> list[bool]:
    """Whether each engine has calls."""
    return [engine["in_flight"] > 0 for engine in json.loads(get(f"{control}/fleet")[1])["engines"]]
