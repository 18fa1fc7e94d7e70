"""Command line and environment of an engine, from its profile, of an engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Child, answers, free_port, get
from sidecar.core.addresses import EngineAddress
from sidecar.core.arguments import QUIET, command, environment
from sidecar.core.flags import FLAGS
from sidecar.core.inventory import Size
from sidecar.core.profile import EngineSettings, KvMemory, Profile

ROOT = Path(__file__).parents[3]
START = ("/v/python", "-m", "vllm.entrypoints.cli.main", "serve")
SIMULATED = ("py", "-m", "loadtest.engine", "--profile", "h100-8b", "--model", "m")
HALF = ("--gpu-memory-utilization", "0.5")
AWAKE: dict[str, Any] = {"sleep": None}
ADDRESS = EngineAddress(port=8100)
# As a profile without a word beyond its path has it.
HERE = "--host 127.0.0.1 --port 8100"
PLAIN = f"/m --served-model-name m --tensor-parallel-size 1 {HERE}"


def argv(address: EngineAddress = ADDRESS, share: float | None = None, **fields: Any) -> str:
    """The arguments of vLLM for such a profile, joined by spaces."""
    profile = Profile(model_path="/m", **fields)
    whole = told(profile, EngineSettings(python="/v/python"), address, share=share)
    assert tuple(whole[:4]) == START
    return " ".join(whole[4:])


def told(profile: Profile, engine: EngineSettings, address: EngineAddress = ADDRESS, **sizes: Any) -> list[str]:
    """The command line without the flag that every engine gets."""
    return [
        part for part in command(profile, engine, "m", address, own="py", size=Size(**sizes)) if part != f"--{QUIET}"
    ]


@pytest.mark.parametrize(("given", "expected"), [(None, ["61440"]), (8192, ["8192"])])
def test_a_context_that_fits_is_told_unless_the_profile_says_it(given: int | None, expected: list[str]) -> None:
    profile = Profile(model_path="/m", context_length=given)
    found = command(profile, EngineSettings(), "m", ADDRESS, own="py", size=Size(context_length=61_440))
    assert [found[at + 1] for at, word in enumerate(found) if word == "--max-model-len"] == expected


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, ["--max-num-seqs", "8"]), ({"max-num-seqs": 4}, ["--max-num-seqs", "4"])]
)
def test_sequences_at_once_are_the_profiles_before_the_estimates(flags: dict[str, Any], expected: list[str]) -> None:
    profile = Profile(model_path="/m", flags=flags)
    found = told(profile, EngineSettings(), sequences=8)
    assert found[-2:] == expected
    assert found.count("--max-num-seqs") == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, f"{PLAIN} --enable-sleep-mode"),
        (AWAKE, PLAIN),
        ({"address": EngineAddress(uds="/run/m.sock"), **AWAKE}, PLAIN.replace(HERE, "--uds /run/m.sock")),
        (
            {"tokenizer_path": "/t", "context_length": 8192, "tensor_parallel": 2, "trust_remote_code": True, **AWAKE},
            "/m --tokenizer /t --served-model-name m --max-model-len 8192 --tensor-parallel-size 2 "
            "--trust-remote-code --host 127.0.0.1 --port 8100",
        ),
        # memory: the plan's share, unless the profile says one; beside a fixed cache too
        ({"share": 0.305, **AWAKE}, f"{PLAIN} --gpu-memory-utilization 0.305"),
        ({"share": 0.3, "gpu_memory": 0.45, **AWAKE}, f"{PLAIN} --gpu-memory-utilization 0.45"),
        ({"gpu_memory": KvMemory(kv=2**30), **AWAKE}, f"{PLAIN} --kv-cache-memory-bytes 1073741824"),
        (
            {"share": 0.5, "gpu_memory": KvMemory(kv=2**30), **AWAKE},
            f"{PLAIN} --gpu-memory-utilization 0.5 --kv-cache-memory-bytes 1073741824",
        ),
        # flags of vLLM
        ({"flags": {"enforce-eager": True, "enable-prefix-caching": False}, **AWAKE},
         f"{PLAIN} --enforce-eager --no-enable-prefix-caching"),
        ({"flags": {"max-num-seqs": 8, "dtype": "bfloat16"}, **AWAKE}, f"{PLAIN} --max-num-seqs 8 --dtype bfloat16"),
        ({"flags": {"cudagraph-capture-sizes": [1, 2]}, **AWAKE}, f"{PLAIN} --cudagraph-capture-sizes 1 2"),
        ({"flags": {"limit-mm-per-prompt": {"image": 2}}, **AWAKE}, PLAIN + ' --limit-mm-per-prompt {"image":2}'),
    ],
)  # fmt: skip
def test_a_profile_becomes_the_arguments_of_vllm(fields: dict[str, Any], expected: str) -> None:
    assert argv(**fields) == expected


def test_an_engine_that_exchanges_kv_caches_is_told_so_and_where() -> None:
    profile = Profile(model_path="/m", sleep=None, kv_transfer="decode", flags={"dtype": "bfloat16", "seed": 1})
    found = command(profile, EngineSettings(), "m", ADDRESS, own="py")
    assert json.loads(found[found.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    }  # fmt: skip
    variables = environment(
        profile, EngineSettings(), (0,), {"UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}, 5601
    )
    side = {name: value for name, value in variables.items() if "NIXL" in name or "UCX" in name}
    assert side == {
        "UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601",
    }  # fmt: skip
    assert profile.transfer == "nixl-tp1-bfloat16"
    assert Profile(model_path="/m").transfer == ""
    simulated = command(profile, EngineSettings(simulated="h100-8b"), "m", ADDRESS, own="py")
    assert " ".join(simulated).endswith("--kv-transfer --kv-load-failure-policy recompute")


def test_what_is_one_value_is_one_argument() -> None:
    profile = Profile(model_path="/my models/m", flags={"hf-overrides": {"a b": [1, None]}})
    found = command(profile, EngineSettings(), "m", ADDRESS, own="py")
    assert (found[0], found[found.index("serve") + 1]) == ("py", "/my models/m")
    assert json.loads(found[found.index("--hf-overrides") + 1]) == {"a b": [1, None]}


def test_a_vllm_for_cpu_is_told_nothing_of_gpus() -> None:
    profile = Profile(model_path="/m", gpu_memory=0.5)
    found = told(profile, EngineSettings(device="cpu"), share=0.5)
    assert " ".join(found[4:]) == PLAIN


@pytest.mark.parametrize(
    ("address", "fields", "expected"),
    [
        (ADDRESS, {}, ("--host", "127.0.0.1", "--port", "8100", *HALF)),
        (
            EngineAddress(uds="/run/m.sock"),
            {"context_length": 4096},
            ("--uds", "/run/m.sock", *HALF, "--max-model-len", "4096"),
        ),
        (
            ADDRESS,
            {"flags": {"num-gpu-blocks-override": 99, "enforce-eager": True, "enable-prefix-caching": False}},
            ("--host", "127.0.0.1", "--port", "8100", *HALF, "--no-enable-prefix-caching", "--num-gpu-blocks", "99"),
        ),
        (ADDRESS, {"flags": {"enable-prompt-tokens-details": False}}, ("--host", "127.0.0.1", "--port", "8100", *HALF)),
        (
            ADDRESS,
            {"gpu_memory": KvMemory(kv=2**30)},
            ("--host", "127.0.0.1", "--port", "8100", *HALF, "--kv-cache-memory-bytes", "1073741824"),
        ),
    ],
)
def test_a_simulated_engine_is_told_what_it_obeys(
    address: EngineAddress, fields: dict[str, Any], expected: tuple[str]
) -> None:
    found = command(
        Profile(model_path="/m", **fields),
        EngineSettings(simulated="h100-8b"),
        "m",
        address,
        own="py",
        size=Size(share=0.5),
    )
    assert found == (*SIMULATED, *expected)


def test_a_simulated_engine_without_a_gpu_is_told_nothing_of_its_memory() -> None:
    engine = EngineSettings(simulated="h100-8b", device="cpu")
    found = command(Profile(model_path="/m", gpu_memory=0.5), engine, "m", ADDRESS, own="py", size=Size(share=0.5))
    assert found == (*SIMULATED, "--host", "127.0.0.1", "--port", "8100")


# -- the environment --------------------------------------------------------------------------------------------------


def test_an_engine_gets_what_is_listed_and_what_the_sidecar_sets() -> None:
    own = {"PATH": "/bin", "HF_TOKEN": "t", "AWS_SECRET": "s", "VLLM_API_KEY": "k", "CUDA_VISIBLE_DEVICES": "7"}
    own |= dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
    assert environment(Profile(model_path="/m"), EngineSettings(), (2, 0), own) == {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,0",
        "VLLM_SERVER_DEV_MODE": "1",
    }


def test_a_profiles_variables_come_before_the_sidecars_own() -> None:
    profile = Profile(model_path="/m", environment={"PATH": "/v/bin", "VLLM_NO_USAGE_STATS": "0"})
    found = environment(profile, EngineSettings(), (0,), {"PATH": "/bin"})
    assert (found["PATH"], found["VLLM_NO_USAGE_STATS"]) == ("/v/bin", "0")


@pytest.mark.parametrize("never", [Profile(model_path="/m", sleep=None), Profile(model_path="/m", pin=True)])
def test_a_model_that_never_sleeps_has_no_routes_to_put_it_to_sleep(never: Profile) -> None:
    found = environment(never, EngineSettings(), (), {})
    assert "VLLM_SERVER_DEV_MODE" not in found
    assert "--enable-sleep-mode" not in command(never, EngineSettings(), "m", EngineAddress(), own="python")
    assert found["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"gpu_memory": KvMemory(kv=3 * 2**30)}, "3"),
        ({"environment": {"VLLM_CPU_KVCACHE_SPACE": "2"}}, "2"),
    ],
)
def test_on_cpu_the_size_of_the_kv_cache_is_a_variable(fields: dict[str, Any], expected: str | None) -> None:
    profile = Profile(model_path="/m", **fields)
    assert environment(profile, EngineSettings(device="cpu"), (), {}).get("VLLM_CPU_KVCACHE_SPACE") == expected
    on_gpu = environment(Profile(model_path="/m", gpu_memory=KvMemory(kv=2**30)), EngineSettings(), (0,), {})
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu


def test_on_cpu_the_server_itself_is_started_and_told_its_model_by_a_flag() -> None:
    engine = EngineSettings(device="cpu")
    found = told(Profile(model_path="/m", **AWAKE), engine)
    assert " ".join(found) == f"py -m vllm.entrypoints.openai.api_server --model {PLAIN}"


@pytest.mark.parametrize(("flags", "last"), [({}, f"--{QUIET}"), ({QUIET: False}, f"--no-{QUIET}")])
def test_an_engine_writes_no_line_for_a_request_unless_its_profile_asks(flags: dict[str, Any], last: str) -> None:
    profile = Profile(model_path="/m", flags=flags, **AWAKE)
    assert command(profile, EngineSettings(), "m", ADDRESS, own="py")[-1] == last


@pytest.mark.slow
def test_the_simulated_engine_has_every_flag_it_is_told() -> None:
    engine = EngineSettings(simulated="h100-8b")
    asked = (sys.executable, "-m", "loadtest.engine", "--help")
    printed = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60, cwd=ROOT).stdout
    flags = set(re.findall(r"--[a-z][a-z-]*", printed))
    full = dict.fromkeys(FLAGS, 1) | {"enable-prefix-caching": False, "enable-prompt-tokens-details": True}
    profile = Profile(model_path="/m", context_length=1, flags=full, gpu_memory=KvMemory(kv=2**30))
    for address in (ADDRESS, EngineAddress(uds="/s")):
        found = command(profile, engine, "m", address, own=sys.executable, size=Size(share=0.5))
        assert len(found) > 15
        assert {part for part in found if part.startswith("--")} <= flags


@pytest.mark.slow
def test_a_simulated_engine_starts_by_its_command_and_serves_the_name(tmp_path: Path) -> None:
    profile, address = Profile(model_path="/m", context_length=4096, sleep=None), EngineAddress(port=free_port())
    argv = command(profile, EngineSettings(simulated="h100-8b"), "org/m", address, own=sys.executable)
    with Child(
        "engine", argv, tmp_path / "log", env=environment(profile, EngineSettings(simulated="h100-8b"), (), os.environ)
    ) as child:
        child.wait(lambda: answers(f"{address.url}/health"), 60.0, "health")
        (card,) = json.loads(get(f"{address.url}/v1/models")[1])["data"]
    assert (card["id"], card["max_model_len"]) == ("org/m", 4096)
