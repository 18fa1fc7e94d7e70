"""`python -m tests.sidecar.corpus_table`: estimates of GPU memory and of seconds beside published vLLM starts.

Each start is planned as the sidecar would, with `gpu_memory: auto`, on a GPU of its size. A start *succeeds* if the
claim leaves, beside the measured weights and the measured rest, a KV cache for one whole context. What is claimed
beyond that, KV cache for more contexts included, is *over*. `chosen`: the context in thousands of tokens that the
sidecar chooses where the profile gives none, and whether a start with that succeeds; `whole`: the model's own fits.
Sizes in GiB on each GPU; `-`: the source does not tell.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.inventory import Size
from sidecar.core.profile import Profile
from sidecar.core.step_times import StepTimes
from sidecar.sizing.estimate import Estimate, KnownModel, estimate
from sidecar.sizing.model_config import ModelShape, shape_from
from sidecar.sizing.weights import StoredWeights

CORPUS = Path(__file__).parent / "corpus"
# GiB as CUDA reports them, of GPUs whose starts do not say.
CUDA_GIB = {
    "RTX 3090": 23.57,
    "RTX 4090": 23.52,
    "RTX 5090": 31.36,
    "L40S": 44.39,
    "A100 80GB": 79.25,
    "H100 80GB": 79.19,
    "H100 80GB class": 79.19,
    "H200": 139.8,
    "H20": 95.0,
    "T4": 14.56,
    "RTX PRO 6000": 94.97,
    "GB10 (DGX Spark)": 121.69,
    "32 GB class": 31.36,
    "46 GB class": 44.4,
}
GOOD = {None: "-", True: "yes", False: "NO"}
UNIFIED = "GB10"  # its memory is the host's too: what is left of a share is also other processes'


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One start. `rest`: beside weights and KV cache; `context`: KV cache of one whole context; `over`: claimed beyond
    what was needed, as a share of the GPU; `chosen`: the context that is chosen where the profile gives none, None: the
    model's own, and whether a start with it `chosen_succeeds`."""

    id: str
    gpu: float
    weights: tuple[float, float | None]
    rest: tuple[float, float | None]
    context: tuple[float, float | None]
    claim: float
    succeeds: bool | None
    over: float | None
    chosen: int | None
    chosen_succeeds: bool | None


def starts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CORPUS / "vllm_starts.jsonl").read_text().splitlines()]


def models() -> dict[str, dict[str, Any]]:
    lines = (CORPUS / "models.jsonl").read_text().splitlines()
    return {each["model"]: each for each in map(json.loads, lines)}


def row(told: dict[str, Any], model: dict[str, Any]) -> Row | None:
    """A start beside its estimate; None where the size of its GPU is not known."""
    measured, gpus = told["measured"], told.get("gpus", 1)
    gpu = told.get("total_gib") or CUDA_GIB.get(told.get("gpu", ""))
    if gpu is None or told["outcome"] != "started":
        return None
    shape = shape_from(json.dumps(model["config"]).encode())
    context = told.get("max_model_len") or shape.context or 0
    known = KnownModel(shape, _stored(model, measured, shape, gpus))

    def estimated(profile: Profile) -> Estimate:
        return estimate(profile, known, int(gpu * GIB), 8, cuda=int(gpu * GIB))

    found = estimated(profile := _profile(told, gpus))
    free = estimated(msgspec.structs.replace(profile, context_length=None))
    least = found.least
    weights, kv = measured.get("weights_gib", measured.get("consumed_gib")), _context_of(measured, context)
    rest = _rest(told, measured, gpu, weights)
    claim = found.claim.bytes / GIB
    # Of one that tells no bytes of a context: it started, so its whole cache was enough.
    enough = min(least.kv / GIB, measured.get("kv_gib", math.inf)) if kv is None else kv
    beside = None if weights is None or rest is None else weights + rest
    needed = None if beside is None else beside + enough
    free_needs = None if beside is None else beside + enough * (free.least.kv / least.kv if least.kv else 1.0)
    return Row(
        id=told["id"],
        gpu=gpu,
        weights=(least.weights / GIB, weights),
        rest=((least.activations + least.overhead) / GIB, rest),
        context=(least.kv / GIB, kv),
        claim=claim,
        succeeds=None if needed is None else claim >= needed,
        over=None if needed is None else (claim - needed) / gpu,
        chosen=free.context_length,
        chosen_succeeds=None if free_needs is None else free.claim.bytes / GIB >= free_needs,
    )


def _profile(told: dict[str, Any], gpus: int) -> Profile:
    given = {
        "max-num-seqs": told.get("max_num_seqs"),
        "max-num-batched-tokens": told.get("max_num_batched_tokens"),
        "kv-cache-dtype": told.get("kv_cache_dtype"),
        "enforce-eager": told.get("enforce_eager"),
        **told.get("flags", {}),
    }
    flags = {name: value for name, value in given.items() if value is not None and not isinstance(value, dict)}
    if (method := flags.pop("speculative", None)) is not None:
        flags["speculative-config"] = {"method": method.split()[0]}
    return msgspec.convert(
        {"model_path": "m", "context_length": told.get("max_model_len"), "tensor_parallel": gpus, "flags": flags},
        Profile,
    )


def stored_of(parameters: int, shape: ModelShape) -> StoredWeights:
    """Bytes of `parameters` by the model's dtype or quantization, which leaves embeddings in 16 bits."""
    if shape.quantization is None or shape.quantization.bits is None:
        return StoredWeights(2 * parameters)
    whole = min(shape.embedding, parameters)
    return StoredWeights(2 * whole + int((parameters - whole) * shape.quantization.bits / 8))


def _stored(model: dict[str, Any], measured: dict[str, Any], shape: ModelShape, gpus: int) -> StoredWeights:
    if "safetensors_bytes" in model:
        return StoredWeights(model["safetensors_bytes"])
    if "checkpoint_gib" in measured:
        return StoredWeights(int(measured["checkpoint_gib"] * GIB))
    if "weights_gib" in measured:  # what it loaded is what its files hold, where the source does not tell their size
        return StoredWeights(int(measured["weights_gib"] * gpus * GIB))
    return stored_of(model["parameters"], shape)


def _context_of(measured: dict[str, Any], context: int) -> float | None:
    """GiB of KV cache for one whole context, as measured."""
    if "kv_gib" not in measured or not context:
        return None
    if "concurrency" in measured:
        return float(measured["kv_gib"] / measured["concurrency"])
    return float(measured["kv_gib"] / measured["kv_tokens"] * context) if "kv_tokens" in measured else None


def _rest(told: dict[str, Any], measured: dict[str, Any], gpu: float, weights: float | None) -> float | None:
    """GiB beside weights and KV cache: by what vLLM says of them, else what is left of its share."""
    if "activation_gib" in measured:
        more = "graphs_estimated_gib" if "graphs_estimated_gib" in measured else "graphs_gib"
        return float(measured["activation_gib"] + measured.get("non_torch_gib", 0.0) + measured.get(more, 0.0))
    if weights is None or "kv_gib" not in measured or told.get("utilization") is None or UNIFIED in told["gpu"]:
        return None
    return float(max(0.0, told["utilization"] * gpu - weights - measured["kv_gib"]))


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """A first start's seconds, each as foretold and as measured: to load the weights, and to begin to serve then."""

    id: str
    load: tuple[float, float | None]
    begin: tuple[float, float | None]


def seconds() -> list[Seconds]:
    """All starts that tell how long they took, as they would have been foretold on a machine that knows nothing."""
    found = []
    for told in starts():
        measured, gpus = told["measured"], told.get("gpus", 1)
        weights = measured.get("weights_gib", measured.get("consumed_gib"))
        if weights is None or not {"load_seconds", "init_seconds"} & measured.keys():
            continue
        stored = int(measured.get("checkpoint_gib", weights * gpus) * GIB)
        times = StepTimes(told["id"], "", eager=told.get("enforce_eager") is True, machine={})
        stages = times.start_stages(Size(weights=int(weights * GIB), stored=stored))
        found.append(
            Seconds(
                id=told["id"],
                load=(stages["weights"], measured.get("load_seconds")),
                begin=(stages["compile"] + stages["graphs"], measured.get("init_seconds")),
            )
        )
    return found


def factor(pairs: Iterable[tuple[float, float | None]]) -> tuple[float, int]:
    """The median factor between foretold and measured, never below 1, and the number of those that were measured."""
    factors = [max(told / seen, seen / told) for told, seen in pairs if seen]
    return statistics.median(factors), len(factors)


def rows() -> list[Row]:
    """All starts that say enough."""
    known = models()
    found = (row(told, known[told["model_key"]]) for told in starts() if told.get("model_key") in known)
    return [each for each in found if each is not None]


def lines(table: list[Row]) -> Iterator[str]:
    """The table, a line for each start, and what it comes to."""
    yield f"{'start':34}{'GPU':>7}{'weights':>15}{'rest':>13}{'context':>15}{'claim':>8}  succeeds    over      chosen"
    for each in table:
        pairs = (_pair(each.weights), _pair(each.rest), _pair(each.context))
        over = "-" if each.over is None else f"{each.over:.1%}"
        good, chosen_good = (GOOD[found] for found in (each.succeeds, each.chosen_succeeds))
        chosen = f"{'whole' if each.chosen is None else f'{each.chosen // 1024}k'} {chosen_good}"
        sizes = f"{pairs[0]:>15}{pairs[1]:>13}{pairs[2]:>15}{each.claim:8.1f}"
        yield f"{each.id:34}{each.gpu:7.1f}{sizes}{good:>10}{over:>8}{chosen:>12}"
    judged = [each for each in table if each.succeeds is not None]
    errors = [abs(each.context[0] / each.context[1] - 1) for each in table if each.context[1]]
    yield f"first starts that succeed: {sum(bool(each.succeeds) for each in judged)} of {len(judged)}"
    short = sum(each.chosen is not None for each in judged)
    free = f"{sum(bool(each.chosen_succeeds) for each in judged)} of {len(judged)}"
    yield f"and where the profile gives no context: {free}, {short} of them with a shorter one than the model's"
    yield f"claimed beyond the need, median: {statistics.median(_over(judged)):.1%} of the GPU"
    yield f"KV cache of a context, median error: {statistics.median(errors):.1%} of {len(errors)}"


def second_lines(table: list[Seconds]) -> Iterator[str]:
    """Seconds of each start, and what they come to."""
    yield f"{'start':34}{'load':>18}{'begin':>18}   seconds, foretold / measured"
    for each in table:
        yield f"{each.id:34}{_pair(each.load):>18}{_pair(each.begin):>18}"
    (load, loads), (begin, begins) = factor(each.load for each in table), factor(each.begin for each in table)
    yield f"seconds to load the weights, median factor: {load:.1f} of {loads}"
    yield f"seconds to begin to serve then, median factor: {begin:.1f} of {begins}"


def _over(judged: list[Row]) -> list[float]:
    return [each.over for each in judged if each.over is not None]


def _pair(pair: tuple[float, float | None]) -> str:
    return f"{pair[0]:.1f} / {'-' if pair[1] is None else f'{pair[1]:.1f}'}"


if __name__ == "__main__":
    print("\n".join([*lines(rows()), "", *second_lines(seconds())]))
    sys.exit(0)
