"""The embedded sidecar of `--engine demo`: four models on two simulated GPUs, for a first look without a GPU.

It is a child process as it would be on a machine of its own: it reports to the control port, starts simulated engines
when they are asked for, and puts them to sleep to make room. It ends, its engines with it, when its standard input
closes: no path of our own end, not even SIGKILL, leaves one behind.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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
    # Too little, which nobody knows before it was tried: its first start fails, in vLLM's words, and the next claims
    # what they say.
    gpu_memory: {{kv: 6GiB}}
    max_starvation: 1s
    engine: {{simulated: l4-4b-fp8}}
"""


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
        config.write_text(CONFIG.format(gateway=gateway, listen=listen, folder=folder))
        environment = {SPEED_VARIABLE: speed}
        all_flags = ("--gpus-from", str(gpus), *flags)
        yield SidecarProcess(config, *all_flags, environment=environment, stop_within=STOP_WITHIN, say=say)


def _known(speed: float) -> bytes:
    """The state file of a sidecar that has seen each model start and wake."""
    times = {"load": LOAD / speed + OTHERWISE, "wake1": WAKE / speed + OTHERWISE, "sleep": WAKE / speed}
    return msgspec.json.encode({"version": 1, "times": dict.fromkeys(MODELS, times)})


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
