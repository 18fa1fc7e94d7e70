"""Estimates of GPU memory with the lessons of failed starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gateway.shared.files.units import GIB, MIB
from sidecar.core.lesson import Lesson
from sidecar.sizing.claim import (
    MOST,
    OWN_CONTEXT,
    beside,
    claim,
    cuda_of,
    cuda_total,
    largest_share,
    no_room_reason,
    taught,
    taught_share,
)
from sidecar.sizing.memory import Need, graphs
from sidecar.sizing.model_config import shape_from

KNOWN = Lesson(settings="a", rest=5 * GIB, beyond=GIB)
CUDA = cuda_total(80 * GIB)
NEED = Need(weights=10 * GIB, kv=2 * GIB, activations=GIB, overhead=GIB, tokens=8192)


def test_a_need_is_what_was_told_of_it_and_claims_less_margin() -> None:
    assert taught(NEED, KNOWN, GIB).without_kv == 12 * GIB, "what was exceeded was less"
    assert taught(NEED, Lesson(settings="a", beyond=GIB), GIB) == NEED
    told = taught(NEED, Lesson(settings="a", rest=15 * GIB, exact=True, context=2 * GIB), GIB)
    assert (told.without_kv, told.kv, told.overhead, told.margin) == (15 * GIB, 4 * GIB, 4 * GIB, 256 * MIB)
    less = taught(NEED, Lesson(settings="a", rest=11 * GIB, exact=True), GIB)
    assert (less.without_kv, less.overhead) == (11 * GIB, 0), "less than estimated, if that was told"
    more = taught(NEED, Lesson(settings="a", rest=16 * GIB), GIB)
    assert (more.kv, more.margin) == (2 * GIB, 2 * GIB)
    none = taught(msgspec.structs.replace(NEED, kv=0), Lesson(settings="a", context=GIB), 0)
    assert none.kv == GIB


def test_cuda_has_what_it_told_of_such_a_gpu() -> None:
    lesson = Lesson(settings="a", total=80 * GIB, cuda=79 * GIB)
    assert cuda_of(80 * GIB, lesson) == 79 * GIB
    assert cuda_of(24 * GIB, lesson) == 24 * GIB - 768 * MIB


def test_the_largest_share_leaves_room_beside_it_but_never_less_than_is_needed() -> None:
    assert largest_share(KNOWN, 100 * GIB, 0) == 96 * GIB
    assert largest_share(KNOWN, 100 * GIB, 96 * GIB + 1) == -(-100 * GIB * 961 // 1000), "in whole thousandths"
    for most, least, expected in ((50, 40, 50), (50, 60, 96), (98, 0, 96)):
        lesson = msgspec.structs.replace(KNOWN, most=most * GIB)
        assert largest_share(lesson, 100 * GIB, least * GIB) == expected * GIB


def test_a_share_of_which_nothing_else_is_known() -> None:
    nothing = Lesson(settings="a", total=100 * GIB, cuda=100 * GIB)
    assert taught_share(0.9, 100 * GIB, nothing) == 0.9
    for fields, expected in (
        ({"most": 50 * GIB}, 0.5),
        ({"rest": 91 * GIB, "exact": True}, 0.923),
        ({"rest": 80 * GIB}, 0.91),
        ({"rest": 95 * GIB}, 0.97),
    ):
        assert taught_share(0.9, 100 * GIB, msgspec.structs.replace(nothing, **fields)) == expected


@pytest.mark.parametrize(
    ("share", "learnt", "expected"),
    [
        (40 * GIB, 0, OWN_CONTEXT),
        (40 * GIB, 3 * GIB, 3 * GIB),
        (CUDA * MOST // 1000 - GIB // 4, 0, GIB // 4),  # no more than is left of what is claimed at most
        (CUDA * 99 // 100, 0, 0),  # an operator's share: tried
        (40 * GIB, 60 * GIB, 80 * GIB * MOST // 1000 - 40 * GIB),
        (80 * GIB - 1, 2 * GIB, 0),
    ],
)
def test_beside_its_share_an_engine_takes_a_context_or_what_a_start_told(
    share: int, learnt: int, expected: int
) -> None:
    assert beside(share, Lesson(settings="a", beyond=learnt), CUDA, 80 * GIB) == expected


def test_beside_its_share_an_engine_takes_its_graphs_too() -> None:
    """Measured of Qwen3-8B under vLLM 0.26 on an H200: a share of 27.96 GiB, of which nothing was its CUDA graphs' 1.0
    GiB or its context's 0.51, and 29.07 GiB once it had slept and woken."""
    llama = Path(__file__).parents[1] / "configs" / "llama-3-8b.json"
    shape = msgspec.structs.replace(shape_from(llama.read_bytes()), layers=36)  # that is all that graphs go by
    share, total = int(27.96 * GIB), int(140.40 * GIB)
    own = beside(share, Lesson(settings="a"), cuda_total(total), total, graphs(shape, 1024))
    assert 31_211_913_216 <= share + own <= 31_996_248_064


@pytest.mark.parametrize("most", [20 * GIB, 20 * GIB + 3 * MIB, 20 * GIB + 40 * MIB])
def test_a_share_that_was_free_and_is_just_enough_is_enough_in_thousandths_too(most: int) -> None:
    need = Need(weights=10 * GIB, kv=8 * GIB, activations=GIB, overhead=GIB, tokens=8192, measured=True)
    lesson = Lesson(settings="a", most=most)
    assert claim(need, 24 * GIB - 1, most=largest_share(lesson, 24 * GIB - 1, need.total)).bytes >= need.total


def test_a_least_share_that_left_too_little_beside_it_is_refused_on_gpus_that_have_no_more() -> None:
    need = Need(weights=60 * GIB, kv=4 * GIB, activations=6 * GIB, overhead=4 * GIB, tokens=8192, measured=True)
    lesson = Lesson(settings="a", beyond=4 * GIB, over=4 * GIB)

    def reason(total: int, lesson: Lesson, **operator: float) -> str | None:
        cuda = cuda_of(total, lesson)
        limit = largest_share(lesson, cuda, need.total)
        return no_room_reason(claim(need, cuda, most=limit, **operator), lesson, total)  # type: ignore[arg-type]

    told = reason(78 * GIB, lesson)
    assert told is not None
    assert told.startswith("needs 74.0 GiB of a GPU and more than 4.0 GiB beside them")
    assert reason(80 * GIB, lesson) is None, "there is more beside it"
    assert reason(78 * GIB, msgspec.structs.replace(lesson, over=0)) is None
    assert reason(78 * GIB, lesson, utilization=0.97) is None, "an operator's own share"
