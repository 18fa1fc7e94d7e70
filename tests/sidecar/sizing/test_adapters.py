"""LoRA adapters of a profile: ranks, the memory of their slots, and folders that are no adapters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.arguments import lora_arguments
from sidecar.core.config import decode
from sidecar.core.engine_records import Unusable
from sidecar.core.profile import Profile
from sidecar.sizing.estimate import Sizing
from sidecar.sizing.extras import adapter_rank, slot_bytes
from sidecar.sizing.model_config import shape_from

GIB = 1 << 30
CONFIGS = Path(__file__).parents[1] / "configs"


def adapter(folder: Path, **fields: Any) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | fields))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder.name


@pytest.mark.parametrize(
    ("fields", "rank"), [({}, 8), ({"r": 9}, 16), ({"r": 512}, 512), ({"r": 4, "rank_pattern": {"q_proj": 33}}, 64)]
)
def test_the_rank_is_the_next_that_vllm_has(tmp_path: Path, fields: dict[str, Any], rank: int) -> None:
    assert adapter_rank(tmp_path, {"x": adapter(tmp_path / "x", **fields)}) == rank


def test_the_largest_rank_counts_and_no_adapter_has_none(tmp_path: Path) -> None:
    both = {name: adapter(tmp_path / name, r=rank) for name, rank in (("x", 8), ("y", 100))}
    assert adapter_rank(tmp_path, both) == 128
    assert adapter_rank(tmp_path, {}) == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"r": 0}, "r is 0, expected a whole number from 1 to 512"),
        ({"r": True}, "r is True"),
        ({"r": "8"}, "r is '8'"),
        ({"r": 513}, "r is 513"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is 'PREFIX_TUNING', expected LORA"),
        ({"rank_pattern": [8]}, r"rank_pattern is \[8\], expected an object"),
        ({"rank_pattern": {"q": -1}}, "rank_pattern is -1"),
    ],
)
def test_what_is_no_adapter_says_so_in_a_line(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    name = adapter(tmp_path / "x", **fields)
    with pytest.raises(Unusable, match=rf"^its adapter sql cannot be used: \S+/x: {says}"):
        adapter_rank(tmp_path, {"sql": name})


def test_a_folder_that_is_not_there_or_lacks_a_file(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"^its adapter sql cannot be read: \S+adapter_config.json: No such file"):
        adapter_rank(tmp_path, {"sql": "nowhere"})
    name = adapter(tmp_path / "x")
    (tmp_path / "x" / "adapter_model.safetensors").unlink()
    with pytest.raises(Unusable, match="it has no weights, expected adapter_model"):
        adapter_rank(tmp_path, {"sql": name})
    (tmp_path / "x" / "adapter_config.json").write_bytes(b"\xff{")
    with pytest.raises(Unusable, match=r"adapter_config\.json cannot be read as JSON"):
        adapter_rank(tmp_path, {"sql": name})


def test_slots_for_a_model_whose_layers_are_known() -> None:
    shape = shape_from((CONFIGS / "llama-3-8b.json").read_bytes())
    assert slot_bytes(shape, 64, 4) / GIB == pytest.approx(1.34, abs=0.01)  # 4 x 64 x 2 x 32 x (11 x 4096 + 3 x 14336)


def test_arguments_and_the_flags_that_win() -> None:
    two = Profile(model_path="/m", adapters={"sql": "/l/sql", "a=b": "l/x"})
    modules = ['{"name":"sql","path":"/l/sql"}', '{"name":"a=b","path":"l/x"}']
    assert lora_arguments(two, 16) == [
        "--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--lora-modules", *modules
    ]  # fmt: skip
    given = Profile(model_path="/m", adapters={"x": "/x"}, flags={"max-loras": 9, "max-lora-rank": 256})
    assert lora_arguments(given, 16)[:2] == ["--enable-lora", "--lora-modules"]
    assert "--max-lora-rank" not in lora_arguments(two, 0)
    assert lora_arguments(Profile(model_path="/m"), 0) == []


def test_a_bad_adapter_makes_its_model_unusable_and_a_good_one_is_claimed_for(tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((CONFIGS / "llama-3-8b.json").read_bytes())
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(15 * GIB)
    adapter(tmp_path / "lora", r=64)
    text = (
        "models: {with: {model_path: with, context_length: 8192, adapters: {sql: lora}}, "
        "without: {model_path: without, context_length: 8192}, "
        "bad: {model_path: with, adapters: {sq: gone}}}"
    )
    sizing = Sizing(decode(text.encode()), tmp_path, {}, sizes_only=True)

    async def sized(name: str) -> int:
        size = await sizing.size(name, 80 * GIB, 1, None, None, unified=False)
        assert size.lora_rank == (64 if name == "with" else 0)
        return size.claim

    assert asyncio.run(sized("with")) - asyncio.run(sized("without")) > GIB // 4
    with pytest.raises(Unusable, match="its adapter sq cannot be read"):
        asyncio.run(sized("bad"))


def test_adapters_on_a_disk_that_hangs_and_those_of_the_file_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes((CONFIGS / "llama-3-8b.json").read_bytes())
    with (tmp_path / "m" / "model.safetensors").open("wb") as file:
        file.truncate(15 * GIB)
    adapter(tmp_path / "lora")
    sizing = Sizing(decode(b"models: {m: {model_path: m, context_length: 8192}}"), tmp_path, {}, sizes_only=True)
    assert asyncio.run(sizing.size("m", 80 * GIB, 1, None, None, unified=False)).lora_rank == 0
    sizing.apply(decode(b"models: {m: {model_path: m, context_length: 8192, adapters: {sql: lora}}}"))
    assert asyncio.run(sizing.size("m", 80 * GIB, 1, None, None, unified=False)).lora_rank == 8
    monkeypatch.setattr("sidecar.sizing.estimate.READ_WITHIN", 0.0)
    with pytest.raises(Unusable, match="its adapters were not read within 0 s: does their disk hang"):
        asyncio.run(sizing.size("m", 80 * GIB, 1, None, None, unified=False))
