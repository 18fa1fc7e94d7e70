"""`sidecar plan --gpu` and `--all`: models on GPUs that are not here, from folders of which only the sizes matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.shared.files.units import GIB
from sidecar.cli import main
from sidecar.cli.plan_on import Gpu, gpu
from sidecar.sizing.claim import cuda_total

CONFIGS = Path(__file__).parents[1] / "configs"
WEIGHTS = 16_060_522_496


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sparse files beside real configs."""
    monkeypatch.chdir(tmp_path)
    for name, size in {"llama-3-8b": WEIGHTS, "bamba-9b": 19_560_000_000}.items():
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
        with (made / "model.safetensors").open("wb") as file:
            file.truncate(size)
    return tmp_path


def file(folder: Path, models: str) -> None:
    (folder / "sidecar.yaml").write_text(f"host_memory_for_sleep: 64GiB\nmodels: {{{models}}}\n")


def large(folder: Path) -> None:
    """Larger models, of which only the sizes are there."""
    llama = json.loads((CONFIGS / "llama-3-70b.json").read_text()) | {"max_position_embeddings": 131_072}
    deepseek = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    made = {
        "mistral": (llama | {"num_hidden_layers": 40, "hidden_size": 5120}, 44),
        "qwen-32b": (llama | {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27_648}, 61),
        "fp8-70b": (llama | {"quantization_config": {"quant_method": "fp8"}}, 67),
        "405b": (llama | {"num_hidden_layers": 126, "hidden_size": 16_384, "num_attention_heads": 128}, 756),
        "deepseek": (deepseek, 642),
        "qwen3-tiny": (json.loads((CONFIGS / "qwen3-tiny.json").read_text()), 1),
    }
    for name, (config, gib) in made.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        with (folder / name / "model.safetensors").open("wb") as weights:
            weights.truncate(gib * GIB)


def plans(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    assert main(("plan", *argv, "--json")) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "total", "cuda"),
    [
        ("24GiB:23.57GiB", 24 * GIB, int(23.57 * GIB)),
        ("80GiB:79.19GiB", 80 * GIB, int(79.19 * GIB)),
        ("24GB", 24 * GIB, None),
        ("24G", 24 * GIB, None),
        ("23.99gib", int(23.99 * GIB), None),
        ("24576MiB", 24 * GIB, None),
    ],
)
def test_a_gpu_is_written_as_people_and_nvidia_smi_write_it(text: str, total: int, cuda: int | None) -> None:
    assert gpu(text) == Gpu(total, cuda_total(total) if cuda is None else cuda)


def test_an_object_for_each_size_of_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file(folder, "a: {model_path: llama-3-8b}")
    large, small = plans(capsys, "a", "--gpu", "80GiB:79.25GiB", "--gpu", "16GiB", "--gpu", "16GiB")
    assert (large["fits"], large["why"], large["weights_bytes"]) == (True, "", WEIGHTS)
    assert large["claim_bytes"] == -(-int(79.25 * GIB) * round(large["share"] * 1000) // 1000)
    parts = large["weights_bytes"] + large["kv_bytes"] + large["rest_bytes"]
    assert parts == large["claim_bytes"], "the margin is KV cache"
    assert large["kv_tokens"] == pytest.approx(large["kv_bytes"] / 131_072, rel=0.001)
    assert (large["max_num_seqs"], large["asleep_bytes"] > GIB) == (1024, True)
    assert (small["fits"], small["gpu_bytes"], small["max_num_seqs"]) == (False, 16 * GIB, 256)
    assert small["why"].startswith("needs ")
    assert main(("plan", "a", "--gpu", "16GiB")) == 1
    assert "a on 1 x 16.0 GiB: does not fit" in capsys.readouterr().out


def test_a_context_that_does_not_fit_is_told_with_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "llama-3-8b" / "config.json").read_text())
    (folder / "llama-3-8b" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    file(folder, "a: {model_path: llama-3-8b}, b: {model_path: llama-3-8b, context_length: 8192}")
    small, large = plans(capsys, "a", "--gpu", "24GiB", "--gpu", "80GiB")
    told = ("fits", "context_length", "model_context_length", "context_chosen")
    assert [small[name] for name in told] == [True, 40_960, 131_072, True]
    assert [large[name] for name in told] == [True, 131_072, 131_072, False]
    (given,) = plans(capsys, "b", "--gpu", "24GiB")
    assert [given[name] for name in told] == [True, 8192, 131_072, False]
    assert main(("plan", "a", "--gpu", "24GiB", "--gpu", "80GiB")) == 0
    assert capsys.readouterr().out.count("\n  context 40,960 of 131,072: what fits\n") == 1
    file(folder, "a: {model_path: llama-3-8b, gpu_memory: 90%}, b: {model_path: llama-3-8b, gpu_memory: 90%}")
    for turn in plans(capsys, "--all", "--gpu", "24GiB")["models"]:
        assert [turn[name] for name in told] == [True, 27_648, 131_072, True], "less memory, so that they take turns"
    assert main(("plan", "--all", "--gpu", "24GiB")) == 0
    assert capsys.readouterr().out.count("; context 27,648 of 131,072: what fits; a call") == 2


def test_a_hybrid_model_is_given_as_many_sequences_as_it_has_states_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file(folder, "a: {model_path: bamba-9b, sleep: null}")
    (found,) = plans(capsys, "a", "--gpu", "80GiB")
    assert found["max_num_seqs"] == found["kv_bytes"] // 62_287_360 < 1024
    assert found["asleep_bytes"] == 0


def test_models_that_can_take_turns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file(folder, "a: {model_path: llama-3-8b}, b: {model_path: llama-3-8b, sleep: null}, c: {model_path: bamba-9b}")
    found = plans(capsys, "--all", "--gpu", "48GiB")
    assert (found["take_turns"], found["why"]) == (True, "")
    a, b, c = found["models"]
    assert [each["gpus"] for each in (a, b, c)] == [[0], [0], [0]]
    assert a["host_bytes"] == WEIGHTS * 3 // 2
    assert (b["host_bytes"], b["asleep_bytes"]) == (0, 0)
    assert 0 < a["wait_s"] < a["first_wait_s"]
    assert b["wait_s"] == b["first_wait_s"], "one that is stopped is loaded every time"
    assert main(("plan", "--all", "--gpu", "48GiB")) == 0
    assert capsys.readouterr().out.startswith("all 3 can take turns\n  a on GPU 0: ")


@pytest.mark.parametrize(
    ("models", "gpus", "why"),
    [
        (
            "a: {model_path: llama-3-8b, tensor_parallel: 2}",
            ["48GiB"],
            "a: needs 2 GPUs (tensor_parallel), there are 1",
        ),
        ("a: {model_path: gone/away}", ["48GiB"], "a: no estimate: gone/away is not in the cache"),
        ("a: {model_path: llama-3-8b}", ["12GiB"], "a: needs "),
    ],
)
def test_models_that_cannot(
    folder: Path, capsys: pytest.CaptureFixture[str], models: str, gpus: list[str], why: str
) -> None:
    file(folder, models)
    found = plans(capsys, "--all", *(word for gpu in gpus for word in ("--gpu", gpu)), status=1)
    assert found["take_turns"] is False
    assert found["why"].startswith(why)
    assert main(("plan", "--all", *(word for gpu in gpus for word in ("--gpu", gpu)))) == 1
    assert why in capsys.readouterr().out


def test_those_that_leave_too_little_asleep_are_stopped_and_a_file_without_that_is_proposed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file(folder, "a: {model_path: llama-3-8b, gpu_memory: 97%}, b: {model_path: llama-3-8b, gpu_memory: 97%}")
    found = plans(capsys, "--all", "--gpu", "24GiB")
    assert (found["take_turns"], [each["may_stop"] for each in found["models"]]) == (True, [True, True])
    assert found["why"].startswith("a: asleep, others keep 1.3 GiB too much of GPU 0: some are stopped instead")
    assert all(each["wait_s"] == each["first_wait_s"] for each in found["models"])
    assert "gpu_memory: 91%" in found["proposal"]
    assert main(("plan", "--all", "--gpu", "24GiB")) == 0
    out = capsys.readouterr().out
    assert out.startswith("all 2 can take turns, a, b stopped instead of put to sleep\n")
    assert out.endswith(found["proposal"])


MACHINES = [
    (1, "24GiB", {"a": "llama-3-8b", "b": "qwen3-tiny", "c": "llama-3-8b, gpu_memory: {kv: 2GiB}"}, ""),
    (2, "25GiB", {"a": "llama-3-8b", "b": "mistral", "c": "bamba-9b, sleep: null"}, "# b: its weights in 8 bits, on"),
    (1, "80GiB", {"a": "qwen-32b", "b": "fp8-70b", "c": "llama-3-8b", "d": "bamba-9b"}, ""),
    (
        8,
        "80GiB",
        {"a": "qwen-32b", "b": "fp8-70b", "c": "405b", "d": "deepseek"},
        "# d: left out: needs 86.0 GiB on each of 8 GPUs",
    ),
    (1, "121.69GiB", {"a": "qwen-32b", "b": "fp8-70b", "c": "llama-3-8b"}, ""),
]


@pytest.mark.parametrize(("number", "size", "models", "note"), MACHINES, ids=lambda value: str(value)[:9])
def test_a_file_that_is_proposed_is_planned_with_yes(
    folder: Path, capsys: pytest.CaptureFixture[str], number: int, size: str, models: dict[str, str], note: str
) -> None:
    large(folder)
    file(folder, ", ".join(f"{name}: {{model_path: {path}}}" for name, path in models.items()))
    gpus = ("--gpu", size) * number
    main(("plan", "--all", *gpus, "--propose", "proposed.yaml"))
    text = (folder / "proposed.yaml").read_text()
    assert note in text
    assert "host_memory_for_sleep: 64GiB\n" in text, "what the file says else is kept"
    capsys.readouterr()
    found = plans(capsys, "--all", *gpus, "--config", "proposed.yaml")
    assert (found["take_turns"], found["proposal"]) == (True, "")
    assert not any(each["may_stop"] for each in found["models"])
    assert main(("plan", "--all", *gpus, "--propose", "proposed.yaml")) == 2
    assert "proposed.yaml" in capsys.readouterr().err, "never over another file"


def test_where_nothing_fits_no_file_is_proposed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file(folder, "a: {model_path: llama-3-8b}")
    assert plans(capsys, "--all", "--gpu", "4GiB", status=1)["proposal"] == ""


def test_memory_that_is_the_hosts_too_is_one_pool(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file(folder, "a: {model_path: llama-3-8b}, b: {model_path: llama-3-8b, flags: {enable-lora: true}}")
    found = plans(capsys, "--all", "--gpu", "121.69GiB")
    a, b = found["models"]
    assert (found["unified"], found["host_bytes"], a["host_bytes"]) == (True, 0, 0), "level 1 would free nothing"
    assert a["asleep_bytes"] > 4 * GIB, "its processes count there as well"
    assert b["asleep_bytes"] == 0, "without level 2 it is stopped"
    assert b["wait_s"] == b["first_wait_s"] > a["wait_s"]
    assert main(("plan", "--all", "--gpu", "64GiB:unified")) == 0
    assert "GPU and host share one memory: level 1 would free nothing" in capsys.readouterr().out
    assert main(("plan", "a", "--gpu", "121.69GiB")) == 0
    assert "level 1 would free nothing" in capsys.readouterr().out
    (found,) = plans(capsys, "a", "--gpu", "20GiB:unified")
    assert found["share"] <= 0.9, "the rest is the system's and other programs'"


def test_the_machines_own_memory_is_planned_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sidecar.yaml").write_text(
        "models: {a: {model_path: llama-3-8b}, b: {model_path: llama-3-8b}, c: {model_path: llama-3-8b}}"
    )
    found = plans(capsys, "--all", "--gpu", "80GiB", "--host-memory", "64GiB")
    assert found["host_limit_bytes"] == 32 * GIB, "a sidecar uses half of it"
    assert "host_memory_for_sleep is 32.0: some sleep at level 2" in found["why"]
    assert main(("plan", "--all", "--gpu", "80GiB")) == 0
    assert "a sidecar uses half of its machine's (--host-memory SIZE, or host_memory" in capsys.readouterr().out


def test_host_memory_is_told_where_it_is_too_little(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file(folder, ", ".join(f"{name}: {{model_path: llama-3-8b}}" for name in "abcdef"))
    found = plans(capsys, "--all", "--gpu", "80GiB")
    assert found["take_turns"] is True
    assert "of host memory, and host_memory_for_sleep is 64.0: some sleep at level 2" in found["why"]


def test_without_level_2_a_model_may_be_stopped_where_host_memory_is_too_little(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = dict.fromkeys("abc", "") | {"d": ", flags: {enable-lora: true}", "e": ", sleep: {level: 2}"}
    file(folder, ", ".join(f"{name}: {{model_path: llama-3-8b{more}}}" for name, more in models.items()))
    a, _, _, d, e = (found := plans(capsys, "--all", "--gpu", "80GiB"))["models"]
    assert found["why"].endswith("host_memory_for_sleep is 64.0: d may be stopped")
    assert (a["may_stop"], d["may_stop"], e["may_stop"]) == (False, True, False)
    assert d["wait_s"] == d["first_wait_s"] > a["wait_s"] == e["wait_s"], "at level 2 the weights are read again"
    assert (e["host_bytes"], d["host_bytes"]) == (0, a["host_bytes"])


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("a", "--gpu", "80"), "a GPU is its size, as 80GiB"),
        (("a", "--gpu", "80GiB:81GiB"), "CUDA has no more of a GPU than there is"),
        (("a", "--gpu", "80GiB:79GiB:1GiB"), "a GPU is its size"),
        (("a", "--json"), "--json needs --gpu"),
        (("--all",), "--all is for all models"),
        (("--all", "--gpu", "24GiB", "--host-memory", "much"), "a size is as 512GiB"),
        (("a", "--gpu", "24GiB:shared"), "as 64GiB:unified where its memory is the host's"),
        (("a", "--all", "--gpu", "80GiB"), "--all is for all models"),
        ((), "the following arguments are required: MODEL"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], told: str) -> None:
    file(folder, "a: {model_path: llama-3-8b}")
    try:
        status = main(("plan", *argv))
    except SystemExit as ended:
        status = int(str(ended.code))
    assert (status, told in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (b"", "config.json cannot be read"),
        (b'{"num_hidden_layers": 1000000, "hidden_size": 64}', "num_hidden_layers is 1000000"),
        (b'{"num_hidden_layers": -1, "hidden_size": 64}', "num_hidden_layers is -1"),
        (b'{"num_hidden_layers": "many", "hidden_size": 64}', "num_hidden_layers is 'many'"),
        (
            b'{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": -5}',
            "intermedi",
        ),
        (
            b'{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_experts_per_tok": "x"}',
            "experts",
        ),
    ],
)
def test_absurd_configs_are_one_clear_line(
    folder: Path, capsys: pytest.CaptureFixture[str], config: bytes, told: str
) -> None:
    file(folder, "a: {model_path: llama-3-8b}")
    (folder / "llama-3-8b" / "config.json").write_bytes(config)
    status = main(("plan", "a", "--gpu", "80GiB"))
    out, err = capsys.readouterr()
    assert status == 1
    assert told in out + err
    assert "Traceback" not in err


def test_engines_without_gpus_of_a_size_are_not_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sidecar.yaml").write_text("engine: {simulated: h100-8b}\nmodels: {a: {model_path: x}}\n")
    assert main(("plan", "a", "--gpu", "80GiB")) == 1
    assert "simulated, or on CPU" in capsys.readouterr().err
