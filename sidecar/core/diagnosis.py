"""Diagnosis of an engine's output: the kind of failure, the line that tells it, the numbers in it, and advice.

vLLM tells a failed start twice. The engine's process tells the cause, then the API server tells, last and at length,
that there was one. The cause wins. Among causes, want of memory wins, since other errors follow from it. Lines before
the last complete start do not count, so a healthy or unfinished log has no failure.

A kind is found by a line's words, else by where the last exception of the innermost process was raised. An exception
of no kind is told with what vLLM was doing then, and what helps there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from sidecar.core.failure_kinds import KINDS, REFUSED, REFUSES, Kind

LOOKED_AT = 2000  # lines: a traceback of each of eight workers, and the API server's
READ = 4000  # characters of a line; a longer one is cut before anything is looked for in it
READ_IN_ALL = 400_000  # characters of all lines, of which 2,000 usual ones have 300,000
SHOWN = 400  # characters of a line
MOST_TOLD = 1e15  # a line may hold any digits
NONE, UNKNOWN, SECOND_HAND = "none", "unknown", "second_hand"
ARGUMENTS = frozenset(("bad_flag", "bad_config"))  # kinds whose remedy is another profile


class Phase(msgspec.Struct, frozen=True):
    """A phase of a start. `begins`: what vLLM writes in it first. `advice`: what to look at when it fails in it."""

    name: str
    begins: re.Pattern[str]
    advice: str


PHASES = (
    Phase(
        "reading its arguments",
        re.compile(r"API server version|non-default args|Automatically detected platform"),
        "See the profile's flags and environment, and that vLLM is installed.",
    ),
    Phase(
        "setting up its GPUs",
        re.compile(r"Initializing an? .*engine|Waiting for .* engine|rank \d+ in world size|world_size="),
        "See nvidia-smi, `tensor_parallel`, and the container's GPUs and /dev/shm.",
    ),
    Phase(
        "loading weights",
        re.compile(
            r"Starting to load model|Loading (?:safetensors|pt|weights)|[Dd]ownload\w* weights|model weights format"
        ),
        "See that the model's files are whole, and that this vLLM knows its class and quantization.",
    ),
    Phase(
        "compiling and measuring",
        re.compile(r"Model loading took|torch\.compile|Dynamo bytecode|Encoder cache|[Mm]emory profiling"),
        "Try the flag `enforce-eager`, which compiles nothing, another attention backend, or another vLLM.",
    ),
    Phase(
        "setting up its KV cache and CUDA graphs",
        re.compile(r"Available KV cache memory|GPU KV cache size|# GPU blocks|Capturing CUDA graph|Graph capturing"),
        "Try the flag `enforce-eager`, which captures no graphs, or a smaller `max-num-seqs`.",
    ),
    Phase(
        "serving",
        re.compile(r"init engine|Starting vLLM|Started server process|Application startup complete|Avg prompt through"),
        "It had started. See what was called before, and dmesg.",
    ),
)
_SECOND_ADVICE = (
    "The cause stands further up in the log, and was not kept or not understood. A process that died without a word "
    "was mostly ended by the kernel: see dmesg."
)
# What says only that something has been said.
_SECOND_HAND = re.compile(
    r"Engine core initialization failed|See (?:the )?root cause|EngineDeadError|EngineCore (?:failed|encountered)"
    r"|See stack trace|WorkerProc (?:failed|hit an exception)|Worker proc \S+ died|WorkerProc initialization failed"
    r"|died unexpectedly|Engine process failed|Exception in worker|Error executing method"
    r"|^(?:Segmentation fault|Aborted)\b"
)
# What a healthy engine writes, though it has a failure's words in it.
_HEALTHY = re.compile(r"Free memory on device .* on startup\. Desired|shared memory broadcast block found")
_COMPLETE = re.compile(r"Application startup complete")
# Pydantic's first line only counts; what is wrong stands in the next, or below the field's name.
_COUNTED = re.compile(r"\d+ validation errors? for \S+$")
_FURTHER = re.compile(r" \[type=.*|For further information.*")
_SIZES = {"KiB": 1 / 1024**2, "MiB": 1 / 1024, "GiB": 1.0, "TiB": 1024.0}  # in GiB


_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BEFORE = (
    r"[\w.-]{1,100} +\|(?= |$)",  # docker compose: `vllm-1  | `
    r"[A-Z][a-z]{2} +\d+ [\d:]{8} \S+ [^\s:\[]{1,100}\[\d+\]:",  # journald: `Aug 17 18:42:18 host vllm[8052]: `
    r"\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?",  # Kubernetes: `2026-05-14T12:43:22.149Z `
    r"std(?:out|err)(?: [FP]|/[A-Z]+)?(?= )",
    r"[(\[][^()\[\]]*pid=\d+[^()\[\]]*[)\]]",  # vLLM, Ray: `(EngineCore_DP0 pid=12) `
    r"[(\[](?:[A-Za-z]\w{0,20}|\d+/\d+|[\d:]{8})[)\]]:?(?= |\[|[A-Z])",  # torchrun: `[rank0]:`
    r"[EWIF]\d{4} [\d:.]+ +\d+ \S+\]",  # glog, as torch writes: `E0701 14:28:21.083000 911603 torch/x.py:539] `
)
_PREFIX = re.compile(rf"(?:(?:{'|'.join(_BEFORE)})[\s|]*)+")
_LEVEL = re.compile(r"(?P<level>[A-Z]{4,8})\s+\d\d-\d\d \d\d:\d\d:\d\d\s+(?:\[[^\]]*\]\s*|\S+\] ?)?")
_NO_ERROR = re.compile(r"(?:INFO|DEBUG|WARNING)\b")
_PROCESS = re.compile(r"\((?P<name>\w+)[^()]*pid=\d+")
_FRAME = re.compile(r"File \"[^\"]+\", line \d+")
_POINTERS = re.compile(r"[\s~^]+$")
# `ValueError: x`, `triton.runtime.errors.OutOfResources: x`, `AssertionError`, `api_server.py: error: x`.
_RAISED = r"(?:(?:Error|Exception|Interrupt|Exit)\b|\berror|\bfatal)\s*: *\S"
_BY_MODULE = r"(?:[a-z_]\w*\.)+[A-Z]\w+: \S"
_EXCEPTION = re.compile(rf"(?i:{_RAISED})|^{_BY_MODULE}")  # searched for: what stands before it is not read again
_EXCEPTION_FIRST = re.compile(rf"(?i:[\w.]{{0,200}}{_RAISED})|{_BY_MODULE}")
_BARE = re.compile(r"[\w.]*(?:Error|Exception)$")


class Line(msgspec.Struct, frozen=True):
    """A line's `words`. `harmless`: logged as no error. `depth`: 2 of a worker, 1 of an engine core, 0 of others.
    `exception`: it tells of one, whose traceback's `frames` are these, innermost last."""

    words: str
    harmless: bool
    depth: int
    exception: bool = False
    frames: tuple[str, ...] = ()


class Diagnosis(msgspec.Struct, frozen=True):
    """`kind`: of KINDS, or `unknown`: an error of no kind; `second_hand`: only that there was one; `none`: no failure.
    `line`: the most telling one, empty where nothing was written. `numbers`: those of the line, sizes in GiB. `phase`:
    what vLLM was doing, of PHASES; empty where there is no failure."""

    kind: str
    line: str
    advice: str = ""
    numbers: dict[str, float] = {}
    phase: str = ""

    @property
    def refused_arguments(self) -> bool:
        """Whether vLLM refused its arguments before it touched a GPU, so that the same start fails again."""
        return self.kind in ARGUMENTS and self.phase == PHASES[0].name

    @property
    def out_of_memory(self) -> bool:
        """Whether a GPU had too little memory."""
        return any(kind.name == self.kind and kind.memory for kind in KINDS)


def diagnosis(lines: Sequence[str]) -> Diagnosis:
    """Diagnosis of the last lines that an engine wrote."""
    looked_at = _last(lines)
    since = max((number for number, line in enumerate(looked_at) if _COMPLETE.search(line)), default=-1) + 1
    told = list(_said(looked_at[since:] or looked_at[-1:]))
    phase = _phase(told, PHASES[-1] if since else PHASES[0])
    kinds = [kind for kind in KINDS if not (since and phase is PHASES[-1] and kind.starting)]
    ill = [line for line in told if not line.harmless and not _HEALTHY.search(line.words)]
    first_hand = [line for line in ill if line.exception and not _SECOND_HAND.search(line.words)]
    last = max(enumerate(first_hand), key=lambda each: (each[1].depth, each[0]))[1] if first_hand else None
    for weak in (False, True):
        for kind in kinds:
            for line in reversed(ill):
                if kind.weak is weak and (match := kind.pattern.search(line.words)):
                    return Diagnosis(kind.name, _whole(line.words, told), kind.advice, _numbers(match), phase.name)
        if last is not None and (
            placed := _by_place(last, kinds if weak else [kind for kind in kinds if kind is not REFUSES])
        ):
            return Diagnosis(placed.name, _whole(last.words, told), placed.advice, phase=phase.name)
    if last is not None:
        name, advice = UNKNOWN, f"It failed while {phase.name}. {phase.advice}"
        if REFUSES in kinds and REFUSED.search(last.words):
            name, advice = REFUSES.name, REFUSES.advice
        return Diagnosis(name, _whole(last.words, told), advice, phase=phase.name)
    second_hand = [line.words for line in ill if _SECOND_HAND.search(line.words)]
    if second_hand:
        advice = f"It failed while {phase.name}. {_SECOND_ADVICE}"
        return Diagnosis(SECOND_HAND, _cut(second_hand[-1]), advice, phase=phase.name)
    return Diagnosis(NONE, _cut(told[-1].words) if told else "")


def _last(lines: Sequence[str]) -> Sequence[str]:
    """The last LOOKED_AT lines, or fewer, which have READ_IN_ALL characters."""
    room = READ_IN_ALL
    for number, line in enumerate(reversed(lines[-LOOKED_AT:])):
        room -= min(len(line), READ)
        if room < 0:
            return lines[-number:]
    return lines[-LOOKED_AT:]


def _said(lines: Sequence[str]) -> Iterator[Line]:
    """Yield the lines of an engine's output. Frames and source lines are attached to their exception. An exception
    without words gets the source line that raised it."""
    frames: list[str] = []
    source, in_frame = "", False
    for text in lines:
        plain = _COLOUR.sub("", text[:READ])
        start = match.end() if (match := _PREFIX.match(plain)) else 0
        process = found["name"] if (found := _PROCESS.search(plain[:start])) else ""
        depth = 2 if "orker" in process else 1 if "Engine" in process else 0
        harmless = _NO_ERROR.match(plain, start) is not None
        if level := _LEVEL.match(plain, start):
            start = level.end()
        words = "".join(letter if letter.isprintable() else " " for letter in plain[start:])
        words = _FURTHER.sub("", words).strip()
        if not words or _POINTERS.match(words):
            continue
        if not harmless and _FRAME.match(words):
            frames.append(words)
            source, in_frame = "", True
            continue
        bare = _BARE.fullmatch(words) is not None
        if in_frame and not bare and not harmless and not _EXCEPTION_FIRST.match(words):
            source, in_frame = words, False
            continue
        exception = not harmless and (bare or _EXCEPTION.search(words) is not None)
        if bare and source:
            words = f"{words}: {source}"
        yield Line(words, harmless, depth, exception, tuple(frames) if exception else ())
        if exception:
            frames, source, in_frame = [], "", False


def _phase(told: Sequence[Line], otherwise: Phase) -> Phase:
    """The last phase of which something was logged."""
    begun = [phase for phase in PHASES if any(phase.begins.search(line.words) for line in told)]
    return begun[-1] if begun else otherwise


def _by_place(line: Line, kinds: Sequence[Kind]) -> Kind | None:
    """The kind of the innermost frame that has one."""
    for frame in reversed(line.frames):
        for kind in kinds:
            if kind.place is not None and kind.place.search(frame):
                return kind
    return None


def _whole(words: str, told: Sequence[Line]) -> str:
    """The line, with the two after it where it only counts mistakes."""
    if _COUNTED.search(words):
        every = [each.words for each in told]
        at = len(every) - every[::-1].index(words)
        details = " ".join(every[at : at + 2])
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
