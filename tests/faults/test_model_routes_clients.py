"""Model routes through the clients' own packages: OpenAI's and Anthropic's, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from loadtest.processes import Gateway, until
from tests.e2e.children import SimEngine, gateway

pytestmark = pytest.mark.slow  # it starts processes

MESSAGES = [{"role": "user", "content": "Why is the river level?"}]
POLICY = """
models:
  support: {members: [sim], fallback: [other]}
  asleep: {members: [nobody-has-it], fallback: [other]}
batching: {embeddings: {window: 20ms}}
"""


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("routes")
    engine = SimEngine(folder / "engine.log", "--model", "sim", "--model", "other")
    with engine.child, gateway(folder, engine, POLICY) as running:
        yield running


@pytest.fixture
def client(routed: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0, timeout=20.0) as ready:
        yield ready


@pytest.mark.parametrize(("name", "member"), [("support", "sim"), ("asleep", "other")])
def test_openai(client: openai.OpenAI, name: str, member: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=name, messages=MESSAGES, max_tokens=5)  # type: ignore[call-overload]
    assert raw.headers["x-weir-model"] == member
    assert raw.parse().model == name
    assert raw.parse().usage.completion_tokens == 5
    chunks = list(client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=5, stream=True))  # type: ignore[call-overload]
    assert {chunk.model for chunk in chunks} == {name}
    response = client.responses.create(model=name, input="Why?", max_output_tokens=16)
    assert response.model == name
    with client.responses.stream(model=name, input="Why?", max_output_tokens=16) as stream:
        assert stream.get_final_response().model == name
    vectors = client.embeddings.create(model=name, input=["one", "two"])
    assert (vectors.model, len(vectors.data)) == (name, 2)


def test_anthropic(routed: Gateway) -> None:
    with anthropic.Anthropic(base_url=routed.url, api_key="none", max_retries=0, timeout=20.0) as client:
        raw = client.messages.with_raw_response.create(model="support", messages=MESSAGES, max_tokens=7)  # type: ignore[arg-type]
        assert raw.headers["x-weir-model"] == "sim"
        assert raw.parse().model == "support"
        with client.messages.stream(model="asleep", messages=MESSAGES, max_tokens=7) as stream:  # type: ignore[arg-type]
            last = stream.get_final_message()
        assert (last.model, last.usage.output_tokens) == ("asleep", 7)
        assert {model.id for model in client.models.list()} >= {"support", "asleep", "sim", "other"}


def test_no_fallback_is_an_error_that_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(
            model="asleep", messages=MESSAGES, max_tokens=5, extra_headers={"x-weir-fallback": "none"}
        )  # type: ignore[call-overload]


def test_the_metric_and_the_log_name_route_and_member(routed: Gateway, client: openai.OpenAI) -> None:
    before = routed.total("weir_model_route_calls_total", asked_model="asleep", model="other", how="fallback")
    client.chat.completions.create(model="asleep", messages=MESSAGES, max_tokens=5)  # type: ignore[call-overload]
    name, labels = "weir_model_route_calls_total", {"asked_model": "asleep", "model": "other", "how": "fallback"}
    assert until(lambda: routed.total(name, **labels) == before + 1, 30.0) is not None
    assert until(lambda: '"asked_model":"asleep"' in Path(routed.child.log).read_text(), 30.0) is not None
