"""Host memory that flags keep for an engine's life, and draft models: counted, or refused with a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.shared.files.units import GIB
from sidecar.core.engine_records import Unusable
from sidecar.core.profile import Profile
from sidecar.sizing.estimate import KnownModel, estimate
from sidecar.sizing.extras import draft_gpus, draft_model, drafted_share, host_pool_bytes
from sidecar.sizing.model_config import shape_from
from sidecar.sizing.weights import StoredWeights
from tests.sidecar.sizing.test_model_files import cached, engines, sharded, size

CONFIGS = Path(__file__).parents[1] / "configs"
LARGE, SMALL = (shape_from((CONFIGS / f"{name}.json").read_bytes()) for name in ("llama-3-70b", "llama-3-8b"))


def connector(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


POOLS: list[tuple[dict[str, Any], int, float]] = [
    ({}, 2, 0.0),
    ({"kv-offloading-size": 400}, 8, 400.0),  # all GPUs together
    ({"cpu-offload-gb": 10}, 2, 20.0),  # each
    ({"kv-transfer-config": connector("LMCacheConnectorV1")}, 2, 10.0),
    ({"kv-transfer-config": connector("LMCacheConnectorV1", **{"lmcache.max_local_cpu_size": 40})}, 2, 80.0),
    ({"kv-transfer-config": connector("OffloadingConnector", cpu_bytes_to_use=3 * GIB)}, 2, 3.0),
    ({"kv-transfer-config": connector("MultiConnector", connectors=[connector("LMCacheConnectorV1"), 5])}, 1, 5.0),
    ({"kv-transfer-config": {"kv_connector": "NixlConnector", "kv_connector_extra_config": None}}, 2, 0.0),
    ({"kv-transfer-config": connector("OffloadingConnector", cpu_bytes_to_use="many")}, 2, 0.0),
]


@pytest.mark.parametrize(("flags", "gpus", "gib"), POOLS)
def test_what_flags_keep_of_host_memory(flags: dict[str, Any], gpus: int, gib: float) -> None:
    assert host_pool_bytes(Profile(model_path="/m", tensor_parallel=gpus, flags=flags)) == int(gib * GIB)


def test_nixl_with_a_buffer_in_host_memory_keeps_the_cache_twice(tmp_path: Path) -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    profile = Profile(model_path="/m", tensor_parallel=2, flags={"kv-transfer-config": nixl})
    assert host_pool_bytes(profile, 3 * GIB) == 6 * GIB
    assert host_pool_bytes(Profile(model_path="/m", sleep=None, kv_transfer="both"), 3 * GIB) == 0, "moved in place"
    sharded(tmp_path / "m")
    kept = "{kv-transfer-config: {kv_connector: NixlConnector, kv_buffer_device: cpu}}"
    found = size(engines(tmp_path, f"model_path: m, gpu_memory: {{kv: 2GiB}}, flags: {kept}"))
    assert found.pools == 3 * GIB, "with 1 GiB of margin"


def test_a_size_has_the_pools_whether_its_files_are_known_or_not(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    for model in ("m", "some/model"):
        assert size(engines(tmp_path, f"model_path: {model}, flags: {{kv-offloading-size: 40}}")).pools == 40 * GIB


def test_a_draft_models_weights_and_cache_are_counted() -> None:
    flags = {"speculative-config": {"model": "/draft", "num_speculative_tokens": 5}}
    profile, model = (
        Profile(model_path="/m", tensor_parallel=2, flags=flags),
        KnownModel(LARGE, StoredWeights(131 * GIB)),
    )
    drafting = msgspec.structs.replace(model, draft=KnownModel(SMALL, StoredWeights(15 * GIB)))
    alone = estimate(profile, model, 80 * GIB, 2).least
    drafted = estimate(profile, drafting, 80 * GIB, 2).least
    assert drafted.weights - alone.weights == 15 * GIB // 2
    assert drafted_share(flags, LARGE, SMALL) == pytest.approx(32 / 80), "layers of the same width"
    one = Profile(
        model_path="/m",
        tensor_parallel=2,
        flags={"speculative-config": flags["speculative-config"] | {"draft_tensor_parallel_size": 1}},
    )
    whole = estimate(one, drafting, 80 * GIB, 2).least
    assert whole.weights - alone.weights == 15 * GIB


DRAFTS: list[tuple[Any, tuple[str, str] | None]] = [
    ({"method": "ngram", "model": "ngram"}, None),
    ({"method": "mtp"}, None),
    ({"model": "org/draft"}, ("org/draft", "main")),
    ({"model": "/d", "method": "eagle3", "revision": "v2"}, ("/d", "v2")),
]


@pytest.mark.parametrize(("given", "expected"), DRAFTS)
def test_which_draft_model_has_files_of_its_own(given: Any, expected: tuple[str, str] | None) -> None:
    assert draft_model({"speculative-config": given}) == expected
    assert draft_gpus({"speculative-config": given}, 4) == 4


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    with pytest.raises(
        Unusable, match=r"its draft model \(speculative-config\): there is no folder or file .*/gone here"
    ):
        size(engines(tmp_path, "model_path: m, flags: {speculative-config: {model: gone here}}"))
    found = size(engines(tmp_path, "model_path: m, flags: {speculative-config: {model: m}}"))
    assert found.weights == 2 * size(engines(tmp_path, "model_path: m")).weights


def test_a_draft_model_is_looked_for_where_its_engine_does(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    cached(tmp_path / "hub", "meta/Draft")
    drafting = "speculative-config: {model: meta/Draft}"
    plain = size(engines(tmp_path, "model_path: m")).weights
    home = f"environment: {{HF_HOME: '{tmp_path}'}}"
    assert size(engines(tmp_path, f"model_path: m, flags: {{{drafting}}}, {home}")).weights == 2 * plain
    elsewhere = f"download-dir: elsewhere, {drafting}"
    assert size(engines(tmp_path, f"model_path: m, flags: {{{elsewhere}}}, {home}")).guessed, "not there"
