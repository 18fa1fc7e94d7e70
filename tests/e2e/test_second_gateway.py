"""A second Weir as a provider: two gateways as processes. The first one's engine is down, so its calls go to the second
one, with a key of its own, and cost what the second one counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from loadtest.processes import Gateway, get, until

pytestmark = pytest.mark.slow

INNER = "keys_file: keys\ntenants: {house: {}}\nstorage: {folder}\n"
OUTER = """\
models: {{support: {{members: [own], fallback: [mini]}}}}
fleet: {{engines: [{{url: "http://127.0.0.1:9", models: [own]}}]}}
providers:
  annex:
    url: {url}/v1
    key_file: annex.key
    models: {{mini: {model}}}
    prices: 10/10/20
    budget: [1/day]
    tenants: [anonymous]
    classes: [default]
    allow_private: true
storage: {folder}
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_gateway_is_a_provider(tmp_path: Path, stream: bool) -> None:
    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
    inside = tmp_path / "inner" / "policy.yaml"
    inside.write_text(INNER.replace("{folder}", str(tmp_path / "inner")))
    argv = [sys.executable, "-m", "gateway.cli", "key", "add", "house", "--policy", str(inside)]
    key = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.split()[0]
    with Gateway(tmp_path / "inner.log", "--policy", str(inside), "--engine", "sim:1", "--log", "none") as inner:
        model = next(iter(inner.fleet()["engines"]))["models"][0]
        (tmp_path / "outer" / "annex.key").write_text(key)
        (tmp_path / "outer" / "annex.key").chmod(0o600)
        outside = tmp_path / "outer" / "policy.yaml"
        outside.write_text(OUTER.format(url=inner.url, model=model, folder=tmp_path / "outer"))
        with (
            Gateway(tmp_path / "outer.log", "--policy", str(outside), "--log", os.devnull, ready=False) as outer,
            OpenAI(base_url=f"{outer.url}/v1", api_key="none", max_retries=0) as client,
        ):
            asked: Any = {"model": "support", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
            if stream:
                more: Any = {"stream": True, "stream_options": {"include_usage": True}}
                chunks = list(client.chat.completions.create(**asked, **more))
                assert chunks[0].model == "support"
                usage = chunks[-1].usage
            else:
                answer = client.chat.completions.create(**asked)
                assert answer.model == "support"
                usage = answer.usage
            assert usage is not None
            assert usage.completion_tokens == 4

            def spent() -> list[dict[str, Any]]:
                told: list[dict[str, Any]] = json.loads(get(f"{outer.control}/usage")[1])["providers"]["annex"]["spent"]
                return told

            # OpenAI's client leaves at [DONE], before the engine's last chunk, with which the calls are settled.
            total = partial(inner.total, "weir_tenant_tokens_total", tenant="house")
            assert until(lambda: total() == usage.total_tokens, 60.0) is not None, total()
            assert until(lambda: spent()[0]["tokens"] == usage.total_tokens, 60.0) is not None, spent()
            (day, _) = spent()
            assert (day["tenant"], day["tokens"]) == ("anonymous", usage.total_tokens)
            assert day["money"] == pytest.approx((10 * usage.prompt_tokens + 20 * 4) / 1e6)
