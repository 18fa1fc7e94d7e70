"""The embedded sidecar of `--engine demo`: four models on two simulated GPUs, for a first look without a GPU.

It is a child process as it would be on a machine of its own: it reports to the control port, starts simulated engines
when they are asked for, and puts them to sleep to make room. It ends, its engines with it, when its standard input
closes: no path of our own end, not even SIGKILL, leaves one behind.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import msgspec

from gateway.serve.sidecar_process import SidecarProcess
from gateway.shared.addresses import reachable
from gateway.shared.new_file import write_new

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
        environment = {SPEED_VARIABLE: speed}
        all_flags = ("--gpus-from", str(gpus), *flags)
        yield SidecarProcess(config, *all_flags, environment=environment, stop_within=STOP_WITHIN, say=say)


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
