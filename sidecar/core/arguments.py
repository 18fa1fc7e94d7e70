"""Command line and environment of an engine, made from its profile.

A profile's words are the same for every engine; only this module turns them into vLLM's own. The command starts a
module with the interpreter that the file names: the module behind the `vllm` script, or, on CPU, the API server's own,
which newer versions warn of. A build for CPU has no metadata by the name of vllm, without which the script does not
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.addresses import LOOPBACK, EngineAddress
from sidecar.core.flags import CPU_KV, VARIABLES
from sidecar.core.inventory import Size
from sidecar.core.profile import EngineSettings, KvMemory, Profile

CLI = ("-m", "vllm.entrypoints.cli.main", "serve")
SERVER = ("-m", "vllm.entrypoints.openai.api_server")
MODEL = "--model"  # before the model's path, for SERVER
SIMULATED = "loadtest.engine"
UNSIZED = Size()
# Sidecar and gateways ask again and again: a line for each would push an engine's own lines out of its log.
QUIET = "disable-uvicorn-access-log"
AT_ONCE = 4  # adapters that one batch may use, unless told: each has a slot of its own in GPU memory
# Every engine is both to vLLM: gateways obey the profile's role. An engine that cannot fetch a prompt reads it.
NIXL: Mapping[str, str] = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
}  # fmt: skip
SIDE_HOST, SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
# The profile's words that are vLLM's by another name; model_path has none, it comes first.
UNIFIED: Mapping[str, str] = {
    "tokenizer_path": "--tokenizer",
    "served_name": "--served-model-name",
    "context_length": "--max-model-len",
    "tensor_parallel": "--tensor-parallel-size",
    "trust_remote_code": "--trust-remote-code",
}
# Of a profile's flags those that a simulated engine obeys, and what it calls them; the others mean nothing to it.
OF_SIMULATED: Mapping[str, str] = {
    "enable-prompt-tokens-details": "--enable-prompt-tokens-details",
    "max-num-batched-tokens": "--max-num-batched-tokens",
    "max-num-seqs": "--max-num-seqs",
    "num-gpu-blocks-override": "--num-gpu-blocks",
    "scheduling-policy": "--scheduling-policy",
}


def command(
    profile: Profile,
    engine: EngineSettings,
    served_name: str,
    address: EngineAddress,
    *,
    own: str,
    size: Size = UNSIZED,
    to_compare: bool = False,
) -> tuple[str, ...]:
    """The command line that starts a profile's engine.

    `own`: the sidecar's own interpreter, for an engine that names none. `size`: what the plan has claimed for it; what
    the profile says of share, sequences and context comes first. vLLM is told the share beside a cache of fixed size
    too, since it does not start without that much free. `to_compare`: as all versions of the sidecar word it, whatever
    they start it by.
    """
    if engine.simulated is not None:
        return _simulated(profile, engine, served_name, address, own, size.share)
    values = {field: getattr(profile, field) for field in UNIFIED} | {"served_name": served_name}
    values["context_length"] = profile.context_length or size.context_length
    found = [part for field, value in values.items() for part in _argument(UNIFIED[field], value)]
    found += _listen(address)
    if engine.device == "gpu":
        found += _memory(profile, size.share)
        found += ["--enable-sleep-mode"] if profile.sleeps is not None else []
    if "max-num-seqs" not in profile.flags:
        found += _argument("--max-num-seqs", size.sequences)
    found += lora_arguments(profile, size.lora_rank)
    found += _argument("--kv-transfer-config", None if profile.kv_transfer is None else NIXL)
    for name, value in (profile.flags if to_compare else {QUIET: True, **profile.flags}).items():
        found += [f"--no-{name}"] if value is False else _argument(f"--{name}", value)
    launcher = (*SERVER, MODEL) if engine.device == "cpu" and not to_compare else CLI
    return (engine.python or own, *launcher, profile.model_path, *found)


def environment(
    profile: Profile,
    engine: EngineSettings,
    gpus: Sequence[int],
    own: Mapping[str, str],
    transfer_port: int = 0,
) -> dict[str, str]:
    """The whole environment of a profile's engine on the GPUs with these numbers, as nvidia-smi counts them.

    `own`: the sidecar's environment, of which an engine gets what VARIABLES lists. Without GPUs it sees none.
    `transfer_port`: as in EngineAddress.
    """
    inherited = {name: value for name, value in own.items() if name in VARIABLES}
    found = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", **inherited, **profile.environment}
    if engine.device == "cpu" and isinstance(profile.gpu_memory, KvMemory):
        found[CPU_KV] = str(profile.gpu_memory.kv // GIB)
    # What has no line yet is a stall, so no line waits in a buffer.
    found |= {"PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if profile.sleeps is not None:  # only then has vLLM routes to put it to sleep, which ask nobody for a key
        found["VLLM_SERVER_DEV_MODE"] = "1"
    if profile.kv_transfer is not None:
        found |= {SIDE_HOST: LOOPBACK, SIDE_PORT: str(transfer_port)}
    return found


def lora_slots(profile: Profile) -> int:
    """`--max-loras`: adapters that one batch may use."""
    given = profile.flags.get("max-loras")
    return int(given) if given else min(AT_ONCE, len(profile.adapters))


def largest_rank(profile: Profile, rank: int) -> int:
    """`--max-lora-rank`; `rank`: that of the profile's adapters."""
    return int(profile.flags.get("max-lora-rank") or rank)


def lora_arguments(profile: Profile, rank: int) -> list[str]:
    """Arguments for a profile with adapters whose largest rank is `rank`; 0: not known, vLLM's own. The profile's flags
    `max-loras` and `max-lora-rank` win; `max-cpu-loras` is vLLM's."""
    if not profile.adapters:
        return []
    found = ["--enable-lora"]
    if "max-loras" not in profile.flags:
        found += ["--max-loras", str(lora_slots(profile))]
    if rank and "max-lora-rank" not in profile.flags:
        found += ["--max-lora-rank", str(rank)]
    modules = ({"name": name, "path": path} for name, path in profile.adapters.items())
    return [*found, "--lora-modules", *(msgspec.json.encode(each).decode() for each in modules)]


def _argument(flag: str, value: Any) -> list[str]:
    """A flag with its value; nothing where the value is None or False, the flag alone where it is True."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, Mapping):
        return [flag, msgspec.json.encode(value).decode()]
    return [flag, str(value)]


def _listen(address: EngineAddress) -> list[str]:
    """Always told: what vLLM does by itself is to listen for everybody."""
    if address.uds is not None:
        return ["--uds", address.uds]
    return ["--host", LOOPBACK, "--port", str(address.port)]


def _memory(profile: Profile, share: float | None) -> list[str]:
    memory = profile.gpu_memory
    kept = memory if isinstance(memory, float) else share
    cache = memory.kv if isinstance(memory, KvMemory) else None
    return [
        *_argument("--gpu-memory-utilization", kept),
        *_argument("--kv-cache-memory-bytes", cache),
    ]


def _simulated(
    profile: Profile, engine: EngineSettings, served_name: str, address: EngineAddress, own: str, share: float | None
) -> tuple[str, ...]:
    found = ["--profile", str(engine.simulated), "--model", served_name, *_listen(address)]
    found += _memory(profile, share) if engine.device == "gpu" else []
    found += _argument("--max-model-len", profile.context_length)
    found += [] if profile.kv_transfer is None else ["--kv-transfer", "--kv-load-failure-policy", "recompute"]
    found += ["--no-enable-prefix-caching"] if profile.flags.get("enable-prefix-caching") is False else []
    for name, flag in OF_SIMULATED.items():
        found += _argument(flag, profile.flags.get(name))
    return (own, "-m", SIMULATED, *found)
