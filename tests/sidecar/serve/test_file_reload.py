"""The sidecar's file as it is edited while `sidecar serve` runs as a process, with simulated engines."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from loadtest.processes import until
from tests.sidecar.served import MODELS, Box, box

pytestmark = pytest.mark.slow
WITHIN = 60.0


def edit(machine: Box, old: str, new: str) -> None:
    text = machine.file.read_text()
    assert old in text
    machine.file.write_text(text.replace(old, new))


def metric(machine: Box, name: str) -> float:
    text = httpx.get(f"http://{machine.listen}/metrics", trust_env=False, timeout=60.0).text
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


def profiles(machine: Box) -> list[str]:
    return [model["profile"] for model in machine.ask("GET", "/status")["models"]]


def test_a_saved_file_counts_and_the_log_says_what_it_changes(tmp_path: Path) -> None:
    with box(tmp_path) as machine, machine.served("--end-engines") as sidecar:
        machine.awake("a")
        engines = machine.engines()
        edit(machine, "gpu_memory: 40%}", "gpu_memory: 40%, stop_after: 1h}\n  c: {model_path: /m/c, gpu_memory: 20%}")
        assert until(lambda: profiles(machine) == ["a", "b", "c"], WITHIN) is not None
        sidecar.says("file: new: c")
        sidecar.says("file: changed, without a restart: a")
        assert machine.engines() == engines
        machine.awake("c")
        edit(machine, "gpu_memory: 40%, stop_after: 1h", "gpu_memory: 45%")
        edit(machine, "  c: {model_path: /m/c, gpu_memory: 20%}\n", "")
        assert until(lambda: profiles(machine) == ["a", "b"] and machine.state("a") == "stopped", WITHIN) is not None
        assert until(lambda: not machine.engines(), WITHIN) is not None
        machine.awake("a")
        sidecar.says("file: gone, and their engines end once their calls have: c")
        assert machine.ask("GET", "/status")["file"]["reloads"] >= 2


def test_a_file_with_mistakes_changes_nothing_and_is_told_everywhere(tmp_path: Path) -> None:
    with box(tmp_path) as machine, ExitStack() as stack, machine.served("--end-engines") as sidecar:
        machine.awake("a")
        good = machine.file.read_text()
        edit(machine, "gpu_memory: 40%", "gpu_memory: 400%")
        stack.callback(machine.file.write_text, good)
        line = next(n for n, text in enumerate(machine.file.read_text().splitlines(), 1) if "400%" in text)
        said = f"{machine.file}:{line}: models.a.gpu_memory: found '400%'"
        sidecar.signal(signal.SIGHUP)
        sidecar.says(said)
        assert metric(machine, "weir_sidecar_file_bad") == 1
        status, out, _ = machine.run("status")
        assert (status, "version 1 stays active" in out, said in out) == (0, True, True)
        assert machine.state("a") == "running"
        machine.file.write_text(good)
        assert until(lambda: metric(machine, "weir_sidecar_file_bad") == 0, WITHIN) is not None
        assert machine.ask("GET", "/status")["troubles"] == []


def test_what_needs_a_restart_is_named_and_the_rest_counts(tmp_path: Path) -> None:
    with box(tmp_path) as machine, machine.served("--end-engines") as sidecar:
        edit(machine, MODELS, MODELS.replace("  b:", "  c:") + "log_dir: elsewhere\nhost_memory_for_sleep: 1GiB\n")
        sidecar.signal(signal.SIGHUP)
        assert until(lambda: profiles(machine) == ["a", "c"], WITHIN) is not None
        sidecar.says("file: not before the sidecar is started again: log_dir")
        assert "log_dir" in machine.ask("GET", "/status")["troubles"][0]
