"""The embedded fleet of `--engine sim[:N[:PROFILE]]`: simulated vLLM engines as child processes.

Each child prints `ready URL` when it listens, and ends by itself when its standard input closes: no path of our own
end, not even SIGKILL, leaves one behind. Of several processes of a gateway the parent has them, so that they outlive
its decider.
"""

from __future__ import annotations

import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

READY_WITHIN = 30.0  # seconds
STOP_WITHIN = 5.0
MOST = 64

_SPEC = re.compile(r"sim(?::(?P<count>[0-9]{1,9})(?::(?P<profile>.{1,4096}))?)?")


class EmbeddedFleet(msgspec.Struct, frozen=True):
    """`count` engines of one latency profile: its name, or its file."""

    count: int = 2
    profile: str = "h100-8b"


def parse_embedded(text: str) -> EmbeddedFleet | None:
    """`sim`, `sim:N` or `sim:N:PROFILE`; None if it is not of that form. Raises ValueError for a bad N."""
    match = _SPEC.fullmatch(text)
    if match is None:
        return None
    count = int(match["count"] or 2)
    if not 1 <= count <= MOST:
        raise ValueError(f"{text!r}: 1 to {MOST} simulated engines, not {count}")
    return EmbeddedFleet(count, match["profile"] or "h100-8b")


@contextmanager
def embedded(fleets: Sequence[EmbeddedFleet]) -> Iterator[list[str]]:
    """Start the engines of these fleets; their URLs. They end with the block, which waits for that. Raises RuntimeError
    if one does not come up."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        profiles = [fleet.profile for fleet in fleets for _ in range(fleet.count)]
        for seed, profile in enumerate(profiles):
            children.append(_started(profile, seed))
        until = time.monotonic() + READY_WITHIN
        yield [_url(child, profile, until) for child, profile in zip(children, profiles, strict=True)]
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                child.terminate()
        until = time.monotonic() + STOP_WITHIN
        for child in children:
            _stop(child, until)


def _started(profile: str, seed: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 # our own program, without a shell
        [
            *(sys.executable, "-m", "loadtest.engine", "--port", "0", "--profile", profile),
            *("--seed", str(seed), "--die-with-parent"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A session of its own: Ctrl-C in the terminal reaches the gateway, which drains before they end.
        start_new_session=True,
    )


def _url(child: subprocess.Popen[bytes], profile: str, until: float) -> str:
    """Return the URL of the engine, once it listens. Raises RuntimeError."""
    assert child.stdout is not None  # noqa: S101 # PIPE was asked for
    ready, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
    word, _, url = (child.stdout.readline() if ready else b"").decode().strip().partition(" ")
    if word != "ready":
        if ready:  # its output has ended, and so will it
            with suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
        raise RuntimeError(f"the simulated engine ({profile}) did not start: exit code {child.poll()}")
    return url


def _stop(child: subprocess.Popen[bytes], until: float) -> None:
    try:
        child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
