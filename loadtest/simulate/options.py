"""Options of `gateway simulate`: its flags, and the simulations they ask for.

Every mistake is found here, before anything starts, but for the rows of a trace, which are read as they are sent.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.shared.files.plain_file import open_plain
from gateway.shared.protocol import Role
from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import profile_of
from loadtest.load.scenario import Mistake, Scenario
from loadtest.load.scenario_flags import add_groups, overridden, policy_in, scenario_of, whole
from loadtest.simulate.help_text import GROUPS
from loadtest.simulate.inprocess import policy_for
from loadtest.simulate.rivals.rules import RULES, SPILL_ON_LOAD
from loadtest.simulate.run import Cell

MOST_ENGINES = 1024
MOST_JOBS = 256


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be done. `rows`: about how many a trace has, 0 without one; `notes`: what is odd, in words."""

    scenario: Scenario
    source: str
    profile: str
    jobs: Sequence[Cell]
    at_once: int
    rows: int
    out: Path | None
    force: bool
    notes: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load and those of GROUPS."""
    readers: dict[str, Callable[[str], Any]] = {
        "engines": _engines, "profile": _profile, "compare": _rules, "jobs": whole(1, MOST_JOBS),
        "max-model-len": whole(16, 10_000_000), "prefill": whole(1, MOST_ENGINES - 1),
    }  # fmt: skip
    add_groups(parser, GROUPS, readers)


def simulation_of(given: argparse.Namespace) -> Simulation:
    """Plan of the simulation. Raises Mistake."""
    scenario, source, folder = scenario_of(given)
    scenario = overridden(scenario, given)
    engines: tuple[int, ...] = given.engines or (4,)
    profile = given.profile or "h100-8b"
    try:
        config = engine_config(profile_of(profile), max_model_len=given.max_model_len)
    except ValueError as error:
        raise Mistake(f"--max-model-len {given.max_model_len}: {error}") from error
    jobs: list[Cell] = []
    notes: list[str] = []
    for name, before, policy in _sides(given, scenario, notes):
        for number in engines:
            cell = Cell(
                name=f"{name}, {number} engine{'s' if number > 1 else ''}" if len(engines) > 1 else name,
                before=before, policy=policy, engines=number, config=config, scenario=scenario, folder=folder,
                requests=given.requests, find_capacity=given.find_capacity,
            )  # fmt: skip
            jobs.append(cell)
            if before == "gateway" and given.prefill:
                jobs.append(_split(cell, given.prefill))
    try:
        rows = 0 if scenario.trace is None else about(folder / scenario.trace.file)
    except OSError as error:
        raise Mistake(f"{error.filename}: {error.strerror}") from error
    at_once = given.jobs or len(os.sched_getaffinity(0))
    return Simulation(
        scenario=scenario, source=source, profile=profile, jobs=jobs, at_once=at_once, rows=rows,
        out=given.out and Path(given.out), force=given.force, notes=notes,
    )  # fmt: skip


def _split(cell: Cell, readers: int) -> Cell:
    """The same engines, so many of which read prompts for the others. Raises Mistake where none would answer."""
    if readers >= cell.engines:
        raise Mistake(f"--prefill {readers}: expected fewer than the {cell.engines} engines, for some have to answer")
    roles: list[Role] = ["prefill" if number < readers else "decode" for number in range(cell.engines)]
    name, comma, rest = cell.name.partition(", ")
    return msgspec.structs.replace(cell, name=f"{name} prefill {readers}{comma}{rest}", roles=tuple(roles))


def about(path: Path, head: int = 1 << 18) -> int:
    """About how many lines a file has, by the length of its first ones. Raises OSError."""
    with open_plain(path) as file:
        first = file.read(head)
        size = file.seek(0, 2)
    return max(1, round(first.count(b"\n") * size / max(1, len(first))))


def _sides(given: argparse.Namespace, scenario: Scenario, notes: list[str]) -> Iterator[tuple[str, str, bytes]]:
    """Sides that are compared: policies by the names of their files, and baselines."""
    names: list[str] = []
    paid: list[tuple[str, bytes]] = []
    tenants = tuple(scenario.workload.tenants) or ("",)
    asked = dict.fromkeys(kind.class_name for kind in scenario.workload.mix)
    for file in given.policy or [""]:
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(file).stem) or "weir"
        if name in names:
            raise Mistake(f"--policy {file}: there are two policies called {name}")
        names.append(name)
        try:
            text = policy_in(file) if file else b""
            policy = policy_for(text, tenants, file or "the default policy")
        except ValueError as error:
            raise Mistake(str(error)) from error
        missing = [one for one in asked if one not in policy.classes]
        if missing:
            notes.append(f"{name} has no class {' nor '.join(missing)}: calls that ask for it are refused")
        strangers = [tenant for tenant in tenants if tenant and tenant not in policy.tenants]
        if strangers:
            notes.append(f"{name} has no tenant {' nor '.join(strangers)}: they call without a key, as anonymous")
        if policy.providers:
            paid.append((name, text))
        yield name, "gateway", text
    for baseline in given.compare or ():
        if baseline != SPILL_ON_LOAD:
            yield baseline, baseline, b""
            continue
        if not paid:
            raise Mistake(f"--compare {SPILL_ON_LOAD}: no policy has providers")
        for name, text in paid:
            yield f"{name} by load", SPILL_ON_LOAD, text


# -- arguments --------------------------------------------------------------------------------------------------------


def _engines(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split(","):
        if not part.isdecimal() or not 1 <= int(part) <= MOST_ENGINES:
            raise ValueError(f"{part!r} is not a number of engines from 1 to {MOST_ENGINES}")
        numbers.append(int(part))
    return tuple(sorted(set(numbers)))


def _rules(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in (*RULES, SPILL_ON_LOAD):
            raise ValueError(f"{name!r} is not one of {', '.join((*RULES, SPILL_ON_LOAD))}")
    return names


def _profile(text: str) -> str:
    profile_of(text)
    return text
