"""Profile: one model that the sidecar may run, and its settings. A caller names a profile and nothing else.

Times are seconds, sizes bytes, shares 0..1, whatever units the file used. `faults` finds mistakes that no single field
shows. flags.py has the flags that may be handed on to vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gateway.shared.files.checked import Fault, Path, listed, nearest, readable, shortened
from gateway.shared.files.kinds import Text
from gateway.shared.files.units import GIB, SECONDS, Bytes, Count, Seconds, Share
from gateway.shared.protocol import Role
from sidecar.core.flags import CPU_KV, FLAGS, OWNED, OWNED_VARIABLES, VARIABLES, fits, owned_flag

Bounds = msgspec.Meta
Moment = Annotated[Seconds, Bounds(ge=1, le=30 * 86_400)]
GpuIndex = Annotated[Count, Bounds(ge=0, le=127)]
# What is handed on as an argument must not look like a flag.
FileName = Annotated[str, Text(r"[^\x00-\x1f-][^\x00-\x1f]{0,4095}", "a file name that does not begin with -")]
ModelPath = Annotated[str, Text(r"[^\x00-\x20-][^\x00-\x1f]{0,4095}", "a folder, a file or the model's id on a hub")]
ServedName = Annotated[str, Text(r"[!-,.-~][!-~]{0,199}", "a model name without spaces")]
SimulatedName = Annotated[str, Text(r"[a-z0-9][a-z0-9-]{0,63}", "the name of a latency profile such as h100-8b")]
Prompt = Annotated[str, Text(r"(?s:.{1,10000})", "a prompt of at most 10000 characters")]
FlagName = Annotated[str, Text(r"-{0,2}[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "the name of a flag such as max-num-seqs")]
VariableName = Annotated[str, Text(r"[A-Za-z_][A-Za-z0-9_]{0,63}", "the name of a variable")]
VariableText = Annotated[str, Text(r"[^\x00-\x1f\x7f]{0,4096}", "text of one line")]
Flag = Any  # as YAML writes it; FLAGS says what each takes


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The program that runs a model.

    `python`: Interpreter whose vLLM runs; null: the sidecar's own.
    `device`: Device of that vLLM; cpu: a vLLM built for CPU, which frees no memory asleep.
    `simulated`: Latency profile of a simulated engine in place of vLLM, for a trial without a GPU.
    """

    shorthand: ClassVar[str] = "python"

    python: FileName | None = None
    device: Literal["gpu", "cpu"] = "gpu"
    simulated: SimulatedName | None = None


class KvMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a model on each GPU.

    `kv`: Memory of the KV cache; weights and the rest come on top.
    """

    kv: Annotated[Bytes, Bounds(ge=16 * 1024**2, le=1024**4)]


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """Sleep of a model.

    `level`: 1: weights stay in host memory while there is room, and waking is fastest; 2: weights are dropped.
    `after`: Idle time until the model sleeps; null: only when another model needs its memory.
    """

    level: Literal[1, 2] = 1
    after: Moment | None = None


class Warmup(msgspec.Struct, frozen=True, kw_only=True):
    """Calls made before a model counts as ready.

    `prompt`: Prompt of the calls.
    `requests`: Number of calls; 0: none.
    """

    prompt: Prompt = "hello"
    requests: Annotated[Count, Bounds(ge=0, le=100)] = 1


PREFILL_ROLES = frozenset(("kv_producer", "kv_consumer"))  # half an engine, which gateways would send whole calls
BLOCK_FLAGS = ("dtype", "kv-cache-dtype", "block-size")  # engines that exchange KV caches have the same
LONGEST_TRANSFER = 128  # characters of a group's name
LOAD_TIMEOUT = 3600.0  # seconds, unless told


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Model that the sidecar may run.

    `model_path`: Folder of the model, its GGUF file with a config.json beside it, or its id on a hub.
    `tokenizer_path`: Tokenizer, if it is not beside the model.
    `served_name`: Name that calls use; null: the profile's name.
    `aliases`: Other names that calls may use; all count as the served name.
    `adapters`: LoRA adapters, each a folder under the name that calls use.
    `context_length`: Tokens of prompt and answer; null: the model's own, or the longest that fits its memory.
    `trust_remote_code`: Whether to run code that came with the model.
    `tensor_parallel`: Number of GPUs that share the model.
    `gpus`: GPUs for the model; null: those that fit best.
    `gpu_memory`: KV cache on each GPU, or a share of the GPU in all; auto: worked out by the sidecar.
    `sleep`: Sleep of the model; null: stopped instead to make room.
    `stop_after`: Idle time until the model is stopped; null: never.
    `pin`: Whether the model is never put to sleep or stopped to make room.
    `max_starvation`: Longest wait of a call before models used more give way; auto: five switches, from 5 s to 1 min.
    `warmup`: Calls made before the model counts as ready.
    `load_stall`: Longest start without progress (new lines, bytes read, written, downloaded); CPU time doubles it.
    `load_timeout`: Longest start in all, at least `load_stall`; null: no limit while it progresses.
    `engine`: Engine of this model, if it differs from the others'.
    `kv_transfer`: Role in the exchange of KV caches with the model's other engines on this machine, by NIXL. prefill:
    reads prompts for others, and answers what they have no room for; decode: answers calls and reads no prompt for
    others; both; null: exchanges none.
    `flags`: More flags of vLLM, without their dashes.
    `environment`: More environment variables.
    """

    model_path: ModelPath
    tokenizer_path: ModelPath | None = None
    served_name: ServedName | None = None
    aliases: tuple[ServedName, ...] = ()
    adapters: Mapping[ServedName, FileName] = msgspec.field(default_factory=dict)
    context_length: Annotated[Count, Bounds(ge=1, le=1_000_000_000)] | None = None
    trust_remote_code: bool = False
    tensor_parallel: Annotated[Count, Bounds(ge=1, le=64)] = 1
    gpus: tuple[GpuIndex, ...] | None = None
    gpu_memory: Literal["auto"] | Annotated[Share, Bounds(ge=0.02, le=1)] | KvMemory = "auto"
    sleep: Sleep | None = Sleep()
    stop_after: Moment | None = None
    pin: bool = False
    max_starvation: Literal["auto"] | Moment = "auto"
    warmup: Warmup = Warmup()
    load_stall: Moment = 300.0
    load_timeout: Moment | None = LOAD_TIMEOUT
    engine: EngineSettings | None = None
    kv_transfer: Role | None = None
    flags: Mapping[FlagName, Flag] = msgspec.field(default_factory=dict)
    environment: Mapping[VariableName, VariableText] = msgspec.field(default_factory=dict)

    @property
    def sleeps(self) -> Sleep | None:
        """Settings of sleep; None if the profile is pinned or has no `sleep`. Only an engine that may sleep has vLLM's
        development routes."""
        return None if self.pin else self.sleep

    @property
    def transfer(self) -> str:
        """Name of the engines of its model that it exchanges KV caches with: those whose blocks are alike. Empty: it
        exchanges none."""
        if self.kv_transfer is None:
            return ""
        blocks = [str(self.flags[name]) for name in BLOCK_FLAGS if name in self.flags]
        return "-".join(["nixl", f"tp{self.tensor_parallel}", *blocks])[:LONGEST_TRANSFER]


def faults(profile: Profile, at: Path) -> Iterator[Fault]:
    """Mistakes that keep a well-formed profile, which is at the path `at`, from being used."""
    yield from readable(_gpus(profile, at), _idle(profile, at), _loads(profile, at))
    yield from readable(engine_faults(profile.engine, (*at, "engine")))
    yield from readable(_transfer(profile, at))
    for name, value in profile.flags.items():
        yield from _flag(name, value, (*at, "flags", name))
        if profile.adapters and name in ("enable-lora", "lora-modules"):
            yield Fault((*at, "flags", name), "adapters as well", "one of them")
    for name in profile.environment:
        yield from _variable(name, (*at, "environment", name))


def _transfer(profile: Profile, at: Path) -> Iterator[Fault]:
    if profile.kv_transfer is None:
        return
    if profile.kv_transfer == "prefill" and not profile.pin:
        yield Fault((*at, "kv_transfer"), "prefill", "pin: true too: no call would start an engine that answers none")
    elif profile.sleeps is not None:
        expected = "sleep: null, or pin: true: NIXL has registered the KV cache, which an engine asleep gives back"
        yield Fault((*at, "kv_transfer"), profile.kv_transfer, expected)
    if pooling(profile):
        yield Fault((*at, "kv_transfer"), profile.kv_transfer, "null: a pooling model keeps no KV cache")
    if "kv-transfer-config" in profile.flags:
        yield Fault((*at, "flags", "kv-transfer-config"), "kv_transfer as well", "one of them")


def engine_faults(engine: EngineSettings | None, at: Path) -> Iterator[Fault]:
    """Mistakes in how the engine is started that no single field shows."""
    if engine is not None and engine.simulated is not None and engine.python is not None:
        yield Fault((*at, "simulated"), "python as well", "one of them: a simulated engine is no vLLM")


def on_cpu(profile: Profile, at: Path) -> Iterator[Fault]:
    """Mistakes of memory settings that mean nothing without a GPU."""
    memory = profile.gpu_memory
    if isinstance(memory, float):
        expected = "auto, or {kv: 4GiB}: on CPU there is no GPU to have a share of"
        yield Fault((*at, "gpu_memory"), f"{memory:.0%}", expected)
    elif isinstance(memory, KvMemory) and memory.kv % GIB:
        expected = "whole GiB such as 1GiB: vLLM on CPU cannot be told anything else"
        yield Fault((*at, "gpu_memory", "kv"), f"{memory.kv / GIB:.2f} GiB", expected)
    elif isinstance(memory, KvMemory) and CPU_KV in profile.environment:
        yield Fault((*at, "environment", CPU_KV), "gpu_memory as well", "one of them")


def _gpus(profile: Profile, at: Path) -> Iterator[Fault]:
    gpus = profile.gpus
    if gpus is None:
        return
    if len(set(gpus)) < len(gpus):
        yield Fault((*at, "gpus"), f"a GPU twice in {_numbers(gpus)}", "each GPU once")
    elif len(gpus) != profile.tensor_parallel:
        expected = f"as many as tensor_parallel says, {profile.tensor_parallel}"
        yield Fault((*at, "gpus"), f"{len(gpus)} in {_numbers(gpus)}", expected)


def _numbers(gpus: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, gpus))}]"


def _idle(profile: Profile, at: Path) -> Iterator[Fault]:
    after = profile.sleep.after if profile.sleep is not None else None
    if profile.pin:
        for path, seconds in ((("sleep", "after"), after), (("stop_after",), profile.stop_after)):
            if seconds is not None:
                yield Fault((*at, *path), SECONDS.show(seconds), "null: a pinned model is always ready")
    elif after is not None and profile.stop_after is not None and profile.stop_after <= after:
        expected = f"more than sleep.after, {SECONDS.show(after)}, or it would never sleep"
        yield Fault((*at, "stop_after"), SECONDS.show(profile.stop_after), expected)


def _loads(profile: Profile, at: Path) -> Iterator[Fault]:
    if profile.load_timeout not in (None, LOAD_TIMEOUT) and profile.load_timeout < profile.load_stall:
        expected = f"at least load_stall, {SECONDS.show(profile.load_stall)}"
        yield Fault((*at, "load_timeout"), SECONDS.show(profile.load_timeout), expected)


def _flag(name: str, value: Flag, at: Path) -> Iterator[Fault]:
    instead = owned_flag(name)
    if instead is not None:
        yield Fault(at, f"the flag {shortened(name)}", instead)
    elif name not in FLAGS:
        near = nearest(name.lstrip("-").replace("_", "-"), (*FLAGS, *OWNED))
        yield Fault(at, f"the flag {shortened(name)}", OWNED.get(near or "", f"one of {listed(FLAGS)}"), near)
    elif not fits(name, value):
        yield Fault(at, _shown(value), FLAGS[name])
    elif name == "kv-transfer-config" and value.get("kv_role") in PREFILL_ROLES:
        yield Fault(
            (*at, "kv_role"),
            str(value["kv_role"]),
            "kv_both: kv_transfer says that an engine only reads prompts for others, or only answers",
        )


def _shown(value: Flag) -> str:
    if isinstance(value, str):
        return shortened(value)
    return "nothing" if value is None else shortened(msgspec.json.encode(value).decode())


def _variable(name: str, at: Path) -> Iterator[Fault]:
    if name in OWNED_VARIABLES:
        yield Fault(at, f"the variable {name}", OWNED_VARIABLES[name])
    elif name not in VARIABLES:
        yield Fault(at, f"the variable {name}", f"one of {listed(sorted(VARIABLES))}", nearest(name, VARIABLES))


def pooling(profile: Profile) -> bool:
    """Whether a profile says that its model generates nothing: it embeds, classifies, scores."""
    return profile.flags.get("runner") == "pooling" or profile.flags.get("task") in {
        "classify",
        "embed",
        "embedding",
        "reward",
        "score",
    }
