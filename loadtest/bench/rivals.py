"""Rivals that the bench starts before its engines, by the names that `--compare` takes.

None is part of the project: each is installed in an environment of its own, and found on the PATH or named by an
environment variable. A name may go on with a policy of that router: `vllm-router:round_robin`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadtest.processes import Child, answers, free_port

BASELINES = ("direct", "round_robin")  # nothing before the engines
READY_WITHIN = 60.0  # seconds
ROUTER = "vllm-router"
VARIABLE = "VLLM_ROUTER"  # names the program
POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "consistent_hash", "sticky_least_loaded")


def parse_compared(text: str) -> tuple[str, ...]:
    """Names of what a gateway is compared with, separated by commas. Raises ValueError."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in BASELINES and not is_rival(name):
            raise ValueError(
                f"{name!r} is not one of {', '.join(BASELINES)}, {ROUTER}, {ROUTER}:POLICY ({', '.join(POLICIES)})"
            )
    return names


def is_rival(name: str) -> bool:
    """Whether `--compare` may name it."""
    router, colon, policy = name.partition(":")
    return router == ROUTER and (policy in POLICIES if colon else True)


def program(environment: Mapping[str, str] = os.environ) -> str | None:
    """The router's program; None where it is not installed."""
    return shutil.which(environment.get(VARIABLE) or ROUTER, path=environment.get("PATH"))


def absent(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why the router cannot be started here, and what to do; None if it can."""
    if program(environment) is not None:
        return None
    named = environment.get(VARIABLE)
    where = f"{VARIABLE} names {named}, which is no program" if named else f"{ROUTER} is not on the PATH"
    return f"{where}: pip install {ROUTER} in an environment of its own, and name its program in {VARIABLE}"


@contextmanager
def routed(name: str, engines: Sequence[str], log: Path) -> Iterator[str]:
    """The URL of a router before these engines, with the default policy or that of `name`. Raises ChildError."""
    port = free_port()
    argv = [program() or ROUTER, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    argv += ["--log-level", "error", "--policy", name.partition(":")[2] or POLICIES[0], "--worker-urls", *engines]
    with Child(name, argv, log) as child:
        url = f"http://127.0.0.1:{port}"
        child.wait(lambda: answers(f"{url}/readiness"), READY_WITHIN, "readiness")
        yield url
