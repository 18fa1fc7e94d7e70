"""Sidecar as a child process of the gateway: one machine in one command, or the simulated one of `--engine demo`.

It is a child as it would be on a machine of its own: it reports to the control port and starts engines when they are
asked for. It ends, its engines with it, when its standard input closes: no path of our own end, not even SIGKILL,
leaves one behind. Where it ends before, however, it is started again, and takes over the engines that it finds running.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import msgspec

from gateway.shared.addresses import reachable
from gateway.shared.new_file import write_new
from gateway.shared.tasks import lasting

# Seconds to listen. It reads its models' files first, for 30 s each where their disk hangs, and takes over engines,
# or ends those that hang: one that is ended before would never come to an end with them.
READY_WITHIN = 300.0
FIRST, LATEST = 0.5, 30.0  # seconds before one that has ended is started again: twice as many each time
IN_ORDER = 60.0  # seconds after which one that ends is started again as soon as the first time
COMMAND = (sys.executable, "-m", "sidecar.cli")


class SidecarProcess(msgspec.Struct, eq=False):
    """The child that runs the file `config`, with more `flags` and `environment`. `stop` gives it and its engines
    `stop_within` seconds to end. `say` takes a line for the operator whenever it has ended before."""

    config: Path
    _flags: Sequence[str]
    _stop_within: float
    _say: Callable[[str], None]
    _environment: Mapping[str, str] = {}
    _keeping: asyncio.Task[None] | None = None
    _child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Back when it listens; from then on it lives until `stop`. Raises RuntimeError where it does not come to that;
        what it wrote says why."""
        await self._begin()
        self._keeping = lasting(f"the sidecar of {self.config}", self._keep)

    async def _keep(self) -> None:
        """Restart the sidecar whenever it has ended."""
        loop, pause = asyncio.get_running_loop(), FIRST
        while (child := self._child) is not None:
            began = loop.time()
            why = f"has ended with exit status {await child.wait()}"
            if loop.time() >= began + IN_ORDER:
                pause = FIRST
            self._say(f"the sidecar of {self.config} {why}; it is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LATEST)
            try:
                await self._begin()
                self._say(f"the sidecar of {self.config} runs again")
            except (OSError, RuntimeError) as error:
                self._say(str(error))

    async def _begin(self) -> None:
        """Start the sidecar, and wait until it listens. Raises RuntimeError, and OSError without a process."""
        self._child = await asyncio.create_subprocess_exec(
            *(*COMMAND, "serve", "--config", str(self.config), *self._flags, "--end-with-parent", "--end-engines"),
            env={**os.environ, **self._environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C in the terminal reaches the gateway, which drains before engines end.
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(self._announced(self._child), READY_WITHIN)
        except TimeoutError:
            self._child.kill()  # what says nothing may do nothing
            raise RuntimeError(f"the sidecar of {self.config} has said nothing for {READY_WITHIN:g} s") from None

    async def _announced(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None  # noqa: S101 # PIPE was asked for
        while not (await child.stdout.readline()).startswith(b"control API "):
            if child.stdout.at_eof():
                raise RuntimeError(f"the sidecar of {self.config} did not start: exit code {await child.wait()}")

    async def stop(self) -> None:
        """Stop the sidecar and its engines by closing its standard input, and engines that a failed one left."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None  # noqa: S101 # PIPE was asked for
            child.stdin.close()
            if await self._ended(child) not in (0, 2):  # 2: it has never run
                argv = (*COMMAND, "stop", "--all", "--config", str(self.config))
                await self._ended(await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL))

    async def _ended(self, child: asyncio.subprocess.Process) -> int:
        """Return the exit status; -9 for a process that had to be killed."""
        try:
            return await asyncio.wait_for(child.wait(), self._stop_within)
        except TimeoutError:
            child.kill()
            return await child.wait()


# -- the simulated one of `--engine demo` -----------------------------------------------------------------------------

GPUS = (24 * 1024**3, 24 * 1024**3)
MODELS = ("llama-3-8b", "mistral-7b", "qwen-2.5-7b", "phi-3-mini")  # to be asked for in this order
STOP_WITHIN = 15.0  # seconds; its engines end in a fraction of one
SPEED = "2"  # a start takes 8 s, to sleep or wake half a second
# What the small one really needs of its share: all beside the KV cache, and the KV cache of one whole context.
TRUE = {"rest": 4_800 * 1024**2, "context": 2_200 * 1024**2}
LOAD, WAKE, OTHERWISE = 14.5, 1.1, 1.0  # seconds of a start; of waking or falling asleep, at speed 1; more at any
GIVEN_OUT = 32_768  # the first of the ports that Linux gives to connections, and to listeners on port 0
SPEED_VARIABLE = "WEIR_SIMULATED_SPEED"  # what engines go by
CONFIG = Template(Path(__file__).with_name("demo-sidecar.yaml").read_text(encoding="utf-8"))


@contextmanager
def embedded_sidecar(
    control: str, token: str, say: Callable[[str], None], flags: Sequence[str] = ()
) -> Iterator[SidecarProcess]:
    """The child, to be started and stopped within; its files are in a folder that ends with the block. It reports to
    the gateway whose control port is `control`, and shows it `token`. `say` takes a line for the operator. `flags`:
    more of the sidecar's. Raises RuntimeError where no port is free, ValueError for a speed that is no number."""
    with tempfile.TemporaryDirectory(prefix="weir-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        gpus, config = folder / "gpus", folder / "sidecar.yaml"
        gpus.mkdir()
        for index, size in enumerate(GPUS):  # sidecar/gpus/simulated.py says what is in such a folder
            (gpus / f"GPU-{index}.total").write_text(str(size))
        (gpus / f"{MODELS[-1]}.memory").write_bytes(msgspec.json.encode(TRUE))
        speed = os.environ.get(SPEED_VARIABLE, SPEED)
        # What a sidecar would know of its models after the first day: else it expects a minute, as of real engines.
        (folder / "sidecar.state").write_bytes(_known(float(speed)))
        write_new(folder / "token", token, 0o600)
        gateway = reachable(control)
        listen = f"127.0.0.1:{_free_port(urlsplit(gateway).port or 0)}"
        config.write_text(CONFIG.substitute(gateway=gateway, listen=listen, folder=folder))
        all_flags = ("--gpus-from", str(gpus), *flags)
        yield SidecarProcess(config, all_flags, STOP_WITHIN, say, {SPEED_VARIABLE: speed})


def _known(speed: float) -> bytes:
    """The state file of a sidecar that has seen each model start and wake."""
    times = {"load": LOAD / speed + OTHERWISE, "wake1": WAKE / speed + OTHERWISE, "sleep": WAKE / speed}
    return msgspec.json.encode({"version": 1, "times": dict.fromkeys(MODELS, times)})


def _free_port(wish: int) -> int:
    """The port after the gateway's, which is 8002 where nothing else was asked for, or one that the kernel gives to
    nobody by chance before the sidecar has it."""
    near: tuple[int, ...] = () if wish >= GIVEN_OUT else (wish + 1,)
    for port in (*near, *random.sample(range(10_000, 20_000), 100)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("there is no free port for the embedded sidecar")
