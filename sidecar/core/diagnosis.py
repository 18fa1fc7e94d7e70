"""Diagnosis of an engine's output: the kind of failure, the line that tells it, the numbers in it, and advice.

vLLM tells a failed start twice. The engine's process tells the cause, then the API server tells, last and at length,
that there was one. The cause wins. Among causes, want of memory wins, since other errors follow from it. Lines before
the last complete start do not count, so a healthy or unfinished log has no failure. Lines are as vLLM 0.5 to 0.33,
torch, transformers and huggingface_hub write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

LOOKED_AT = 2000  # lines: a traceback of each of eight workers, and the API server's
SHOWN = 400  # characters of a line
MOST_TOLD = 1e15  # a line may hold any digits
READ = 4000  # characters of a line; a longer one is cut before anything is looked for in it
NONE, UNKNOWN, SECOND_HAND = "none", "unknown", "second_hand"


class Kind(msgspec.Struct, frozen=True):
    """A kind of failure. `pattern`: what its lines hold; its named groups are the numbers. `memory`: a GPU had too
    little for what was tried, so a smaller claim or a freer GPU helps."""

    name: str
    pattern: re.Pattern[str]
    advice: str
    memory: bool = False


_GIB = r"[\d.]+) ?Gi?B"
_KV_TOO_SMALL = (
    r"max seq len \((?P<max_model_len>\d+)\)(?:"
    rf",? \(?(?P<needed_gib>{_GIB} KV cache is needed, which is larger than the available KV cache memory "
    rf"\((?P<available_gib>{_GIB}\)(?:.*?maximum model length is (?P<estimated_len>\d+))?"
    r"| is larger than the maximum number of tokens that can be stored in KV cache \((?P<available_tokens>\d+)\))"
)
_FREE_TOO_LOW = (
    rf"Free memory on device(?: \S+)? \((?P<free_gib>[\d.]+)/(?P<total_gib>{_GIB}\) on startup is less than desired "
    rf"GPU memory utilization \((?P<utilization>[\d.]+), (?P<desired_gib>{_GIB}\)"
    r"|less than desired GPU memory utilization"
)
_WAKE = r"out of memory at \S*cumem_allocator|wake_?up\b.*out of memory"
# Exact, since vLLM also gives advice about memory in plain words.
_OUT_OF_MEMORY = (
    r"(?:OutOfMemoryError|(?:CUDA|HIP|XPU|NPU)(?: [Ee]rror:)? out of memory|[Oo]ut of memory\. Tried to allocate"
    r"|(?:CUDA_|hip|cuda)\w*(?:OUT_OF_MEMORY|OutOfMemory|MemoryAllocation)|CUBLAS_STATUS_ALLOC_FAILED)"
    rf"(?:.*?Tried to allocate (?P<tried>[\d.]+ [KMGT]iB))?(?:.*?total capacity of (?P<total_gib>{_GIB})?"
    rf"(?:.*? of which (?P<free>[\d.]+ [KMGT]iB) is free)?(?:.*?\bwith (?P<seqs>\d+) dummy requests)?"
)
# In the order of their rank: an error of a later kind often follows from one of an earlier kind.
KINDS = (
    Kind(
        "kv_too_small",
        re.compile(_KV_TOO_SMALL),
        "The KV cache holds no request of the full context. Give the profile a smaller `context_length`, or more "
        "`gpu_memory`.",
    ),
    Kind(
        "mamba_blocks",
        re.compile(r"max_num_seqs \((?P<seqs>\d+)\) exceeds available Mamba cache blocks \((?P<blocks>\d+)\)"),
        "A hybrid model keeps a state per sequence. Give the profile the flag `max-num-seqs` of at most that many "
        "blocks, or more `gpu_memory`.",
    ),
    Kind(
        "no_kv",
        re.compile(r"No available memory for the cache blocks"),
        "Weights and activations leave nothing of the share for the KV cache. Give the profile more `gpu_memory`.",
        memory=True,
    ),
    Kind(
        "free_memory_too_low",
        re.compile(_FREE_TOO_LOW),
        "Another process holds memory of the GPU, or the share is too large. See who with nvidia-smi.",
        memory=True,
    ),
    Kind(
        "memory_changed",
        re.compile(
            rf"Error in memory profiling\.(?: Initial free memory (?P<free_gib>{_GIB}, current free memory "
            rf"(?P<current_gib>{_GIB})?"
        ),
        "Another process gave memory back while vLLM measured. Start it again; nothing is wrong with the profile.",
    ),
    Kind(
        "wake_oom",
        re.compile(_WAKE, re.IGNORECASE),
        "The GPU has no room for an engine that wakes. Another process holds its memory.",
        memory=True,
    ),
    Kind(
        "oom",
        re.compile(_OUT_OF_MEMORY),
        "The GPU ran out of memory. Give the profile less `gpu_memory`, so that more is left beside the share, or a "
        "smaller flag `max-num-seqs` or `max-num-batched-tokens`.",
        memory=True,
    ),
    Kind(
        "disk_full",
        re.compile(r"No space left on device|Disk quota exceeded|[Nn]ot enough (?:free )?disk space"),
        "A disk is full, or the container's /dev/shm is too small. Free some space, or move HF_HOME.",
    ),
    Kind(
        "auth_gated_model",
        re.compile(
            r"gated repo|GatedRepoError|is restricted\. You must|must be authenticated to access"
            r"|RepositoryNotFoundError|\b40[13] Client Error|is not a valid model identifier|[Ii]nvalid user token"
            r"|[Ii]nvalid username or password"
        ),
        "The hub wants a token, or the model's terms accepted, or knows no such model. Set HF_TOKEN in the profile's "
        "`env`.",
    ),
    Kind(
        "driver_mismatch",
        re.compile(
            r"NVIDIA driver on your system is too old(?: \(found version (?P<driver>\d+)\))?"
            r"|driver version is insufficient|[Dd]river/library version mismatch|Found no NVIDIA driver"
            r"|libcuda\.so\S*: cannot"
            r"|unsupported display driver|forward compatibility was attempted|unsupported toolchain"
            r"|CUDA error: system not yet initialized"
        ),
        "The GPU's driver does not fit this vLLM's CUDA. Install a newer driver, or a vLLM for the CUDA you have.",
    ),
    Kind(
        "unsupported_gpu",
        re.compile(
            r"no kernel image is available|device kernel image is invalid|not compatible with the current PyTorch"
            r"|only supported on GPUs with compute capability|not supported for the current GPU|[Mm]inimum capability"
            r"|requires? (?:a )?(?:GPU|device)s? with (?:compute )?capability"
            r"|not supported on (?:this|your|the current) GPU|compute capability (?:at least|of at least|>=)"
            r"|not supported (?:on|for) compute capability"
        ),
        "This GPU is too old or too new for the kernels. Use another `dtype`, quantization or vLLM, or another GPU.",
    ),
    Kind(
        "unsupported_arch",
        re.compile(
            r"Transformers does not recognize this architecture|Model architectures? .*(?:not supported|failed to be)"
            r"|has no vLLM implementation|Unrecognized model in |does not support (?:this|the) (?:model )?architecture"
            r"|No model architectures are specified"
        ),
        "This vLLM, or its transformers, does not know the model. Use a newer one.",
    ),
    Kind(
        "bad_flag",
        re.compile(
            r"error: (?:unrecognized arguments?|argument |ambiguous option|the following arguments are|invalid choice)"
            r"|got an unexpected keyword argument|[Nn]o such option"
            r"|[Uu]nknown (?:command.line )?(?:option|flag|argument)\b"
        ),
        "This vLLM does not know a flag of the profile, or not with that value. See its --help.",
    ),
    Kind(
        "port_in_use",
        re.compile(r"[Aa]ddress already in use|EADDRINUSE|while attempting to bind on address"),
        "Another process listens there. Give the sidecar other `engine_addresses`.",
    ),
    Kind(
        "nccl_hang",
        re.compile(
            r"NCCL operations have failed or timed out|collective operation timeout|NCCL (?:error|timeout)\b"
            r"|nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage)Error|DistBackendError|ProcessGroupNCCL.*terminat"
            r"|RPC call to \w+ timed out"
        ),
        "The GPUs of one engine do not reach each other. Try the environment variables NCCL_DEBUG=INFO, then "
        "NCCL_P2P_DISABLE=1; see the container's /dev/shm and IPC settings.",
    ),
    Kind(
        "bad_config",
        re.compile(
            r"must be divisible by tensor parallel size|is not divisible by|validation errors? for \w*(?:Config|Args)\b"
            r"|User-specified max_model_len|is greater than the derived max_model_len|[Uu]nknown quantization method"
            r"|[Qq]uantization method .* does not match|Cannot find (?:the )?config|No supported config format"
            r"|Can't load the configuration"
            r"|(?:Invalid|Unsupported|Unknown) (?:config|quantization|dtype|kv.cache|load.format|backend)"
            r"|Weight \w+ = \d+ is not|Total number of attention heads|config\.json\b.*(?:not found|invalid|No such)"
        ),
        "The model and the profile's settings do not fit each other: read the line, and mend the profile's flags.",
    ),
)
_SECOND_ADVICE = "The cause stands further up in the log, and was not kept or not understood."

# Where, in `ValueError: no such model` and `api_server.py: error: unrecognized arguments`, the words begin.
_TELLING = re.compile(r"(?:\b[\w.]*(?:Error|Exception|Interrupt|Exit)\b|\berror|\bfatal)\s*: *\S", re.IGNORECASE)
# What says only that something has been said.
_SECOND_HAND = re.compile(
    r"Engine core initialization failed|See (?:the )?root cause|EngineDeadError|EngineCore (?:failed|encountered)"
    r"|See stack trace|WorkerProc (?:failed|hit an exception)|Worker proc \S+ died|WorkerProc initialization failed"
)
# What a healthy engine writes, though it has a failure's words in it.
_HEALTHY = re.compile(r"Free memory on device .* on startup\. Desired|shared memory broadcast block found")
_COMPLETE = re.compile(r"Application startup complete")
# What a container's log and vLLM put before a level: `2026-05-14 12:43:22.149 | (EngineCore pid=219) `.
_WHO = r"(?:\d{4}-\d\d-\d\d[T ][\d:.,]+Z?[\s|]*)?(?:[(\[][^()\[\]]*pid=\d+[)\]]\s*)*"
_LEVEL = re.compile(_WHO + r"(?:INFO|DEBUG|WARNING)\b")
# Pydantic's first line only counts; what is wrong stands in the next, or below the field's name.
_COUNTED = re.compile(r"\d+ validation errors? for \S+$")
_FURTHER = re.compile(r" \[type=.*|For further information.*")
# What stands before the words: colours, `(EngineCore_0 pid=12)`, `ERROR 11-21 16:00:00 [core.py:700]`.
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(_WHO + r"(?:[A-Z]{4,8}\s+\d\d-\d\d \d\d:\d\d:\d\d\s+(?:\[[^\]]*\]\s*)?)?\s*")
_SIZES = {"KiB": 1 / 1024**2, "MiB": 1 / 1024, "GiB": 1.0, "TiB": 1024.0}  # in GiB


class Diagnosis(msgspec.Struct, frozen=True):
    """`kind`: of KINDS, or `unknown`: an error of no kind; `second_hand`: only that there was one; `none`: no failure.
    `line`: the most telling one, empty where nothing was written. `numbers`: those of the line, sizes in GiB."""

    kind: str
    line: str
    advice: str = ""
    numbers: dict[str, float] = {}

    @property
    def out_of_memory(self) -> bool:
        """Whether a GPU had too little memory."""
        return any(kind.name == self.kind and kind.memory for kind in KINDS)


def diagnosis(lines: Sequence[str]) -> Diagnosis:
    """Diagnosis of the last lines that an engine wrote."""
    said = list(_said(lines[-LOOKED_AT:]))
    for kind in KINDS:
        for words, logged in reversed(said):
            if not logged and not _HEALTHY.search(words) and (match := kind.pattern.search(words)):
                return Diagnosis(kind.name, _whole(words, said), kind.advice, _numbers(match))
    telling = [words for words, logged in said if not logged and _TELLING.search(words)]
    first_hand = [words for words in telling if not _SECOND_HAND.search(words)]
    if first_hand:
        return Diagnosis(UNKNOWN, _whole(first_hand[-1], said), "Read the line, and the ones before it in the log.")
    second_hand = [words for words, _ in said if _SECOND_HAND.search(words)]
    if second_hand:
        return Diagnosis(SECOND_HAND, _cut(second_hand[-1]), _SECOND_ADVICE)
    return Diagnosis(NONE, _cut(said[-1][0]) if said else "")


def _said(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Words of each line since the last complete start, and whether it was logged as no error."""
    since = max((number for number, line in enumerate(lines) if _COMPLETE.search(line)), default=-1) + 1
    for line in lines[since:] or lines[-1:]:
        plain = _COLOUR.sub("", line[:READ])
        words = plain[match.end() :] if (match := _PREFIX.match(plain)) else plain
        shown = "".join(character if character.isprintable() else " " for character in words).strip()
        if shown:
            yield shown, _LEVEL.match(plain) is not None


def _whole(words: str, said: Sequence[tuple[str, bool]]) -> str:
    """The line, with the two after it where it only counts mistakes."""
    if _COUNTED.search(words):
        every = [each for each, _ in said]
        at = len(every) - every[::-1].index(words)
        details = " ".join(_FURTHER.sub("", line) for line in every[at : at + 2]).strip()
        words = f"{words}: {details}" if details else words
    return _cut(words)


def _cut(words: str) -> str:
    return words if len(words) <= SHOWN else f"{words[:SHOWN]}..."


def _numbers(match: re.Match[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, text in match.groupdict().items():
        number, _, unit = (text or "").partition(" ")
        if re.fullmatch(r"\d+(?:\.\d+)?", number):
            size = round(min(float(number), MOST_TOLD) * _SIZES.get(unit, 1.0), 6)
            found[f"{name}_gib" if unit else name] = int(size) if number.isdecimal() and not unit else size
    return found
