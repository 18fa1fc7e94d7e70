"""GPU memory that vLLM claims, and the message for a model that does not fit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.shared.files.units import GIB
from sidecar.sizing.claim import MOST, Claim, claim, cuda_total, refuse_reason
from sidecar.sizing.memory import FLOOR, Need
from sidecar.sizing.model_config import ModelShape, shape_from

CONFIGS = Path(__file__).parents[1] / "configs"


def shape(name: str) -> ModelShape:
    return shape_from((CONFIGS / f"{name}.json").read_bytes())


def needs(weights: float, kv: float, gpus: int = 1) -> Need:
    """In GiB; 2 GiB beside weights and KV cache. It was measured, so no margin is claimed."""
    return msgspec.structs.replace(estimated(weights, kv, gpus), measured=True)


def estimated(weights: float, kv: float, gpus: int = 1) -> Need:
    return Need(weights=int(weights * GIB), kv=int(kv * GIB), activations=GIB, overhead=GIB, tokens=8192, gpus=gpus)


def test_by_itself_the_least_share_that_fits_is_claimed() -> None:
    assert claim(needs(14, 4), 80 * GIB) == Claim(
        bytes=20 * GIB, kv=4 * GIB, total=80 * GIB, thousandths=250, said="auto"
    )
    barely = claim(needs(14, 4.01), 80 * GIB)
    assert (barely.thousandths, barely.utilization) == (251, 0.251)
    assert barely.kv - int(4.01 * GIB) < 0.001 * 80 * GIB, "what is left of a thousandth is KV cache too"
    assert claim(needs(200, 4), 80 * GIB).thousandths == MOST


def test_an_estimate_is_claimed_with_a_margin() -> None:
    assert claim(estimated(14, 4), 80 * GIB).bytes == pytest.approx(21 * GIB, abs=GIB / 10)
    assert claim(estimated(58, 4), 80 * GIB).bytes == pytest.approx(67 * GIB, abs=GIB / 10), "5 % of 60"
    assert claim(estimated(14, 4), 80 * GIB, kv=8 * GIB).bytes == 25 * GIB
    assert claim(estimated(14, 4), 80 * GIB, utilization=0.25).bytes == 20 * GIB, "an operator's share is the share"
    wanted = estimated(73, 2)
    assert refuse_reason(shape("llama-3-8b"), wanted, claim(wanted, 80 * GIB), 1) is None, "and refuses nothing"


@pytest.mark.parametrize(
    ("nvml", "cuda"), [(80.0, 79.25), (79.65, 79.19), (44.99, 44.39), (23.99, 23.52), (15.0, 14.56)]
)
def test_cuda_has_less_than_nvml_says(nvml: float, cuda: float) -> None:
    assert 0.98 * cuda <= cuda_total(int(nvml * GIB)) / GIB <= cuda


def test_a_share_is_filled_with_kv_cache() -> None:
    taken = claim(needs(14, 4), 80 * GIB, utilization=0.9)
    assert (taken.bytes, taken.kv, taken.utilization) == (72 * GIB, 56 * GIB, 0.9)
    assert taken.said == "utilization"
    assert claim(needs(14, 4), 80 * GIB, utilization=0.1).kv == 0
    assert claim(needs(14, 4), 80 * GIB, utilization=1.0).bytes == 80 * GIB
    assert claim(needs(14, 4), 80 * GIB, utilization=1e-9).thousandths == 1


def test_a_cap_on_the_kv_cache_is_all_that_is_claimed_of_it() -> None:
    taken = claim(needs(14, 4), 80 * GIB, kv=8 * GIB)
    assert (taken.bytes, taken.kv, taken.said) == (24 * GIB, 8 * GIB, "kv")
    assert taken.start_needs == 24 * GIB, "vLLM asks for its share whatever the cap"
    assert claim(needs(14, 4), 80 * GIB, kv=100 * GIB).bytes < 80 * GIB


def test_it_starts_where_its_whole_share_is_free() -> None:
    taken = claim(needs(14, 4), 80 * GIB, utilization=0.9)
    assert taken.start_needs == 72 * GIB
    capped = claim(needs(14, 4), 80 * GIB, kv=int(4.01 * GIB))
    assert capped.start_needs > capped.bytes, "the share is in thousandths"


def test_a_share_of_nothing_is_never_asked_for() -> None:
    nothing = Need(weights=0, kv=0, activations=0, overhead=0, tokens=0, measured=True)
    assert claim(nothing, 80 * GIB).utilization == 0.001


def test_what_fits_is_not_refused() -> None:
    for amount in ({}, {"utilization": 0.9}, {"kv": 4 * GIB}):
        wanted = needs(14, 4)
        assert refuse_reason(shape("llama-3-8b"), wanted, claim(wanted, 80 * GIB, **amount), 1) is None


def reason(name: str, wanted: Need, taken: Claim, present: int) -> str:
    found = refuse_reason(shape(name), wanted, taken, present)
    assert found is not None
    return found


def test_a_model_that_is_too_large_is_refused_with_the_arithmetic() -> None:
    wanted = needs(131.4, 8, gpus=2)
    assert reason("llama-3-70b", wanted, claim(wanted, 80 * GIB), 2) == (
        "needs 141.4 GiB on each of 2 GPUs (weights 131.4, KV 8.0 for 8,192 tokens, activations 1.0, overhead 1.0), "
        "each has 80.0, of which an engine can have 77.6: use more GPUs (tensor_parallel), a lower context_length, "
        "an fp8 KV cache or a quantised model"
    )
    wanted = needs(16, 1)
    for amount in ({}, {"kv": GIB}):
        assert reason("llama-3-8b", wanted, claim(wanted, 16 * GIB, **amount), 1).startswith(
            "needs 19.0 GiB on its GPU (weights 16.0, KV 1.0 for 8,192 tokens, activations 1.0, overhead 1.0), which "
            "has 16.0, of which an engine can have 15.5: "
        )


def test_a_setting_that_is_too_small_is_refused_with_what_it_must_be() -> None:
    wanted = needs(14, 4)
    small = claim(wanted, 80 * GIB, utilization=0.08)
    assert reason("llama-3-8b", wanted, small, 1).endswith(
        "which has 80.0 and gpu_memory gives 6.4 of them: give it 0.25 or more"
    )
    tried = claim(wanted, 80 * GIB, utilization=0.2)
    assert refuse_reason(shape("llama-3-8b"), wanted, tried, 1) is None, "the weights may be quantised while they load"
    assert reason("llama-3-8b", wanted, claim(wanted, 80 * GIB, kv=2 * GIB), 1) == (
        "needs a KV cache of 4.0 GiB for 8,192 tokens, and gpu_memory caps it at 2.0: raise the cap or lower "
        "context_length"
    )


def test_gpus_that_are_not_there_or_do_not_divide_the_model_are_refused() -> None:
    for gpus, present, told in (
        (4, 2, "needs 4 GPUs (tensor_parallel), the sidecar has 2"),
        (3, 8, "tensor_parallel 3 does not divide the model's 28 attention heads: use one of 1, 2, 4, 7"),
    ):
        wanted = needs(1, 1, gpus)
        assert reason("qwen2.5-7b", wanted, claim(wanted, 80 * GIB), present) == told


@given(
    st.builds(needs, st.floats(0, 300), st.floats(0, 300)),
    st.integers(1, 192 * GIB),
    st.none() | st.floats(0.02, 1),
    st.none() | st.integers(0, 300 * GIB),
)
def test_a_claim_is_never_more_than_the_gpu_and_never_less_than_a_need_that_is_not_refused(
    wanted: Need, total: int, utilization: float | None, kv: int | None
) -> None:
    taken = claim(wanted, total, utilization=utilization, kv=kv)
    assert 0 <= taken.kv <= taken.bytes <= taken.start_needs <= total
    assert 0 < taken.utilization <= 1
    refused = refuse_reason(shape("llama-3-8b"), wanted, taken, 1)
    tried = utilization is not None and int(wanted.weights * FLOOR) < taken.bytes
    assert (refused is None) == (wanted.total <= taken.bytes or tried)
    if wanted.total <= taken.bytes:
        assert taken.kv >= wanted.kv
        assert taken.start_needs <= total
