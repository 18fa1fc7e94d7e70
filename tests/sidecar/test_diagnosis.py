"""The line that tells why an engine failed, found in what vLLM, torch and Python write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.diagnosis import LOOKED_AT, SHOWN, diagnosis

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
