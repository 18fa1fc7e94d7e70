"""Reader of vLLM's answers and metrics. In the sidecar only this module knows their names and shapes.

Versions are vLLM 0.9 up to 0.33. Every reader raises AnswerError, with the text that was found. A /metrics that is cut
off, lacks a figure that is acted on, or holds a number that cannot be is refused as a whole: an engine half read looks
idle, and is put to sleep. The gateway's reader of the same engines reads the lines of metrics and the lists of models.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from gateway.shared.vllm import answers

AnswerError = answers.AnswerError
T = TypeVar("T")
# The first counts steps, a long prompt's pieces too; the others also move where it is absent.
_STEPS = (b"vllm:iteration_tokens_total_count", *answers.GENERATION_TOKENS, *answers.PROMPT_TOKENS)
_NAMES = frozenset((answers.RUNNING, answers.WAITING, *answers.KV_USAGE, answers.CACHE, answers.SLEEP, *_STEPS))


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Scrape of one server, over all its engine cores: sums, and the worst `kv_usage` (a share 0..1).

    `kv_tokens` is the size of the KV cache, None if vLLM does not report it. `sleep_state` is None before 0.12;
    `paused` is a sleep that frees nothing. `steps` changes with every step of an engine core, and means nothing else.
    """

    running: int
    waiting: int
    kv_usage: float
    kv_tokens: int | None = None
    sleep_state: answers.SleepState | None = None
    steps: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits. Gauges lag under load: seconds, at worst."""
        return self.running == self.waiting == 0


def gauges_from(text: bytes) -> Gauges:
    """The Prometheus text of GET /metrics. Raises AnswerError."""
    series = answers.series_of(text, _NAMES)
    running, waiting = series.get(answers.RUNNING), series.get(answers.WAITING)
    usage = next((series[name] for name in answers.KV_USAGE if name in series), None)
    if running is None or waiting is None or usage is None or not len(running) == len(waiting) == len(usage):
        raise AnswerError(
            "running, waiting and KV usage are not all told of every engine: is this a whole vLLM scrape?"
        )
    worst = max(value for _, value in usage)
    if worst > 1.0:
        raise AnswerError(f"KV usage of {worst:g} where 1 is full")
    return Gauges(
        running=int(_sum(running)),
        waiting=int(_sum(waiting)),
        kv_usage=worst,
        kv_tokens=answers.capacity_of(series.get(answers.CACHE, [])),
        sleep_state=answers.sleep_state_of(series.get(answers.SLEEP, [])),
        steps=sum(_sum(series.get(name, [])) for name in _STEPS),
    )


def _sum(rows: answers.Rows) -> float:
    return sum(value for _, value in rows)


# -- JSON -------------------------------------------------------------------------------------------------------------


class Completion(msgspec.Struct, frozen=True):
    """Completion of a prompt. Two completions are equal if their text and tokens are. vLLM before 0.10.2 returns only
    the text."""

    text: str
    token_ids: tuple[int, ...] | None = None


class Acknowledgement(msgspec.Struct, frozen=True):
    """Answer of the routes that change something. Each gives a part of it, older versions nothing."""

    status: str | None = None
    level: int | None = None
    success: bool | None = None


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _Completion(msgspec.Struct):
    choices: Annotated[list[Completion], msgspec.Meta(min_length=1)]


def _read(kind: type[T], body: bytes) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AnswerError(str(error)) from None


def models_from(body: bytes) -> dict[str, int | None]:
    """GET /v1/models: served names (adapters too), each with its longest context in tokens where told."""
    return {card.id: card.max_model_len for card in _read(answers.ModelList, body).data}


def sleeping_from(body: bytes) -> bool:
    """GET /is_sleeping."""
    return _read(_Sleeping, body).is_sleeping


def said_from(body: bytes) -> Completion:
    """POST /v1/completions: its first choice."""
    return _read(_Completion, body).choices[0]


def done_from(body: bytes) -> Acknowledgement:
    """POST /sleep, /wake_up, /collective_rpc, /reset_prefix_cache."""
    return _read(Acknowledgement, body) if body else Acknowledgement()
