"""Real vLLM as the sidecar starts one: its flags checked, asleep and awake, taken over, ended; and one that fails."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from loadtest.processes import free_port
from sidecar.core.config import decode
from sidecar.core.engine_records import EngineFailed
from sidecar.core.inventory import Size
from sidecar.core.vllm import Completion
from sidecar.process.engine import VllmEngines
from tests.sidecar.nothing_left import gone, nothing_left
from tests.vllm import install
from tests.vllm.real_vllm import CONTEXT, ENVIRONMENT, model, venv

pytestmark = pytest.mark.vllm

FILE = """
engine: {{python: {python}, device: cpu}}
engine_addresses: {port}-{last}
models:
  tiny:
    model_path: {model}
    context_length: {context}
    load_timeout: 5m
    flags: {{dtype: bfloat16, enforce-eager: true, max-num-seqs: 64}}
  broken:
    model_path: {model}
    context_length: 1000000
    flags: {{dtype: bfloat16, enforce-eager: true}}
"""


def test_the_life_of_a_real_engine(tmp_path: Path) -> None:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    said: list[str] = []
    port = min(free_port(), 65_000)
    python = venv() / "bin" / "python"
    text = FILE.format(python=python, port=port, last=port + 9, model=model(), context=CONTEXT)

    async def scenario(scratch: str) -> None:
        environment = {**os.environ, **ENVIRONMENT, "TMPDIR": scratch}  # short: vLLM has sockets there
        engines = VllmEngines(
            decode(text.encode()),
            tmp_path,
            sidecar=f"test-{os.getpid()}",
            clock=time.monotonic,
            environment=environment,
            say=said.append,
        )
        broken = await engines.start("broken", (), Size())
        with pytest.raises(EngineFailed) as caught:
            await broken.ready()
        await broken.stop()
        assert "it did not get ready: it ended with exit status 1; it said: " in str(caught.value)
        assert "max_model_len (1000000)" in str(caught.value)
        assert not caught.value.out_of_memory

        engine = await engines.start("tiny", (), Size())
        told = await engine.ready()
        assert (told.context_length, told.max_concurrency) == (CONTEXT, 64)
        assert told.kv_tokens
        assert told.canary is not None
        for _ in range(2):
            await engine.alive()
            await engine.sleep(1)
            assert await engine.awake() == 1
            await engine.wake(1, told)
            assert await engine.awake() == 0
        await engine.sleep(2)
        await engine.wake(2, told)
        await engine.sleep(2)
        other = msgspec.structs.replace(told, canary=Completion("what it never said", (1,)))
        with pytest.raises(EngineFailed, match="its weights are not what they were"):
            await engine.wake(2, other)

        record = engine.record(level=0, told=told)
        await engine.leave()
        engine = await engines.adopt("tiny", record)
        await engine.alive()
        assert await engine.busy() == 0
        await engine.stop()
        assert gone(record.process.pid)

    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch, nothing_left():
        asyncio.run(scenario(scratch))
    assert said == []
