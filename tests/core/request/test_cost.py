"""Token estimates against a hidden tokenizer, alpha against hidden distributions, and robustness against garbage."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from gateway.core.request import cost
from gateway.core.request.call import Call
from gateway.core.request.cost import CostModel, Quantile, Weights
from gateway.core.request.routes import ROUTES


def call(
    kind: str = "chat", *, model: str = "m", max_tokens: int | None = 100, n: int = 1, media: int = 0,
    ascii_bytes: int = 400, cjk_bytes: int = 0, other_bytes: int = 0, messages: int = 2, token_ids: int = 0,
) -> Call:  # fmt: skip
    return Call(
        request_id="r",
        route=next(route for route in ROUTES.values() if route.kind == kind),
        model=model,
        tenant="t",
        class_name="default",
        arrived=0.0,
        deadline=1.0,
        stream=False,
        wants_usage=False,
        max_tokens=max_tokens,
        n=n,
        ascii_bytes=ascii_bytes,
        cjk_bytes=cjk_bytes,
        other_bytes=other_bytes,
        media=media,
        messages=messages,
        prefix=(),
        body=b"",
        token_ids=token_ids,
    )


def english(rng: random.Random) -> tuple[float, float, float]:
    return 1.0, 0.0, 0.0


def mixed(rng: random.Random) -> tuple[float, float, float]:
    if rng.random() < 0.6:
        return rng.choice([(1.0, 0.0, 0.0), (0.1, 0.9, 0.0), (0.2, 0.0, 0.8)])
    share = rng.random()
    return share, (1 - share) * 0.6, (1 - share) * 0.4


@pytest.mark.parametrize("mix", [english, mixed])
@pytest.mark.parametrize(
    "tokenizer",  # tokens per ASCII, CJK and other byte, per message, per call
    [(0.22, 0.25, 0.35, 4, 1), (0.3, 0.5, 0.6, 5, 30), (0.5, 1.0, 1.0, 8, 0), (0.15, 0.2, 0.2, 3, 20)],
)
def test_prompt_error_after_200_calls(
    mix: Callable[[random.Random], tuple[float, float, float]], tokenizer: tuple[float, float, float, int, int]
) -> None:
    rng = random.Random(1)  # a seeded test
    model = CostModel()
    errors = []
    for count in range(400):
        total = math.exp(rng.uniform(math.log(60), math.log(40_000)))
        a, c, o = (int(total * share) for share in mix(rng))
        one = call(ascii_bytes=a, cjk_bytes=c, other_bytes=o, messages=rng.choice([1, 2, 2, 3, 5, 9, 20]))
        text = tokenizer[0] * a + tokenizer[1] * c + tokenizer[2] * o
        actual = max(1, round(text * rng.gauss(1, 0.05) + tokenizer[3] * one.messages + tokenizer[4]))
        model.estimate(one, None)
        if count >= 200:
            errors.append(abs(one.prompt_tokens - actual) / actual)
        model.learn(one, actual, 10)
    errors.sort()
    assert statistics.median(errors) <= 0.05
    assert errors[int(0.95 * len(errors))] <= 0.15


def test_a_changed_tokenizer_is_learned_again() -> None:
    model = CostModel()
    for ratio in (0.2, 0.5):
        for _ in range(400):
            model.learn(call(ascii_bytes=4000), int(4000 * ratio), 10)
        one = call(ascii_bytes=4000)
        model.estimate(one, None)
        assert one.prompt_tokens == pytest.approx(4000 * ratio, rel=0.05)


def test_one_outlier_moves_little() -> None:
    model = CostModel()
    for _ in range(200):
        model.learn(call(ascii_bytes=4000), 1000, 10)
    before, after = call(ascii_bytes=4000), call(ascii_bytes=4000)
    model.estimate(before, None)
    model.learn(call(ascii_bytes=4000), 100, 10)
    model.estimate(after, None)
    assert 0 < before.prompt_tokens - after.prompt_tokens < 50


def test_text_beside_token_ids_teaches_of_the_text() -> None:
    model = CostModel()
    for _ in range(200):
        model.learn(call("completion", ascii_bytes=4000, token_ids=3000), 3000 + 2000, 1)
    one = call("completion", ascii_bytes=4000)
    model.estimate(one, None)
    assert one.prompt_tokens == pytest.approx(2000, rel=0.05)


@pytest.mark.parametrize("tokens", [0, -5, 6, 10**9])
def test_numbers_that_cannot_be_teach_nothing(tokens: int) -> None:
    model = CostModel()
    model.learn(call(), tokens, 0)
    assert model._weights == {}
    assert model._alphas == {}


def test_an_expected_length_is_one_that_was_seen_and_never_longer_than_what_is_held() -> None:
    model = CostModel()
    one = call(max_tokens=None)
    model.estimate(one, 32_768)
    assert (one.expected_tokens, one.output_tokens > 16_000) == (0, True), "nobody has seen such an answer"
    model.learn(one, one.prompt_tokens, 20)
    model.estimate(one, 32_768)
    assert one.expected_tokens in (19, 20)
    assert one.output_tokens > 14_000, "what is held comes down slowly"
    for completion in [20] * 60 + [one.asked] * 200:
        model.learn(one, one.prompt_tokens, completion)
        model.estimate(one, 32_768)
        assert one.expected_tokens <= one.output_tokens
    assert one.expected_tokens > 0.9 * one.asked


def test_an_expected_length_is_learned_where_the_share_that_is_held_is_fixed() -> None:
    model = CostModel(0.25)
    one = call(max_tokens=400)
    for _ in range(100):
        model.estimate(one, None)
        model.learn(one, one.prompt_tokens, 40)
    assert (one.output_tokens, one.expected_tokens) == (101, 40)


def test_media_and_token_ids_teach_nothing_of_text() -> None:
    model = CostModel()
    model.learn(call(media=1), 300, 0)
    model.learn(call(ascii_bytes=0, token_ids=50), 50, 0)
    assert model._weights == {}


def test_media_and_token_ids_are_counted() -> None:
    model = CostModel(media_tokens=700)
    plain, rich = call(), call(media=2, token_ids=31)
    model.estimate(plain, None)
    model.estimate(rich, None)
    assert rich.prompt_tokens - plain.prompt_tokens == 2 * 700 + 31


def test_weights_stay_within_what_tokenizers_do() -> None:
    rng = random.Random(3)  # a seeded test
    weights = Weights()
    for _ in range(5000):
        size = rng.choice([10, 1000, 1_000_000])
        features = (rng.choice([0, size]), rng.choice([0, size]), rng.choice([0, size]), rng.randrange(200), 1.0)
        weights.learn(features, rng.uniform(1, 2 * size))
        v, w, x, y, z = weights.values
        assert all(0.02 <= per_byte <= 1.1 for per_byte in (v, w, x))
        assert 0.0 <= y <= 64.0
        assert 0.0 <= z <= 4096.0
    diagonal = [weights.covariance[index] for index in (0, 5, 9, 12, 14)]
    assert all(0.0 < known <= prior * 1.001 for known, prior in zip(diagonal, cost._VARIANCE, strict=True))


# -- output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "max_tokens", "context", "asked"),
    [
        ("chat", 100, None, 100),
        ("chat", 100, 8192, 100),
        ("chat", None, None, cost.OUTPUT_UNKNOWN),
        ("chat", 10_000, 1000, "left"),
        ("chat", None, 1000, "left"),
        ("response", None, 1000, "left"),
        ("message", 5000, 1000, "left"),
        ("chat", None, 50, 1),
        ("completion", None, 1000, 16),
        ("completion", None, None, 16),
    ],
)
def test_what_is_asked(kind: str, max_tokens: int | None, context: int | None, asked: int | str) -> None:
    one = call(kind, max_tokens=max_tokens)
    CostModel().estimate(one, context)
    assert one.asked == (1000 - one.prompt_tokens if asked == "left" else asked)
    assert one.output_tokens == one.asked // 2 + 1


def test_n_multiplies_output() -> None:
    one, four = call(), call(n=4)
    for made in (one, four):
        CostModel().estimate(made, None)
    assert four.output_tokens == 4 * one.output_tokens


def test_alpha_is_learned_of_each_of_n() -> None:
    model = CostModel()
    for _ in range(200):
        one = call(n=4)
        model.estimate(one, None)
        model.learn(one, 100, 4 * 10)
    assert one.output_tokens == pytest.approx(4 * 10, abs=8)


def test_nothing_is_generated_where_the_route_generates_nothing() -> None:
    one = call("embedding", max_tokens=None)
    CostModel().estimate(one, 1000)
    assert (one.output_tokens, one.asked) == (0, 0)
    assert one.prompt_tokens > 50
    model = CostModel()
    model.learn(one, 100, 5)
    assert model._alphas == {}


@pytest.mark.parametrize(("alpha", "output"), [(1.0, 100), (0.25, 26), (0.0, 1)])
def test_a_fixed_alpha_is_not_learned_over(alpha: float, output: int) -> None:
    model = CostModel(alpha)
    for _ in range(50):
        learned = call()
        model.estimate(learned, None)
        model.learn(learned, 100, 3)
    assert learned.output_tokens == output


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (lambda rng: rng.randrange(1, 101), 90),
        (lambda rng: 10, 10),
        (lambda rng: 100, 100),
        (lambda rng: 200, 100),  # more than was asked cannot be; a ratio is at most 1
        (lambda rng: min(100, 1 + int(rng.expovariate(0.05))), 46),
    ],
)
def test_alpha_is_the_090_quantile(actual: Callable[[random.Random], int], expected: int) -> None:
    rng = random.Random(5)  # a seeded test
    model = CostModel()
    seen = []
    for count in range(600):
        one = call()
        model.estimate(one, None)
        model.learn(one, 100, actual(rng))
        if count >= 200:
            seen.append(one.output_tokens)
    assert statistics.mean(seen) == pytest.approx(expected, rel=0.15, abs=1.5)


def test_alpha_is_learned_by_model_class_and_size_asked() -> None:
    model = CostModel()
    for _ in range(100):
        one = call(max_tokens=1000)
        model.estimate(one, None)
        model.learn(one, 100, 10)
    model.estimate(one, None)
    assert one.output_tokens < 60
    for other in (call(max_tokens=100), call(max_tokens=None), call(max_tokens=1000, model="x")):
        model.estimate(other, 1200)
        assert other.output_tokens == other.asked // 2 + 1


def test_quantile_rests_where_nine_in_ten_lie_below() -> None:
    rng = random.Random(2)  # a seeded test
    quantile = Quantile()
    below = 0
    for count in range(3000):
        ratio = rng.random()
        below += count >= 1000 and ratio <= math.exp(quantile.log)
        quantile.learn(ratio)
    assert below / 2000 == pytest.approx(0.9, abs=0.02)


def test_estimates_make_no_entries_and_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MAX_KEYS", 3)
    model = CostModel()
    for name in "abcdefgh":
        model.estimate(call(model=name), None)
    assert model._weights == {}
    for name in "abcad":
        one = call(model=name)
        model.estimate(one, None)
        model.learn(one, 100, 10)
    assert [key[0] for key in model._weights] == ["c", "a", "d"]
    assert [key[0] for key in model._alphas] == ["c", "a", "d"]


def test_prompt_and_output_can_be_estimated_apart() -> None:
    """The class is found between the two: it depends on the one, and the other on it."""
    whole, apart, model = call(), call(), CostModel()
    model.estimate(whole, 1000)
    model.estimate_prompt(apart)
    assert (apart.prompt_tokens, apart.output_tokens) == (whole.prompt_tokens, 0)
    model.estimate_output(apart, 1000)
    assert (apart.asked, apart.output_tokens) == (whole.asked, whole.output_tokens)


def test_a_reload_fixes_alpha_and_frees_it_again_with_what_was_learned() -> None:
    model = CostModel()
    for _ in range(200):
        one = call()
        model.estimate(one, None)
        model.learn(one, 100, one.asked)
    learned = one.output_tokens
    model.set_alpha(0.25)
    model.estimate(one, None)
    assert one.output_tokens == one.asked // 4 + 1
    model.set_alpha("auto")
    model.estimate(one, None)
    assert one.output_tokens == pytest.approx(learned, abs=2)
