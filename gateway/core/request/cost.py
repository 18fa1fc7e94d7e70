"""What a call will cost in KV tokens, before any engine has seen it: prompt and output, whose sum is `Call.cost`.

Prompt: a linear model per (model, kind of route) over the prompt's bytes by script, its messages and a constant (the
chat template), learned from the engines' own usage. Output: what was asked times alpha, the learned 0.9 quantile of
actual over asked. That starts high, so that holds are safe. What deadlines are held against, `expected_tokens`, starts
at nothing instead: no call is refused for a length that nobody has seen. Only `learn`, which sees answers of real
engines, makes entries; an estimate never does, so clients cannot fill the tables with invented models. All tables are
bounded, oldest use out first.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

from gateway.core.request.call import Call

_K = TypeVar("_K")
_T = TypeVar("_T")

MAX_KEYS = 4096
COLD_ALPHA = 0.5
QUANTILE = 0.9
MEDIA_TOKENS = 1000  # an image or a recording: about what vision models and Whisper make of one
OUTPUT_UNKNOWN = 2048  # asked for nothing, and no engine tells its context
COMPLETION_DEFAULT = 16  # vLLM's max_tokens for /v1/completions

# Tokens per ASCII byte, per CJK byte (3 to a character), per other byte, per message, per call: where learning starts,
# and the variance of what the truth may well be.
_PRIOR = (0.25, 0.30, 0.40, 4.0, 4.0)
_VARIANCE = (0.10**2, 0.15**2, 0.25**2, 4.0**2, 8.0**2)
_NOISE = 0.06**2  # variance of actual / predicted that no linear model explains
LEARN_ALL = 256
SAMPLE = 8
_DRIFT = 2e-5  # share of the spread's variance that comes back per call: memory of about 80 calls


class Weights:
    """Tokens per unit of each feature: a Kalman filter on a random walk, which is recursive least squares that forgets.

    Every call is divided by its own token count, so relative errors are minimised and a long prompt counts no more
    than a short one. A feature that is not seen goes back to its prior spread and no further.
    """

    __slots__ = ("calls", "covariance", "values")

    def __init__(self) -> None:
        self.calls = 0
        self.values = _PRIOR
        a, b, c, d, e = _VARIANCE
        self.covariance = (a, 0.0, 0.0, 0.0, 0.0, b, 0.0, 0.0, 0.0, c, 0.0, 0.0, d, 0.0, e)  # the upper triangle

    def learn(self, features: tuple[float, float, float, float, float], tokens: float) -> None:
        """`features` cost `tokens`. Written out: loops over five features would take three times as long."""
        a, b, c, d, e = features
        a, b, c, d, e = a / tokens, b / tokens, c / tokens, d / tokens, e / tokens
        aa, ab, ac, ad, ae, bb, bc, bd, be, cc, cd, ce, dd, de, ee = self.covariance
        f = aa * a + ab * b + ac * c + ad * d + ae * e
        g = ab * a + bb * b + bc * c + bd * d + be * e
        h = ac * a + bc * b + cc * c + cd * d + ce * e
        i = ad * a + bd * b + cd * c + dd * d + de * e
        j = ae * a + be * b + ce * c + de * d + ee * e
        variance = f * a + g * b + h * c + i * d + j * e + _NOISE
        v, w, x, y, z = self.values
        error = 1.0 - (v * a + w * b + x * c + y * d + z * e)
        if error * error > 9.0 * variance:
            # An outlier moves the weights no more than a surprise of three standard deviations does.
            error = math.copysign(3.0 * math.sqrt(variance), error)
        gain = error / variance
        values = v + gain * f, w + gain * g, x + gain * h, y + gain * i, z + gain * j
        self.values = _within(values)
        k, m, n, p, q = f / variance, g / variance, h / variance, i / variance, j / variance
        aa, bb, cc, dd, ee = aa - k * f, bb - m * g, cc - n * h, dd - p * i, ee - q * j
        r, s, t, u, o = _VARIANCE
        self.covariance = (
            aa + _DRIFT * r if aa < r else aa, ab - k * g, ac - k * h, ad - k * i, ae - k * j,
            bb + _DRIFT * s if bb < s else bb, bc - m * h, bd - m * i, be - m * j,
            cc + _DRIFT * t if cc < t else cc, cd - n * i, ce - n * j,
            dd + _DRIFT * u if dd < u else dd, de - p * j,
            ee + _DRIFT * o if ee < o else ee,
        )  # fmt: skip


def _within(values: tuple[float, float, float, float, float]) -> tuple[float, float, float, float, float]:
    """Each weight inside what a tokenizer can do."""
    v, w, x, y, z = values
    if 0.02 <= v <= 1.1 and 0.05 <= w <= 1.1 and 0.02 <= x <= 1.1 and 0.0 <= y <= 64.0 and 0.0 <= z <= 4096.0:
        return values
    return (
        max(0.02, min(1.1, v)), max(0.05, min(1.1, w)), max(0.02, min(1.1, x)),
        max(0.0, min(64.0, y)), max(0.0, min(4096.0, z)),
    )  # fmt: skip


class Quantile:
    """Running quantile of a ratio 0..1, in its logarithm: Robbins and Monro's stochastic approximation.

    A step up weighs `QUANTILE`, a step down the rest, so it rests where that share lies below. Steps start large.
    `value` comes down from COLD_ALPHA; `most` is the largest ratio that was really seen, 0 before the first.
    """

    __slots__ = ("calls", "log", "most", "seen", "value")

    def __init__(self) -> None:
        self.calls = 0
        self.log = math.log(COLD_ALPHA)
        self.value = COLD_ALPHA
        self.most = 0.0
        self.seen = 0

    def learn(self, ratio: float) -> None:
        self.seen += 1
        if ratio > self.most:
            self.most = min(1.0, ratio)
        step = 0.05 if self.seen >= 380 else 1.0 / (1.0 + self.seen / 20.0)
        log = self.log + step * (QUANTILE if ratio > self.value else QUANTILE - 1.0)
        if not -12.0 <= log <= 0.0:
            log = max(-12.0, min(0.0, log))
        self.log = log
        self.value = math.exp(log)


class CostModel:
    """Estimates calls and learns from their usage. `alpha`: `auto`, or a fixed share of the tokens asked."""

    def __init__(self, alpha: float | Literal["auto"] = "auto", *, media_tokens: int = MEDIA_TOKENS) -> None:
        self.fix(alpha)
        self.media_tokens = media_tokens
        self._weights: dict[tuple[str, str], Weights] = {}
        self._alphas: dict[tuple[str, str, int], Quantile] = {}

    def fix(self, alpha: float | Literal["auto"]) -> None:
        """Go by this share from now on, or by what is learned; that goes on in either case."""
        self.alpha = None if alpha == "auto" else alpha

    def estimate(self, call: Call, context: int | None) -> None:
        """Fill in `prompt_tokens`, `output_tokens` (of all its sequences), `asked` and `expected_tokens` (of each).

        `context` is the longest the model's engines take, in tokens; None: not known.
        """
        self.estimate_prompt(call)
        self.estimate_output(call, context)

    def estimate_prompt(self, call: Call) -> None:
        """Fill in `prompt_tokens`."""
        weights = self._weights.get((call.model, call.route.kind))
        v, w, x, y, z = _PRIOR if weights is None else weights.values
        text = v * call.ascii_bytes + w * call.cjk_bytes + x * call.other_bytes + y * call.messages
        call.prompt_tokens = int(text + z) + 1 + call.token_ids + call.media * self.media_tokens

    def estimate_output(self, call: Call, context: int | None) -> None:
        """Fill in `asked`, `output_tokens` and `expected_tokens`, which depend on the prompt's tokens and the class."""
        if not call.route.generates:
            return
        asked = call.max_tokens
        if asked is None:
            asked = COMPLETION_DEFAULT if call.route.kind == "completion" else context or OUTPUT_UNKNOWN
        if context is not None and asked > context - call.prompt_tokens:
            asked = max(1, context - call.prompt_tokens)
        self.expect(call, asked)

    def expect(self, call: Call, asked: int) -> None:
        """Fill in `output_tokens` and `expected_tokens` for `asked` tokens of each sequence."""
        call.asked = asked
        alpha = self.alpha
        known = self._alphas.get(_bucket(call))
        if alpha is None:
            alpha = COLD_ALPHA if known is None else known.value
        call.expected_tokens = 0 if known is None else int(min(known.value, known.most) * asked)
        call.output_tokens = (int(alpha * asked) + 1 if alpha < 1.0 else asked) * call.n

    def learn(self, call: Call, prompt_tokens: int, completion_tokens: int) -> None:
        """The engine's own numbers for an estimated call that it answered. Numbers that cannot be are ignored.

        Each lesson costs 3 us, so a model that knows its traffic takes one call in SAMPLE, and every surprise.
        """
        if call.asked and completion_tokens > 0:
            quantile = self._alphas.get(_bucket(call))
            if quantile is None or _teaches(quantile):
                quantile = _entry(self._alphas, _bucket(call), Quantile)
                quantile.learn(completion_tokens / (call.asked * call.n))
        text_bytes = call.ascii_bytes + call.cjk_bytes + call.other_bytes
        tokens = prompt_tokens - call.token_ids
        # Media tokens depend on the model and the picture: such a call says nothing about text.
        if text_bytes and not call.media and text_bytes / 64 < tokens < 1.2 * text_bytes + 64 * call.messages + 4096:
            weights = self._weights.get((call.model, call.route.kind))
            wrong = abs(call.prompt_tokens - prompt_tokens) > 0.05 * prompt_tokens
            if weights is None or _teaches(weights) or wrong:
                weights = _entry(self._weights, (call.model, call.route.kind), Weights)
                features = (call.ascii_bytes, call.cjk_bytes, call.other_bytes, call.messages, 1.0)
                weights.learn(features, tokens)


def _teaches(learner: Weights | Quantile) -> bool:
    """Whether this call is one to learn from: each of the first, then one in SAMPLE."""
    learner.calls += 1
    return learner.calls < LEARN_ALL or learner.calls % SAMPLE == 0


def _bucket(call: Call) -> tuple[str, str, int]:
    """Calls whose answers are alike: by power of two of what was asked; 0 where nothing was."""
    return call.model, call.class_name, 0 if call.max_tokens is None else call.asked.bit_length()


def _entry(table: dict[_K, _T], key: _K, make: type[_T]) -> _T:
    """The entry, made if need be, as the most recently used one."""
    found = table.pop(key, None)
    if found is None:
        found = make()
        if len(table) >= MAX_KEYS:
            del table[next(iter(table))]
    table[key] = found
    return found
