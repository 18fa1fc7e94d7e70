"""Command-line flags of a load, and the scenario they choose: the same for `gateway bench` and `gateway simulate`.

Flags win over the scenario file. Every mistake is found before anything starts, but for the rows of a trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.shared.command_line import argument
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.units import SECONDS
from loadtest.load.arrivals import Arrivals, Closed, Rate, parse_rate
from loadtest.load.scenario import Mistake, Scenario, find, load, of_trace, recorded
from loadtest.load.scenario_rules import faults
from loadtest.load.slo import parse_slo
from loadtest.load.trace import TraceError

DEFAULT_SCENARIO = "chat"
MOST_POLICY = 1 << 20  # bytes; the gateway's reader says so too, and what is wrong with it
SENT = "what is sent"
REPEATED = ("target", "metrics", "policy")  # flags that may be given more than once

Flags = tuple[tuple[str, str, str], ...]  # name, metavar ("": a switch), help

SENT_FLAGS: Flags = (
    ("scenario", "FILE|NAME", "a scenario file, or one of those that are shipped (default: chat)"),
    ("trace", "FILE", "recorded traffic: of Azure, BurstGPT or Mooncake, or the call log"),
    ("speed", "X", "send the trace so many times faster"),
    ("rate", "RATE", "requests over time, 5/s or 600/min; ramps and steps keep their shape at this mean"),
    ("clients", "N", "a closed loop: so many clients, each with its next request when it has its answer"),
    ("duration", "TIME", "how long requests are sent, 90s or 5m"),
    ("warmup", "TIME", "what is sent so early is not counted"),
    ("cooldown", "TIME", "nor what is sent so late"),
    ("model", "NAME", "the model that requests name; left out: the scenario's, or a target's only one"),
    ("seed", "N", "the same seed is the same load"),
    ("retries", "N", "tries after the first, by the rules of OpenAI's client; 0: none"),
    ("timeout", "TIME", "after which a client gives up a try"),
)


def add_groups(
    parser: argparse.ArgumentParser, groups: Mapping[str, Flags], readers: Mapping[str, Callable[[str], Any]]
) -> None:
    """Add the flags of a load and those of `groups`, read by READERS and by `readers`."""
    readers = {**READERS, **readers}
    for title, flags in {SENT: SENT_FLAGS, **groups}.items():
        group = parser.add_argument_group(title)
        for name, metavar, text in flags:
            how: dict[str, Any] = {"metavar": metavar, "type": argument(readers.get(name, str))}
            if not metavar:
                how = {"action": "store_true"}
            elif name in REPEATED:
                how |= {"action": "append", "default": []}
            group.add_argument(f"--{name}", help=text, **how)


# -- the scenario -----------------------------------------------------------------------------------------------------


def scenario_of(given: argparse.Namespace) -> tuple[Scenario, str, Path]:
    """The scenario, how it is called, and the folder its files are relative to. Raises Mistake."""
    if given.trace is not None and given.scenario is not None:
        raise Mistake("--trace and --scenario: one of them; a scenario can name a trace itself")
    if given.speed is not None and given.trace is None:
        raise Mistake("--speed is of a --trace; --rate changes any scenario's rate")
    try:
        found = _found(given)
        next(recorded(found[0], found[2]) or iter(()), None)  # another file altogether is found before a run
    except (TraceError, InvalidFile) as error:
        raise Mistake(str(error)) from error
    except OSError as error:
        raise Mistake(f"{error.filename}: {error.strerror}") from error
    return found


def _found(given: argparse.Namespace) -> tuple[Scenario, str, Path]:
    if given.trace is not None:
        if not Path(given.trace).is_file():
            why = "no file, which each run reads" if Path(given.trace).exists() else "there is no such file"
            raise Mistake(f"--trace {given.trace}: {why}")
        return of_trace(given.trace, speed=given.speed or 1.0), Path(given.trace).name, Path()
    file = find(given.scenario or DEFAULT_SCENARIO)
    return load(file), given.scenario or DEFAULT_SCENARIO, file.parent


def overridden(scenario: Scenario, given: argparse.Namespace) -> Scenario:
    """The scenario with what flags say instead. Raises Mistake."""
    if given.rate is not None and given.clients is not None:
        raise Mistake("--rate and --clients: an open loop or a closed one")
    change: dict[str, Any] = {}
    for name in ("duration", "warmup", "cooldown", "seed", "retries", "timeout", "slo"):
        if getattr(given, name) is not None:
            change[name] = getattr(given, name)
    if given.clients is not None:
        change["arrivals"] = Arrivals(closed=Closed(clients=given.clients))
    if given.model is not None:
        mix = tuple(msgspec.structs.replace(kind, model=None) for kind in scenario.workload.mix)
        change["workload"] = msgspec.structs.replace(scenario.workload, model=given.model, mix=mix)
    scenario = msgspec.structs.replace(scenario, **change)
    if given.rate is not None:
        known = scenario.rate  # a ramp or steps keep their shape
        scenario = (
            scenario.scaled(given.rate / known)
            if known
            else msgspec.structs.replace(scenario, arrivals=Arrivals(poisson=Rate(given.rate)))
        )
    for fault in faults(scenario):  # of what flags and file say together
        if fault.path != ("trace",):
            raise Mistake(f"{fault.path[0]}: {fault.found}, expected {fault.expected}")
        scenario = msgspec.structs.replace(scenario, trace=None)  # flags have replaced its arrivals
    if given.find_capacity and not scenario.slo:
        raise Mistake("--find-capacity: there is no SLO to keep; give --slo, such as --slo 'ttft.p99<2s'")
    if given.find_capacity and not scenario.rate and scenario.arrivals != "trace":
        raise Mistake("--find-capacity: a closed loop has no rate; give --rate to begin with")
    return scenario


def policy_in(file: str | Path) -> bytes:
    """The text of a policy's file. Raises Mistake."""
    try:
        with open_plain(Path(file)) as opened:
            return opened.read(MOST_POLICY + 1)
    except OSError as error:
        raise Mistake(f"--policy {file}: {error.strerror}") from error


# -- values of flags --------------------------------------------------------------------------------------------------


def seconds(text: str) -> float:
    value = SECONDS.parse(text if text[-1:].isalpha() else f"{text}s")
    if value is None or value > 30 * 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 5m or 1h")
    return value


def factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 10_000:
        raise ValueError(f"{text!r} is not a number from 0.001 to 10000")
    return value


def whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read


READERS: dict[str, Callable[[str], Any]] = {
    "slo": parse_slo, "rate": parse_rate, "duration": seconds, "warmup": seconds,
    "cooldown": seconds, "timeout": seconds, "clients": whole(1, 100_000), "seed": whole(0, 1_000_000_000),
    "retries": whole(0, 10), "speed": factor,
}  # fmt: skip
