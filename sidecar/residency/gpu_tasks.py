"""Tasks of the manager: operations, each with exclusive models and GPUs, and background work beside them.

vLLM measures the memory of its GPU while it starts and sleeps, so a neighbour must not change it meanwhile: one
operation at a time on each GPU, beside those that are late. A task that fails by a bug is not hidden: `reap` raises its
error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from gateway.shared.tasks import cancel

ON_CPU = -1  # what engines without a GPU have to themselves: they start one after the other too

Work = Coroutine[Any, Any, object]


class GpuTasks:
    """`done` is called at the end of every task."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._locked: Counter[int] = Counter()
        self._held: dict[asyncio.Task[Any], tuple[int, ...]] = {}  # GPUs that an operation has to itself

    def __contains__(self, name: str) -> bool:
        """Whether an operation on this model is under way."""
        return name in self._under_way

    def free(self, gpus: Iterable[int], names: Iterable[str] = ()) -> bool:
        """Whether nothing is under way on these GPUs, beside what shares them, nor on these models."""
        return not (any(name in self for name in names) or any(self._locked[gpu] for gpu in gpus or (ON_CPU,)))

    def spawn(self, work: Work) -> asyncio.Task[Any]:
        """Something that goes on beside the operations."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._done())
        return task

    def begin(self, names: Iterable[str], gpus: Iterable[int], work: Work) -> None:
        """An operation on these models, with these GPUs to itself: the caller has seen that they are free."""
        names = tuple(names)
        task = self.spawn(work)
        self._under_way |= dict.fromkeys(names, task)
        held = self._held[task] = tuple(gpus) or (ON_CPU,)
        self._locked.update(held)

        def ended(_: asyncio.Task[Any]) -> None:
            self._locked.subtract(self._held.pop(task))
            for name in names:
                del self._under_way[name]

        task.add_done_callback(ended)

    def share(self, name: str) -> None:
        """Let other operations use the GPUs of the one on this model, which goes on."""
        task = self._under_way[name]
        self._locked.subtract(self._held[task])
        self._held[task] = ()
        self._done()

    async def wait(self, name: str) -> None:
        """Until no operation on this model is under way."""
        task = self._under_way.get(name)
        if task is not None:
            await asyncio.wait((task,))

    def reap(self) -> None:
        """Forget the tasks that have ended; a bug of one is raised."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            if not task.cancelled():
                task.result()

    async def aclose(self) -> None:
        """Cancel all tasks and wait for their ends."""
        await cancel(*self._tasks)
