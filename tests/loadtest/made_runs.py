"""Generated runs for tests of the report: results drawn from a seed, with everything that a page shows."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable

from loadtest.report.records import EngineSample, RequestResult, Run, Slo, Window

SLOS = (
    Slo(class_name="interactive", ttft=0.5, tpot=0.05, attainment=0.99),
    Slo(class_name="batch", e2e=60.0, attainment=0.95),
)
CLASSES = {"interactive": 0.6, "default": 0.3, "batch": 0.1}
WINDOW = Window(duration=120.0, warmup=20.0, cooldown=10.0)


def a_result(**fields: object) -> RequestResult:
    """Asked at 10 s, sent 1 ms later, first token after 0.2 s, three more 0.1 s apart."""
    return RequestResult(**{
        "index": 0, "target": "weir", "repeat": 0, "at": 10.0, "kind": "chat", "class_name": "interactive",
        "tenant": "a", "sent": 10.001, "first_byte": 10.15, "first_token": 10.2, "finished": 10.51, "status": 200,
        "outcome": "ok", "prompt_tokens": 100, "completion_tokens": 4, "gaps": (0.1, 0.1, 0.1),
    } | fields)  # type: ignore[arg-type] # fields of Result, passed through # fmt: skip


def a_run(name: str = "weir", rate: float = 20.0, **more: object) -> Run:
    """One run. `slow`: how much slower its answers are; `refused`: the share of requests that are; `lag`: seconds of
    sender's lag on average; `repeats`; `tokens`: of an answer, on average; `seed`; `series`: whether engines tell."""
    slow, refused = float(str(more.get("slow", 1.0))), float(str(more.get("refused", 0.02)))
    lag, repeats = float(str(more.get("lag", 0.0004))), int(str(more.get("repeats", 1)))
    rng = random.Random(str(more.get("seed", name)) + str(rate))
    tokens = int(str(more.get("tokens", 24)))
    results = []
    for repeat in range(repeats):
        at, index = rng.expovariate(rate), 0
        while at < WINDOW.duration:
            results.append(_drawn(rng, name, repeat, index, at, slow=slow, refused=refused, lag=lag, tokens=tokens))
            at, index = at + rng.expovariate(rate), index + 1
    series = _series(rng, rate, slow) if more.get("series", True) else []
    meta = {"command": f"gateway bench --target {name}=http://127.0.0.1:8000 --rate {rate:g}", "seed": 1}
    return Run(name=name, rate=rate, window=WINDOW, slos=SLOS, results=results, series=series, meta=meta)


def _drawn(
    rng: random.Random, name: str, repeat: int, index: int, at: float, *, slow: float, refused: float, lag: float,
    tokens: int,
) -> RequestResult:  # fmt: skip
    class_name = rng.choices(list(CLASSES), list(CLASSES.values()))[0]
    tenant = rng.choice(["acme", "globex", "initech", "umbrella"])
    sent = at + rng.expovariate(1.0 / lag)
    own = RequestResult(index, name, repeat, at, "chat", class_name, tenant, sent, sent + 0.01, prompt_tokens=200)
    if rng.random() < refused:
        own.status, own.outcome, own.reason = rng.choice(
            [(429, "rate_limited", "tenant"), (503, "overloaded", "queue full"), (0, "unanswered", "refused"),
             (200, "truncated", "engine died"), (504, "deadline", "cannot be met")]
        )  # fmt: skip
        own.finished = sent + 0.02
        return own
    first = 0.08 * slow * math.exp(rng.gauss(0.0, 0.7))
    count = 1 + int(rng.expovariate(1.0 / tokens))
    gaps = tuple(0.02 * slow * math.exp(rng.gauss(0.0, 0.3)) for _ in range(count - 1))
    own.status, own.outcome, own.completion_tokens, own.gaps = 200, "ok", count, gaps
    own.first_token = sent + first
    own.finished = own.first_token + sum(gaps) + 0.001
    return own


def _series(rng: random.Random, rate: float, slow: float) -> list[EngineSample]:
    level = min(0.95, 0.1 + rate * slow / 60.0)
    samples = []
    for second in range(int(WINDOW.duration)):
        rise = min(1.0, second / 15.0)
        samples.append(EngineSample(float(second), "", 0.0, 0, int(rise * rate * rng.random())))
        for engine in ("gpu0", "gpu1", "gpu2", "gpu3"):
            kv = min(1.0, max(0.0, rise * level + rng.gauss(0.0, 0.03)))
            samples.append(
                EngineSample(float(second), engine, kv, int(rise * rate / 3 + rng.random() * 4), rng.randint(0, 3))
            )
    return samples


def counts_of(times: Iterable[float], width: float, start: float, end: float) -> list[int]:
    """Count `times` in each whole window of `width` seconds from `start` on; none reaches past `end`."""
    windows = int((end - start) / width + 1e-9)
    found = Counter(math.floor((time - start) / width) for time in times)
    return [found[window] for window in range(windows)]
