"""Reader of vLLM's answers and metrics, by name and shape. In the gateway only this module knows them.

Names are those of vLLM 0.9 up to 0.33. The sidecar's reader builds on this one. A text that is cut off, lacks a figure
that admission depends on, or holds a number that cannot be, raises AnswerError as a whole: a partial sample would look
plausible and be believed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

SleepState = Literal["awake", "weights_offloaded", "discard_all", "paused"]


class AnswerError(ValueError):
    """An answer that is not what a vLLM says, or cannot be trusted; says what was found."""


class ModelLoad(msgspec.Struct, frozen=True):
    """Requests of one model in an engine."""

    running: int
    waiting: int


class LoraLoad(msgspec.Struct, frozen=True):
    """LoRA adapters of an engine: the `most` that it keeps on the GPU, and the names of those with requests."""

    most: int
    names: tuple[str, ...]


class EngineSample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of one server: sums over all its engine cores (data parallelism), and the mean of their `kv_usage`.

    `kv_usage` is the share 0..1 in use of the capacity, which is KV tokens of all cores (None: not reported). Of those
    that wait, `deferred` wait for no place (0.32): for their adapter, or for KV blocks from elsewhere. Totals count
    since the engine's start.
    `sleep_state` is None before 0.12; `paused` is a sleep that frees nothing. `lora` is None if LoRA is not enabled.
    """

    running: int
    waiting: int
    kv_usage: float
    deferred: int = 0
    capacity_tokens: int | None = None
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    sleep_state: SleepState | None = None
    models: dict[str, ModelLoad] = {}
    lora: LoraLoad | None = None

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return self.waiting - self.deferred

    @property
    def tokens_total(self) -> int:
        """Tokens that were read and written."""
        return self.prompt_tokens_total + self.generation_tokens_total


RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
BY_REASON = b"vllm:num_requests_waiting_by_reason"
KV_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_PREEMPTIONS = (b"vllm:num_preemptions_total",)
PROMPT_TOKENS = (b"vllm:prompt_tokens_total",)
GENERATION_TOKENS = (b"vllm:generation_tokens_total",)
SLEEP = b"vllm:engine_sleep_state"
CACHE = b"vllm:cache_config_info"
LORA = b"vllm:lora_requests_info"
_NAMES = frozenset((
    RUNNING, WAITING, BY_REASON, *KV_USAGE, *_PREEMPTIONS, *PROMPT_TOKENS, *GENERATION_TOKENS, SLEEP, CACHE, LORA,
))  # fmt: skip
_SAMPLE = re.compile(rb"([\w:]+)(?:\{(.*)\})?[ \t]+([-+.0-9eE]+)(?:[ \t]+-?[0-9]+)?[ \t\r]*")
_LABELS = re.compile(r'(?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*')
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_MOST = 2.0**53
MOST_LORAS = 4096  # adapters that an engine keeps at once

Rows = list[tuple[dict[str, str], float]]  # of one metric: labels and value


def sample_from(text: bytes) -> EngineSample:
    """The Prometheus text of GET /metrics. Raises AnswerError."""
    series = series_of(text, _NAMES)
    running, waiting = _by_engine(series, RUNNING), _by_engine(series, WAITING)
    kv_usage = _by_engine(series, *KV_USAGE)
    if not running.keys() == waiting.keys() == kv_usage.keys():
        raise AnswerError("running, waiting and KV usage are told of different engines or models: a partial answer")
    cores: dict[str, float] = {}  # of one core's models the worst: they share its cache
    for (_, core), usage in kv_usage.items():
        cores[core] = max(usage, cores.get(core, 0.0))
    worst = max(cores.values())
    if worst > 1.0:
        raise AnswerError(f"KV usage of {worst:g} where 1 is full")
    models: dict[str, ModelLoad] = {}
    for key, count in running.items():
        known = models.get(key[0], ModelLoad(0, 0))
        models[key[0]] = ModelLoad(known.running + int(count), known.waiting + int(waiting[key]))
    return EngineSample(
        running=int(sum(running.values())),
        waiting=int(sum(waiting.values())),
        kv_usage=sum(cores.values()) / len(cores),
        deferred=_deferred(series.get(BY_REASON, [])),
        capacity_tokens=capacity_of(series.get(CACHE, [])),
        preemptions_total=_total(series, _PREEMPTIONS),
        prompt_tokens_total=_total(series, PROMPT_TOKENS),
        generation_tokens_total=_total(series, GENERATION_TOKENS),
        sleep_state=sleep_state_of(series.get(SLEEP, [])),
        models=models,
        lora=lora_of(series.get(LORA, [])),
    )


def series_of(text: bytes, names: frozenset[bytes]) -> dict[bytes, Rows]:
    """The metrics of these names in the Prometheus text of GET /metrics, those that are there. No other line is read.
    Raises AnswerError where the text is cut off or a line of theirs cannot be read."""
    if not text.endswith(b"\n"):
        raise AnswerError(f"the metrics are cut off: {len(text)} bytes without a last newline")
    stems = frozenset(name[:9] for name in names)
    series: dict[bytes, Rows] = {}
    # Nine in ten lines are histogram buckets and comments: nine bytes tell, and nothing more of them is looked at.
    for line in [line for line in text.split(b"\n") if line[:9] in stems]:
        name = line[: len(line) - len(line.lstrip(_NAME_BYTES))]
        if name in names:
            series.setdefault(name, []).append(_read_line(line))
    return series


_NAME_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:"


def _read_line(line: bytes) -> tuple[dict[str, str], float]:
    match = _SAMPLE.fullmatch(line)
    try:
        if match is None:
            raise ValueError
        labels = (match[2] or b"").decode()
        value = float(match[3])
        if not 0.0 <= value <= _MOST or _LABELS.fullmatch(labels) is None:
            raise ValueError
    except ValueError:  # UnicodeDecodeError is one
        raise AnswerError(f"cannot read the metrics line {line[:200].decode(errors='replace')!r}") from None
    return dict(_LABEL.findall(labels)), value


def _by_engine(series: dict[bytes, Rows], *names: bytes) -> dict[tuple[str, str], float]:
    """Values by (model, engine) of the first of `names` that is there."""
    found = next((series[name] for name in names if name in series), None)
    if found is None:
        raise AnswerError(f"no {names[0].decode()} in the metrics: is this a vLLM engine with statistics on?")
    values = {(labels.get("model_name", ""), labels.get("engine", "")): value for labels, value in found}
    if len(values) < len(found):
        raise AnswerError(f"{names[0].decode()} is told twice of one engine and model")
    return values


def _total(series: dict[bytes, Rows], names: tuple[bytes, ...]) -> int:
    found = next((series[name] for name in names if name in series), [])
    return int(sum(value for _, value in found))


def _deferred(rows: Rows) -> int:
    return int(sum(value for labels, value in rows if labels.get("reason") == "deferred"))


def capacity_of(rows: Rows) -> int | None:
    """KV tokens of all engine cores, of the rows of CACHE; None where they are not told. Raises AnswerError.

    `kv_cache_size_tokens` (0.32) is one core's, and right for hybrid models too. Before it there is blocks x block
    size; under data parallelism every core's row already tells the sum of all cores' blocks.
    """
    sizes = [_whole(labels, "kv_cache_size_tokens") for labels, _ in rows]
    blocks = [_whole(labels, "num_gpu_blocks") * _whole(labels, "block_size") for labels, _ in rows]
    return (sum(sizes) if all(sizes) else max(blocks, default=0)) or None


def _whole(labels: dict[str, str], name: str) -> int:
    """A label as a number; 0 where it is absent or Python's None (before the engine has profiled its memory)."""
    text = labels.get(name, "None")
    if text == "None":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise AnswerError(f"vllm:cache_config_info says {name}={text[:40]!r}")
    return int(text)


def sleep_state_of(rows: Rows) -> SleepState | None:
    """The deepest state of any core, of the rows of SLEEP; they sleep together. None where it is not told."""
    if not rows:
        return None
    states = {labels.get("sleep_state") for labels, value in rows if value}
    if "discard_all" in states:
        return "discard_all"
    if "weights_offloaded" in states:
        return "weights_offloaded"
    return "awake" if "awake" in states else "paused"


def lora_of(rows: Rows) -> LoraLoad | None:
    """The adapters with requests now, of the rows of LORA; None where LoRA is not enabled. Raises AnswerError.

    vLLM (0.9 to 0.33) writes the time as the value and all else as labels, so every state that ever was stays there as
    a row of its own: the newest counts. Its V0 core (0.9, 0.10) writes rows of `max_lora="0"` without LoRA.
    """
    if not rows:
        return None
    labels, _ = max(rows, key=lambda row: row[1])
    most = labels.get("max_lora", "")
    if most == "0":
        return None
    if not (most.isascii() and most.isdigit() and 1 <= int(most[:6]) <= MOST_LORAS):
        raise AnswerError(f"vllm:lora_requests_info says max_lora={most[:40]!r}")
    told = [labels.get(f"{state}_lora_adapters", "") for state in ("waiting", "running")]
    names = [name for names in told for name in names.split(",") if name]
    return LoraLoad(int(most), tuple(dict.fromkeys(names)))


_Length = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of GET /v1/models. An adapter has a `parent`. `max_model_len`: in tokens, None if not reported."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    object: str = "model"
    created: int = 0
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: _Length | None = None


class ModelList(msgspec.Struct):
    """An engine's answer to GET /v1/models."""

    data: list[ModelCard]


_decode_models = msgspec.json.Decoder(ModelList).decode


def models_from(body: bytes) -> list[ModelCard]:
    """An engine's answer to GET /v1/models; adapters get their parent's context length. Raises AnswerError."""
    try:
        cards = _decode_models(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AnswerError(f"cannot read the engine's list of models: {error}") from None
    lengths = {card.id: card.max_model_len for card in cards}
    return [
        msgspec.structs.replace(card, max_model_len=lengths.get(card.parent))
        if card.max_model_len is None and card.parent is not None
        else card
        for card in cards
    ]


class EngineFault(msgspec.Struct):
    """The fields of an error, as OpenAI's API names them."""

    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class EngineFaultAnswer(msgspec.Struct):
    """OpenAI's nested object (0.10.2 and later), vLLM's older flat one, or FastAPI's `detail`."""

    error: EngineFault | str | None = None
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None
    detail: Any = None


_decode_error = msgspec.json.Decoder(EngineFaultAnswer).decode


def error_of(body: bytes) -> EngineFault:
    """The error in an engine's answer, in any of the forms that vLLM and FastAPI have for one."""
    try:
        answer = _decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return EngineFault()
    error = answer.error
    if isinstance(error, str):
        error = EngineFault(message=error)
    elif error is None:
        error = EngineFault(answer.message, answer.type, answer.param, answer.code)
    if error.message is None and answer.detail is not None:
        detail = answer.detail if isinstance(answer.detail, str) else msgspec.json.encode(answer.detail).decode()
        return EngineFault(detail, error.type, error.param, error.code)
    return error
