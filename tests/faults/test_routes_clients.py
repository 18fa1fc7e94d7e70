"""OpenAI's and Anthropic's packages, unchanged, through each kind of route: of one process, and with relays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from loadtest.processes import Gateway, until
from tests.e2e.children import SimEngine

pytestmark = pytest.mark.slow  # it starts processes

KEY = "key-of-the-house-at-its-provider"
MESSAGES = [{"role": "user", "content": "Why is the river level?"}]
OUTSIDE = """
tenants: {house: {keys: [%s]}}
"""
HOUSE = """
storage: data
classes: {default: {}, batch: {headroom: 30%%}}
service_tiers: {}
models:
  support: {members: [sim], fallback: [other]}
  trial: {members: [{model: sim, weight: 1000}, {model: other, weight: 0.01, until: {errors: 2%%}}]}
  copied: {members: [sim], mirror: {model: other, share: 100%%}}
  asleep: {members: [nobody-has-it], fallback: [other]}
  away: {members: [nobody-has-it], fallback: [mini]}
batching: {embeddings: 20ms}
providers:
  cloud:
    url: %s/v1
    key_file: cloud.key
    models: {mini: other}
    prices: 1/2
    budget: [10/day]
    tenants: [anonymous]
    classes: [default]
    allow_private: true
"""
# What callers ask for: the model that answers, and how calls come to it.
ROUTES = {
    "support": ("sim", "member"),
    "trial": ("sim", "member"),
    "copied": ("sim", "member"),
    "asleep": ("other", "fallback"),
    "away": ("mini", "spilled"),
    "mini": (None, None),  # a provider's model by its name
}
each_route = pytest.mark.parametrize("name", ROUTES)


@pytest.fixture(scope="module", params=[(), ("--workers", "2")], ids=["one process", "relays"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose provider is a second one."""
    folder = tmp_path_factory.mktemp("routes")
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
                yield running
                for each in (running, outside):
                    assert "Traceback" not in each.child.output()
                    assert KEY not in each.child.output()
                    assert KEY not in Path(each.child.log).read_text()


@pytest.fixture
def client(house: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=2, timeout=60.0) as ready:
        yield ready


@each_route
def test_openai(house: Gateway, client: openai.OpenAI, name: str) -> None:
    model, how = ROUTES[name]
    leaves = "mini" in (name, model)
    raw = client.chat.completions.with_raw_response.create(
        model=name, messages=MESSAGES, max_tokens=5, extra_body={"top_k": 3}
    )  # type: ignore[call-overload]
    assert raw.headers.get("x-weir-model") == model
    assert (raw.headers["x-weir-engine"], raw.headers.get("x-weir-dropped")) == (
        ("cloud", "top_k") if leaves else ("engine-1", None)
    )
    assert (raw.parse().model, raw.parse().usage.completion_tokens) == (name, 5)
    chunks = list(client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=5, stream=True))  # type: ignore[call-overload]
    assert {chunk.model for chunk in chunks} == {name}
    assert client.completions.create(model=name, prompt="Why?", max_tokens=4).usage.completion_tokens == 4  # type: ignore[union-attr]
    if how is not None:
        counted = {"asked_model": name, "model": str(model), "how": how}
        assert until(lambda: house.total("weir_model_route_calls_total", **counted) >= 3, 60.0) is not None
        assert until(lambda: f'"asked_model":"{name}"' in Path(house.child.log).read_text(), 60.0) is not None
    if leaves:
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=name, input=["one"])
        return
    assert client.responses.create(model=name, input="Why?", max_output_tokens=16).model == name
    with client.responses.stream(model=name, input="Why?", max_output_tokens=16) as stream:
        assert stream.get_final_response().model == name
    vectors = client.embeddings.create(model=name, input=["one", "two"])
    assert (vectors.model, len(vectors.data)) == (name, 2)


@each_route
def test_anthropic(house: Gateway, name: str) -> None:
    with anthropic.Anthropic(base_url=house.url, api_key="none", max_retries=2, timeout=60.0) as client:
        raw = client.messages.with_raw_response.create(model=name, messages=MESSAGES, max_tokens=7)  # type: ignore[arg-type]
        assert raw.headers.get("x-weir-model") == ROUTES[name][0]
        assert raw.parse().model == name
        with client.messages.stream(model=name, messages=MESSAGES, max_tokens=7) as stream:  # type: ignore[arg-type]
            last = stream.get_final_message()
        assert (last.model, last.usage.output_tokens) == (name, 7)
        assert {model.id for model in client.models.list()} >= {*ROUTES, "sim", "other"}


def test_no_fallback_is_an_error_that_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(
            model="asleep", messages=MESSAGES, max_tokens=5, extra_headers={"x-weir-fallback": "none"}
        )  # type: ignore[call-overload]
