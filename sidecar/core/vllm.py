"""Reader of vLLM's answers that only the sidecar asks for; `gateway.shared.vllm.answers` reads the others.

Versions are vLLM 0.9 up to 0.33. Every reader raises AnswerError, with the text that was found.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from gateway.shared.vllm.answers import GENERATION_TOKENS, PROMPT_TOKENS, AnswerError, series_of

T = TypeVar("T")
# The first counts steps, a long prompt's pieces too; the others also move where it is absent.
_STEPS = frozenset((b"vllm:iteration_tokens_total_count", *GENERATION_TOKENS, *PROMPT_TOKENS))


def steps_from(text: bytes) -> float:
    """GET /metrics: a number that changes with every step of an engine core, and means nothing else."""
    return sum(value for rows in series_of(text, _STEPS).values() for _, value in rows)


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


def sleeping_from(body: bytes) -> bool:
    """GET /is_sleeping."""
    return _read(_Sleeping, body).is_sleeping


def said_from(body: bytes) -> Completion:
    """POST /v1/completions: its first choice."""
    return _read(_Completion, body).choices[0]


def done_from(body: bytes) -> Acknowledgement:
    """POST /sleep, /wake_up, /collective_rpc, /reset_prefix_cache."""
    return _read(Acknowledgement, body) if body else Acknowledgement()
