"""Manager of simulated models on simulated GPUs, built as `sidecar serve` builds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from sidecar.core.config import decode
from sidecar.gpus.monitor import Sampler
from sidecar.residency.manager import Manager
from sidecar.residency.state_file import StateFile, own_state
from sidecar.serve.assembly import gpus_of, managed
from tests.sidecar.laid_out import lay_out

GIB = 1 << 30
FILE = """
id: box
engine: {simulated: h100-8b}
gpus: all
models:
  a: {model_path: /m/a, served_name: org/A, gpu_memory: 40%}
  b: {model_path: /m/b, gpu_memory: 40%, sleep: null}
  big: {model_path: /m/big, tensor_parallel: 4}
"""


@contextlib.asynccontextmanager
async def opened(
    folder: Path, text: str = FILE, gpus: Sequence[int] = (80 * GIB,), *, run: bool = False
) -> AsyncIterator[Manager]:
    """The manager of the file `text`, in `folder`. `run`: it does what is wanted, and ends its engines afterwards."""
    fake = folder / "gpus"
    lay_out(fake, gpus)
    config = decode(text.encode())
    sampler = Sampler(gpus_of(config, fake))
    state = StateFile(folder / config.state_file, lambda _: None)
    manager = managed(config, folder, sampler, own_state(state.load(), state.path, lambda _: None), state, fake)
    await manager.open()
    running = asyncio.ensure_future(manager.run()) if run else None
    try:
        yield manager
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait((running,))
        await manager.close(end_engines=True)
        await state.flush()
        state.close()
