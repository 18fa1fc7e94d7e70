"""Lessons of starts that failed for memory."""

from __future__ import annotations

import msgspec
import pytest

from gateway.shared.files.units import GIB
from sidecar.core.diagnosis import Diagnosis
from sidecar.core.inventory import Size
from sidecar.core.lesson import (
    MOST_CONTEXT,
    STEP,
    FailedStart,
    Lesson,
    Measured,
    learn,
    lower_share,
    measurement,
    taken_by_others,
)

SIZE = Size(claim=20 * GIB, start_needs=20 * GIB, context=2 * GIB)
KNOWN = Lesson(settings="a", rest=5 * GIB, beyond=GIB)


def learnt(kind: str, known: Lesson | None = None, size: Size = SIZE, free: int = 0, **numbers: float) -> Lesson | None:
    found = Diagnosis(kind, "x", numbers=numbers)
    return learn(known, FailedStart(size=size, found=found, total=80 * GIB, free=free), "a")


@pytest.mark.parametrize(
    ("kind", "numbers", "fields"),
    [
        ("kv_too_small", {"needed_gib": 3.0, "available_gib": 1.0},
         {"rest": 19 * GIB, "exact": True, "context": 3 * GIB}),
        ("kv_too_small", {"available_tokens": 100}, {"rest": 20 * GIB, "context": 2 * GIB}),
        ("kv_too_small", {"needed_gib": 3.0, "available_gib": 1.0, "max_model_len": 8192},
         {"rest": 19 * GIB, "exact": True, "context": 3 * GIB, "tokens": 8192}),
        ("kv_too_small", {"available_tokens": 2048, "max_model_len": 8192},
         {"rest": int(19.5 * GIB), "context": 2 * GIB, "tokens": 8192}),
        ("no_kv", {}, {"rest": 20 * GIB}),
        ("mamba_blocks", {"seqs": 1024, "blocks": 722}, {"sequences": 722}),
        ("mamba_blocks", {"seqs": 1024, "blocks": 0}, {"rest": 20 * GIB}),
        ("free_memory_too_low", {"free_gib": 18.5, "total_gib": 79.0},
         {"most": int(18.5 * GIB), "total": 80 * GIB, "cuda": 79 * GIB}),
        ("oom", {}, {"beyond": GIB}),
        ("oom", {"tried_gib": 4.0, "free_gib": 0.5}, {"beyond": int(3.5 * GIB)}),
        ("oom", {"tried_gib": 40.0, "free_gib": 0.5}, {"beyond": 5 * GIB}),
    ],
)  # fmt: skip
def test_what_each_kind_of_failure_teaches(kind: str, numbers: dict[str, float], fields: dict[str, int]) -> None:
    assert learnt(kind, **numbers) == Lesson(settings="a", **fields)  # type: ignore[arg-type] # as they are


@pytest.mark.parametrize("kind", ["bad_flag", "unknown", "free_memory_too_low"])
def test_a_failure_without_its_numbers_or_of_another_kind_teaches_nothing(kind: str) -> None:
    assert learnt(kind) is None


@pytest.mark.parametrize(("asked", "longest"), [(200_704, 131_072), (131_072, None), (None, None)])
def test_a_context_that_vllm_does_not_derive_is_learnt_where_the_sidecar_chose_it(
    asked: int | None, longest: int | None
) -> None:
    found = learnt("bad_config", size=Size(context_length=asked), derived_len=131_072)
    assert (None if found is None else found.longest) == longest


def test_a_lesson_is_added_to_what_is_known_of_the_same_settings() -> None:
    assert learnt("no_kv", KNOWN) == msgspec.structs.replace(KNOWN, rest=20 * GIB)
    assert learnt("no_kv", msgspec.structs.replace(KNOWN, settings="b")) == Lesson(settings="a", rest=20 * GIB)
    fewer = learnt("mamba_blocks", learnt("mamba_blocks", seqs=9, blocks=5), seqs=9, blocks=7)
    assert fewer is not None
    assert fewer.sequences == 5


def test_the_kv_cache_of_a_context_is_learnt_with_the_tokens_that_it_was_started_with() -> None:
    shorter = msgspec.structs.replace(SIZE, context_length=4096)
    known = Lesson(settings="a", rest=5 * GIB, context=9 * GIB, tokens=8192)
    found = learnt("kv_too_small", known, shorter, needed_gib=3.0, available_gib=1.0)
    assert found == Lesson(settings="a", rest=19 * GIB, exact=True, context=3 * GIB, tokens=4096)


def test_what_is_taken_beside_the_share_doubles() -> None:
    beside = msgspec.structs.replace(SIZE, beyond=2 * GIB, start_needs=22 * GIB)
    assert learnt("oom", size=beside) == Lesson(settings="a", beyond=4 * GIB)
    small = learnt("oom", size=Size(start_needs=4 * GIB))
    assert small == Lesson(settings="a", beyond=STEP)


@pytest.mark.parametrize(
    ("known", "free", "over"),
    [
        (0, 80.0, 0),  # the first such start: more can still be left free beside it
        (1, 80.0, 0),  # more was left than was known to be needed
        (2, 80.0, 0),
        (3, 80.0, 4),  # no more could be left, though this one lacked more than was known
        (4, 80.0, 4),
        (4, 79.0, 3),  # others hold a part of it, who may go
        (4, 76.0, 0),
        (19, 99.0, 0),  # so much beside its share another has taken
    ],
)
def test_a_share_beside_which_no_more_can_be_left_free_has_too_little_there(known: int, free: float, over: int) -> None:
    size = Size(claim=78 * GIB, start_needs=78 * GIB, share=0.95, beyond=2 * GIB)
    lesson = Lesson(settings="a", beyond=known * GIB)
    found = learnt("oom", lesson, size, free=int(free * GIB))
    assert found is not None
    assert (found.over, found.beyond) == (over * GIB, max(known, 4) * GIB)


@pytest.mark.parametrize(("share", "beyond", "lower"), [(0.95, 1.0, 0.93), (0.5, 40.0, 0.01), (0.9, 0.0, 0.9)])
def test_the_lower_share_to_try_leaves_what_was_taken_beside_the_last(
    share: float, beyond: float, lower: float
) -> None:
    assert lower_share(share, Lesson(settings="a", beyond=int(beyond * GIB)), 80 * GIB) == lower


@pytest.mark.parametrize(("free", "beyond"), [(19.0, 0.5), (18.0, 0.0), (60.0, MOST_CONTEXT / GIB)])
def test_the_context_of_the_engine_itself_has_to_be_free_too(free: float, beyond: float) -> None:
    found = learnt("free_memory_too_low", free=int(free * GIB), free_gib=18.5)
    assert found == Lesson(settings="a", most=int(18.5 * GIB), beyond=int(beyond * GIB))


@pytest.mark.parametrize(
    ("free", "over"),
    [
        (80.0, 4),  # CUDA has 1 GiB less and its context takes another
        (80.1, 0),  # that much others took meanwhile
        (76.0, 0),  # nothing was left beside the share
    ],
)
def test_a_share_beside_which_the_context_has_no_room_on_an_empty_gpu_has_none(free: float, over: int) -> None:
    size = Size(claim=76 * GIB, start_needs=76 * GIB, share=0.95)
    found = learnt("free_memory_too_low", None, size, int(free * GIB), free_gib=78.0, total_gib=79.0)
    assert found is not None
    assert found.over == over * GIB


@pytest.mark.parametrize(("total", "over"), [(0, 0), (80, 0), (96, 3)])
def test_what_was_too_little_on_smaller_gpus_still_is_once_the_engine_runs_on_larger_ones(
    total: int, over: int
) -> None:
    known = Lesson(settings="a", over=3, most=9, total=80)
    assert known.after(None, total) == Lesson(settings="a", over=over, total=80)


def test_a_measurement_replaces_what_was_told_of_needs_unless_it_is_of_less() -> None:
    known = Lesson(settings="a", rest=8, exact=True, context=2, tokens=7, beyond=3, over=3, most=9, sequences=4)
    kept = Lesson(settings="a", context=2, tokens=7, beyond=3, sequences=4)
    assert known.after(Measured(settings="a", peak=10, settled=10, kv=2), 80) == kept
    for measured in (None, Measured(settings="a", peak=9, settled=9, kv=2)):
        assert known.after(measured, 80) == msgspec.structs.replace(known, most=None, over=0)


@pytest.mark.parametrize(
    ("kind", "numbers", "taken"),
    [
        ("free_memory_too_low", {"free_gib": 24.0}, 55.0),
        ("free_memory_too_low", {"free_gib": 78.5}, 0.0),  # its own CUDA context, and what CUDA does not count
        ("free_memory_too_low", {}, 0.0),
        ("oom", {"tried_gib": 56.0, "free_gib": 24.0, "own_gib": 0.5}, 55.5),
        ("oom", {"tried_gib": 2.0, "free_gib": 0.5, "own_gib": 78.5}, 0.0),  # it alone has filled the GPU
        ("oom", {"tried_gib": 2.0, "free_gib": 0.5}, 0.0),
    ],
)
def test_what_others_have_taken_is_told_by_what_an_engine_said_as_it_failed(
    kind: str, numbers: dict[str, float], taken: float
) -> None:
    assert taken_by_others(Diagnosis(kind, "x", numbers=numbers), 80 * GIB) == int(taken * GIB)


SEEN = [
    ((30, 28, 8), Measured(settings="s", peak=30, settled=28, kv=8)),
    ((20, 28, 8), Measured(settings="s", peak=28, settled=28, kv=8)),  # the peak was missed
    ((30, 28, 28), None),  # nothing but KV cache
    ((0, 0, 8), None),  # NVML tells no process's bytes
    ((30, 28, 0), None),
]


@pytest.mark.parametrize(("seen", "expected"), SEEN)
def test_what_was_seen_is_believed_where_it_fits_together(
    seen: tuple[int, int, int], expected: Measured | None
) -> None:
    assert measurement("s", *seen) == expected
