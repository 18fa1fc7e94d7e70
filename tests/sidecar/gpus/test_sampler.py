"""GPU sampling from an event loop: a driver that hangs (a silent FIFO), one call at a time, waits for memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.simulate import vtime
from sidecar.core.gpus import GPU, GPUError, Unselectable
from sidecar.gpus import monitor
from sidecar.gpus.monitor import GpuMonitor, Sampler
from sidecar.gpus.simulated import SimulatedGPUs, claim
from tests.sidecar.laid_out import lay_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lay_out(tmp_path, [1000, 1000])
    return tmp_path


def calls() -> int:
    return sum(thread.name == "blocking-call" for thread in threading.enumerate())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def hang(folder: Path) -> Callable[[], None]:
    """The driver hangs from now on, until what is returned is called."""
    os.mkfifo(folder / "error")

    def resume() -> None:
        (folder / "error").write_text("hardware fault")  # waits for its reader
        (folder / "error").unlink()

    return resume


def test_a_snapshot_and_its_errors_pass_through(folder: Path) -> None:
    async def main() -> None:
        sampler = Sampler(SimulatedGPUs(folder))
        assert [gpu.free for gpu in await sampler.sample()] == [1000, 1000]
        (folder / "error").write_text("hardware fault")
        with pytest.raises(GPUError, match="hardware fault"):
            await sampler.sample()
        (folder / "error").unlink()
        assert len(await sampler.sample()) == 2
        with pytest.raises(Unselectable):
            await Sampler(SimulatedGPUs(folder, [7])).sample()

    asyncio.run(main())


def test_a_driver_that_hangs_costs_one_thread_and_no_waiting(folder: Path) -> None:
    async def main() -> None:
        sampler = Sampler(SimulatedGPUs(folder), limit=0.1)
        resume = hang(folder)
        began = time.monotonic()
        answers = await asyncio.gather(*(sampler.sample() for _ in range(5)), return_exceptions=True)
        assert all(isinstance(answer, GPUError) and "hangs: no answer for 0." in str(answer) for answer in answers)
        assert calls() == 1
        for _ in range(1000):
            with pytest.raises(GPUError, match="the GPU driver hangs"):
                await sampler.sample()
        assert calls() == 1
        assert time.monotonic() - began < 90, "those that came later were told at once"
        await asyncio.to_thread(resume)
        await until(lambda: calls() == 0)
        assert len(await sampler.sample()) == 2, "the late answer was not used"

    asyncio.run(main())


def test_a_driver_that_hangs_is_told_of_once(folder: Path) -> None:
    async def main() -> None:
        lines: list[str] = []
        looking = GpuMonitor(Sampler(SimulatedGPUs(folder), limit=0.05).sample, lines.append)
        resume = hang(folder)
        for _ in range(5):
            await looking.look()
            await asyncio.sleep(0.06)
        assert [line.partition(":")[0] for line in lines] == ["the GPU driver hangs"]
        await asyncio.to_thread(resume)

    asyncio.run(main())


def test_a_bug_is_told_to_who_waits_and_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: shown.append(arguments.exc_type))
    monkeypatch.setattr(SimulatedGPUs, "snapshot", lambda _: 1 / 0)

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await Sampler(SimulatedGPUs(folder)).sample()
        await until(lambda: shown == [ZeroDivisionError])

    asyncio.run(main())


def test_who_asks_meanwhile_shares_the_answer_and_who_leaves_takes_nothing_with_him(folder: Path) -> None:
    async def main() -> None:
        sampler = Sampler(SimulatedGPUs(folder), limit=10)
        resume = hang(folder)
        waiting = [asyncio.create_task(sampler.sample()) for _ in range(3)]
        await until(lambda: calls() == 1)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        await asyncio.to_thread(resume)
        for task in waiting[1:]:
            with pytest.raises(GPUError, match="hardware fault"):
                await task

    asyncio.run(main())


@pytest.mark.slow
def test_a_driver_that_hangs_does_not_keep_the_process(folder: Path) -> None:
    hang(folder)
    program = """
import asyncio, sys
from pathlib import Path
from sidecar.core.gpus import GPUError
from sidecar.gpus.simulated import SimulatedGPUs
from sidecar.gpus.monitor import Sampler

async def main():
    try:
        await Sampler(SimulatedGPUs(Path(sys.argv[1])), limit=0.05).sample()
    except GPUError as error:
        print(error)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, timeout=60, check=True)
    assert b"the GPU driver hangs" in done.stdout
    assert done.stderr == b""


# -- memory that comes back, in virtual time --------------------------------------------------------------------------


class Waited:
    """How a wait ended, after how many (virtual) seconds and snapshots."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = -1.0
        self.back: bool | None = None


def wait_for(
    folder: Path,
    size: int,
    claims: dict[int, int],
    left: int = 0,
    after: Callable[[float], None] = lambda now: None,
) -> Waited:
    """This process holds `size` on both GPUs, then `left`, and it is waited for `claims`."""
    waited = Waited()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gpus = SimulatedGPUs(folder)

        async def sample() -> tuple[GPU, ...]:
            waited.samples += 1
            after(loop.time())
            return gpus.snapshot()

        for index in (0, 1):
            claim(folder, {index: size})
        before = gpus.snapshot()
        for index in (0, 1):
            claim(folder, {index: left})
        waited.back = await GpuMonitor(sample, print).back(before, claims)
        waited.seconds = loop.time()
        for index in (0, 1):
            (folder / f"GPU-{index}.lost").unlink(missing_ok=True)
            claim(folder, {index: 0})

    vtime.run(main())
    return waited


def test_memory_that_is_back_is_seen_at_once(folder: Path) -> None:
    waited = wait_for(folder, 800, {0: 800, 1: 800})
    assert (waited.back, waited.seconds, waited.samples) == (True, 0.0, 1)


@pytest.mark.parametrize(("left", "expected"), [(200, True), (201, False)])
def test_three_quarters_are_enough(folder: Path, left: int, expected: bool) -> None:
    waited = wait_for(folder, 800, {0: 800}, left)
    assert waited.back is expected
    waited = wait_for(folder, 800, {0: 796}, left)
    assert waited.back is True


def test_it_is_polled_until_every_gpu_has_it_back(folder: Path) -> None:
    def after(now: float) -> None:
        claim(folder, {0: 0 if now >= 1.0 else 800, 1: 0 if now >= 3.1 else 800})

    waited = wait_for(folder, 800, {0: 800, 1: 800}, 800, after)
    assert (waited.back, waited.seconds, waited.samples) == (True, 3.25, 14)
    assert wait_for(folder, 800, {0: 800}, 800, after).seconds == 1.0, "the other GPU is not its business"


def test_it_is_given_up(folder: Path) -> None:
    waited = wait_for(folder, 800, {0: 800, 1: 800}, 800)
    assert (waited.back, waited.seconds) == (False, 5.0)


def test_a_neighbour_that_grew_is_no_memory_back(folder: Path) -> None:
    assert wait_for(folder, 800, {0: 400}, left=900).back is False


def test_a_gpu_that_is_lost_has_given_nothing_back(folder: Path) -> None:
    assert wait_for(folder, 800, {0: 800}, after=lambda now: (folder / "GPU-0.lost").touch()).back is False


def test_an_error_is_asked_again(folder: Path) -> None:
    def after(now: float) -> None:
        (folder / "error").write_text("hardware fault") if now < 2 else (folder / "error").unlink(missing_ok=True)

    waited = wait_for(folder, 800, {0: 800}, after=after)
    assert (waited.back, waited.seconds) == (True, 2.0)


def test_one_that_left_the_selection_has_given_nothing_back(folder: Path) -> None:
    async def sample() -> tuple[GPU, ...]:
        return ()

    back = GpuMonitor(sample, print).back([GPU(index=0, total=1000, used=800)], {0: 800})
    assert vtime.run(back) is False


def test_a_wait_ends_in_time_while_the_driver_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "BACK_WITHIN", 0.1)

    async def main() -> None:
        sampler = Sampler(SimulatedGPUs(folder), limit=600)
        resume = hang(folder)
        began = time.monotonic()
        assert await GpuMonitor(sampler.sample, print).until(lambda _: True) is False
        assert time.monotonic() - began < 300, "the driver alone would take ten minutes"
        await asyncio.to_thread(resume)
        await until(lambda: calls() == 0)

    asyncio.run(main())
