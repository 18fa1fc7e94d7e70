"""Processes of `sidecar serve` on simulated GPUs, with simulated engines that start in a moment; none is left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from loadtest.processes import Child, free_port, get, until
from sidecar.core.config import decode
from sidecar.process import process_family
from sidecar.serve.assembly import owner
from tests.plain_http import NOBODY
from tests.sidecar.laid_out import lay_out

GIB = 1 << 30
NUMBERS = itertools.count()
MODELS = """
models:
  a: {model_path: /m/a, served_name: org/A, gpu_memory: 40%}
  b: {model_path: /m/b, gpu_memory: 70%}
"""


def wait_kept(folder: Path, profile: str) -> None:
    """Wait until the sidecar's state file, which a thread writes, has the profile's engine."""
    state = folder / "sidecar.state"

    def kept() -> bool:
        return state.exists() and profile in json.loads(state.read_bytes())["engines"]

    assert until(kept, 60.0) is not None, state


class Box:
    """A machine: a folder with a sidecar's file, its GPUs and its engines' sockets. `served` runs a sidecar on it."""

    def __init__(self, folder: Path, more: str = MODELS) -> None:
        self.listen = f"127.0.0.1:{free_port()}"
        self.id = f"test-{os.getpid()}-{next(NUMBERS)}"
        self.folder = folder
        self.gpus = folder / "gpus"
        self.file = folder / "sidecar.yaml"
        (folder / "e").mkdir()
        lay_out(self.gpus, [80 * GIB])
        head = f"id: {self.id}\nengine: {{simulated: h100-8b}}\nlisten: {self.listen}\n"
        self.file.write_text(f"{head}engine_addresses: unix:{folder}/e\n{more}")
        self.env = os.environ | {"WEIR_SIMULATED_SPEED": "200"}

    def argv(self, command: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "sidecar.cli", command, "--config", str(self.file), *more]

    @contextlib.contextmanager
    def served(self, *flags: str) -> Iterator[Child]:
        """A sidecar that listens; it gets SIGTERM in the end if it still runs."""
        argv = self.argv("serve", "--gpus-from", str(self.gpus), *flags)
        with Child("sidecar", argv, self.folder / f"serve-{next(NUMBERS)}.log", env=self.env) as child:
            child.line(r"^control API (\S+)", 60.0)
            yield child

    def run(self, command: str, *more: str) -> tuple[int, str, str]:
        """Status and outputs of another command."""
        done = subprocess.run(
            self.argv(command, *more), capture_output=True, text=True, timeout=60, env=self.env, check=False
        )
        return done.returncode, done.stdout, done.stderr

    def ask(self, method: str, path: str) -> Any:
        """The JSON of the control API's answer."""
        return json.loads(get(f"http://{self.listen}{path}", method=method)[1])

    def state(self, profile: str) -> str:
        return next(model["state"] for model in self.ask("GET", "/status")["models"] if model["profile"] == profile)

    def awake(self, profile: str) -> None:
        """Have it run, and wait for that, and until the next sidecar knows of it."""
        self.ask("POST", f"/models/{profile}/ensure")
        assert until(lambda: self.state(profile) == "running", 60.0) is not None
        wait_kept(self.folder, profile)

    def serves(self, profile: str) -> bool:
        """Whether the engine of a profile answers, with or without a sidecar."""
        transport = httpx.HTTPTransport(uds=str(self.folder / "e" / f"{profile}.sock"), verify=NOBODY)
        with httpx.Client(transport=transport, timeout=60) as client:
            try:
                return client.get("http://engine/health").status_code == 200
            except httpx.HTTPError:
                return False

    def fault(self, profile: str, **faults: object) -> None:
        """Give the engine of a profile these faults."""
        transport = httpx.HTTPTransport(uds=str(self.folder / "e" / f"{profile}.sock"), verify=NOBODY)
        with httpx.Client(transport=transport, timeout=60) as client:
            assert client.post("http://engine/_faults", json=faults).status_code == 200

    def engines(self) -> list[tuple[str, int, int]]:
        return process_family.orphans(owner(decode(self.file.read_bytes()), self.folder))


@contextlib.contextmanager
def box(folder: Path, more: str = MODELS) -> Iterator[Box]:
    """A Box, of whose engines none is left afterwards."""
    found = Box(folder, more)
    try:
        yield found
    finally:
        for _, pid, started in found.engines():
            process_family.send(pid, started, signal.SIGKILL)
        assert until(lambda: not found.engines(), 60.0) is not None
