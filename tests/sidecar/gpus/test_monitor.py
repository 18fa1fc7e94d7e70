"""The monitor of a machine's GPUs."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.core.gpus import GPU, GPUError
from sidecar.gpus import monitor as gpu_monitor
from sidecar.gpus.monitor import NOT_BACK, GpuMonitor


def monitor(*totals: int) -> GpuMonitor:
    async def sample() -> tuple[GPU, ...]:
        return tuple(GPU(index=index, total=total, free=total) for index, total in enumerate(totals))

    made = GpuMonitor(sample, print)
    asyncio.run(made.look())
    return made


@pytest.mark.parametrize(
    ("totals", "gpus", "several", "expected"),
    [
        ((24, 48, 2), None, 1, [2, 24, 48]),
        ((24, 48, 2), None, 2, [2, 24]),
        ((24, 48, 48), None, 2, [24, 48]),
        ((24, 48, 2), (0, 2), 1, [2, 24]),
        ((24, 48), (0, 1), 3, [24, 48]),
        ((24, 48), (7,), 1, [24, 48]),
        ((0, 0), None, 1, [0]),
        ((), None, 1, [0]),
    ],
)
def test_bytes_of_gpus_that_an_engine_is_sized_for(
    totals: tuple[int, ...], gpus: tuple[int, ...] | None, several: int, expected: list[int]
) -> None:
    assert monitor(*totals).sizes(gpus, several) == expected


def test_the_smallest_of_some() -> None:
    made = monitor(24, 48, 2)
    assert (made.smallest((0, 1)), made.smallest((1,)), made.smallest(())) == (24, 48, 0)


@pytest.mark.slow
def test_it_waits_for_a_reading_that_will_do_and_no_longer() -> None:
    free = iter((1, 2, 3))

    async def sample() -> tuple[GPU, ...]:
        return (GPU(index=0, total=9, free=next(free)),)

    seen = GpuMonitor(sample, print)
    assert asyncio.run(seen.until(lambda gpus: gpus[0].free == 3))
    assert seen.gpus[0].free == 3
    assert asyncio.run(GpuMonitor(None, print).until(lambda gpus: gpus == ()))


def test_a_reading_from_before_the_driver_failed_will_not_do() -> None:
    answers = iter((GPUError("it hangs"), GPUError("it hangs"), None))

    async def sample() -> tuple[GPU, ...]:
        failure = next(answers)
        if failure is not None:
            raise failure
        return (GPU(index=0, total=9, free=9),)

    seen = GpuMonitor(sample, print)
    assert asyncio.run(seen.until(lambda _: True))
    assert list(answers) == []


def test_a_quarantine_is_seen_before_the_next_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor, "BACK_WITHIN", 0.0)
    refused: list[list[str]] = []

    async def sample() -> tuple[GPU, ...]:
        refused.append([gpu.refused for gpu in seen.gpus])
        return tuple(GPU(index=index, total=9, used=8, free=1) for index in range(2))

    seen = GpuMonitor(sample, print)

    async def scene() -> None:
        assert not await seen.back(await seen.look(), {1: 8})

    asyncio.run(scene())
    assert refused == [[], ["", ""], ["", NOT_BACK]]
