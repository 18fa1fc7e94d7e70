"""Evidence of a start's progress: what real processes write and read, and their CPU time."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.shared.files.units import MIB
from sidecar.core import start_progress
from sidecar.core.addresses import EngineAddress
from sidecar.core.profile import Profile
from sidecar.core.start_progress import StartProgress
from sidecar.process import process_family, start_evidence
from sidecar.process.engine_api import ApiError, EngineApi
from sidecar.process.process import Process
from sidecar.process.start_evidence import StartEvidence, bytes_in, download_folders, ready
from tests.sidecar.nothing_left import gone, nothing_left

pytestmark = pytest.mark.slow  # processes and seconds: `make check` has enough of them

STALL = 2.0
LONG = 6.0  # seconds of a stall within which a program is to be seen working, however busy the machine is
HUNG = """
import time
while True:
    print(time.time(), "No available shared memory broadcast block", flush=True)
    {}
"""
COMPILER = "import time; open('/dev/zero', 'rb').read(9_000_000); time.sleep(2.0)"
READS = "import time\nfile = open('/dev/zero', 'rb')\nwhile True: file.read(9_000_000); time.sleep(0.3)"
SLEEPS, SPINS = "time.sleep(0.1)", "for _ in range(3_000_000): pass"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


class Start:
    """A program that never gets ready."""

    def __init__(self, program: str, tmp_path: Path, stall: float = STALL) -> None:
        self.began = time.monotonic()
        argv = [sys.executable, "-c", program]
        address = EngineAddress(uds=str(tmp_path / "socket"))
        self.process = Process.spawn(
            argv, env=dict(os.environ), engine=f"box{tmp_path}", address=address, log=tmp_path / "log", cwd=tmp_path
        )
        self.progress = StartProgress(time.monotonic(), stall)
        self.gpu_bytes = 0
        self.evidence = StartEvidence(self.process, self.progress, time.monotonic, lambda: self.gpu_bytes)

    async def wrote(self, word: str) -> None:
        """Until a line of its output has this word."""
        while not any(word in line for line in self.process.output.ring.lines()):
            await asyncio.sleep(0.01)

    async def given_up(self, limit: float | None = None) -> tuple[float, str]:
        """Seconds from the start's beginning to its end, and the reason. Nothing of the start is left then."""
        try:
            async with aclosing(EngineApi(self.process.record.address.url, "m")) as api:
                with pytest.raises(ApiError) as caught:
                    await ready(
                        api,
                        self.progress,
                        limit,
                        time.monotonic,
                        dead=self.process.wait(),
                        look=self.evidence.look,
                    )
            return time.monotonic() - self.began, str(caught.value)
        finally:
            self.evidence.close()
            await self.process.terminate(5.0)
            assert gone(self.process.record.pid)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await scene()

    asyncio.run(bounded())


def test_a_hang_that_says_so_again_and_again_is_given_up_after_a_stall(tmp_path: Path) -> None:
    async def scene() -> None:
        start = Start(HUNG.format(SLEEPS), tmp_path)
        await start.wrote("No available")
        took, why = await start.given_up()
        assert took >= STALL
        assert "No available shared memory" in why

    run(scene)


def test_growth_of_its_gpu_memory_is_progress(tmp_path: Path) -> None:
    async def scene() -> None:
        start = Start("import time; print('up', flush=True); time.sleep(60)", tmp_path)
        try:
            await start.wrote("up")  # it reads nothing any more
            signs = []
            for size in (0, 1024**3, 1024**3):
                start.gpu_bytes = size
                await start.evidence.look()
                signs.append(start.progress.what)
            began, *grown = signs
            assert began == "it wrote 'up'"
            assert grown == ["its GPU memory grew by 1024.0 MiB"] * 2
        finally:
            start.evidence.close()
            await start.process.terminate(5.0)

    run(scene)


@pytest.fixture
def slow_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of many neighbours gives a program that spins a small part of a core."""
    monkeypatch.setattr(start_progress, "BUSY", 0.05)


@pytest.mark.usefixtures("slow_cores")
def test_a_hang_that_burns_cpu_is_given_up_after_two(tmp_path: Path) -> None:
    async def scene() -> None:
        start = Start(HUNG.format(SPINS), tmp_path, LONG)
        await start.wrote("No available")
        took, why = await start.given_up()
        assert took >= 2 * LONG
        assert "without progress, though it burnt CPU (the last, " in why

    run(scene)


@pytest.mark.usefixtures("slow_cores")
def test_cpu_time_of_a_child_counts_too(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"

    async def scene() -> None:
        took, why = await Start(child, tmp_path, LONG).given_up()
        assert took >= 2 * LONG
        assert "though it burnt CPU" in why

    run(scene)


@pytest.mark.parametrize(
    "program",
    [
        "import sys, time\nfor n in range(1000): sys.stderr.write(f'\\rLoading: {n}/1000'); time.sleep(0.3)",
        "import time\nfile = open('blob', 'ab')\nwhile True: file.write(b'x' * 999_999); time.sleep(0.3)",
        f"import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', {COMPILER!r}])",
        READS,
    ],
    ids=["a progress bar", "writing", "compilers that come and go", "reading"],
)
def test_a_start_that_gets_on_goes_on_until_its_limit(program: str, tmp_path: Path) -> None:
    async def scene() -> None:
        took, _ = await Start(program, tmp_path, LONG).given_up(limit=2.5 * LONG)
        assert took >= 2.5 * LONG, "burning CPU alone would have got it two stalls"

    run(scene)


def test_a_look_that_hangs_is_no_progress_and_costs_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_evidence, "LOOK_WITHIN", 0.1)

    async def scene() -> None:
        start = Start(READS, tmp_path)
        os.mkfifo(tmp_path / "fifo")
        hanging = [0]

        def hangs(_: object) -> tuple[float, dict[int, int]]:
            hanging[0] += 1
            with open(tmp_path / "fifo", "rb") as file:
                return 0.0, {1: len(file.read())}

        monkeypatch.setattr(Process, "usage", hangs)
        for _ in range(3):
            await start.evidence.look()
        assert (hanging, start.progress.what) == ([1], "its process began")
        (tmp_path / "fifo").write_bytes(b"")
        monkeypatch.undo()
        while not start.progress.what.startswith("it read and wrote "):
            await start.evidence.look()
        start.evidence.close()
        await start.process.terminate(5.0)

    run(scene)


def test_a_folder_is_counted_without_links_and_only_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_in(tmp_path / "none") == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "one").write_bytes(b"x" * 5000)
    before = bytes_in(tmp_path)
    assert before >= 5000
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    assert bytes_in(tmp_path) - before < 5000
    with open(tmp_path / "reserved", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
    reserved = bytes_in(tmp_path)
    assert reserved >= before + MIB
    monkeypatch.setattr(start_evidence, "MOST_FILES", 1)
    assert bytes_in(tmp_path) < reserved


def test_folders_without_files_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path.joinpath(*["a"] * 9)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x")
    monkeypatch.setattr(start_evidence, "MOST_FILES", 10)
    assert bytes_in(tmp_path) > 0
    monkeypatch.setattr(start_evidence, "MOST_FILES", 9)
    assert bytes_in(tmp_path) == 0


def test_a_model_in_a_local_folder_is_downloaded_nowhere(tmp_path: Path) -> None:
    env = {"HF_HOME": "/hub"}
    profile = Profile(model_path="Qwen/Qwen3-8B", flags={"download-dir": "down"})
    found = [Path("/hub/hub/models--Qwen--Qwen3-8B"), tmp_path / "down" / "models--Qwen--Qwen3-8B"]
    assert download_folders(profile, tmp_path, env) == found
    assert download_folders(Profile(model_path="/models/m"), tmp_path, env) == []
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert download_folders(profile, tmp_path, env) == []
    drafted = Profile(
        model_path="Qwen/Qwen3-8B", flags={"speculative-config": {"method": "eagle3", "model": "org/draft"}}
    )
    assert download_folders(drafted, tmp_path, env) == [Path("/hub/hub/models--org--draft")]


IO = [
    ("char: 5\nwchar: 3\nsyscr: 9\n\nnew_in_linux\n", 3),  # gVisor calls rchar otherwise
    ("rchar: 900\nwchar: 70\nread_bytes: 800\nwrite_bytes: 60\n", 970),  # the same bytes, told twice
    ("rchar: 5\nwchar: 3\nread_bytes: 800\nwrite_bytes: 60\n", 860),  # mapped files
]


@pytest.mark.parametrize(("told", "expected"), IO)
def test_bytes_moved_are_read_from_any_form_of_proc_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, expected: int
) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "io").write_text(told)
    monkeypatch.setattr(process_family, "Path", lambda name: tmp_path / name.lstrip("/"))
    snapshot = process_family.ProcessSnapshot(7, 1, 7, 7, "S", started=1)
    assert process_family.usage([snapshot]) == (0.0, {7: expected})
