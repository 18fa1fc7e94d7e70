"""Priority scheduling of a real vLLM: a class that is more important goes before what waits inside the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.processes import Gateway
from tests.e2e.children import post
from tests.priority_order import answered, policy
from tests.vllm.conftest import Place
from tests.vllm.real_vllm import MODEL, Vllm

pytestmark = pytest.mark.vllm
FLAGS = ("--scheduling-policy", "priority", "--max-num-seqs", "1", "--max-model-len", "2048")


def test_an_important_call_goes_before_what_waits_in_the_engine(place: Place, tmp_path: Path) -> None:
    place.close()
    with Vllm(tmp_path / "vllm.log", place.port, *FLAGS) as vllm:
        file = policy(tmp_path, vllm.url, "priority")
        with Gateway(tmp_path / "gateway.log", "--policy", str(file)) as gateway:
            ended = answered(gateway, vllm.url, MODEL, 400)
            message = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
            status, _, answer = post(f"{gateway.url}/v1/messages", message, **{"x-weir-class": "batch"})
    assert {status for _, status in ended} == {200}
    assert [name for name, _ in ended].index("interactive") <= 1
    assert status == 200, answer
