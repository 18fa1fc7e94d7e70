"""Starts that hang, download or end for host memory, as processes: a real sidecar on simulated GPUs and engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.engine.vllm_lines import VLLM_LINES
from loadtest.processes import until
from tests.sidecar.served import Box, box

pytestmark = pytest.mark.slow
MODELS = """
models:
  a: {model_path: org/model, gpu_memory: 40%, load_stall: 8s}
  b: {model_path: /m/b, gpu_memory: 70%}
"""


def faults(machine: Box, **fields: object) -> None:
    """Of the next starts of `a`; none: they succeed."""
    (machine.gpus / "a.faults").write_text(json.dumps(fields))


def last_error(machine: Box) -> str:
    return next(str(each["last_error"]) for each in machine.ask("GET", "/status")["models"] if each["profile"] == "a")


def failed(machine: Box, within: float) -> str:
    """What the status says of `a` once a start of it has failed."""
    machine.ask("POST", "/models/a/ensure")
    assert until(lambda: last_error(machine) != "", within) is not None
    return last_error(machine)


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_a_start_that_hangs_while_it_loads_is_ended_and_frees_its_gpu(tmp_path: Path, how: str) -> None:
    """Whether a busy one got half a core, and so twice the time, is the machine's affair."""
    with box(tmp_path, MODELS) as machine, machine.served():
        faults(machine, hang_loading=how)
        said = failed(machine, 60.0)
        assert "without progress" in said
        assert "No available shared memory broadcast block" in said, "the last sign is named"
        assert until(lambda: machine.engines() == [], 60.0) is not None
        machine.awake("b")


def test_a_download_without_a_line_is_no_stall(tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    with box(tmp_path, MODELS) as machine:
        machine.env["HF_HUB_CACHE"] = str(tmp_path / "hub")
        faults(machine, download=str(blobs / "x.incomplete"), download_seconds=12.0)  # longer than `load_stall`
        with machine.served():
            machine.ask("POST", "/models/a/ensure")
            assert until(lambda: machine.state("a") == "running", 60.0) is not None, last_error(machine)
            assert last_error(machine) == ""


def test_an_exit_for_want_of_host_memory_is_told_and_is_no_want_of_gpu_memory(tmp_path: Path) -> None:
    with box(tmp_path, MODELS.replace(", load_stall: 8s", "")) as machine, machine.served():
        faults(machine, fail_start=VLLM_LINES.host_memory.format(bytes=17179869184))
        said = failed(machine, 60.0)
        assert "can't allocate memory: you tried to allocate 17179869184 bytes" in said
        _, out, _ = machine.run("logs", "a")
        assert "can't allocate memory" in out
        faults(machine)
        machine.awake("a")
