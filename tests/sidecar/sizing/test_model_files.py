"""Model files on disk: whole, cut off, half downloaded, in a hub's cache, or none."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.shared.files.units import GIB
from sidecar.core.config import decode
from sidecar.core.diagnosis import diagnosis
from sidecar.core.engine_records import EngineFacts, Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import FailedStart, Lesson, Measured, learn
from sidecar.process.engine import VllmEngines
from sidecar.residency.engine_memory import current
from sidecar.sizing.claim import OWN_CONTEXT
from sidecar.sizing.memory import GRAPH, RESIDUE
from sidecar.sizing.model_config import Quantization
from sidecar.sizing.model_files import ModelLocation, NotHere, NotKnown, cache_folder, read_model
from sidecar.sizing.weights import StoredWeights

LLAMA = (Path(__file__).parents[1] / "configs" / "llama-3-8b.json").read_bytes()
EIGHT_B = 16_060_522_496  # bytes of its weights
BESIDE = OWN_CONTEXT + 50 * 1024**2 + 51 * 32 * GRAPH  # its share: a context, and graphs of 51 batches in 32 layers
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def safetensors(path: Path, sizes: Mapping[str, int], *, cut: int = 0) -> None:
    """A file of tensors in 16 bits of these many bytes, with holes for their contents."""
    at, tensors = 0, {}
    for name, size in sizes.items():
        tensors[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}
        at += size
    header = msgspec.json.encode(tensors)
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + at - cut)


def sharded(folder: Path, *, total: int = EIGHT_B) -> Path:
    """A folder as Hugging Face lays one out: two files and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(LLAMA)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        safetensors(folder / name, {f"{name}.weight": total // 2})
    index = {"metadata": {"total_size": total}, "weight_map": {f"{name}.weight": name for name in names}}
    (folder / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    return folder


def cached(cache: Path, model: str = "meta/Llama") -> Path:
    """A snapshot in a hub's cache, its files links to blobs as there."""
    folder = cache / f"models--{model.replace('/', '--')}"
    sharded(folder / "blobs")
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for blob in (folder / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return snapshot


def read(folder: Path, model: str = "m", environment: Mapping[str, str] | None = None, **more: Any) -> StoredWeights:
    shape, stored = read_model(ModelLocation(model=model, folder=folder, environment=environment or {}, **more))
    assert shape.model_type == "llama"
    return stored


def refused(folder: Path, model: str = "m", **more: Any) -> str:
    with pytest.raises(Unusable) as caught:
        read(folder, model, **more)
    return str(caught.value)


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_safetensors_is_its_headers(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    safetensors(tmp_path / "m" / "consolidated.safetensors", {"all": EIGHT_B})  # the same again
    assert read(tmp_path) == read(Path("/"), str(tmp_path / "m")) == StoredWeights(EIGHT_B)
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    assert read(tmp_path) == StoredWeights(EIGHT_B)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_files_that_count_each_other_have_to_be_all_there(tmp_path: Path, ending: str) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    for part in folder.glob("*.safetensors"):
        part.rename(part.with_suffix(f".{ending}"))
    whole = read(tmp_path)
    assert EIGHT_B <= whole.bytes <= EIGHT_B + 1000
    (folder / f"model-00001-of-00002.{ending}").unlink()
    why = f"model-00001-of-00002.{ending} is missing, which model-00002-of-00002.{ending} beside it counts"
    assert why in refused(tmp_path)


def test_weights_in_other_forms_are_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_bytes(LLAMA)
    for name, size in [("a.pt", 1), ("pytorch_model-1.bin", 20), ("pytorch_model-2.bin", 300), ("optimizer.bin", 9)]:
        (folder / name).write_bytes(b"x" * size)
    assert read(tmp_path) == StoredWeights(320)
    for path in folder.glob("*.bin"):
        path.unlink()
    assert read(tmp_path) == StoredWeights(1)


def test_what_is_wrong_with_a_folder_is_said_with_what_to_do(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    second = folder / "model-00002-of-00002.safetensors"
    safetensors(second, {"x": 1000}, cut=1)
    assert f"{second} is cut off: it has 1067 bytes of 1068: copy or download it again" in refused(tmp_path)
    second.write_bytes(b"\xff" * 100)
    assert f"{second} cannot be used: a safetensors header of" in refused(tmp_path)
    second.unlink()
    assert refused(tmp_path).startswith(f"{second} is missing, which the index beside it names")
    os.mkfifo(second)
    assert refused(tmp_path) == f"{second} cannot be read: not a plain file"
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "index.json cannot be used: the safetensors index has neither" in refused(tmp_path)
    (folder / "config.json").unlink()
    assert f"{folder / 'config.json'} is missing: " in refused(tmp_path)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.bin", "m.gguf"])
@pytest.mark.parametrize("sizes_only", [True, False])
def test_a_pointer_of_git_lfs_is_not_taken_for_weights(tmp_path: Path, name: str, sizes_only: bool) -> None:
    folder = sharded(tmp_path / "m")
    if not name.endswith(".safetensors"):
        for path in folder.glob("model*"):
            path.unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n")
    with pytest.raises(Unusable) as caught:
        read(tmp_path, "m/m.gguf" if name.endswith(".gguf") else "m", sizes_only=sizes_only)
    advice = "is a pointer of git-lfs, not the weights: run `git lfs pull` in its folder"
    assert str(caught.value) == f"{folder / name} {advice}"


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_bytes(LLAMA)
    assert refused(tmp_path) == f"{folder} holds no weights (.safetensors, .bin or .pt): copy or download it again"
    (folder / "q4.gguf").touch()
    assert refused(tmp_path).endswith("name one of its files in model_path, such as q4.gguf")


def test_what_is_no_model_at_all(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "notes.txt is no GGUF file" in refused(tmp_path, "notes.txt")
    assert refused(tmp_path, "/no/such/model") == "there is no folder or file /no/such/model: correct model_path"
    assert refused(tmp_path, "x" * 300).startswith(f"{tmp_path}/xxx")


def test_a_config_that_is_not_understood_is_no_reason_not_to_run(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "new"}')
    with pytest.raises(NotKnown, match="num_hidden_layers is missing"):
        read(tmp_path)
    (folder / "config.json").unlink()
    (folder / "params.json").write_text("{}")
    with pytest.raises(NotKnown, match=r"Mistral's params\.json"):
        read(tmp_path)
    sharded(tmp_path / "other")
    assert read(tmp_path, shape="other") == StoredWeights(EIGHT_B)


def test_a_config_that_is_nowhere_leaves_the_models_own(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    for nowhere in ("no folder, and no hub's id", "meta/Absent"):
        assert read(tmp_path, shape=nowhere, environment={"HF_HOME": str(tmp_path)}) == StoredWeights(EIGHT_B)


# -- GGUF -------------------------------------------------------------------------------------------------------------


def gguf(path: Path, size: int = 5000) -> None:
    path.write_bytes(b"GGUF")
    os.truncate(path, size)


def test_the_shape_of_a_gguf_file_is_that_of_the_config_beside_it(tmp_path: Path) -> None:
    gguf(tmp_path / "m.gguf")
    with pytest.raises(NotKnown, match=r"has no config\.json of its model beside it \(copy it there\)"):
        read(tmp_path, "m.gguf")
    (tmp_path / "config.json").write_bytes(LLAMA)
    assert read(tmp_path, "m.gguf") == StoredWeights(5000)
    shape, _ = read_model(ModelLocation(model="m.gguf", folder=tmp_path, environment={}))
    assert shape.quantization == Quantization("gguf", None)


def test_a_gguf_file_without_a_config_keeps_no_more_host_memory_asleep_than_its_weights(tmp_path: Path) -> None:
    gguf(tmp_path / "m.gguf", 4 * GIB)
    found = size(engines(tmp_path, "model_path: m.gguf"))
    assert (found.share, found.host) == (0.9, 6 * GIB)
    assert size(engines(tmp_path, "model_path: m.gguf, gpu_memory: 5%")).host == 4 * GIB, "no more than its share"
    assert size(engines(tmp_path, "model_path: m.gguf, sleep: null")).host == 0
    sharded(tmp_path / "drafted")
    drafting = "model_path: drafted, flags: {speculative-config: {model: m.gguf}}"
    assert size(engines(tmp_path, drafting)).host == 72 * GIB, "the file is the draft model's alone"


def test_the_parts_of_a_gguf_file_belong_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(LLAMA)
    for part in (1, 2):
        gguf(tmp_path / f"m-{part:05}-of-00002.gguf")
    assert read(tmp_path, "m-00001-of-00002.gguf") == StoredWeights(10_000)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    assert "m-00002-of-00002.gguf cannot be read: No such file" in refused(tmp_path, "m-00001-of-00002.gguf")


# -- the cache of a hub -----------------------------------------------------------------------------------------------


def test_a_hub_s_model_is_found_in_the_cache(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "hub")
    home = {"HF_HOME": str(tmp_path)}
    assert read(tmp_path, "meta/Llama", home) == StoredWeights(EIGHT_B)
    assert read(tmp_path, "meta/Llama", home, revision=COMMIT) == StoredWeights(EIGHT_B)
    assert read(tmp_path, "meta/Llama", home, downloads="hub") == StoredWeights(EIGHT_B)
    (tmp_path / "hub" / "models--meta--Llama" / "refs" / "odd").write_text(f"../snapshots/{COMMIT}")
    for absent in ({"revision": "v2"}, {"revision": "odd"}, {"downloads": "elsewhere"}):
        with pytest.raises(NotKnown, match="meta/Llama is not in the cache, and vLLM will download it"):
            read(tmp_path, "meta/Llama", home, **absent)
    offline = home | {"HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE keeps vLLM from" in refused(tmp_path, "other/model", environment=offline)

    (snapshot / "model-00002-of-00002.safetensors").unlink()  # not downloaded yet
    found = read(tmp_path, "meta/Llama", home)
    assert found == StoredWeights(EIGHT_B, absent=found.absent), "the index knows"
    assert found.absent == pytest.approx(EIGHT_B / 2, abs=1000)
    assert "not wholly in the cache, and HF_HUB_OFFLINE" in refused(tmp_path, "meta/Llama", environment=offline)
    (snapshot / "model.safetensors.index.json").unlink()
    with pytest.raises(NotHere, match="not wholly in the cache"):
        read(tmp_path, "meta/Llama", home)
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(NotKnown, match="not wholly in the cache"):
        read(tmp_path, "meta/Llama", home)
    with pytest.raises(NotKnown, match="s3://bucket/m is not on this machine"):
        read(tmp_path, "s3://bucket/m")


def test_where_the_cache_is() -> None:
    home = {"HOME": "/h"}
    assert cache_folder(home) == Path("/h/.cache/huggingface/hub")
    assert cache_folder(home | {"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_folder(home | {"XDG_CACHE_HOME": "/x", "HF_HOME": "/f"}) == Path("/f/hub")
    assert cache_folder(home | {"HF_HOME": "/f", "HF_HUB_CACHE": "/c"}) == Path("/c")


# -- what an engine will take of a GPU --------------------------------------------------------------------------------


class Made(msgspec.Struct):
    """Engines of one file, and what earlier ones have shown."""

    engines: VllmEngines
    measured: dict[str, Measured]
    lessons: dict[str, Lesson]

    @property
    def settings(self) -> str:
        return self.engines.settings("m")

    def kv_bytes(self, told: EngineFacts) -> int | None:
        return self.engines.sizing.kv_bytes("m", told)


def engines(
    folder: Path,
    profile: str,
    measured: dict[str, Measured] | None = None,
    engine: str = "p",
    lessons: dict[str, Lesson] | None = None,
) -> Made:
    config = decode(f"engine: {engine}\nmodels:\n  m: {{{profile}}}".encode())
    made = VllmEngines(config, folder, sidecar="box", clock=time.monotonic, environment={}, say=print)
    return Made(made, {} if measured is None else measured, {} if lessons is None else lessons)


def size(made: Made, total: int = 80, present: int = 1) -> Size:
    seen, learnt = current(made.measured, "m", made.settings), current(made.lessons, "m", made.settings)
    return asyncio.run(made.engines.sizing.size("m", total * GIB, present, seen, learnt, unified=False))


def test_a_claim_is_the_least_share_that_holds_the_model_and_some_contexts(tmp_path: Path) -> None:
    """15.0 GiB of weights, 8 GiB of KV cache for 65,536 tokens (128 KiB each), 1.4 and 1.2 GiB of the rest, 1 GiB of
    margin: 26.5 GiB are 335 thousandths of the 79.25 that CUDA has."""
    sharded(tmp_path / "m")
    found = size(engines(tmp_path, "model_path: m"))
    assert found.share == 0.335
    assert found.beyond == BESIDE
    assert found.claim == found.start_needs == -(-(80 * GIB - 768 * 1024**2) * 335 // 1000) + BESIDE
    assert (found.residue, found.host) == (RESIDUE, EIGHT_B * 3 // 2)
    assert found.arithmetic == (
        "26.5 GiB on its GPU of 79.2 GiB: weights 15.0, KV 9.0 for 73,927 tokens, activations 1.4, overhead 1.2"
    )
    awake = size(engines(tmp_path, "model_path: m, sleep: null"))
    assert (awake.claim, awake.residue, awake.host) == (found.claim, 0, 0)
    eight = size(engines(tmp_path, "model_path: m, flags: {max-num-seqs: 2}"))
    assert found.claim - eight.claim == pytest.approx(7.5 * GIB, abs=GIB / 5), (
        "6 of KV cache, smaller batches, fewer graphs"
    )
    long = size(engines(tmp_path, "model_path: m, context_length: 131072, flags: {enforce-eager: true}"))
    assert long.claim - found.claim == pytest.approx(6.9 * GIB, abs=GIB / 5), (
        "one long context is enough, and no graphs"
    )


def test_a_model_whose_files_come_with_its_start_is_guessed_until_they_are_here(tmp_path: Path) -> None:
    at = f"model_path: meta/Llama, environment: {{HF_HOME: {tmp_path}}}"
    for memory in ("", ", gpu_memory: {kv: 8GiB}"):
        made = engines(tmp_path, f"{at}{memory}")
        found = size(made)
        assert (found.guessed, found.share) == (True, 0.9)
        assert (
            "not in the cache, and vLLM will download it; once its files are here it is started anew"
            in found.arithmetic
        )
    assert not size(engines(tmp_path, f"{at}, gpu_memory: 45%")).guessed, "nothing else would be tried"
    cached(tmp_path / "hub")
    known = size(made)
    assert not known.guessed
    assert known.claim == pytest.approx((15 + 8 + 2.6 + 1) * GIB + BESIDE, abs=GIB / 5), (
        "weights, cache, the rest, margin"
    )


def test_a_cache_of_fixed_size_on_top_of_nobody_knows_what_is_refused(tmp_path: Path) -> None:
    made = engines(tmp_path, "model_path: 's3://bucket/m', gpu_memory: {kv: 8GiB}")
    with pytest.raises(Unusable, match=r"not known, since s3://bucket/m is not on this machine: give it a share, such"):
        size(made)
    assert not size(engines(tmp_path, "model_path: 's3://bucket/m'")).guessed


def fails(made: Made, learnt: dict[str, Lesson], of: Size, line: str) -> Size:
    """The size after a start of this one has failed with such a line."""
    failed = FailedStart(size=of, found=diagnosis([line]), total=80 * GIB, free=79 * GIB)
    lesson = learn(learnt.get("m"), failed, made.settings)
    assert lesson is not None
    learnt["m"] = lesson
    return size(made)


def too_small(needed: float, available: float) -> str:
    return (
        f"ValueError: To serve at least one request with the models's max seq len (8192), ({needed:.2f} GiB KV cache "
        f"is needed, which is larger than the available KV cache memory ({available:.2f} GiB)."
    )


NO_KV = "ValueError: No available memory for the cache blocks."


def test_a_start_that_failed_raises_the_claim_by_what_it_told(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    learnt: dict[str, Lesson] = {}
    made = engines(tmp_path, "model_path: m", lessons=learnt)
    first = size(made)
    second = fails(made, learnt, first, too_small(2.0, 1.5))
    assert second.claim == pytest.approx(first.claim - 1.5 * GIB + 16 * GIB + GIB / 4, abs=GIB / 10), "8 contexts of 2"
    assert "(by what a failed start told)" in second.arithmetic
    third = fails(made, learnt, second, NO_KV)
    assert third.claim - second.claim == pytest.approx(16 * GIB + second.claim / 8, abs=GIB / 5)
    changed = engines(tmp_path, "model_path: m, flags: {seed: 1}", lessons=learnt)
    assert size(changed).claim == first.claim, "with other settings nothing was learnt"


def test_a_share_that_the_operator_gave_is_refused_once_it_has_failed_with_what_it_must_be(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    learnt: dict[str, Lesson] = {}
    made = engines(tmp_path, "model_path: m, context_length: 8192, gpu_memory: 23%", lessons=learnt)
    first = size(made)
    with pytest.raises(Unusable, match=r"gpu_memory gives 18.2 of them: give it 0.24[0-9] or more"):
        fails(made, learnt, first, too_small(2.0, 0.9))
    learnt.clear()
    made = engines(tmp_path, "model_path: m, context_length: 8192, gpu_memory: {kv: 2GiB}", lessons=learnt)
    with pytest.raises(Unusable, match=r"needs a KV cache of 3.0 GiB .* caps it at 2"):
        fails(made, learnt, size(made), too_small(3.0, 2.0))


def test_a_gpu_that_had_less_free_gets_a_smaller_share_where_the_need_still_fits(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    learnt: dict[str, Lesson] = {}
    made = engines(tmp_path, "model_path: m", lessons=learnt)
    first = size(made)
    low = (
        "ValueError: Free memory on device cuda:0 ({:.2f}/79.19 GiB) on startup is less than desired GPU memory "
        "utilization (0.335, 26.55 GiB)."
    )
    second = fails(made, learnt, first, low.format(24.0))
    assert second.start_needs - second.beyond <= 24 * GIB
    assert learnt["m"].cuda == pytest.approx(79.19 * GIB, abs=GIB / 100)
    assert fails(made, learnt, second, low.format(10.0)).starts_as(
        size(engines(tmp_path, "model_path: m", lessons={"m": msgspec.structs.replace(learnt["m"], most=None)}))
    ), "there is no room for it, so it waits for more"


def test_one_that_took_more_than_its_share_leaves_more_beside_it(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    learnt: dict[str, Lesson] = {}
    made = engines(tmp_path, "model_path: m, context_length: 300000", lessons=learnt)
    first = size(made)
    assert first.share == 0.696
    for _ in range(6):
        first = fails(made, learnt, first, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert first.claim <= 80 * GIB
    assert first.share is not None
    assert first.beyond > 10 * GIB
    made = engines(tmp_path, "model_path: m, context_length: 131072, gpu_memory: 97%", lessons=(kept := {}))
    sized = size(made)
    again = fails(made, kept, sized, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert (again.share, again.claim > sized.claim) == (0.97, True), "his share is obeyed, and more is booked"


def test_a_model_of_which_nothing_is_known_learns_too(tmp_path: Path) -> None:
    learnt: dict[str, Lesson] = {}
    made = engines(tmp_path, "model_path: org/name", lessons=learnt)
    first = size(made)
    assert first.share == 0.9
    second = fails(made, learnt, first, "torch.OutOfMemoryError: CUDA out of memory.")
    assert (second.share, second.beyond) == (0.9, pytest.approx(3.6 * GIB, abs=GIB / 10))
    third = fails(made, learnt, second, "torch.OutOfMemoryError: CUDA out of memory.")
    assert third.share == pytest.approx(0.879, abs=0.002)
    learnt.clear()
    assert fails(made, learnt, first, too_small(2.0, 1.5)).share == pytest.approx(0.918, abs=0.002)
    assert fails(made, learnt, first, NO_KV).share == 0.97
    learnt.clear()
    made = engines(tmp_path, "model_path: org/name, gpu_memory: 50%", lessons=learnt)
    assert fails(made, learnt, size(made), NO_KV).share == 0.5


def test_a_hybrid_model_gets_as_many_sequences_as_have_states(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    line = "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (722)"
    learnt: dict[str, Lesson] = {}
    made = engines(tmp_path, "model_path: m", lessons=learnt)
    assert fails(made, learnt, size(made), line).sequences == 722
    learnt.clear()
    made = engines(tmp_path, "model_path: m, flags: {max-num-seqs: 800}", lessons=learnt)
    with pytest.raises(Unusable, match=r"flag max-num-seqs is 800, and a start found room for the states of 722"):
        fails(made, learnt, size(made), line)


def test_what_a_profile_says_of_its_memory_is_obeyed(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    share = size(engines(tmp_path, "model_path: m, gpu_memory: 45%"))
    assert (share.claim, share.share) == (pytest.approx(0.45 * 79.25 * GIB + BESIDE), 0.45)
    assert share.start_needs == share.claim
    cache = size(engines(tmp_path, "model_path: m, gpu_memory: {kv: 2GiB}"))
    assert cache.claim == pytest.approx(20.5 * GIB + BESIDE, abs=GIB / 5)
    assert cache.start_needs >= cache.claim
    half = size(engines(tmp_path, "model_path: m, tensor_parallel: 2"), present=2)
    assert half.claim == pytest.approx(14.7 * GIB + BESIDE, abs=GIB / 5)
    assert half.host == EIGHT_B * 3 // 2
    fp8 = size(engines(tmp_path, "model_path: m, flags: {kv-cache-dtype: fp8}"))
    assert fp8.claim == pytest.approx(22.5 * GIB + BESIDE, abs=GIB / 5)
    newer = size(engines(tmp_path, "model_path: m, flags: {kv-cache-dtype: fp3_new}"))
    assert newer.claim == pytest.approx(26.5 * GIB + BESIDE, abs=GIB / 5)
    offloaded = size(engines(tmp_path, "model_path: m, flags: {cpu-offload-gb: 10}"))
    assert offloaded.claim == pytest.approx(16.5 * GIB + BESIDE, abs=GIB / 5)


CANNOT = [
    ("model_path: m, gpu_memory: 9%", 80, 1, r"needs 18.0 GiB on .* for 4,096 tokens.*: give it 0.22\d or more"),
    ("model_path: m, context_length: 8192, gpu_memory: 9%", 80, 1, r"needs 18.5 GiB on its GPU .*: give it 0.23\d"),
    ("model_path: m", 16, 1, "needs 17.0 GiB on its GPU .*: use more GPUs"),
    ("model_path: m, context_length: 8192", 16, 1, "needs 17.5 GiB on its GPU .*: use more GPUs"),
    ("model_path: m, tensor_parallel: 2", 80, 1, r"needs 2 GPUs \(tensor_parallel\), the sidecar has 1"),
    ("model_path: m", 80, 0, "needs a GPU, the sidecar has none"),
    ("model_path: m", 0, 1, "no GPU of this machine can be read"),
    ("model_path: /m", 80, 1, "there is no folder or file /m"),
]


@pytest.mark.parametrize(("profile", "total", "present", "why"), CANNOT)
def test_what_can_never_run_is_refused(tmp_path: Path, profile: str, total: int, present: int, why: str) -> None:
    sharded(tmp_path / "m")
    with pytest.raises(Unusable, match=why):
        size(engines(tmp_path, profile), total, present)


def test_a_disk_that_hangs_holds_up_only_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.sizing.estimate.READ_WITHIN", 0.0)
    with pytest.raises(Unusable, match="m was not read within 0 s: does its disk hang"):
        size(engines(tmp_path, "model_path: m"))


def test_of_a_model_that_is_not_here_yet_most_of_the_gpu_is_claimed(tmp_path: Path) -> None:
    found = size(engines(tmp_path, "model_path: some/model"))
    assert (found.claim, found.share, found.residue, found.host) == (72 * GIB + OWN_CONTEXT, 0.9, RESIDUE, 72 * GIB)
    assert "90% of each GPU, 72.0 GiB: no estimate, since some/model is not in the cache" in found.arithmetic
    told = size(engines(tmp_path, "model_path: some/model, gpu_memory: 25%"))
    assert (told.claim, told.share) == (20 * GIB + OWN_CONTEXT, 0.25)


def test_engines_without_files(tmp_path: Path) -> None:
    assert size(engines(tmp_path, "model_path: x", engine="{device: cpu}"), 0, 0).claim == 0
    with pytest.raises(Unusable, match="there is no folder or file /m: correct model_path"):
        size(engines(tmp_path, "model_path: /m", engine="{device: cpu}"), 0, 0)
    assert (
        size(engines(tmp_path, "model_path: /m, flags: {load-format: dummy}", engine="{device: cpu}"), 0, 0).share
        is None
    )
    simulated = "{simulated: h100-8b}"
    found = size(engines(tmp_path, "model_path: x", engine=simulated))
    assert (found.claim, found.residue, found.host) == (72 * GIB, GIB, 36 * GIB)
    assert size(engines(tmp_path, "model_path: x, gpu_memory: {kv: 8GiB}", engine=simulated)).claim == 8 * GIB
    with pytest.raises(Unusable, match="and a GPU has 80"):
        size(engines(tmp_path, "model_path: x, gpu_memory: {kv: 81GiB}", engine=simulated))


def test_a_simulated_engine_that_failed_for_memory_claims_what_it_was_told(tmp_path: Path) -> None:
    learnt: dict[str, Lesson] = {}
    made = engines(tmp_path, "model_path: x, gpu_memory: {kv: 8GiB}", engine="{simulated: h100-8b}", lessons=learnt)
    first = size(made)
    assert first.claim == 8 * GIB
    assert fails(made, learnt, first, NO_KV).claim > 9 * GIB
    given = engines(tmp_path, "model_path: x, gpu_memory: 20%", engine="{simulated: h100-8b}", lessons=learnt)
    assert size(given).claim == 16 * GIB, "an operator's share is obeyed"


def test_what_was_measured_counts_while_the_settings_are_the_same(tmp_path: Path) -> None:
    """8 GiB of KV cache hold 65,536 tokens; what else was seen replaces weights and the rest."""
    sharded(tmp_path / "m")
    measured: dict[str, Measured] = {}
    made = engines(tmp_path, "model_path: m", measured)
    told = EngineFacts(kv_bytes=8 * GIB, kv_tokens=1)
    assert made.kv_bytes(told) is None, "its shape was not read yet"
    before = size(made)
    assert made.kv_bytes(told) == 8 * GIB
    assert made.kv_bytes(EngineFacts()) is None
    measured["m"] = Measured(settings=made.settings, peak=28 * GIB, settled=27 * GIB, kv=8 * GIB)
    after = size(made)
    assert after.claim - before.claim == pytest.approx(
        1.5 * GIB, abs=GIB / 5
    )  # 20 GiB where 17.5 were estimated, and a margin of 1
    assert "by what was measured" in after.arithmetic
    assert size(engines(tmp_path, "model_path: m, flags: {seed: 1}", measured)).claim == before.claim


CACHES = [
    ("", EngineFacts(kv_tokens=1024), 64 * 1024**2),  # of 64 KiB, since it may be in 8 bits
    (", flags: {kv-cache-dtype: bfloat16}", EngineFacts(kv_tokens=1024), 128 * 1024**2),
    (", flags: {kv-cache-dtype: fp8}", EngineFacts(kv_tokens=1024), 64 * 1024**2),
    (
        ", flags: {num-gpu-blocks-override: 64}",
        EngineFacts(kv_tokens=1024, kv_bytes=GIB),
        64 * 1024**2,
    ),  # not all of it used
    ("", EngineFacts(), None),
]


@pytest.mark.parametrize(("profile", "told", "kv"), CACHES)
def test_how_large_a_cache_is(tmp_path: Path, profile: str, told: EngineFacts, kv: int | None) -> None:
    sharded(tmp_path / "m")
    made = engines(tmp_path, f"model_path: m{profile}")
    size(made)
    assert made.kv_bytes(told) == kv


def test_of_windows_nothing_is_concluded_from_tokens(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "config.json").write_bytes((Path(__file__).parents[1] / "configs" / "gemma-3-27b.json").read_bytes())
    made = engines(tmp_path, "model_path: m, context_length: 8192")
    size(made)
    assert made.kv_bytes(EngineFacts(kv_tokens=10)) is None
