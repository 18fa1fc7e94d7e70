"""Failure lines of the simulated engine: those that vLLM publishes, and numbers that the sidecar reads back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadtest.engine.true_memory import CONTEXT, TrueMemory
from loadtest.engine.vllm_lines import VLLM_LINES, line
from sidecar.core.diagnosis import NONE, SECOND_HAND, diagnosis

GIB = 1 << 30
PUBLISHED = [
    json.loads(text)
    for text in (Path(__file__).parents[1] / "sidecar" / "corpus" / "log_lines.jsonl").read_text().splitlines()
]
NAMES = "gpu free total utilization desired length needed available fits sequences blocks tried own current asked"
NUMBERS = dict.fromkeys((*NAMES.split(), "longest"), 1)
WORDINGS = [(kind, number) for kind, wordings in VLLM_LINES.failures.items() for number in range(len(wordings))]


def shape(text: str) -> str:
    """The line without who wrote it, and with N for every number."""
    return re.sub(r"\d+(?:\.\d+)?|MiB\b|GiB\b", "N", re.sub(r"^\(.*?\) ", "", text))


@pytest.mark.parametrize(("kind", "wording"), WORDINGS)
def test_every_wording_is_a_published_line(kind: str, wording: int) -> None:
    ours = shape(line(kind, wording, **NUMBERS))
    assert any(ours == shape(told["line"])[: len(ours)] for told in PUBLISHED if told["kind"] == kind), ours


@pytest.mark.parametrize(("kind", "wording"), WORDINGS)
def test_every_wording_is_diagnosed_as_what_it_is(kind: str, wording: int) -> None:
    assert diagnosis([line(kind, wording, **NUMBERS), VLLM_LINES.follows]).kind == kind


def test_what_follows_and_what_is_slow_are_no_causes() -> None:
    assert diagnosis([VLLM_LINES.follows]).kind == SECOND_HAND
    assert diagnosis([VLLM_LINES.slow_or_hung]).kind == NONE
    assert not any(diagnosis([line(kind)]).out_of_memory for kind in VLLM_LINES.other_causes)
    host = diagnosis([VLLM_LINES.host_memory.format(bytes=1), VLLM_LINES.follows])
    assert not host.out_of_memory, "it is not the GPU's"


TRUE = TrueMemory(rest=10 * GIB, context=2 * GIB, beyond=GIB, blocks=64, hidden=GIB // 2)


@pytest.mark.parametrize("wording", range(3))
def test_the_numbers_of_its_lines_are_those_of_its_memory(wording: int) -> None:
    true = TrueMemory(rest=10 * GIB, context=2 * GIB, blocks=64, hidden=GIB // 2, wording=wording)
    assert true.at_first(0.5, 24 * GIB, 24 * GIB) is None
    crowded = true.at_first(0.5, 12 * GIB, 24 * GIB, gpu=1)
    assert crowded is not None
    told = diagnosis([crowded.line])
    assert (told.kind, told.numbers["free_gib"]) == ("free_memory_too_low", pytest.approx(12 - CONTEXT / GIB))
    assert (told.numbers["total_gib"], told.numbers["desired_gib"]) == (23.5, 11.75)
    short = true.for_cache(0.5, None, 23 * GIB)
    assert short is not None
    told = diagnosis([short.line])
    assert told.kind == short.kind == "kv_too_small"
    if wording < 2:
        assert (told.numbers["needed_gib"], told.numbers["available_gib"]) == (2.0, 1.25)
    assert diagnosis([(true.for_cache(0.4, None, 24 * GIB) or short).line]).kind == "no_kv"
    states = true.for_cache(0.6, None, 24 * GIB)
    assert states is not None
    assert diagnosis([states.line]).numbers == {"seqs": 1024, "blocks": 64}
    assert true.for_cache(0.6, 64, 24 * GIB) is None
    assert diagnosis([true.full(13 * GIB, 12 * GIB, 24 * GIB).line]).kind == "oom"


def test_it_takes_more_than_its_share_and_keeps_more_with_every_sleep() -> None:
    assert (TRUE.takes(12 * GIB), TRUE.takes(5 * GIB)) == (13 * GIB, 10 * GIB)
    grows = TrueMemory(rest=0, context=0, residue=2 * GIB, grows=GIB)
    assert [grows.asleep(sleeps) for sleeps in range(4)] == [2 * GIB, 2 * GIB, 3 * GIB, 4 * GIB]
