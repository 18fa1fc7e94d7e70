"""What vLLM answers, read strictly: the only file of the sidecar that knows its metrics' names and its answers' shapes.

vLLM 0.9 up to 0.33. Every reader raises AnswerError, saying what was found. A /metrics that is cut off, lacks what is
acted on or holds a number that cannot be is refused as a whole: an engine half read looks idle, and is put to sleep.
The gateway has a reader of its own, of three times as many series: neither side imports the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec

T = TypeVar("T")
SleepState = Literal["awake", "weights_offloaded", "discard_all", "paused"]


OLDEST = (0, 6)  # a build from source without tags calls itself 0.1.dev1, whatever it is


class AnswerError(ValueError):
    """An answer that is not what a vLLM says."""


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape over all engine cores behind one server: sums, and the worst `kv_usage` (a share 0..1).

    `kv_tokens` is the size of the KV cache, None where it is not told; `sleep_state` is None before 0.12, `paused` a
    sleep that frees nothing. `steps` changes with every step an engine core makes, and means nothing else.
    """

    running: int
    waiting: int
    kv_usage: float
    kv_tokens: int | None = None
    sleep_state: SleepState | None = None
    steps: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits. Gauges lag under load: seconds, at worst."""
        return self.running == self.waiting == 0


_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_KV_USAGE = b"vllm:kv_cache_usage_perc"
_KV_USAGE_OLD = b"vllm:gpu_cache_usage_perc"  # gone in 0.12
_CACHE = b"vllm:cache_config_info"
_SLEEP = b"vllm:engine_sleep_state"
# The first counts steps, a long prompt's pieces too; the others also move where it is absent.
_STEPS = (b"vllm:iteration_tokens_total_count", b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total")
_NAMES = frozenset((_RUNNING, _WAITING, _KV_USAGE, _KV_USAGE_OLD, _CACHE, _SLEEP, *_STEPS))
_NAME = re.compile(rb"[\w:]+")
_SAMPLE = re.compile(rb"[\w:]+(?:\{(.*)\})?[ \t]+([-+.0-9eE]+)(?:[ \t]+-?[0-9]+)?[ \t\r]*")
_LABELS = re.compile(r'(?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*')
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_MOST = 2.0**53

_Rows = list[tuple[dict[str, str], float]]


def gauges_from(text: bytes) -> Gauges:
    """The Prometheus text of GET /metrics. Raises AnswerError."""
    if not text.endswith(b"\n"):
        raise AnswerError(f"the metrics are cut off: {len(text)} bytes without a last newline")
    series: dict[bytes, _Rows] = {}
    for line in text.split(b"\n"):
        if line.startswith(b"vllm:"):
            name = _NAME.match(line)
            if name is not None and name[0] in _NAMES:
                series.setdefault(name[0], []).append(_row(line))
    running, waiting = series.get(_RUNNING), series.get(_WAITING)
    usage = series.get(_KV_USAGE) or series.get(_KV_USAGE_OLD)
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
        kv_tokens=_kv_tokens(series.get(_CACHE, [])),
        sleep_state=_sleep_state(series.get(_SLEEP, [])),
        steps=sum(_sum(series.get(name, [])) for name in _STEPS),
    )


def _row(line: bytes) -> tuple[dict[str, str], float]:
    try:
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise ValueError
        labels, value = (match[1] or b"").decode(), float(match[2])
        if not 0.0 <= value <= _MOST or _LABELS.fullmatch(labels) is None:
            raise ValueError
    except ValueError:  # UnicodeDecodeError is one
        raise AnswerError(f"cannot read the metrics line {line[:200].decode(errors='replace')!r}") from None
    return dict(_LABEL.findall(labels)), value


def _sum(rows: _Rows) -> float:
    return sum(value for _, value in rows)


def _kv_tokens(rows: _Rows) -> int | None:
    """Since 0.32 each core's row tells its own size; before, every row tells the blocks of all cores together."""
    sizes = [_whole(labels, "kv_cache_size_tokens") for labels, _ in rows]
    blocks = [_whole(labels, "num_gpu_blocks") * _whole(labels, "block_size") for labels, _ in rows]
    return (sum(sizes) if all(sizes) else max(blocks)) or None


def _whole(labels: dict[str, str], name: str) -> int:
    """A label as a number; 0 where it is absent or Python's None (before the engine has profiled its memory)."""
    text = labels.get(name, "None")
    if text == "None":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise AnswerError(f"vllm:cache_config_info says {name}={text[:40]!r}")
    return int(text)


def _sleep_state(rows: _Rows) -> SleepState | None:
    """The deepest state of any core; they sleep together."""
    if not rows:
        return None
    states = {labels.get("sleep_state") for labels, value in rows if value}
    if "discard_all" in states:
        return "discard_all"
    if "weights_offloaded" in states:
        return "weights_offloaded"
    return "awake" if "awake" in states else "paused"


# -- JSON -------------------------------------------------------------------------------------------------------------


class Said(msgspec.Struct, frozen=True):
    """One completion. Two are equal if the tokens are; before 0.10.2 only the text is told."""

    text: str
    token_ids: tuple[int, ...] | None = None


class Done(msgspec.Struct, frozen=True):
    """What the routes that change something tell of it, each a part; older versions nothing."""

    status: str | None = None
    level: int | None = None
    success: bool | None = None


class _Card(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _Completion(msgspec.Struct):
    choices: Annotated[list[Said], msgspec.Meta(min_length=1)]


_decode_models = msgspec.json.Decoder(_Models).decode
_decode_version = msgspec.json.Decoder(_Version).decode
_decode_sleeping = msgspec.json.Decoder(_Sleeping).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_done = msgspec.json.Decoder(Done).decode


def _read(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AnswerError(str(error)) from None


def models_from(body: bytes) -> dict[str, int | None]:
    """GET /v1/models: served names (adapters too), each with its longest context in tokens where told."""
    return {card.id: card.max_model_len for card in _read(_decode_models, body).data}


def version_from(body: bytes) -> tuple[int, int] | None:
    """GET /version: major and minor; None where it is not a release's."""
    match = re.match(r"v?([0-9]{1,9})\.([0-9]{1,9})", _read(_decode_version, body).version)
    found = (0, 0) if match is None else (int(match[1]), int(match[2]))
    return None if found < OLDEST else found


def sleeping_from(body: bytes) -> bool:
    """GET /is_sleeping."""
    return _read(_decode_sleeping, body).is_sleeping


def said_from(body: bytes) -> Said:
    """POST /v1/completions: its first choice."""
    return _read(_decode_completion, body).choices[0]


def done_from(body: bytes) -> Done:
    """POST /sleep, /wake_up, /collective_rpc, /reset_prefix_cache."""
    return _read(_decode_done, body) if body else Done()
