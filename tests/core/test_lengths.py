"""Learned lengths of answers: what they learn, whom they believe, how they are bounded, and what they change."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from gateway.core import lengths
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.admission.ticket import PATIENCE
from gateway.core.checkpoint import MOST_LENGTH_WEIGHTS, SavedCosts
from gateway.core.lengths import LEARN_ALL, LEAST_ANSWERS, SESSION_ALL, LengthModel
from gateway.core.policy.policy import Policy
from gateway.core.request.call import FORMAT, STOP, TOOLS, Call
from gateway.core.request.cost import LEAST_BOOKED, CostModel
from tests.calls import a_call


def call(**fields: Any) -> Call:
    fields = {"prompt_tokens": 100, "asked": 4096, "max_tokens": 4096, "tenant": "a"} | fields
    return a_call(**fields)


def taught(model: LengthModel, rng: random.Random, answers: int = 400, tenant: str = "a") -> None:
    """Calls with tools are answered in about 20 tokens, others in about 400."""
    for _ in range(answers):
        tools = rng.random() < 0.5
        model.learn(
            call(shape=TOOLS if tools else 0, tenant=tenant), (20 if tools else 400) * rng.lognormvariate(0, 0.3)
        )


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"shape": TOOLS}, {}),
        ({"shape": FORMAT}, {"shape": STOP}),
        ({"prompt_tokens": 100}, {"prompt_tokens": 150}),
        ({"asked": 64, "max_tokens": 64}, {"max_tokens": None}),
        ({"session": 5}, {"session": 6}),
        ({"class_name": "batch"}, {}),
    ],
)
def test_what_calls_have_in_common_tells_their_length(short: dict[str, Any], long: dict[str, Any]) -> None:
    model, rng = LengthModel(), random.Random(3)
    for _ in range(300):
        fields, tokens = rng.choice([(short, 20.0), (long, 400.0)])
        model.learn(call(**fields), tokens * rng.lognormvariate(0, 0.2))
    forecasts = [model.predict(call(**fields)) for fields in (short, long)]
    assert forecasts[0] is not None
    assert forecasts[1] is not None
    assert forecasts[0][0] < 60
    assert forecasts[1][0] > 150
    assert forecasts[0][0] < forecasts[0][1] < forecasts[0][2]


def test_nine_answers_of_ten_are_within_the_quantile(rng: random.Random) -> None:
    model, within, seen = LengthModel(), 0, 0
    for _ in range(3000):
        one = call(session=rng.randrange(1, 9))
        tokens = 50.0 * one.session * rng.lognormvariate(0, 0.5)
        forecast = model.predict(one)
        if forecast is not None:
            seen, within = seen + 1, within + (tokens <= forecast[1])
        model.learn(one, tokens)
    assert seen > 2900
    assert within / seen == pytest.approx(0.9, abs=0.02)
    assert model.tables["a", "m"].influence > 0.6


def test_nothing_is_predicted_of_few_answers_or_of_noise(rng: random.Random) -> None:
    model = LengthModel()
    assert model.predict(call()) is None
    taught(model, rng, LEAST_ANSWERS - 1)
    assert model.predict(call()) is None
    model, believed = LengthModel(), 0
    for _ in range(3000):
        model.learn(call(session=rng.randrange(1, 20)), rng.lognormvariate(5, 1))
        believed += model.predict(call()) is not None
    assert believed < 100


def test_a_tenant_that_turns_to_noise_loses_its_influence(rng: random.Random) -> None:
    model = LengthModel()
    taught(model, rng)
    assert model.predict(call()) is not None
    for _ in range(6000):
        model.learn(call(session=1, shape=rng.choice((0, TOOLS))), rng.lognormvariate(5, 1))
    assert model.predict(call()) is None


def test_noise_and_invented_sessions_spoil_nobody_elses_estimates(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "MOST_WEIGHTS", 256)
    model = LengthModel()
    taught(model, rng)
    before = [model.predict(call(shape=shape)) for shape in (0, TOOLS)]
    for session in range(1, 3000):
        model.learn(call(tenant="evil", session=session), rng.choice((1.0, 4096.0)))
        assert model.weights <= 257
    assert [model.predict(call(shape=shape)) for shape in (0, TOOLS)] == before
    assert model.weights == sum(len(table.weights) for table in model.tables.values())


def test_tables_are_bounded_and_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST_TABLES", 2)
    model = LengthModel()
    for name in "abac":
        model.learn(call(tenant=name), 10.0)
    assert [tenant for tenant, _ in model.tables] == ["a", "c"]
    assert model.weights == 4


def test_a_long_known_tenant_is_learned_from_now_and_then_but_for_new_sessions() -> None:
    model = LengthModel()
    for _ in range(LEARN_ALL + 80):
        model.learn(call(), 10.0)
    assert model.tables["a", "m"].answers == LEARN_ALL + 10
    for _ in range(SESSION_ALL + 3):
        model.learn(call(session=4), 10.0)
    assert model.tables["a", "m"].answers == LEARN_ALL + 10 + SESSION_ALL


def test_no_answer_moves_an_estimate_far(rng: random.Random) -> None:
    model = LengthModel()
    taught(model, rng)
    before = model.predict(call())
    model.learn(call(session=1), 1e6)
    after = model.predict(call())
    assert before is not None
    assert after is not None
    assert after[0] < 1.2 * before[0]


def test_the_same_answers_give_the_same_estimates() -> None:
    def forecast() -> Any:
        model = LengthModel()
        taught(model, random.Random(1))
        return model.predict(call()), model.checkpoint()

    assert forecast() == forecast()


# -- what they change -------------------------------------------------------------------------------------------------


def costs(learned: bool = True, **fields: Any) -> CostModel:
    """Of a tenant whose calls with tools are short, and of another whose are not."""
    model, rng = CostModel(**fields), random.Random(2)
    model.learn_lengths(learned)
    for _ in range(600):
        tools = rng.random() < 0.5
        one = call(shape=TOOLS if tools else 0)
        model.estimate(one, None)
        model.learn(one, 100, max(1, int((20 if tools else 400) * rng.lognormvariate(0, 0.3))))
    return model


def test_a_call_books_and_is_expected_to_last_as_those_like_it() -> None:
    model = costs()
    short, long = call(shape=TOOLS, n=2), call()
    for one in (short, long):
        model.estimate(one, None)
    assert 15 < short.likely_tokens < 40
    assert 300 < long.likely_tokens < 550
    assert short.likely_tokens < short.expected_tokens < 150
    assert 400 < long.expected_tokens < long.output_tokens < 1000
    asked_by_alpha = call(shape=TOOLS, n=2)
    costs(learned=False).estimate(asked_by_alpha, None)
    assert asked_by_alpha.likely_tokens == 0
    assert short.output_tokens == int(LEAST_BOOKED * asked_by_alpha.output_tokens), (
        "never less than an eighth of alpha's"
    )


def test_a_call_that_goes_to_another_model_is_estimated_anew() -> None:
    model, one = costs(), call(max_tokens=5)
    model.estimate(one, None)
    model.learn_lengths(False)
    model.estimate_output(one, None)
    assert one.likely_tokens == 0


def test_an_answer_is_never_expected_to_be_longer_than_asked() -> None:
    model, one = costs(), call(max_tokens=5)
    model.estimate(one, None)
    assert (one.expected_tokens, one.output_tokens, one.likely_tokens) == (5, 5, 5)


def test_a_fixed_share_books_as_it_says() -> None:
    model, one = costs(alpha=0.5), call()
    model.estimate(one, None)
    assert one.output_tokens == 2049
    assert one.likely_tokens


def test_lengths_that_no_policy_wants_are_forgotten() -> None:
    model = CostModel()
    model.learn_lengths(True)
    learns = model.lengths
    model.learn_lengths(True)
    assert model.lengths is learns is not None
    model.learn_lengths(False)
    assert model.lengths is None
    model.learn_lengths(True)
    assert model.lengths is not learns


def test_an_answer_that_shaping_has_cut_teaches_nothing() -> None:
    model = CostModel()
    model.learn_lengths(True)
    assert model.lengths is not None
    model.learn(call(shaped=16, n=2), 100, 32)
    assert not model.lengths.tables
    model.learn(call(shaped=16, n=2), 100, 31)
    assert model.lengths.tables


def test_the_shortest_goes_first_but_nobody_passes_who_came_much_later() -> None:
    queues = Queues(Policy().classes)
    long = Ticket(call(arrived=0.0, deadline=300.0, likely_tokens=200), 0.0)
    early = Ticket(call(arrived=10.0, deadline=310.0, likely_tokens=20), 10.0)
    late = Ticket(call(arrived=200 * PATIENCE + 1.0, deadline=400.0, likely_tokens=1), 21.0)
    unknown = Ticket(call(arrived=0.0, deadline=300.0), 0.0)
    hurried = Ticket(call(arrived=5.0, deadline=6.0, likely_tokens=1000), 5.0)
    for ticket in (unknown, long, early, late, hurried):
        queues.push(ticket)
    newcomer = call(arrived=21.0, deadline=400.0, likely_tokens=1)
    assert queues.own_ahead(newcomer)[0] == sum(each.cost for each in (long, early, late, hurried))
    order = [queues.pop(lambda _: True, 22.0) for _ in range(5)]
    assert order == [hurried, early, long, late, unknown]


# -- over restarts ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_all_but_sessions(rng: random.Random) -> None:
    before, after = costs(), CostModel()
    assert before.lengths is not None
    for _ in range(50):
        before.lengths.learn(call(session=7, max_tokens=None), 300.0)
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(before.checkpoint()), type=SavedCosts)
    after.restore(saved)
    assert after.lengths is None, "nobody wants them"
    after.learn_lengths(True)
    after.restore(saved)
    assert after.lengths is not None
    for one in (call(), call(shape=TOOLS), call(max_tokens=None)):
        assert after.lengths.predict(one) == before.lengths.predict(one)
    assert after.lengths.predict(call(session=7)) == after.lengths.predict(call())
    assert after.lengths.checkpoint() == before.lengths.checkpoint()
    assert after.lengths.weights == before.lengths.weights - 1
    learned = after.lengths.tables["a", "m"]
    after.restore(saved)
    assert after.lengths.tables["a", "m"] is learned


def test_a_checkpoint_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LengthModel()
    for size in range(300):
        model.learn(call(prompt_tokens=2**size % 2**31), 10.0)
    (saved,) = model.checkpoint()
    assert len(saved.weights) <= MOST_LENGTH_WEIGHTS
    monkeypatch.setattr(lengths, "MOST_TABLES", 0)
    fresh = LengthModel()
    fresh.restore([saved])
    assert not fresh.tables


def test_answers_of_less_than_a_token_can_be_saved() -> None:
    model = LengthModel()
    model.learn(call(), 0.125)
    (saved,) = model.checkpoint()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(saved), type=type(saved)).mean == 0.0


def test_an_absurd_checkpoint_predicts_something_finite() -> None:
    model = LengthModel()
    taught(model, random.Random(1))
    (saved,) = model.checkpoint()
    fresh = LengthModel()
    fresh.restore([msgspec.structs.replace(saved, mean=64.0, margin=64.0)])
    forecast = fresh.predict(call())
    assert forecast is not None
    assert math.isfinite(forecast[1])
