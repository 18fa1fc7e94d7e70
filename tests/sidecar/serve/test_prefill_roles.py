"""Two engines of one sidecar that exchange KV caches: their profiles say the roles, and the policy says nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.processes import Child, Gateway, free_port, until
from tests.sidecar.laid_out import lay_out

pytestmark = pytest.mark.slow

POLICY = """
version: 1
classes: {default: {tpot: 1ms}}
fleet: {sidecars: {token_file: token}}
"""
SIDECAR = """
id: box
gateways: ["{gateway}"]
token_file: token
listen: 127.0.0.1:{port}
engine: {{simulated: h100-8b}}
models:
  writer: {{model_path: /m, served_name: m, pin: true, kv_transfer: decode}}
  reader: {{model_path: /m, served_name: m, pin: true, kv_transfer: prefill}}
"""


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A gateway whose engines are a sidecar's two, each on a simulated GPU of its own."""
    lay_out(tmp_path / "gpus", [80 << 30, 80 << 30])
    monkeypatch.setenv("WEIR_SIMULATED_GPUS", str(tmp_path / "gpus"))
    monkeypatch.setenv("WEIR_SIMULATED_SPEED", "4")
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "policy.yaml").write_text(POLICY)
    with ExitStack() as stack:
        policy = str(tmp_path / "policy.yaml")
        started = stack.enter_context(Gateway(tmp_path / "gateway.log", "--policy", policy, ready=False))
        (tmp_path / "sidecar.yaml").write_text(SIDECAR.format(gateway=started.control, port=free_port()))
        command, file = [sys.executable, "-m", "sidecar.cli"], ["--config", str(tmp_path / "sidecar.yaml")]
        stack.callback(subprocess.run, [*command, "stop", "--all", *file], check=True, capture_output=True, timeout=60)
        sidecar = stack.enter_context(Child("sidecar", [*command, "serve", *file], tmp_path / "sidecar.log"))
        sidecar.wait(lambda: len(engines(started)) == 2, 60.0, "both engines")
        yield started


def engines(gateway: Gateway) -> list[str]:
    """The engines that may be given work."""
    return [engine["name"] for engine in gateway.fleet()["engines"] if engine["up"]]


def asked(words: int, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "word " * words}]} | more


def test_a_prompt_is_read_by_the_profile_that_reads(gateway: Gateway) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    running = asked(10, max_tokens=20_000, ignore_eos=True, stream=True)
    with httpx.stream("POST", url, json=running, timeout=60.0) as stream:
        lines = stream.iter_lines()
        next(lines)  # it goes on meanwhile
        answer = httpx.post(url, json=asked(20_000, max_tokens=4), timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert sorted(engines(gateway)) == ["reader@box", "writer@box"]
    assert answer.headers["x-weir-prefill"].startswith("there; "), answer.headers
    assert "reason=stalls" in answer.headers["x-weir-prefill"], "any reading would slow the stream down"
    # A call is counted once it is settled, which is after its answer.
    assert until(lambda: gateway.total("weir_prefills_total", place="there") == 1, 60.0) is not None
    assert until(gateway.idle, 60.0) is not None
    assert until(lambda: bool(split(gateway)), 60.0) is not None
    (record,) = split(gateway)
    assert (record["engine"], record["prefill"]["engine"]) == ("writer@box", "reader@box")


def split(gateway: Gateway) -> list[dict[str, Any]]:
    """Records of the calls whose prompts another engine read."""
    lines = [json.loads(line) for line in gateway.child.output().splitlines() if '"event":"call"' in line]
    return [record for record in lines if record["prefill"]["engine"]]
