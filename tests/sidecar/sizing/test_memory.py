"""Memory that models need: figures made by hand from published architectures, and the laws of the arithmetic."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.shared.files.units import GIB
from sidecar.core.lesson import Measured
from sidecar.sizing.memory import (
    CONTEXT,
    DELTA_NET,
    FLOOR,
    GRAPH,
    GRAPHS,
    LARGE,
    MIB,
    RESIDUE,
    Batch,
    Need,
    activations,
    arithmetic,
    asleep,
    batch,
    captured,
    corrected,
    graphs,
    kv_bytes,
    kv_element_bytes,
    kv_per_sequence,
    kv_per_token,
    need,
    overhead,
)
from sidecar.sizing.model_config import ModelShape, Quantization, shape_from
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.weights import StoredWeights

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def shape(name: str) -> ModelShape:
    return shape_from((CONFIGS / f"{name}.json").read_bytes())


# Bytes of one token on one GPU of 1 and of 8, at 2 bytes: layers x KV heads x (K and V) x head_dim x 2.
PER_TOKEN = [
    ("llama-3-8b", 131_072, 16_384),  # 32 x 8 x 2 x 128 x 2; 1 head on each of 8
    ("llama-3-8b-fp8", 131_072, 16_384),  # its weights are in 8 bits, its KV is not
    ("llama-3-70b", 327_680, 40_960),  # 80 x 8 x 2 x 128 x 2
    ("qwen2.5-7b", 57_344, 14_336),  # 28 x 4 x 2 x 128 x 2; 4 heads on 8 GPUs: one each, not half
    ("qwen2.5-7b-awq", 57_344, 14_336),
    ("qwen3-moe-30b", 98_304, 24_576),  # 48 x 4 x 2 x 128 x 2, head_dim given: 2048 / 32 would be 64
    ("qwen3-tiny", 512, 256),  # 2 x 2 x 2 x 32 x 2
    ("mistral-7b-window", 131_072, 16_384),  # as Llama, until the window is full
    ("gemma-3-27b", 507_904, 63_488),  # 62 x 16 x 2 x 128 x 2, below the window
    ("deepseek-v3", 70_272, 70_272),  # 61 x (512 + 64) x 2, the same on each GPU
    ("mixtral-8x7b", 131_072, 16_384),  # experts keep nothing
    ("jamba-mini", 16_384, 2_048),  # 4 layers of attention in 32: 4 x 8 x 2 x 128 x 2
    ("bamba-9b", 12_288, 1_536),  # 3 layers of attention: 3 x 8 x 2 x 128 x 2
    ("gpt2", 36_864, 6_144),  # 12 x 12 x 2 x 64 x 2; 12 heads on 8 GPUs: at most 2
]


@pytest.mark.parametrize(("name", "one", "eight"), PER_TOKEN)
def test_bytes_of_kv_cache_per_token(name: str, one: int, eight: int) -> None:
    assert (kv_per_token(shape(name)), kv_per_token(shape(name), gpus=8)) == (one, eight)
    assert kv_bytes(shape(name), 1000) == 1000 * one + kv_per_sequence(shape(name))
    half = kv_bytes(shape(name), 1000, kv_dtype="fp8")
    assert half == 500 * one + kv_per_sequence(shape(name)), "fp8 halves the KV cache, not the states"


def test_every_config_is_in_the_table() -> None:
    assert sorted(name for name, _, _ in PER_TOKEN) == NAMES


# Bytes of one sequence, however long, on one GPU of 1 and of 4.
PER_SEQUENCE = [
    ("llama-3-8b", 0, 0),
    # 28 layers x (3 inputs x 8192 channels + 8192 x 16) x 2; all of it divided
    ("jamba-mini", 8_716_288, 2_179_072),
    # 29 layers x (3 x (8192 + 1 group x 2 x 128) + 128 heads x 64 x 128) x 2;
    # on 4: 29 x (3 x (2048 + 256) + 262144) x 2, since each GPU needs the group
    ("bamba-9b", 62_287_360, 15_605_248),
]


@pytest.mark.parametrize(("name", "one", "four"), PER_SEQUENCE)
def test_bytes_of_state_per_sequence(name: str, one: int, four: int) -> None:
    assert (kv_per_sequence(shape(name)), kv_per_sequence(shape(name), gpus=4)) == (one, four)
    assert kv_bytes(shape(name), 0, sequences=3) == 3 * one


def test_groups_of_mamba_2_are_divided_while_there_are_enough() -> None:
    groups = msgspec.structs.replace(shape("bamba-9b").states[0], layers=1, groups=8)
    nemotron = msgspec.structs.replace(shape("bamba-9b"), states=(groups,))
    # (3 x (8192 / 4 + 8 / 4 groups x 2 x 128) + 32 heads x 64 x 128) x 2
    assert kv_per_sequence(nemotron, gpus=4) == (3 * (2_048 + 512) + 262_144) * 2


def test_a_window_holds_itself_a_block_and_what_is_being_computed() -> None:
    mistral = shape("mistral-7b-window")
    # 4095 + a block of 16 + 2048 in one step, of 131,072 bytes each
    assert kv_bytes(mistral, 32_768, step=2048) == 6_159 * 131_072
    # two sequences have a window each, and share the step
    assert kv_bytes(mistral, 65_536, sequences=2, step=2048) == (2 * 4_111 + 2048) * 131_072
    assert kv_bytes(mistral, 4_000, step=2048) == 4_000 * 131_072


def test_only_local_layers_have_the_window() -> None:
    # Of 62 layers 10 are global; 1023 + 16 + 2048 tokens in the others; a layer takes 8,192 bytes of a token.
    assert kv_bytes(shape("gemma-3-27b"), 131_072, step=2048) == (52 * 3_087 + 10 * 131_072) * 8_192


def test_elements_follow_the_flags() -> None:
    assert [kv_element_bytes(), kv_element_bytes("float32"), kv_element_bytes("half", "fp8_e5m2")] == [2, 4, 1]
    assert kv_element_bytes("float32", "bfloat16") == 2
    with pytest.raises(ModelError, match="kv_cache_dtype is 'int3', expected auto or one of fp8"):
        kv_element_bytes(kv_dtype="int3")


def test_what_a_model_needs_is_the_sum_of_its_parts() -> None:
    # Llama 3 70B on 2 GPUs: 141.1 GB of weights, 8,192 tokens of 163,840 bytes; logits of 256 x 128,256 x 4, a step of
    # 2,048 x (3 x 28,672 / 2 + 4 x 8,192) x 2; 51 graphs of 80 layers.
    found = need(shape("llama-3-70b"), StoredWeights(141_107_412_992), tokens=8_192, gpus=2)
    assert found == Need(
        weights=70_553_706_496,
        kv=1_342_177_280,
        activations=131_334_144 + 310_378_496,
        overhead=(614 + 50) * MIB + 51 * 80 * GRAPH,
        tokens=8_192,
        gpus=2,
    )
    assert found.total == sum(size for _, size in found.parts)
    assert found.without_kv == found.total - 1_342_177_280
    assert arithmetic(found) == "weights 65.7, KV 1.2 for 8,192 tokens, activations 0.4, overhead 2.0"
    eager = need(shape("llama-3-70b"), StoredWeights(141_107_412_992), tokens=8_192, gpus=2, most=Batch(eager=True))
    assert eager.overhead == CONTEXT
    assert found.margin == int(found.without_kv * 0.05), "of an estimate; an engine that takes more fails its start"
    assert need(shape("qwen3-tiny"), StoredWeights(GIB), tokens=1).margin == GIB


def test_a_batch_is_what_vllm_takes_by_itself() -> None:
    assert [batch(LARGE), batch(LARGE - 1)] == [Batch(8192, 1024), Batch(2048, 256)]
    assert batch(LARGE, 512, 8, eager=True) == Batch(512, 8, eager=True)
    assert [captured(count) for count in (1, 2, 8, 128, 256, 1024)] == [2, 3, 5, 35, 51, 51]


def test_experts_and_delta_nets_work_in_memory_of_their_own() -> None:
    dense, moe = shape("qwen2.5-7b"), shape("qwen3-moe-30b")
    # 2,048 tokens x (3 x 6,144 + 4 x 2,048 + 8 experts x 2 x (768 + 2,048)) x 2, and the logits
    assert activations(moe, Batch()) == 2048 * (18_432 + 8_192 + 45_056) * 2 + 256 * 151_936 * 4
    delta = msgspec.structs.replace(dense, delta_net=True)
    assert activations(delta, Batch()) - activations(dense, Batch()) == DELTA_NET
    assert graphs(moe, 256) == GRAPHS + 51 * 48 * 2 * GRAPH
    assert overhead(dense, Batch()) == CONTEXT + graphs(dense, 256)


def test_weights_that_are_quantised_while_they_load_are_smaller() -> None:
    model = shape("llama-3-8b")
    found = need(model, StoredWeights(16 * GIB), tokens=1, quantized="fp8").weights
    assert found == 2 * model.embedding + (16 * GIB - 2 * model.embedding) // 2
    assert need(shape("llama-3-8b-fp8"), StoredWeights(8 * GIB), tokens=1, quantized="fp8").weights == 8 * GIB
    mxfp4 = msgspec.structs.replace(model, quantization=Quantization("mxfp4", 4.25))
    assert need(mxfp4, StoredWeights(10 * GIB), tokens=1).weights == int(10 * GIB * 1.085)


# -- measured ---------------------------------------------------------------------------------------------------------


def seen(without_kv: int, kv: int = 8 * GIB) -> Measured:
    return Measured(settings="a", peak=without_kv + kv, settled=without_kv + kv, kv=kv)


# 16 GiB of weights, 0.75 GiB of activations, 1 GiB of overhead are estimated; then what was measured without KV.
ESTIMATED = Need(weights=16 * GIB, kv=GIB, activations=768 * MIB, overhead=GIB, tokens=8_192)
CORRECTED = [
    (20.0, (16.0, 0.75, 3.25)),  # more than estimated is overhead
    (17.0, (16.0, 0.75, 0.25)),
    (16.25, (16.0, 0.25, 0.0)),
    (12.0, (12.0, 0.0, 0.0)),  # quantised while loading
    (8.0, (8.0, 0.0, 0.0)),
    (1.0, (8.0, 0.0, 0.0)),  # an engine that had gone
]


@pytest.mark.parametrize(("measured", "parts"), CORRECTED)
def test_what_was_measured_replaces_the_estimate(measured: float, parts: tuple[float, float, float]) -> None:
    found = corrected(ESTIMATED, seen(int(measured * GIB)))
    assert (found.weights / GIB, found.activations / GIB, found.overhead / GIB) == parts
    assert (found.kv, found.measured) == (GIB, True), "the KV cache is what is wanted now"
    assert found.margin == 0, "what was seen needs none"
    assert (
        need(shape("llama-3-8b"), StoredWeights(16 * GIB), tokens=8_192, measured=seen(17 * GIB)).without_kv == 17 * GIB
    )


BAD_MEASUREMENTS = [
    ({"settled": 4}, "a peak of 3 bytes"),
    ({"kv": 3}, "2 settled, 3 of KV cache"),
    ({"kv": -1}, "Expected `int` >= 0"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_MEASUREMENTS)
def test_a_measurement_fits_together(changed: dict[str, int], message: str) -> None:
    good = {"settings": "a", "peak": 3, "settled": 2, "kv": 1}
    assert msgspec.convert(good, Measured).without_kv == 2
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(good | changed, Measured)


# -- asleep -----------------------------------------------------------------------------------------------------------


def test_asleep_it_keeps_a_residue_and_level_1_half_as_much_again_as_its_weights_in_host_memory() -> None:
    large = need(shape("llama-3-70b"), StoredWeights(140 * GIB), tokens=8_192, gpus=2)
    assert RESIDUE >= 2_055_208_960, "measured of vLLM 0.26 on an H200"
    kept = RESIDUE + GIB + large.overhead - CONTEXT  # NCCL and the graphs, where there are GPUs to talk to
    assert (asleep(large, 1).device, asleep(large, 1).host) == (kept, 210 * GIB)
    assert (asleep(large, 2).device, asleep(large, 2).host) == (kept, 0)
    small = need(shape("llama-3-8b"), StoredWeights(16 * GIB), tokens=8_192)
    assert asleep(small, 1).device == RESIDUE


# -- laws -------------------------------------------------------------------------------------------------------------

models = st.sampled_from([shape(name) for name in NAMES])
counts = st.integers(1, 512)
tokens = st.integers(0, 10_000_000)
stores = st.builds(StoredWeights, st.integers(1, 2**42))
measurements = st.builds(seen, st.integers(0, 2**38), st.integers(0, 2**38))


@given(models, stores, tokens, counts, st.integers(1, 16), st.none() | measurements)
def test_parts_are_never_negative_and_sum_to_the_total(
    model: ModelShape, stored: StoredWeights, held: int, sequences: int, gpus: int, measured: Measured | None
) -> None:
    found = need(model, stored, tokens=held, sequences=sequences, gpus=gpus, measured=measured)
    assert min(size for _, size in found.parts) >= 0
    assert found.total == found.weights + found.kv + found.activations + found.overhead
    if measured is None:
        assert found.overhead >= CONTEXT
    else:
        full = need(model, stored, tokens=held, sequences=sequences, gpus=gpus)
        assert found.without_kv == max(measured.without_kv, int(full.weights * FLOOR))


@given(models, stores, tokens, counts, st.integers(1, 16))
def test_more_gpus_never_need_more_of_each(
    model: ModelShape, stored: StoredWeights, held: int, sequences: int, gpus: int
) -> None:
    fewer = need(model, stored, tokens=held, sequences=sequences, gpus=gpus)
    more = need(model, stored, tokens=held, sequences=sequences, gpus=gpus + 1)
    assert all(a >= b for (_, a), (_, b) in zip(fewer.parts, more.parts, strict=True))


@given(models, tokens, tokens, counts, st.integers(1, 16))
def test_more_tokens_or_sequences_never_take_less(
    model: ModelShape, first: int, second: int, sequences: int, gpus: int
) -> None:
    few, many = sorted((first, second))
    less = kv_bytes(model, few, sequences=sequences, gpus=gpus)
    assert 0 <= less <= kv_bytes(model, many, sequences=sequences, gpus=gpus)
    assert less <= kv_bytes(model, few, sequences=sequences + 1, gpus=gpus)
    # What windows save is saved: never more than every token in every layer.
    assert less <= few * kv_per_token(model, gpus=gpus) + sequences * kv_per_sequence(model, gpus=gpus)
