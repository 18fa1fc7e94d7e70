"""Contexts that the sidecar chooses where the model's own does not fit and the profile gives none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.shared.files.units import GIB
from sidecar.core.diagnosis import diagnosis
from sidecar.core.inventory import Size
from sidecar.core.lesson import FailedStart, Lesson, Measured, learn
from sidecar.core.profile import KvMemory, Profile
from sidecar.sizing.claim import LEAST, MOST, NOTHING_LEARNT, STEP, cuda_total, longest_context
from sidecar.sizing.estimate import Estimate, KnownModel, estimate, size_of
from sidecar.sizing.memory import LITTLE
from sidecar.sizing.model_config import shape_from
from sidecar.sizing.weights import StoredWeights
from sidecar.sizing.without_files import unknown
from tests.examples import examples

CONFIGS = Path(__file__).parents[1] / "configs"
SHAPES = {name: shape_from((CONFIGS / f"{name}.json").read_bytes()) for name in ("llama-3-8b", "gemma-3-27b")}
BATCH = {"max-num-batched-tokens": 2048, "max-num-seqs": 256}  # else GPUs from 70 GiB up take larger ones
OWN = 131_072


def found(
    total: float,
    name: str = "llama-3-8b",
    lesson: Lesson = NOTHING_LEARNT,
    measured: Measured | None = None,
    **more: Any,
) -> Estimate:
    """Of a model of 15 GiB that was made for OWN tokens, on a GPU of so many GiB."""
    shape = msgspec.structs.replace(SHAPES[name], context=OWN)
    profile = Profile(model_path="/m", **({"flags": BATCH} | more))
    return estimate(profile, KnownModel(shape, StoredWeights(15 * GIB)), int(total * GIB), 1, measured, lesson=lesson)


# -- the search -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2**24), st.integers(0, 2**24))
def test_the_longest_that_fits_is_found(own: int, room: int) -> None:
    context = longest_context(own, lambda tokens: tokens <= room)
    assert min(own, LEAST) <= context <= own
    assert context == own or context % STEP == 0
    assert context <= max(room, min(own, LEAST))
    assert context == own or min(own, context + STEP) > room


def test_where_weights_leave_little_half_of_it_is_the_contexts() -> None:
    """By estimate 4.9 GiB are left: a margin of 5 % of the rest took all but the least context."""
    profile, shape = Profile(model_path="/m", flags=BATCH), msgspec.structs.replace(SHAPES["llama-3-8b"], context=OWN)
    it = estimate(profile, KnownModel(shape, StoredWeights(int(70.5 * GIB))), 80 * GIB, 1)
    assert it.claim.kv // 2 - it.least.kv // it.least.tokens * STEP <= it.least.kv <= it.claim.kv // 2


# -- estimates --------------------------------------------------------------------------------------------------------


def test_a_context_that_fits_is_the_models_own_and_is_not_told() -> None:
    whole = found(80)
    assert (whole.context_length, whole.least.tokens, whole.why) == (None, OWN, None)
    assert "what fits" not in whole.words


def test_one_that_does_not_fit_is_shortened_and_the_claim_is_all_that_there_is() -> None:
    short = found(24)
    assert short.context_length == short.least.tokens == 40_960
    assert (short.why, short.claim.thousandths) == (None, MOST)
    assert short.tokens >= 40_960 + LITTLE // 131_072, "with a margin"
    assert "; context 40,960 of 131,072: what fits" in short.words
    size = size_of(Profile(model_path="/m"), short)
    assert (size.context_length, size.context) == (40_960, short.least.kv)


def test_a_gpu_without_room_for_the_shortest_is_too_small() -> None:
    small = found(16)
    assert small.least.tokens == LEAST
    assert "KV 0.5 for 4,096 tokens" in str(small.why)
    assert found(80, gpu_memory=0.09).why is not None


MEMORY = st.one_of(
    st.just("auto"), st.floats(0.2, 1.0), st.integers(GIB // 4, 30 * GIB).map(lambda kv: KvMemory(kv=kv))
)
LESSONS = st.builds(
    Lesson,
    settings=st.just("a"),
    rest=st.sampled_from([0, 17 * GIB, 20 * GIB]),
    exact=st.booleans(),
    context=st.sampled_from([0, 10 * GIB, 20 * GIB]),
    tokens=st.sampled_from([0, 65_536]),
    beyond=st.sampled_from([0, 0, GIB, 4 * GIB]),
    over=st.sampled_from([0, 0, 2 * GIB]),
)
MEASURED = st.sampled_from([None, None, Measured(settings="a", peak=30 * GIB, settled=30 * GIB, kv=13 * GIB)])


@settings(max_examples=examples(100))
@given(st.floats(17, 100), st.sampled_from(sorted(SHAPES)), MEMORY, LESSONS, MEASURED)
def test_what_is_chosen_fits_and_one_step_longer_does_not(
    total: float, name: str, memory: Any, lesson: Lesson, measured: Measured | None
) -> None:
    given_ = {"lesson": lesson, "measured": measured, "gpu_memory": memory}
    it = found(total, name, **given_)
    context = it.least.tokens
    assert context == OWN if it.context_length is None else context == it.context_length >= LEAST
    if it.context_length is None or context == LEAST:
        return
    assert it.why is None
    assert it.least.total <= it.claim.bytes
    longer = found(total, name, **given_, context_length=min(OWN, context + STEP)).least
    share = round(memory * 1000) if isinstance(memory, float) else MOST
    room = it.claim.total * share // 1000 - (0 if isinstance(memory, float) else max(lesson.beyond, lesson.over))
    capped = isinstance(memory, KvMemory) and longer.kv > memory.kv
    # The share is in whole thousandths.
    assert capped or longer.total + max(min(longer.margin, longer.kv), LITTLE) > room - it.claim.total // 1000


@settings(max_examples=examples(50))
@given(st.floats(17, 100), st.floats(0, 20), st.sampled_from(sorted(SHAPES)), MEASURED)
def test_a_larger_gpu_has_room_for_as_long_a_context(
    total: float, more: float, name: str, measured: Measured | None
) -> None:
    assert (
        found(total, name, measured=measured).least.tokens <= found(total + more, name, measured=measured).least.tokens
    )


@settings(max_examples=examples(50))
@given(st.floats(1, 100), st.integers(1, 300_000), MEMORY, LESSONS)
def test_what_the_profile_says_is_never_changed(total: float, tokens: int, memory: Any, lesson: Lesson) -> None:
    it = found(total, lesson=lesson, gpu_memory=memory, context_length=tokens)
    assert (it.context_length, it.least.tokens) == (None, tokens)


def test_the_kv_cache_that_the_operator_gives_is_the_bound() -> None:
    assert found(80, gpu_memory=KvMemory(kv=4 * GIB)).context_length == 4 * GIB // 131_072
    assert found(80, gpu_memory=KvMemory(kv=16 * GIB)).context_length is None


def test_after_a_measurement_a_little_is_left_still() -> None:
    before = found(24)
    it = found(
        24, measured=Measured(settings="a", peak=22 * GIB, settled=22 * GIB, kv=22 * GIB - before.least.without_kv)
    )
    assert (it.least.margin, before.context_length or 0) < (1, it.context_length or 0)
    assert it.claim.bytes - it.least.total >= LITTLE


# -- starts that fail -------------------------------------------------------------------------------------------------

NEW = (
    "ValueError: To serve at least one request with the models's max seq len ({asked}), ({needed:.2f} GiB KV cache is "
    "needed, which is larger than the available KV cache memory ({left:.2f} GiB)."
)
OLD = (  # before vLLM 0.9
    "ValueError: The model's max seq len ({asked}) is larger than the maximum number of tokens that can be stored in "
    "KV cache ({held})."
)


def tries(total: float, rest: float, per_token: int, line: str, name: str = "llama-3-8b", **more: Any) -> list[int]:
    """Contexts of the starts of an engine that really needs so many GiB beside its KV cache, until one fits."""
    profile, lesson, contexts = Profile(model_path="/m"), None, []
    while True:
        it = found(total, name, lesson or NOTHING_LEARNT, **more)
        if it.why is not None:
            return [*contexts, 0]
        size, context = size_of(profile, it), it.least.tokens
        contexts.append(context)
        left = max(0, size.start_needs - size.beyond - int(rest * GIB))
        if context * per_token <= left:
            return contexts
        said = line.format(asked=context, needed=context * per_token / GIB, left=left / GIB, held=left // per_token)
        failed = FailedStart(size=size, found=diagnosis([said]), total=int(total * GIB), free=int(total * GIB))
        lesson = learn(lesson, failed, "a")
        assert lesson is not None


@pytest.mark.parametrize("line", [NEW, OLD])
@pytest.mark.parametrize(("rest", "per_token"), [(17.6, 131_072), (18.8, 131_072), (20.0, 131_072), (17.0, 160_000)])
def test_a_start_that_fails_for_memory_shortens_the_next(line: str, rest: float, per_token: int) -> None:
    contexts = tries(24, rest, per_token, line)
    assert contexts[-1] > 0
    assert len(contexts) <= 3
    assert contexts == sorted(set(contexts), reverse=True), "each is shorter"
    most = (cuda_total(24 * GIB) * MOST // 1000 - rest * GIB) / per_token
    if line == NEW:
        assert contexts[-1] >= min(contexts[0], most - 4 * STEP), "and not by much more than it must be"


def test_with_windows_too() -> None:
    """Its layers with a window keep little of a long context, so that told bytes for one length are not linear."""
    contexts = tries(24, 18.0, 90_000, NEW, "gemma-3-27b")
    assert contexts == sorted(set(contexts), reverse=True)


def test_what_has_no_room_for_the_shortest_is_refused_once_that_is_told() -> None:
    assert tries(24, 22.5, 131_072, NEW)[-1] == 0


def test_a_share_that_runs_out_of_memory_becomes_smaller_and_the_context_with_it() -> None:
    it = found(24, lesson=Lesson(settings="a", beyond=2 * GIB))
    assert it.context_length == 40_960 - 2 * GIB // 131_072
    assert (it.why, it.beyond) == (None, 2 * GIB)


# -- models of which no files are known -------------------------------------------------------------------------------


def known(**more: Any) -> Lesson:
    return Lesson(settings="a", rest=18 * GIB, context=16 * GIB, tokens=OWN, **more)


@pytest.mark.parametrize(
    ("profile", "lesson", "expected"),
    [
        ({}, known(exact=True), 34_816),
        ({}, known(), None),  # of the rest it is only known that it is more
        ({}, Lesson(settings="a", rest=18 * GIB, exact=True, context=16 * GIB), None),
        ({}, Lesson(settings="a", rest=8 * GIB, exact=True, context=8 * GIB, tokens=OWN), None),
        ({"context_length": OWN}, known(exact=True), None),
    ],
)
def test_a_model_that_nothing_is_known_of_learns_its_context_too(
    profile: dict[str, Any], lesson: Lesson, expected: int | None
) -> None:
    size = unknown(Profile(model_path="s3://b/m", **profile), 24 * GIB, "it is not here", lesson)
    assert size.context_length == expected
    assert ("of 131,072: what fits" in size.arithmetic) is (expected is not None)


def test_another_context_is_another_start() -> None:
    size = Size(claim=GIB, share=0.5, context_length=8192)
    assert size.starts_as(msgspec.structs.replace(size, arithmetic="x"))
    assert not size.starts_as(msgspec.structs.replace(size, context_length=4096))
