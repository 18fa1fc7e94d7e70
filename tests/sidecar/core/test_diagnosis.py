"""Diagnosis of a failed engine: the decisive line of what vLLM, torch and Python write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.diagnosis import LOOKED_AT, READ, READ_IN_ALL, SECOND_HAND, SHOWN, UNKNOWN, diagnosis
from sidecar.core.failure_kinds import KINDS
from tests.sidecar.fresh_lines import fresh_lines, right

PUBLISHED = [
    json.loads(line) for line in (Path(__file__).parents[1] / "corpus" / "log_lines.jsonl").read_text().splitlines()
]
FAILURES = {SECOND_HAND, *(kind.name for kind in KINDS)}
READY = "(APIServer pid=1) INFO:     Application startup complete."
CORE = "(EngineCore_DP0 pid=4242) ERROR 11-21 16:00:00 [core.py:700] "
TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 3, in f', "    raise ValueError"]
SECOND = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
FREE = (
    "ValueError: Free memory on device (3.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.9, "
    "71.3 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
SHORT = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.20 GiB)."
)
OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB"
COUNTED = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
LONG = [
    "  Value error, max_model_len (1000000) is greater than 4096 [type=value_error, input_value=ArgsKwargs((), {})]",
    "    For further information visit https://errors.pydantic.dev/2.12/v/value_error",
]
TOLD = [
    ([CORE + FREE, *TRACEBACK, SECOND], FREE, True),
    ([CORE + BLOCKS, SECOND], BLOCKS, True),
    ([CORE + SHORT, SECOND], SHORT, False),
    ([*TRACEBACK, OUT, SECOND, "INFO: shutting down"], OUT, True),
    (["CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"], "CUDA Error: out of memory at", True),
    (["RuntimeError: CUDA error: out of memory"], "RuntimeError: CUDA error: out of memory", True),
    (["RuntimeError: HIP out of memory. Tried to allocate 1 GiB."], "RuntimeError: HIP", True),
    (["ncclUnhandledCudaError: cudaErrorMemoryAllocation"], "ncclUnhandledCudaError", True),
    ([*TRACEBACK, "ValueError: no such model", "", "  "], "ValueError: no such model", False),
    ([*TRACEBACK, "vllm.engine.Refused", "pkg.mod.ConfigException: bad"], "pkg.mod.ConfigException: bad", False),
    (["usage: x [-h]", "api_server.py: error: unrecognized arguments: --nope"], "api_server.py: error: unrec", False),
    (["/usr/bin/python3: Error while finding module specification: no"], "/usr/bin/python3: Error while", False),
    ([COUNTED, *LONG], f"{COUNTED}: Value error, max_model_len (1000000) is greater than 4096", False),
    ([COUNTED, "seed", "  Input should be a number [type=x, input=y]"], f"{COUNTED}: seed Input should be a", False),
    ([COUNTED], COUNTED, False),
    ([SECOND], "RuntimeError: Engine core initialization failed", False),
    (["INFO 11-21 16:00:00 [x.py:1] If out of memory errors occur, lower it", "done"], "done", False),
    (["\x1b[1;31mOSError: \x07gone\x1b[0m\r"], "OSError:  gone", False),
    ([], "", False),
    (["", " "], "", False),
]


@pytest.mark.parametrize(("lines", "line", "memory"), TOLD)
def test_the_line_that_tells_most(lines: list[str], line: str, memory: bool) -> None:
    found = diagnosis(lines)
    assert found.line.startswith(line)
    assert bool(found.line) is bool(line)
    assert "type=" not in found.line
    assert found.out_of_memory is memory


def test_what_was_long_ago_or_is_long_is_not_told_whole() -> None:
    assert diagnosis([FREE, *["fine"] * LOOKED_AT]).line == "fine"
    assert diagnosis([f"ValueError: {'x' * 999}"]).line == f"ValueError: {'x' * (SHOWN - 12)}..."


@given(st.lists(st.text(max_size=50), max_size=5))
def test_whatever_an_engine_writes_a_line_is_told_that_a_terminal_can_show(lines: list[str]) -> None:
    assert diagnosis(lines).line.isprintable()


@pytest.mark.parametrize("told", PUBLISHED, ids=[f"{each['kind']}-{n}" for n, each in enumerate(PUBLISHED)])
def test_published_lines_are_understood(told: dict[str, object]) -> None:
    """A failure by its kind and its numbers, also before what the API server says of it; any other line as none."""
    line, kind = str(told["line"]), told["kind"] if told["kind"] in FAILURES else "none"
    found = diagnosis([line])
    assert found.kind == kind
    if kind != "none":
        assert found.advice
        assert diagnosis([*TRACEBACK, line, SECOND]).kind == kind
        assert diagnosis([line, READY, "INFO fine"]).kind == "none"
        named = {"needed_gib", "available_gib", "available_tokens", "estimated_len", "seqs", "blocks"}
        named |= {"free_gib", "total_gib", "desired_gib"}
        numbers = {name: number for name, number in told.items() if name in named}
        assert {name: found.numbers.get(name) for name in numbers} == numbers


@pytest.mark.parametrize(
    ("line", "kind", "numbers"),
    [
        ("ValueError: something nobody has seen", UNKNOWN, {}),
        ("Killed", "host_memory", {}),
        ("Segmentation fault (core dumped)", SECOND_HAND, {}),
        ("/bin/sh: 1: vllm: not found", "bad_install", {}),
        ("/usr/bin/python3: No module named vllm", "bad_install", {}),
        (
            'FileNotFoundError: No such file or directory: "/models/x/model-00002-of-00004.safetensors"',
            "weights_unreadable",
            {},
        ),
        (
            "OSError: It looks like the config file at '/models/x/config.json' is not a valid JSON file.",
            "weights_unreadable",
            {},
        ),
        (OUT, "oom", {"tried_gib": 2.0, "total_gib": 79.18}),
        (
            f"{OUT} of which 112.50 MiB is free. Process 7 has 3.00 GiB memory in use. Including non-PyTorch memory, "
            "this process has 21.92 GiB memory in use.",
            "oom",
            {"tried_gib": 2.0, "total_gib": 79.18, "free_gib": 0.109863, "own_gib": 21.92},
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB.", "oom", {"tried_gib": 0.5}),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 8 dummy requests.",
            "oom",
            {"seqs": 8},
        ),
        ("WARNING 11-21 16:00:00 [x.py:1] ImportError('libcuda.so.1: cannot open shared object file')", "none", {}),
        ("2026-05-14 12:43:22.149 | (EngineCore pid=219) INFO 05-14 10:43:22 x: [Errno 98]", "none", {}),
        ("ERROR: [Errno 98] error while attempting to bind on address ('0.0.0.0', 1)", "port_in_use", {}),
        (
            '{"error":{"message":"Call to wake_up method failed: CUDA Error: out of memory at <path>:163"}}',
            "wake_oom",
            {},
        ),
        ("zmq.error.ZMQError: Too many open files", "process_limit", {}),
        ("OSError: [Errno 24] Too many open files: '/x/kernel.json'", "process_limit", {}),
        ("RuntimeError: can't start new thread", "process_limit", {}),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", "process_limit", {}),
        (
            "OpenBLAS blas_thread_init: pthread_create failed for thread 9 of 64: Resource temporarily unavailable",
            "process_limit",
            {},
        ),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "process_limit", {}),
    ],
)
def test_other_lines(line: str, kind: str, numbers: dict[str, float]) -> None:
    assert (diagnosis([line]).kind, diagnosis([line]).numbers) == (kind, numbers)


def test_want_of_memory_wins_over_what_follows_from_it() -> None:
    followed = [OUT, "torch.distributed.DistBackendError: NCCL error in x", "ValueError: late", SECOND]
    assert diagnosis(followed).kind == "oom"


def test_a_failure_after_a_complete_start_counts() -> None:
    assert diagnosis([READY, "OSError: [Errno 98] Address already in use"]).kind == "port_in_use"


def test_the_work_is_bounded_in_all() -> None:
    oom, long = "torch.OutOfMemoryError: CUDA out of memory.", "x" * (3 * READ)
    assert diagnosis([oom, *[long] * (READ_IN_ALL // READ - 1)]).kind == "oom"
    assert diagnosis([oom, *[long] * (READ_IN_ALL // READ)]).kind == "none"


def test_the_work_is_bounded_by_the_line() -> None:
    """No pattern reads a line more often than a few times for each of its characters: READ of them are looked at."""
    for text in (
        "Model architecture ",
        "CUDA out of memory ",
        "wake_up ",
        "Free memory on device ",
        "max seq len (1) ",
    ):
        assert diagnosis([text * 100_000]).line == diagnosis([(text * 100_000)[:READ]]).line


@pytest.mark.parametrize("building", [True, False])
def test_lines_that_the_kinds_were_not_made_for(building: bool) -> None:
    lines = fresh_lines(building=building)
    assert right(lines, alone=False) >= 0.85 * len(lines)
    assert {each.kind for each in lines} <= {*FAILURES, UNKNOWN}


@pytest.mark.parametrize(
    "before",
    [
        "vllm-1  | ",
        "Aug 17 18:42:18 host vllm[8052]: (APIServer pid=8052) ",
        "2026-06-09T14:01:54.604Z stderr F ",
        "2026-06-09 14:01:54.604 [Info] (Process) (EngineCore pid=42500) ",
        "[rank0]:",
        "[rank0]:E0701 14:28:21.083000 911603 torch/_inductor/x.py:539] [0/0] ",
        "\x1b[1;36m(VllmWorker TP1 pid=168)\x1b[0;0m ERROR 08-12 14:37:42 [multiproc_executor.py:559] ",
        "ERROR 12-05 20:24:46 engine.py:366] ",
    ],
)
def test_what_stands_before_a_line_is_not_told(before: str) -> None:
    assert diagnosis([f"{before}ValueError: nobody has seen this"]).line == "ValueError: nobody has seen this"
    level = "" if "ERROR" in before else "INFO 08-12 14:37:42 [x.py:1] "
    assert not level or diagnosis([f"{before}{level}If CUDA out of memory errors occur, lower it"]).kind == "none"


def test_an_exception_without_words_is_told_with_the_source_that_raised_it() -> None:
    frame = '  File "/usr/lib/vllm/model_executor/layers/linear.py", line 1336, in weight_loader'
    found = diagnosis(
        [frame, "    assert param.shape == loaded_weight.shape", "           ^^^^", "AssertionError", SECOND]
    )
    assert (found.kind, found.line) == ("weights_mismatch", "AssertionError: assert param.shape == loaded_weight.shape")
    assert diagnosis(["AssertionError"]).line == "AssertionError"


def test_where_it_was_raised_tells_what_words_do_not() -> None:
    raised = ["ValueError: not so", SECOND]
    assert diagnosis(raised).kind == UNKNOWN
    for place, kind in (
        ("lora/x.py", "bad_lora"),
        ("config/x.py", "bad_config"),
        ("v1/attention/x.py", "no_attention_backend"),
    ):
        assert diagnosis([f'  File "/usr/lib/vllm/{place}", line 3, in f', *raised]).kind == kind


@pytest.mark.parametrize(
    "line",
    [
        "tokenizer_config.json: 100% 7.23k/7.23k [00:00<00:00, 22.8MB/s]",
        "model-00001-of-00002.safetensors:  40%|####      | 2.0G/4.9G",
        "/usr/lib/python3.12/x.py:3: UserWarning: the tokenizer must be installed with quantization, TimeoutError",
        "2026-05-14 12:43:22.149 | (EngineCore pid=219) WARNING 05-14 10:43:22 [x.py:1] nvcc: not found",
        "[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0",
    ],
)
def test_what_a_healthy_start_prints_is_no_failure(line: str) -> None:
    assert diagnosis([line]).kind == "none"


def test_what_pydantic_says_is_of_its_kind() -> None:
    said = "Value error, Unknown quantization method: awq9. Must be one of ['awq']."
    found = diagnosis(
        [COUNTED, f"  {said} [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]", SECOND]
    )
    assert (found.kind, found.line) == ("bad_quantization", said)
    heads = "Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3)."
    assert diagnosis([COUNTED, f"  {heads} [type=x, input_value={{'shutdown_timeout': 0}}]"]).kind == "bad_config"


def test_the_innermost_process_tells_the_cause() -> None:
    worker = "(Worker_TP1 pid=9) ERROR 11-21 16:00:00 [multiproc_executor.py:880] LookupError: the cause"
    assert (
        diagnosis([worker, f"{CORE}LookupError: what follows", "OSError: later", SECOND]).line
        == "LookupError: the cause"
    )


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        ([], "reading its arguments"),
        (["INFO Initializing a V1 LLM engine (v0.32.0) with config"], "setting up its GPUs"),
        (["INFO Starting to load model x..."], "loading weights"),
        (["INFO Starting to load model x...", "INFO Model loading took 1.2 GiB"], "compiling and measuring"),
        (["INFO GPU KV cache size: 1,782,000 tokens"], "setting up its KV cache and CUDA graphs"),
        ([READY], "serving"),
    ],
)
def test_a_failure_of_no_kind_is_told_with_the_phase_it_came_in(lines: list[str], phase: str) -> None:
    for last in ("LookupError: x", "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."):
        found = diagnosis([*lines, last])
        assert found.phase == phase
        assert found.advice.startswith(f"It failed while {phase}. ")
    assert not diagnosis(lines).phase


def test_what_a_call_did_is_not_blamed_on_the_start() -> None:
    for words in ("ValueError: n must be at least 1", "ValueError: chat template missing", "TimeoutError"):
        assert diagnosis([words]).kind not in (UNKNOWN, "none")
        assert diagnosis([READY, words]).kind == UNKNOWN
    again = [READY, "INFO 08-12 14:37:42 [api_server.py:1] vLLM API server version 0.32.0"]
    assert diagnosis([*again, "ValueError: n must be at least 1"]).kind == "bad_config"
