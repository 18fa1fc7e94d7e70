"""The embedded sidecar of `--engine demo`: four models on two simulated GPUs, for a first look without a GPU.

It is a child process as it would be on a machine of its own: it reports to the control port, starts simulated engines
when they are asked for, and puts them to sleep to make room. It ends, its engines with it, when its standard input
closes: no path of our own end, not even SIGKILL, leaves one behind.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

GPUS = (24 * 1024**3, 24 * 1024**3)
MODELS = ("llama-3-8b", "mistral-7b", "qwen-2.5-7b", "phi-3-mini")  # to be asked for in this order
READY_WITHIN = 30.0  # seconds
STOP_WITHIN = 15.0  # seconds; its engines end in a fraction of one
COMMAND = (sys.executable, "-m", "sidecar.cli")
SPEED = "2"  # a start takes 8 s, to sleep or wake half a second
LOAD, WAKE, OTHERWISE = 14.5, 1.1, 1.0  # seconds of a start; of waking or falling asleep, at speed 1; more at any
SPEED_VARIABLE = "WEIR_SIMULATED_SPEED"  # what engines go by

CONFIG = """\
# What `gateway serve --engine demo` runs: four models on two simulated GPUs of 24 GB. Each GPU has room for two of
# them, a large one and the small one, but not for two large ones: all four are never awake together. So the third
# large one that is asked for puts the one to sleep that has not been used for longest, and the small one finds room.

version: 1
id: demo
gateways: ["{gateway}"]
token_file: token
listen: {listen}
engine_addresses: unix:{folder}/engines

# Simulated: Llama 3 8B in 8 bits on an NVIDIA L4, at twice its speed. The others are taken to be as fast.
engine: {{simulated: l4-8b-fp8}}
# Simulated as the GPUs are: weights that sleep at level 1 take no memory of this machine.
host_memory_for_sleep: 64GiB

models:
  # `max_starvation`: nobody who tries this out wants to wait until the others have been idle for long.
  llama-3-8b: {{model_path: simulated/llama-3-8b, gpu_memory: 55%, max_starvation: 1s}}
  mistral-7b: {{model_path: simulated/mistral-7b, gpu_memory: 55%, max_starvation: 1s}}
  qwen-2.5-7b: {{model_path: simulated/qwen-2.5-7b, gpu_memory: 55%, max_starvation: 1s}}
  phi-3-mini:
    model_path: simulated/phi-3-mini
    gpu_memory: 30%
    max_starvation: 1s
    engine: {{simulated: l4-4b-fp8}}
"""


class EmbeddedSidecar:
    """The running child. `config` is its file, in a folder of its own that goes with it; `stop` ends it and waits."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weir-demo-"))
        self.config = self._folder / "sidecar.yaml"
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, control: str, token: str) -> None:
        """Start it, to report to the gateway whose control port is `control`, and that wants to be shown `token`.
        Raises RuntimeError."""
        gpus = self._folder / "gpus"
        gpus.mkdir()
        for index, size in enumerate(GPUS):  # sidecar/fake_gpu.py says what is in such a folder
            (gpus / f"GPU-{index}.total").write_text(str(size))
        speed = os.environ.get(SPEED_VARIABLE, SPEED)
        # What a sidecar would know of its models after the first day: else it expects a minute, as of real engines.
        (self._folder / "sidecar.state").write_bytes(_known(float(speed)))
        _write_for_us_alone(self._folder / "token", token)
        gateway = _reachable(control)
        self.config.write_text(
            CONFIG.format(
                gateway=gateway,
                listen=f"127.0.0.1:{_free_port(urlsplit(gateway).port or 0)}",
                folder=self._folder,
            )
        )
        self._child = await asyncio.create_subprocess_exec(
            *(*COMMAND, "serve", "--config", str(self.config)),
            *("--gpus-from", str(gpus), "--die-with-parent"),
            env={**os.environ, SPEED_VARIABLE: speed},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C in the terminal reaches the gateway, which drains before engines end.
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(self._announced(self._child), READY_WITHIN)
        except TimeoutError:
            raise RuntimeError(f"the embedded sidecar has said nothing for {READY_WITHIN:g} s") from None

    async def _announced(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None  # noqa: S101 # PIPE was asked for
        while not (await child.stdout.readline()).startswith(b"control API "):
            if child.stdout.at_eof():
                raise RuntimeError(f"the embedded sidecar did not start: exit code {await child.wait()}")

    async def stop(self) -> None:
        """End it, by the end of its standard input, with its engines; those of one that did not end well too."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None  # noqa: S101 # PIPE was asked for
            child.stdin.close()
            if await _ended(child) != 0:
                argv = (*COMMAND, "stop", "--all", "--config", str(self.config))
                await _ended(await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL))
        shutil.rmtree(self._folder, ignore_errors=True)


def _write_for_us_alone(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


async def _ended(child: asyncio.subprocess.Process) -> int:
    """Its exit status, minus nine for one that had to be killed."""
    try:
        return await asyncio.wait_for(child.wait(), STOP_WITHIN)
    except TimeoutError:
        child.kill()
        return await child.wait()


def _known(speed: float) -> bytes:
    """The state file of a sidecar that has seen each model start and wake."""
    times = {"load": LOAD / speed + OTHERWISE, "wake1": WAKE / speed + OTHERWISE, "sleep": WAKE / speed}
    return msgspec.json.encode({"version": 1, "times": dict.fromkeys(MODELS, times)})


def _reachable(control: str) -> str:
    """The control port's URL from this machine, also where it listens on every address."""
    return re.sub(r"//(?:0\.0\.0\.0|\[::\]):", "//127.0.0.1:", control)


def _free_port(wish: int) -> int:
    """The port after the gateway's, which is 8002 where nothing else was asked for, or any."""
    for port in (min(wish + 1, 65_535), 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise RuntimeError("there is no free port for the embedded sidecar")
