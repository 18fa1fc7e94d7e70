"""Simulated GPUs: claims of real processes, their ends, and every fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.core.gpus import GPUError, Unselectable
from sidecar.gpus.simulated import OutOfMemory, SimulatedGPUs, claim
from tests.sidecar.laid_out import lay_out

# What a program does that may not import the sidecar: the format, by hand.
BY_HAND = """
import os, sys
folder, index, size = sys.argv[1:]
start = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
name = f"GPU-{index}.{os.getpid()}.{start}"
with open(f"{folder}/.{name}", "w") as file:
    file.write(size)
os.rename(f"{folder}/.{name}", f"{folder}/{name}")
print("claimed", flush=True)
sys.stdin.read()
os.unlink(f"{folder}/{name}")
"""
# What one does that may: each line is a size to hold from now on.
BY_CALL = """
import sys
from pathlib import Path
from sidecar.gpus.simulated import OutOfMemory, claim
folder, index, size = sys.argv[1:]
while True:
    try:
        claim(Path(folder), {int(index): int(size)})
        print("claimed", flush=True)
    except OutOfMemory as error:
        print(error, flush=True)
    size = sys.stdin.readline()
    if not size:
        break
"""

# One that finds out whether two ever get what only one can have.
BY_FORCE = """
import os, sys
from pathlib import Path
from sidecar.gpus.simulated import OutOfMemory, claim
folder, index, size = sys.argv[1:]
print("claimed", flush=True)
sys.stdin.readline()
had, most = 0, 0
while had < 100:  # the other one may be held up while it has the memory: a number of tries could end meanwhile
    try:
        claim(Path(folder), {int(index): int(size)})
    except OutOfMemory:
        continue
    had += 1
    most = max(most, sum(name.count(".") == 2 for name in os.listdir(folder)))
    claim(Path(folder), {int(index): 0})
print(most, flush=True)
"""


class Claimer:
    """A child process with memory on a simulated GPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.said = self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def resize(self, size: int) -> str:
        self.tell(str(size))
        return self.hear()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped: its pid is still there


@contextmanager
def claimer(program: str, folder: Path, index: int, size: int) -> Iterator[Claimer]:
    arguments = [sys.executable, "-c", program, str(folder), str(index), str(size)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Claimer(process)
        finally:
            process.kill()


def used(gpus: SimulatedGPUs) -> list[int]:
    return [gpu.used for gpu in gpus.snapshot()]


def claims(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.count(".") == 2)


def test_what_a_folder_of_gpus_is(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "gpus"
    lay_out(folder, [1000, 500])
    gpus = SimulatedGPUs(folder)
    a, b = gpus.snapshot()
    assert (a.index, a.total, a.used, a.free, a.processes, a.refused) == (0, 1000, 0, 1000, {}, "")
    assert (b.index, b.total, b.free) == (1, 500, 500)
    assert (a.uuid, gpus.driver) == ("GPU-00000000-5eed-5eed-5eed-000000000000", "simulated")
    (only,) = SimulatedGPUs(folder, [b.index]).snapshot()
    assert only == b
    with pytest.raises(Unselectable):
        SimulatedGPUs(folder, [2]).snapshot()
    gpus.close()


def test_a_process_claims_resizes_and_releases(tmp_path: Path) -> None:
    lay_out(tmp_path, [1000, 500])
    gpus = SimulatedGPUs(tmp_path)
    with claimer(BY_CALL, tmp_path, 0, 600) as child:
        assert child.said == "claimed"
        assert used(gpus) == [600, 0]
        assert gpus.snapshot()[0].processes == {child.pid: 600}
        claim(tmp_path, {0: 400})
        assert gpus.snapshot()[0].processes == {child.pid: 600, os.getpid(): 400}
        assert child.resize(601).startswith(
            "CUDA out of memory. Tried to allocate 0.00 GiB. GPU 0 has a total capacity of"
        )
        assert used(gpus) == [1000, 0], "what it had it still has"
        assert child.resize(50) == "claimed"
        assert used(gpus) == [450, 0]
        assert child.resize(0) == "claimed"
        claim(tmp_path, {0: 0})
        assert used(gpus) == [0, 0]
        assert claims(tmp_path) == []


def test_by_hand_and_over_a_restart_of_the_sidecar(tmp_path: Path) -> None:
    lay_out(tmp_path, [1000])
    with claimer(BY_HAND, tmp_path, 0, 600) as child:
        assert child.said == "claimed"
        assert SimulatedGPUs(tmp_path).snapshot()[0].processes == {child.pid: 600}
        lay_out(tmp_path, [1000])  # as a sidecar does that starts again
        assert used(SimulatedGPUs(tmp_path)) == [600]
        with pytest.raises(OutOfMemory, match="Tried to allocate"):
            claim(tmp_path, {0: 500})
        child.process.communicate()  # it removes its file
        assert used(SimulatedGPUs(tmp_path)) == [0]


@pytest.mark.slow
def test_two_that_claim_at_once_do_not_both_get_it(tmp_path: Path) -> None:
    lay_out(tmp_path, [1000])
    with claimer(BY_FORCE, tmp_path, 0, 600) as a, claimer(BY_FORCE, tmp_path, 0, 600) as b:
        a.tell("go")
        b.tell("go")
        assert [a.hear(), b.hear()] == ["1", "1"]


@pytest.mark.parametrize("restarted", [False, True])
def test_one_that_is_killed_has_released(tmp_path: Path, restarted: bool) -> None:
    lay_out(tmp_path, [1000])
    gpus = SimulatedGPUs(tmp_path)
    with claimer(BY_HAND, tmp_path, 0, 600) as child:
        assert used(gpus) == [600]
        child.kill()
        claim(tmp_path, {0: 1000})
        claim(tmp_path, {0: 0})
        assert len(claims(tmp_path)) == 1, "nobody has looked yet"
        assert used(SimulatedGPUs(tmp_path) if restarted else gpus) == [0]
        assert claims(tmp_path) == []


def test_one_that_is_killed_and_reaped_has_released(tmp_path: Path) -> None:
    lay_out(tmp_path, [1000])
    with claimer(BY_HAND, tmp_path, 0, 600) as child:
        child.process.kill()
        child.process.wait()
        assert used(SimulatedGPUs(tmp_path)) == [0]


def test_a_claim_does_not_pass_to_another_process_of_its_pid(tmp_path: Path) -> None:
    lay_out(tmp_path, [1000])
    (tmp_path / f"GPU-0.{os.getpid()}.1").write_text("600")
    assert used(SimulatedGPUs(tmp_path)) == [0]


def test_faults_of_one_gpu(tmp_path: Path) -> None:
    lay_out(tmp_path, [1000, 1000])
    (tmp_path / "GPU-0.lost").touch()
    lost, well = SimulatedGPUs(tmp_path).snapshot()
    assert (lost.refused, lost.free, lost.readable) == ("it has fallen off the bus (simulated)", 0, False)
    assert (well.refused, well.free) == ("", 1000)
    (tmp_path / "GPU-0.lost").unlink()
    assert SimulatedGPUs(tmp_path).snapshot()[0].refused == ""


def test_faults_of_the_whole(tmp_path: Path) -> None:
    gpus = SimulatedGPUs(tmp_path)
    with pytest.raises(GPUError, match="no simulated GPU in"):
        gpus.snapshot()
    with pytest.raises(GPUError, match="there is no GPU 0 in"):
        claim(tmp_path, {0: 1})
    lay_out(tmp_path, [1000])
    (tmp_path / "error").touch()
    with pytest.raises(GPUError, match="unknown error"):
        gpus.snapshot()
    (tmp_path / "error").unlink()
    assert used(gpus) == [0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("GPU-0.total", "80GiB", "GPU-0.total holds '80GiB', where a number of bytes belongs"),
        ("GPU-0.1.1", "-5", "holds '-5', where a number of bytes belongs"),
    ],
)
def test_files_that_say_something_else(tmp_path: Path, name: str, text: str, message: str) -> None:
    lay_out(tmp_path, [1000])
    claim(tmp_path, {0: 10})
    gpus = SimulatedGPUs(tmp_path)
    gpus.snapshot()
    claim(tmp_path, {0: 0})
    (tmp_path / name).write_text(text)
    with pytest.raises(GPUError, match=message):
        gpus.snapshot()


@pytest.mark.parametrize("name", ["GPU-0.total", "error", "GPU-0.1.2"])
def test_an_entry_that_is_a_folder_or_a_link_to_itself_is_told(tmp_path: Path, name: str) -> None:
    lay_out(tmp_path, [1000])
    entry = tmp_path / name
    entry.unlink(missing_ok=True)
    entry.mkdir()
    with pytest.raises(GPUError, match=f"{name}: Is a directory"):
        SimulatedGPUs(tmp_path).snapshot()
    entry.rmdir()
    entry.symlink_to(name)
    with pytest.raises(GPUError, match=f"{name}: Too many levels of symbolic links"):
        SimulatedGPUs(tmp_path).snapshot()
