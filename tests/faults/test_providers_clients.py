"""A second Weir as provider of one with relays or without, through OpenAI's and Anthropic's packages, unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from loadtest.processes import Gateway
from tests.e2e.children import SimEngine

pytestmark = pytest.mark.slow  # it starts processes

KEY = "key-of-the-house-at-its-provider"
MESSAGES = [{"role": "user", "content": "Why is the river level?"}]
OUTSIDE = """
tenants: {house: {keys: [%s]}}
"""
HOUSE = """
storage: data
models:
  support: {members: [nobody-has-it], fallback: [mini]}
providers:
  cloud:
    url: %s/v1
    key_file: cloud.key
    models: {mini: other}
    prices: {prompt: 1, completion: 2}
    budget: {day: 10}
    tenants: [anonymous]
    classes: [default]
    allow_private: true
"""


@pytest.fixture(scope="module", params=[(), ("--workers", "2")], ids=["one process", "relays"])
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gateway, Gateway]]:
    folder = tmp_path_factory.mktemp("providers")
    engine = SimEngine(folder / "engine.log", "--model", "sim", "--model", "other")
    (folder / "outside.yaml").write_text(OUTSIDE % hashlib.sha256(KEY.encode()).hexdigest())
    (folder / "cloud.key").write_text(KEY)
    (folder / "cloud.key").chmod(0o600)
    with engine.child:
        flags = ("--engine", engine.url, "--policy", str(folder / "outside.yaml"))
        with Gateway(folder / "outside", *flags) as outside:
            (folder / "house.yaml").write_text(HOUSE % outside.url)
            own = ("--engine", engine.url, "--policy", str(folder / "house.yaml"), *request.param)
            with Gateway(folder / "house", *own) as running:
                yield running, outside
                for each in (running, outside):
                    assert "Traceback" not in each.child.output()
                    assert KEY not in each.child.output()
                    assert KEY not in Path(each.child.log).read_text()


def test_openai(house: tuple[Gateway, Gateway]) -> None:
    with openai.OpenAI(base_url=f"{house[0].url}/v1", api_key="none", max_retries=2, timeout=20.0) as client:
        for name in ("support", "mini"):
            raw = client.chat.completions.with_raw_response.create(
                model=name, messages=MESSAGES, max_tokens=5, extra_body={"top_k": 3}
            )  # type: ignore[call-overload]
            assert raw.headers["x-weir-engine"] == "cloud"
            assert raw.headers["x-weir-dropped"] == "top_k"
            assert raw.parse().model == name
            assert raw.parse().usage.completion_tokens == 5
            chunks = list(client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=5, stream=True))  # type: ignore[call-overload]
            assert {chunk.model for chunk in chunks} == {name}
        assert client.completions.create(model="support", prompt="Why?", max_tokens=4).usage.completion_tokens == 4  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="mini", input=["one"])


def test_anthropic(house: tuple[Gateway, Gateway]) -> None:
    with anthropic.Anthropic(base_url=house[0].url, api_key="none", max_retries=2, timeout=20.0) as client:
        raw = client.messages.with_raw_response.create(model="support", messages=MESSAGES, max_tokens=7)  # type: ignore[arg-type]
        assert raw.headers["x-weir-model"] == "mini"
        assert raw.parse().model == "support"
        with client.messages.stream(model="support", messages=MESSAGES, max_tokens=7) as stream:  # type: ignore[arg-type]
            last = stream.get_final_message()
        assert (last.model, last.usage.output_tokens) == ("support", 7)
