"""Simulated engines that the bench starts, behind a gateway with a policy, a rival, or nothing.

Every run gets fresh engines: a second run would find the prefixes of the first in their caches. Engines and gateway are
child processes with their output in files. They end with the run.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from gateway.serve.embedded import MOST, parse_embedded
from loadtest.bench.rivals import is_rival, routed
from loadtest.bench.run import SIGNALS
from loadtest.clients.targets import Spread, Target, parse_url
from loadtest.engine.profile_file import profile_of
from loadtest.processes import Child, Gateway
from loadtest.signals import handled

READY_WITHIN = 30.0  # seconds


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """`count` engines of one latency profile (a name, or a file), which serve these models. `flags`: more of each."""

    count: int
    profile: str
    models: Sequence[str] = ("sim",)
    flags: Sequence[str] = ()


def parse_fleet(text: str) -> Fleet:
    """`sim`, `sim:N` or `sim:N:PROFILE`. Raises ValueError."""
    parsed = parse_embedded(text)
    if parsed is None:
        raise ValueError(f"{text!r} is not sim, sim:N or sim:N:PROFILE")
    profile_of(parsed.profile)
    return Fleet(count=parsed.count, profile=parsed.profile)


@contextmanager
def started(fleet: Fleet, name: str, *, before: str, policy: Path | None, seed: int, folder: Path) -> Iterator[Target]:
    """A target `name`: engines of which nothing is known yet, and `before` them what `fronted` says. Raises ChildError
    where one does not come up."""
    with ExitStack() as stack:
        children = []
        for number in range(fleet.count):
            argv = [sys.executable, "-m", "loadtest.engine", "--profile", fleet.profile, *fleet.flags]
            argv += [word for model in fleet.models for word in ("--model", model)]
            argv += ["--seed", str(seed * MOST + number), "--enable-prompt-tokens-details"]
            with _undivided():
                children.append(stack.enter_context(Child(f"engine {number}", argv, folder / f"engine-{number}.log")))
        urls = [child.line(r"^ready (http://\S+)", READY_WITHIN) for child in children]
        yield stack.enter_context(fronted(urls, name, before=before, policy=policy, folder=folder))


@contextmanager
def fronted(urls: Sequence[str], name: str, *, before: str, policy: Path | None, folder: Path) -> Iterator[Target]:
    """A target `name`: these engines behind a "gateway" with `policy`, which may name them, behind a rival
    (`rivals.py`), or behind nothing ("direct", "round_robin"). Raises ChildError where one does not come up."""
    engines = [parse_url(url) for url in urls]
    sources = [(f"engine {number}", address) for number, address in enumerate(engines)]
    with ExitStack() as stack:
        if before == "gateway":
            named = policy.read_text() if policy is not None else ""
            words = [word for url in urls if url not in named for word in ("--engine", url)]
            words += ["--policy", str(policy)] if policy is not None else []
            with _undivided():
                log = folder / "gateway.log"
                gateway = stack.enter_context(Gateway(log, *words, "--log", "none", timeout=READY_WITHIN))
            addresses = [parse_url(gateway.url)]
            sources.append(("", parse_url(gateway.control)))
            yield Target(name=name, addresses=addresses, sources=sources)
        elif is_rival(before):
            with _undivided():
                url = stack.enter_context(routed(before, urls, folder / "rival.log"))
            yield Target(name=name, addresses=[parse_url(url)], sources=sources)
        else:
            spread: Spread = "direct" if before == "direct" else "round_robin"
            yield Target(name=name, addresses=engines, spread=spread, sources=sources)


@contextmanager
def _undivided() -> Iterator[None]:
    """A signal waits until this is over: a child that was started must be known before anything else happens."""
    came: list[int] = []
    with handled(SIGNALS, lambda number, _: came.append(number)):
        yield
    if came:
        signal.raise_signal(came[0])
