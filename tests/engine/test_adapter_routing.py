"""LoRA adapters through the gateway: listed with their parent, sent where they are loaded, 404 where none has them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import httpx
import pytest

from loadtest.processes import Gateway, get
from tests.e2e.children import SimEngine
from tests.plain_http import NOBODY

pytestmark = pytest.mark.slow  # processes

NAMES = ("sql", "law", "med")
WORDS = [word for name in NAMES for word in ("--lora-module", name)] + ["--max-loras", "2"]


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_each_adapters_calls_go_where_it_is_loaded(tmp_path: Path, words: tuple[str, ...]) -> None:
    engines = [SimEngine(tmp_path / f"engine-{number}.log", *WORDS) for number in range(2)]
    policy = tmp_path / "policy.yaml"
    policy.write_text("fleet: {poll: 100ms}\n")
    try:
        given = [word for engine in engines for word in ("--engine", engine.url)]
        with Gateway(tmp_path / "gateway.log", "--policy", str(policy), *given, *words) as gateway:
            listed = json.loads(get(f"{gateway.url}/v1/models")[1])["data"]
            assert {each["id"]: each["parent"] for each in listed} == {"sim": None} | dict.fromkeys(NAMES, "sim")
            went: dict[str, set[str]] = defaultdict(set)
            for number in range(24):
                answer = asked(gateway, NAMES[number % 3], number)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == NAMES[number % 3]
                went[NAMES[number % 3]].add(answer.headers["x-weir-engine"])
            assert [len(engines) for engines in went.values()] == [1, 1, 1]
            assert len(set.union(*went.values())) == 2, "one engine has not room for three"
            refused = asked(gateway, "poetry", 0)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"
            assert "'poetry' does not exist here" in refused.json()["error"]["message"]
    finally:
        for engine in engines:
            engine.child.stop()


def asked(gateway: Gateway, model: str, number: int) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": f"{number}?"}], "max_tokens": 4}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60.0, trust_env=False, verify=NOBODY)
