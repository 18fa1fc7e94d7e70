"""Command `python -m loadtest.engine`: one simulated vLLM.

Prints `ready URL` once it listens. A bad argument is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import get_args

import uvloop

from loadtest.engine.config import SimConfig, sim_config
from loadtest.engine.engine_memory import GpuShare, StartFailed
from loadtest.engine.kv_transfer import OnFailure
from loadtest.engine.profile_file import profiles
from loadtest.engine.scheduler import Policy
from loadtest.engine.server import SimServer

EPILOG = """examples:
  python -m loadtest.engine --port 8100                        an H100 with an 8B model
  python -m loadtest.engine --port 0 --model m --speed 10      any free port, ten times as fast
  python -m loadtest.engine --num-gpu-blocks 200 --max-num-seqs 8    easily overloaded

It answers the routes of a vLLM API server (chat, completions, responses, messages, embeddings, rerank, score, metrics,
sleep and wake). With --gpu-folder it loads its weights before it listens, in memory that
others then do not have, and gives it back asleep. To break it while it runs:
  curl -d '{"errors": 0.1}' URL/_faults      and to heal it      curl -d '{}' URL/_faults
"""


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.engine",
        description="A simulated vLLM: real scheduling, invented tokens.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    where.add_argument("--port", type=int, default=0, help="port; 0 (the default): any free one")
    where.add_argument("--uds", metavar="PATH", help="on a unix socket instead")
    what = parser.add_argument_group("what it simulates")
    names = f"speed and limits: {', '.join(profiles())}, or a file of `gateway calibrate` (h100-8b)"
    what.add_argument("--profile", default="h100-8b", metavar="NAME|FILE", help=names)
    what.add_argument("--model", dest="models", action="append", metavar="NAME", help="a served name, repeatable (sim)")
    what.add_argument(
        "--lora-module", dest="adapters", action="append", metavar="NAME", help="its LoRA adapter, repeatable"
    )
    what.add_argument("--max-loras", type=int, default=1, metavar="N", help="adapters loaded at once (%(default)s)")
    what.add_argument(
        "--speed",
        type=float,
        default=os.environ.get("WEIR_SIMULATED_SPEED", "1"),
        metavar="X",
        help="run X times faster than the profile; default: $WEIR_SIMULATED_SPEED, or 1",
    )
    what.add_argument("--seed", type=int, default=0, help="of the jitter and of the faults drawn by share (0)")
    limits = parser.add_argument_group("limits, the profile's unless given")
    limits.add_argument("--num-gpu-blocks", type=int, metavar="N", help="KV blocks of 16 tokens")
    limits.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a batch")
    limits.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens in a step")
    limits.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and output")
    _add_of_vllm(parser)
    _add_of_gpus(parser)
    parser.add_argument("--die-with-parent", action="store_true", help="exit when standard input ends")
    return parser


def _add_of_vllm(parser: argparse.ArgumentParser) -> None:
    vllm = parser.add_argument_group("as vLLM")
    vllm.add_argument(
        "--scheduling-policy", dest="policy", default="fcfs", choices=get_args(Policy), help="waiting order (fcfs)"
    )
    vllm.add_argument("--no-enable-prefix-caching", dest="caching", action="store_false", help="find no prefix again")
    details = "tell cached tokens in usage"
    vllm.add_argument("--enable-prompt-tokens-details", dest="prompt_details", action="store_true", help=details)
    vllm.add_argument("--api-key", metavar="KEY", help="guards /v1 only, as vLLM's does")
    vllm.add_argument("--kv-transfer", action="store_true", help="exchange prompts with other simulated engines")
    vllm.add_argument(
        "--kv-load-failure-policy",
        dest="on_kv_failure",
        default="fail",
        choices=get_args(OnFailure),
        help="of a call whose prompt cannot be fetched (fail)",
    )
    vllm.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish what becomes of cached blocks, by ZeroMQ, on tcp://127.0.0.1:PORT or ipc://PATH",
    )


def _add_of_gpus(parser: argparse.ArgumentParser) -> None:
    gpus = parser.add_argument_group("simulated GPUs: with them it takes memory, and time to start, sleep and wake")
    gpus.add_argument(
        "--gpu-folder",
        dest="folder",
        type=Path,
        default=os.environ.get("WEIR_SIMULATED_GPUS") or None,
        metavar="FOLDER",
        help="where they are; default: $WEIR_SIMULATED_GPUS, or none",
    )
    gpus.add_argument(
        "--gpus",
        type=_gpus,
        default=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        metavar="N,N",
        help="which of them; default: $CUDA_VISIBLE_DEVICES, or 0",
    )
    share, cache = "share of each (0.9)", "bytes of KV cache; default: the rest of the share"
    gpus.add_argument("--gpu-memory-utilization", dest="utilization", type=float, default=0.9, metavar="X", help=share)
    gpus.add_argument("--kv-cache-memory-bytes", dest="cache", type=int, metavar="N", help=cache)


def _gpus(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT, or the end of standard input where asked; the exit status: 1 if it cannot start."""
    given = vars(arguments().parse_args(argv))  # by the names of the fields that they set
    die_with_parent = given.pop("die_with_parent")
    gpus = {name: given.pop(name) for name in GpuShare.__struct_fields__}
    share = GpuShare(**gpus) if gpus["folder"] is not None and gpus["gpus"] else None
    try:
        models, adapters = (tuple(given.pop(name) or ()) for name in ("models", "adapters"))
        config = sim_config(models=models, adapters=adapters, share=share, **given)
        uvloop.run(_run(config, die_with_parent=die_with_parent))
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"python -m loadtest.engine: {error}", file=sys.stderr)
        return 2
    return 0


async def _run(config: SimConfig, *, die_with_parent: bool) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    server = SimServer(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: None if server.faults.hang_end else ended.set())
    if die_with_parent:
        await loop.connect_read_pipe(lambda: _Parent(ended), sys.stdin)
    try:
        if await _first(ended, server.load(partial(print, flush=True))):
            return
        await server.start()
        print(f"ready {server.url}", flush=True)
        await _first(ended, server.died.wait())
    finally:
        await server.stop()


async def _first(event: asyncio.Event, work: Coroutine[None, None, object]) -> bool:
    """Whether `event` came before the end of `work`, which is cancelled then. Raises what `work` does."""
    waiting, working = asyncio.ensure_future(event.wait()), asyncio.ensure_future(work)
    await asyncio.wait((waiting, working), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if working.done():
        working.result()
        return False
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    return True


class _Parent(asyncio.Protocol):
    """Standard input: its end is the end of whoever started us."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()


if __name__ == "__main__":
    sys.exit(main())
