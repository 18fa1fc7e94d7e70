"""LoRA adapters of an engine: which are probably loaded, and how calls go where theirs is."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from gateway.core.engines import adapters
from gateway.core.engines.adapters import Adapters, adapters_of
from gateway.core.engines.choice import choose
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.policy.policy import Policy, Routing
from gateway.shared.vllm.answers import (
    AnswerError,
    EngineSample,
    LoraLoad,
    ModelCard,
    lora_of,
    models_from,
    sample_from,
)
from tests.calls import a_call

NAMES = ("sql", "law", "med")
CARDS = [ModelCard(id="m", max_model_len=4096), *[ModelCard(id=name, parent="m") for name in NAMES]]
SAMPLE = EngineSample(running=0, waiting=0, kv_usage=0.0)

# As vLLM 0.32 writes it: a row for each state that ever was, with the time of its last being true.
METRICS = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7643e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,law",waiting_lora_adapters="med,sql"} 1.7645e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="law",waiting_lora_adapters=""} 1.7644e+09
"""


def test_the_newest_row_tells_the_adapters_with_requests() -> None:
    assert sample_from(METRICS).lora == LoraLoad(2, ("med", "sql", "law"))
    without = b"".join(line for line in METRICS.splitlines(keepends=True) if b"lora" not in line)
    assert sample_from(without).lora is None


def test_an_engine_without_adapters_that_tells_of_none_has_none() -> None:
    """The V0 core of vLLM 0.9 and 0.10 writes the row always, LoRA or not."""
    assert sample_from(METRICS.replace(b'max_lora="2"', b'max_lora="0"')).lora is None


@pytest.mark.parametrize("most", ["", "00", "x", "9999", "-1", "\u0661", "1" * 5000])
def test_a_number_of_adapters_that_cannot_be_is_refused(most: str) -> None:
    with pytest.raises(AnswerError, match="max_lora"):
        lora_of([({"max_lora": most}, 1.0)])


def test_adapters_are_models_with_a_parent_and_its_context() -> None:
    body = b'{"data": [{"id": "m", "max_model_len": 4096}, {"id": "sql", "parent": "m"}]}'
    assert [(card.id, card.parent, card.max_model_len) for card in models_from(body)] == [
        ("m", None, 4096),
        ("sql", "m", 4096),
    ]


def test_those_used_last_are_loaded_as_many_as_the_engine_keeps() -> None:
    it = Adapters(NAMES)
    assert [it.score(name) for name in ("m", "sql")] == [1.0, 0.8]
    it.used("m")
    it.used("sql")
    assert [it.score(name) for name in ("sql", "law")] == [1.0, 0.6]
    it.told(LoraLoad(2, ("law", "sql", "unknown")))
    assert it.loaded == ("law", "sql")
    it.used("med")
    assert it.loaded == ("sql", "med")
    it.told(LoraLoad(1, ()))
    assert it.loaded == ("med",)
    it.forget()
    assert it.loaded == ()


def test_a_new_list_of_models_keeps_what_is_known_of_those_that_stay() -> None:
    fleet, engine = Fleet(), Engine("e", "http://e", Policy())
    fleet.add(engine)
    fleet.has_models(engine, CARDS[:1])
    assert engine.adapters is None
    fleet.has_models(engine, CARDS)
    known = engine.adapters
    assert known is not None
    engine.sampled(EngineSample(running=1, waiting=0, kv_usage=0.0, lora=LoraLoad(2, ("sql", "law"))), 1.0)
    fleet.has_models(engine, CARDS)
    assert engine.adapters is known
    assert known.loaded == ("sql", "law")
    fleet.has_models(engine, CARDS[:2])
    assert engine.adapters is not None
    assert (engine.adapters.loaded, engine.adapters.most) == (("sql",), 2)
    engine.forget_cache()
    assert engine.adapters.loaded == ()
    fleet.has_models(engine, CARDS[:1])
    assert engine.adapters is None
    engine.sampled(EngineSample(running=1, waiting=0, kv_usage=0.0, lora=LoraLoad(2, ("sql",))), 2.0)
    assert adapters_of({}, known) is None


def pair(most: int) -> list[Engine]:
    engines = []
    for id in ("a", "b"):
        engine = Engine(id, f"http://{id}", Policy(), capacity=100_000)
        engine.check(True, 0.0)
        engine.models = {card.id: card for card in CARDS}
        engine.adapters = Adapters(NAMES)
        engine.adapters.told(LoraLoad(most, ()))
        engines.append(engine)
    return engines


@pytest.mark.parametrize(("queued", "winner"), [(0, "a"), (100, "a"), (2000, "b")])
def test_a_loaded_adapter_wins_while_it_is_worth_more_than_the_queue(queued: int, winner: str) -> None:
    first, second = pair(2)
    assert first.adapters is not None
    first.adapters.used("sql")
    if queued:
        first.hold(queued, queued, 1000.0)
    call = a_call(arrived=1000.0, deadline=1060.0, model="sql", prompt_tokens=1000)
    for seed in range(5):
        choice = choose([first, second], call, 1000.0, routing=Routing(), rng=random.Random(seed))
        assert choice is not None
        assert choice.engine.id == winner


def loads(calls: int) -> int:
    """Adapters that two engines with room for two each have to load for calls of three, one after another."""
    rng, engines = random.Random(1), pair(2)
    true: dict[str, OrderedDict[str, None]] = {engine.id: OrderedDict() for engine in engines}
    loaded = 0
    for number in range(calls):
        now = 1000.0 + number
        call = a_call(arrived=now, deadline=now + 60.0, model=rng.choice(NAMES), prompt_tokens=500)
        choice = choose(engines, call, now, routing=Routing(), rng=rng)
        assert choice is not None
        assert choice.engine.adapters is not None
        choice.engine.adapters.used(call.model)
        kept = true[choice.engine.id]
        loaded += call.model not in kept
        kept[call.model] = None
        kept.move_to_end(call.model)
        if len(kept) > 2:
            kept.popitem(last=False)
    return loaded


def test_adapters_stay_where_they_are_and_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loads(300) <= 4
    monkeypatch.setattr(adapters, "ROOM", 1.0)
    monkeypatch.setattr(adapters, "REPLACES", 1.0)
    assert loads(300) > 60
