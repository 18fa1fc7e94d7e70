"""Lengths of answers, learned online of each tenant's own calls: an additive model over hashed features.

The logarithm of a length is the tenant's mean plus a weight for each feature that a call has: its route, class and
shape (tools, format, stop) with its prompt's length in quarters of a power of two; the same with its max_tokens in
powers of two; and its session. Weights are learned by normalised least mean squares (Widrow and Hoff, 1960) with the
error clipped as in Huber's loss: one answer moves nothing far.

Influence: the model is believed as far as its order was right. Kendall's tau between predictions and lengths, over
pairs of consecutive answers, is made a correlation (Greiner's relation, r = sin(pi/2 tau)), and predictions are shrunk
towards the tenant's mean by it. A pair whose predictions are closer than TIE says nothing: the later one follows the
earlier answer, which regresses to the mean. Below LEAST_INFLUENCE there is no prediction at all. The 0.9 quantile is
the shrunken prediction plus a learned quantile of its own errors, so it holds whatever the model is worth.

Nothing is shared between tenants or models: noise spoils only its sender's estimates. Memory is bounded: with
MOST_WEIGHTS in all, the table that has the most forgets the half it used longest ago. So a client that invents sessions
crowds out its own. Only `learn` makes entries, and it is given answers of real engines.
"""

from __future__ import annotations

import math
from itertools import islice

from gateway.core.checkpoint import MOST_LENGTH_WEIGHTS, MOST_LENGTHS, SavedLengths, SavedWeight
from gateway.core.request.call import Call

QUANTILE = 0.9
MOST_TABLES = 1024
MOST_WEIGHTS = 32_768  # of all tables; about 7 MB
LEAST_ANSWERS = 32  # of a tenant and model, before anything is predicted
LEAST_INFLUENCE = 0.2  # correlation: about three standard errors of its estimate
CLIP = 1.5  # natural logarithms: an error counts for no more than a factor of 4.5
TIE = 0.1  # natural logarithms
PRIOR_PAIRS = 10  # without any agreement, that every table begins with
LEARN_ALL = 256  # answers that a new table learns from one by one
SAMPLE = 8  # afterwards it learns from one in so many, and from the first of a session: learning costs 5 us
SESSION_ALL = 4  # answers of a session that are learned one by one
LEAST_RATE = 0.02  # of an error that a weight takes, however many answers it has seen
MEAN_RATE = TAU_RATE = 0.01  # a memory of about 100 answers
NEW: list[float] = []

# Kind of route, class, shape and a size, 0 or more of the prompt, negative of max_tokens; a session.
Shared = tuple[str, str, int, int]
Feature = Shared | int
# Tokens of one sequence: the median, the 0.9 quantile, and the longest answer of the tenant so far.
LengthForecast = tuple[float, float, float]


class TenantLengths:
    """All that is known of one tenant's answers from one model. `weights`: value and number of answers, the most
    recently used last. `margin`: of the 0.9 quantile over the prediction. Both and `mean` are natural logarithms."""

    def __init__(self) -> None:
        self.answers = 0  # learned
        self.calls = 0
        self.mean = 0.0
        self.pairs = 0  # that were compared
        self.tau = 0.0
        self.influence = 0.0  # share, 0..1, of the features' part in a prediction
        self.margin = 0.5
        self.largest = 0.0  # tokens
        self.last: tuple[float, float] | None = None  # what was predicted of the last answer, and its length
        self.weights: dict[Feature, list[float]] = {}

    def believe(self) -> None:
        """Work out the influence anew."""
        correlation = math.sin(math.pi / 2.0 * self.tau)
        self.influence = correlation if correlation >= LEAST_INFLUENCE else 0.0

    def learn(self, keys: tuple[Feature, ...], tokens: float) -> None:
        """Learn one answer."""
        length = math.log(max(1.0, tokens))  # of several sequences some may be empty
        if not self.answers:
            self.mean = length
        weights = self.weights
        found = [weights.pop(key, NEW) or [0.0, 0.0] for key in keys]
        weights.update(zip(keys, found, strict=True))
        part = sum([weight[0] for weight in found])
        self.answers += 1
        self._judge(part, length)
        error = length - self.mean - part
        error = CLIP if error > CLIP else -CLIP if error < -CLIP else error
        rates = [max(LEAST_RATE, 1.0 / (weight[1] + 2.0)) for weight in found]
        error /= max(1.0, sum(rates))
        for weight, rate in zip(found, rates, strict=True):
            weight[0] += rate * error
            weight[1] += 1.0
        away = length - self.mean
        away = CLIP if away > CLIP else -CLIP if away < -CLIP else away
        self.mean += max(MEAN_RATE, 1.0 / self.answers) * away
        self.largest = max(self.largest, tokens)

    def _judge(self, part: float, length: float) -> None:
        """Compare an answer with what would have been predicted: learn the margin, and how good the order is."""
        over = length - self.mean - self.influence * part
        step = max(0.05, 1.0 / (1.0 + self.answers / 20.0))
        self.margin += step * (QUANTILE if over > self.margin else QUANTILE - 1.0)
        if self.last is not None and abs(part - self.last[0]) >= TIE:
            agree = (part - self.last[0]) * (length - self.last[1])
            sign = 1.0 if agree > 0.0 else -1.0 if agree < 0.0 else 0.0
            self.pairs += 1
            self.tau += max(TAU_RATE, 1.0 / (self.pairs + PRIOR_PAIRS)) * (sign - self.tau)
            self.believe()
        self.last = part, length

    def forget(self) -> int:
        """Forget the half of the weights that was used longest ago; their number."""
        oldest = list(islice(self.weights, (len(self.weights) + 1) // 2))
        for key in oldest:
            del self.weights[key]
        return len(oldest)


class LengthModel:
    """Tables by tenant and model, the most recently used last."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str], TenantLengths] = {}
        self.weights = 0  # of all tables

    def predict(self, call: Call) -> LengthForecast | None:
        """The length of each sequence of the call's answer. None: too little is known, or it is worth too little."""
        table = self.tables.get((call.tenant, call.model))
        if table is None or not table.influence or table.answers < LEAST_ANSWERS:
            return None
        part, weights = 0.0, table.weights
        for key in features(call):
            if key in weights:
                part += weights[key][0]
        middle = table.mean + table.influence * part
        return math.exp(middle), math.exp(middle + table.margin), table.largest

    def learn(self, call: Call, tokens: float) -> None:
        """Learn that each sequence of the call's answer has had so many `tokens`, which are above 0."""
        key = call.tenant, call.model
        table = self.tables.get(key)
        if table is not None:
            table.calls += 1
            if table.answers >= LEARN_ALL and table.calls % SAMPLE:
                session = table.weights.get(call.session)
                if not call.session or (session is not None and session[1] >= SESSION_ALL):
                    return
            del self.tables[key]
        else:
            table = TenantLengths()
            if len(self.tables) >= MOST_TABLES:
                self.weights -= len(self.tables.pop(next(iter(self.tables))).weights)
        self.tables[key] = table
        known = len(table.weights)
        table.learn(features(call), tokens)
        self.weights += len(table.weights) - known
        if self.weights > MOST_WEIGHTS:
            self.weights -= max(self.tables.values(), key=lambda each: len(each.weights)).forget()

    def checkpoint(self) -> list[SavedLengths]:
        """The tables used last, without sessions: their hashes mean nothing to another process."""
        return [
            SavedLengths(
                *key, each.answers, each.mean, each.tau, each.margin, each.largest,
                [SavedWeight(*name, *weight) for name, weight in each.weights.items() if not isinstance(name, int)][
                    -MOST_LENGTH_WEIGHTS:
                ],
            )
            for key, each in list(self.tables.items())[-MOST_LENGTHS:]
        ]  # fmt: skip

    def restore(self, saved: list[SavedLengths]) -> None:
        """Go on with an earlier decider's tables; one that there is already stays."""
        for each in saved[: MOST_TABLES - len(self.tables)]:
            key = each.tenant, each.model
            if key not in self.tables:
                table = self.tables[key] = TenantLengths()
                table.answers, table.mean, table.tau = each.answers, each.mean, each.tau
                table.margin, table.largest, table.pairs = each.margin, each.largest, each.answers
                table.believe()
                for weight in each.weights:
                    name = weight.kind, weight.class_name, weight.shape, weight.size
                    table.weights[name] = [weight.value, weight.answers]
                self.weights += len(table.weights)


def features(call: Call) -> tuple[Feature, ...]:
    """The names of a call's features. A session is its hash."""
    kind, class_name, shape = call.route.kind, call.class_name, call.shape
    prompt = (kind, class_name, shape, int(4.0 * math.log2(call.prompt_tokens + 1.0)))
    asked = (kind, class_name, shape, -1 if call.max_tokens is None else -1 - call.asked.bit_length())
    return (prompt, asked, call.session) if call.session else (prompt, asked)
