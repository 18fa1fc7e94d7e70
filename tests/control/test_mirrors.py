"""A mirror under a burst, as operators see it: the sides are compared in metrics and console, and copies that find no
room are nobody's trouble."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.processes import Gateway, get, until
from tests.e2e.children import SimEngine, post

pytestmark = pytest.mark.slow

POLICY = """\
classes: {default: {}, batch: {headroom: 30%}}
models: {support: {members: [m0], mirror: {model: m1, share: 100%}}}
"""
CALLS = 40


def ask(gateway: Gateway, number: int) -> int:
    messages = [{"role": "user", "content": f"question {number}"}]
    body: dict[str, Any] = {"model": "support", "messages": messages, "max_tokens": 20, "ignore_eos": True}
    body["stream"] = number % 2 == 0
    status, headers, _ = post(f"{gateway.url}/v1/chat/completions", body)
    assert headers["x-weir-model"] == "m0"
    return status


def shown(gateway: Gateway) -> dict[str, Any]:
    """The entries of the console."""
    with httpx.stream("GET", f"{gateway.control}/events", timeout=60.0, trust_env=False) as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data:"))
    found: dict[str, Any] = json.loads(data.removeprefix("data:"))["set"]
    return found


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_a_burst_drops_copies_and_the_sides_stay_comparable(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    with ExitStack() as stack:
        engines = [SimEngine(tmp_path / f"{name}.log", "--model", name) for name in ("m0", "m1")]
        for engine in engines:
            stack.enter_context(engine.child)
        flags = [word for engine in engines for word in ("--engine", engine.url)]
        log = ("--policy", str(tmp_path / "policy.yaml"), "--log", "none")
        gateway = stack.enter_context(Gateway(tmp_path / "gateway.log", *log, *flags, *words))
        with ThreadPoolExecutor(CALLS) as pool:
            assert set(pool.map(lambda number: ask(gateway, number), range(CALLS))) == {200}

        def count(side: str, result: str) -> int:
            return int(gateway.total("weir_mirror_calls_total", side=side, result=result))

        def copies() -> int:
            return count("copy", "ok") + count("copy", "dropped")

        assert until(lambda: copies() == CALLS, 60.0) is not None, copies()
        ran = count("copy", "ok")
        assert 0 < ran < CALLS, "one prompt at a time is read for them"
        assert until(lambda: count("member", "ok") == ran, 60.0) is not None, "the calls whose copies ran"
        assert count("member", "dropped") == 0
        entries = shown(gateway)
        sides = entries["mirror/support"]["sides"]
        assert entries["mirror/support"]["model"] == "m1"
        assert {side: (each["ok"], each["dropped"]) for side, each in sides.items()} == {
            "member": (ran, 0),
            "copy": (ran, CALLS - ran),
        }
        for each in sides.values():
            assert each["tokens"] == 20.0
            assert each["ttft"] > 0.0
            assert each["finishes"] == {"length": ran}
        assert [line["level"] for line in entries["headline"]] == ["good"]
        assert entries["headline"][0]["calls"] == CALLS
        assert entries["class/batch"]["now"]["offered"] == 0.0
        status = json.loads(get(f"{gateway.control}/status")[1])
        assert [line["level"] for line in status["headline"]] == ["good"]
