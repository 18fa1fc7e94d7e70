"""A prompt that one real vLLM reads and another answers: hits, the same text, each half that dies; as a sidecar's."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from loadtest.processes import Child, Gateway, free_port
from tests.vllm.conftest import PATIENCE, Place
from tests.vllm.real_vllm import CONTEXT, ENVIRONMENT, MODEL, Vllm, model, venv

pytestmark = pytest.mark.vllm
CHAT = "/v1/chat/completions"
# Any stream misses such a target, so that a long prompt is read elsewhere while there is one.
POLICY = """
version: 1
classes: {{default: {{tpot: 1ms, deadline: 500s}}}}
fleet:
  engines:
    - {{url: "{reader}", name: reader, transfer: pool, role: prefill}}
    - {{url: "{writer}", name: writer, transfer: pool, role: decode}}
"""
# The same of a sidecar, whose profiles say the roles.
SIDECARS = """
version: 1
classes: {default: {tpot: 1ms, deadline: 500s}}
fleet: {sidecars: {}}
"""
PROFILES = """
id: pair
listen: 127.0.0.1:%(listen)s
gateways: ["%(gateway)s"]
token_file: sidecar.token
engine: {python: %(python)s, device: cpu}
models:
  writer: &tiny
    model_path: %(model)s
    served_name: tiny
    context_length: %(context)s
    load_timeout: 5m
    sleep: null
    pin: true
    kv_transfer: decode
    gpu_memory: {kv: 1GiB}
    flags: {dtype: bfloat16, enforce-eager: true, max-num-seqs: 16}
    environment: {HF_HUB_OFFLINE: "1", TRANSFORMERS_OFFLINE: "1", UCX_TLS: "tcp,self,sm"}
  reader: {<<: *tiny, kv_transfer: prefill}
"""


def body(text: str, words: int = 600) -> dict[str, object]:
    """A prompt of some 4.5 tokens a word, of which the gateway takes reading 600 for worth sparing."""
    messages = [{"role": "user", "content": text + " ".join(f"word{number}" for number in range(words))}]
    return {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}


def streaming(gateway: Gateway, text: str, words: int, tokens: int) -> socket.socket:
    """A stream that is being read by nobody yet."""
    asked = json.dumps(body(text, words) | {"max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    place = urlsplit(gateway.url)
    stream = socket.create_connection((place.hostname, place.port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    stream.sendall(f"{head}content-length: {len(asked)}\r\n\r\n".encode() + asked)
    return stream


def asked(url: str, fields: dict[str, object], **headers: str) -> httpx.Response:
    return httpx.post(f"{url}{CHAT}", json=fields, headers=headers, timeout=200.0, trust_env=False)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_one_reads_and_another_answers_until_either_is_killed(place: Place, tmp_path: Path) -> None:
    place.close()
    with (
        Vllm(tmp_path / "reader.log", free_port(), exchanges=True) as reader,
        Vllm(tmp_path / "writer.log", free_port(), exchanges=True) as writer,
    ):
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY.format(reader=reader.url, writer=writer.url))
        with Gateway(tmp_path / "gateway.log", "--policy", str(policy)) as gateway:
            _both_halves(gateway, reader, writer)
            _client_leaves(gateway, reader, writer)
            reader.kill()
            answer = asked(gateway.url, body("killed "))
            assert said(answer)
            assert answer.headers["x-weir-prefill"].startswith("here; ")
            writer.kill()
            answer = asked(gateway.url, body("both killed "), **{"x-weir-deadline-ms": "3000"})
            assert answer.status_code in (502, 503, 504), answer.text
            wait(gateway, gateway.idle)


def wait(gateway: Gateway, reached: Callable[[], bool]) -> None:
    gateway.child.wait(reached, 120.0, "what the test waits for")


def _both_halves(gateway: Gateway, reader: Vllm, writer: Vllm) -> None:
    stream = streaming(gateway, "busy ", 20, 1500)
    wait(gateway, lambda: writer.running() == 1)
    answer = asked(gateway.url, body("split "))
    alone = asked(reader.url, body("split "))
    assert said(answer) == said(alone)
    assert answer.headers["x-weir-prefill"].startswith("there; engine=reader; reason=stalls"), answer.headers
    prompt = answer.json()["usage"]["prompt_tokens"]
    assert writer.metric("vllm:external_prefix_cache_hits_total") == prompt
    assert gateway.total("weir_prefills_total", place="there", reason="stalls") == 1
    gone = {"remote_engine_id": "gone", "remote_request_id": "chatcmpl-gone", "remote_block_ids": [[1]]}
    gone |= {"remote_host": "127.0.0.1", "remote_port": free_port(), "tp_size": 1, "remote_num_tokens": prompt}
    stale = {"do_remote_prefill": True, "do_remote_decode": False} | gone
    again = asked(writer.url, body("stale ") | {"kv_transfer_params": stale})
    assert said(again) == said(asked(reader.url, body("stale "))), "an engine that is gone: the prompt is computed anew"
    stream.close()


def _client_leaves(gateway: Gateway, reader: Vllm, writer: Vllm) -> None:
    wait(gateway, gateway.idle)
    stream = streaming(gateway, "busy again ", 20, 1500)
    wait(gateway, lambda: writer.running() == 1)
    leaver = streaming(gateway, "leaves ", 600, 500)
    wait(gateway, lambda: gateway.fleet()["engines"][0]["in_flight"] == 1)
    leaver.close()
    stream.close()
    wait(gateway, gateway.idle)
    wait(gateway, lambda: reader.running() + reader.waiting() + writer.running() + writer.waiting() == 0)


def test_two_profiles_of_a_sidecar_exchange(place: Place, tmp_path: Path) -> None:
    place.close()
    (tmp_path / "policy.yaml").write_text(SIDECARS)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-"))
        gateway = Gateway(tmp_path / "gateway.log", "--policy", str(tmp_path / "policy.yaml"), ready=False)
        stack.enter_context(gateway)
        file = tmp_path / "sidecar.yaml"
        given = {"listen": free_port(), "gateway": gateway.control, "python": venv() / "bin" / "python",
                 "model": model(), "context": CONTEXT}  # fmt: skip
        file.write_text(PROFILES % given)
        command = [sys.executable, "-m", "sidecar.cli"]
        environment = {**os.environ, **ENVIRONMENT, "TMPDIR": scratch}

        def stopped() -> None:
            argv = [*command, "stop", "--all", "--config", str(file)]
            with Child("stop", argv, tmp_path / "stop.log", env=environment) as child:
                assert child.process.wait(PATIENCE) == 0, child.output()

        argv = [*command, "serve", "--config", str(file)]
        sidecar = stack.enter_context(Child("sidecar", argv, tmp_path / "sidecar.log", env=environment))
        stack.callback(stopped)

        def up() -> dict[str, str]:
            return {each["name"]: each["url"] for each in gateway.fleet()["engines"] if each["up"]}

        sidecar.wait(lambda: up().keys() == {"writer@pair", "reader@pair"}, 2.0 * PATIENCE, "both engines")
        stream = streaming(gateway, "busy ", 20, 1500)
        wait(gateway, lambda: sum(each["in_flight"] for each in gateway.fleet()["engines"]) == 1)
        answer = asked(gateway.url, body("split "))
        assert said(answer)
        assert answer.headers["x-weir-prefill"].startswith("there; engine=engine-2; reason=stalls"), answer.headers
        assert hits(up()["writer@pair"]) == answer.json()["usage"]["prompt_tokens"]
        stream.close()
        wait(gateway, gateway.idle)


def hits(url: str) -> float:
    """Prompt tokens that an engine behind a unix socket has fetched."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=url.removeprefix("unix://"))) as client:
        lines = client.get("http://engine/metrics", timeout=60.0).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total"))
