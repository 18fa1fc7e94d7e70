"""Cost of a call in KV-cache tokens, estimated before any engine has seen it: prompt plus output (`Call.cost`).

Prompt tokens come from a linear model per (model, kind of route). Its features are the prompt's bytes by script, its
messages, and a constant for the chat template. It learns from the usage that engines report.

Output tokens are the client's limit times alpha. Alpha is a learned 0.9 quantile of actual over requested tokens. It
starts high, so that too many tokens are booked rather than too few. `expected_tokens`, which deadlines are checked
against, starts at 0 instead: no call is refused for a length that was never observed.

Only `learn` makes table entries, and it is given answers of real engines. An estimate makes none, so clients cannot
fill the tables with invented models. All tables are bounded: the least recently used entry goes first.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

from gateway.core.checkpoint import MOST_ESTIMATES, SavedCosts, SavedOutput, SavedPrompt
from gateway.core.request.call import Call

_K = TypeVar("_K")
_T = TypeVar("_T")

MAX_KEYS = 4096
COLD_ALPHA = 0.5
QUANTILE = 0.9
MEDIA_TOKENS = 1000  # tokens of an image or a recording: about those of vision models and Whisper
OUTPUT_UNKNOWN = 2048  # tokens where the client gives no limit and no engine reports its context

# Tokens per ASCII byte, per CJK byte (3 to a character), per other byte, per message, per call: the prior mean, and its
# variance.
_PRIOR = (0.25, 0.30, 0.40, 4.0, 4.0)
_VARIANCE = (0.10**2, 0.15**2, 0.25**2, 4.0**2, 8.0**2)
_NOISE = 0.06**2  # variance of actual / predicted that no linear model explains
LEARN_ALL = 256  # calls that a new entry learns from one by one
SAMPLE = 8  # afterwards it learns from one call in so many
_DRIFT = 2e-5  # share of the prior variance that comes back per call: a memory of about 80 calls


class Weights:
    """Tokens per unit of each feature, learned by a Kalman filter on a random walk (recursive least squares with
    forgetting).

    Each call's features are divided by its token count. So relative errors are minimised, and a long prompt counts no
    more than a short one. The variance of a feature that does not occur returns to its prior, and no further.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.values = _PRIOR
        a, b, c, d, e = _VARIANCE
        self.covariance = (a, 0.0, 0.0, 0.0, 0.0, b, 0.0, 0.0, 0.0, c, 0.0, 0.0, d, 0.0, e)  # the upper triangle

    def learn(self, features: tuple[float, float, float, float, float], tokens: float) -> None:
        """Learn that `features` took `tokens`. Unrolled: loops over five features would take three times as long."""
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
            # An outlier moves the weights no more than an error of three standard deviations does.
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
    """The weights, each clamped to the range of real tokenizers."""
    v, w, x, y, z = values
    if 0.02 <= v <= 1.1 and 0.05 <= w <= 1.1 and 0.02 <= x <= 1.1 and 0.0 <= y <= 64.0 and 0.0 <= z <= 4096.0:
        return values
    return (
        max(0.02, min(1.1, v)), max(0.05, min(1.1, w)), max(0.02, min(1.1, x)),
        max(0.0, min(64.0, y)), max(0.0, min(4096.0, z)),
    )  # fmt: skip


class Quantile:
    """Running quantile of a ratio 0..1, tracked in its logarithm by stochastic approximation (Robbins and Monro, 1951).

    A step up weighs QUANTILE, a step down 1 - QUANTILE. So the estimate rests where that share of samples lies below.
    Steps start large. `value` comes down from COLD_ALPHA. `largest` is the largest ratio observed, 0 before the first.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.log = math.log(COLD_ALPHA)
        self.value = COLD_ALPHA
        self.largest = 0.0
        self.samples = 0

    def learn(self, ratio: float) -> None:
        """Learn from one observed ratio."""
        self.samples += 1
        if ratio > self.largest:
            self.largest = min(1.0, ratio)
        step = 0.05 if self.samples >= 380 else 1.0 / (1.0 + self.samples / 20.0)
        log = self.log + step * (QUANTILE if ratio > self.value else QUANTILE - 1.0)
        if not -12.0 <= log <= 0.0:
            log = max(-12.0, min(0.0, log))
        self.log = log
        self.value = math.exp(log)


class CostModel:
    """Estimates the tokens of calls, and learns from their usage.

    `alpha`: `auto` (learned), or a fixed share of the client's output limit. `media_tokens`: tokens of one image or
    recording.
    """

    def __init__(self, alpha: float | Literal["auto"] = "auto", *, media_tokens: int = MEDIA_TOKENS) -> None:
        self.set_alpha(alpha)
        self.media_tokens = media_tokens
        self._weights: dict[tuple[str, str], Weights] = {}
        self._alphas: dict[tuple[str, str, int], Quantile] = {}

    def set_alpha(self, alpha: float | Literal["auto"]) -> None:
        """Use this share from now on, or the learned one (`auto`). Learning goes on in either case."""
        self.alpha = None if alpha == "auto" else alpha

    def estimate(self, call: Call, context: int | None) -> None:
        """Fill in `prompt_tokens`, `output_tokens` (of all sequences), `asked` and `expected_tokens` (of each).

        `context`: the longest context of the model's engines in tokens; None: not known.
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
            asked = call.route.default_output or context or OUTPUT_UNKNOWN
        if context is not None and asked > context - call.prompt_tokens:
            asked = max(1, context - call.prompt_tokens)
        call.asked = asked
        alpha = self.alpha
        known = self._alphas.get(_bucket(call))
        if alpha is None:
            alpha = COLD_ALPHA if known is None else known.value
        share = 0.0 if known is None else known.value if known.value < known.largest else known.largest
        call.expected_tokens = int(share * asked)
        call.output_tokens = (int(alpha * asked) + 1 if alpha < 1.0 else asked) * call.n

    def checkpoint(self) -> SavedCosts:
        """The estimates that were used last, for the next decider."""
        prompts = list(self._weights.items())[-MOST_ESTIMATES:]
        outputs = list(self._alphas.items())[-MOST_ESTIMATES:]
        return SavedCosts(
            [SavedPrompt(*key, each.values) for key, each in prompts],
            [SavedOutput(*key, each.log, each.largest, each.samples) for key, each in outputs],
        )

    def restore(self, saved: SavedCosts) -> None:
        """Go on with the estimates of an earlier decider. How sure it was of a prompt's weights is not saved: they move
        as those of a new entry do, and begin where they were."""
        for prompt in saved.prompts:
            _entry(self._weights, (prompt.model, prompt.kind), Weights).values = _within(prompt.weights)
        for output in saved.outputs:
            quantile = _entry(self._alphas, (output.model, output.class_name, output.size), Quantile)
            quantile.log, quantile.value = output.log, math.exp(output.log)
            quantile.largest, quantile.samples = output.largest, output.samples

    def learn(self, call: Call, prompt_tokens: int, completion_tokens: int) -> None:
        """Learn from the usage that an engine reported for an estimated call. Impossible numbers are ignored.

        Learning costs 3 us. So after LEARN_ALL calls it takes one call in SAMPLE, and every prompt estimate that was
        wrong by more than 5 %.
        """
        if call.asked and completion_tokens > 0:
            quantile = self._alphas.get(_bucket(call))
            if quantile is None or _should_learn(quantile):
                quantile = _entry(self._alphas, _bucket(call), Quantile)
                quantile.learn(completion_tokens / (call.asked * call.n))
        text_bytes = call.ascii_bytes + call.cjk_bytes + call.other_bytes
        tokens = prompt_tokens - call.token_ids
        # Media tokens depend on the model and the image, so such a call teaches nothing about text.
        if text_bytes and not call.media and text_bytes / 64 < tokens < 1.2 * text_bytes + 64 * call.messages + 4096:
            weights = self._weights.get((call.model, call.route.kind))
            wrong = abs(call.prompt_tokens - prompt_tokens) > 0.05 * prompt_tokens
            if weights is None or _should_learn(weights) or wrong:
                weights = _entry(self._weights, (call.model, call.route.kind), Weights)
                features = (call.ascii_bytes, call.cjk_bytes, call.other_bytes, call.messages, 1.0)
                weights.learn(features, tokens)


def _should_learn(learner: Weights | Quantile) -> bool:
    """Whether to learn from this call: from each of the first LEARN_ALL, then from one in SAMPLE."""
    learner.calls += 1
    return learner.calls < LEARN_ALL or learner.calls % SAMPLE == 0


def _bucket(call: Call) -> tuple[str, str, int]:
    """Key of calls with similar answers: model, class, and power of two of the client's limit (0: it gave none)."""
    return call.model, call.class_name, 0 if call.max_tokens is None else call.asked.bit_length()


def _entry(table: dict[_K, _T], key: _K, make: type[_T]) -> _T:
    """The entry of `key`, made if missing, and marked as the most recently used."""
    found = table.pop(key, None)
    if found is None:
        found = make()
        if len(table) >= MAX_KEYS:
            del table[next(iter(table))]
    table[key] = found
    return found
