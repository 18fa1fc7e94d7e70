"""Flags of `gateway bench` and the readers of their values; `help_text.py` has their texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from loadtest.bench.fleet import parse_fleet
from loadtest.bench.help_text import GROUPS
from loadtest.bench.rivals import parse_compared
from loadtest.clients.targets import Address, parse_url
from loadtest.load.scenario_flags import add_groups, seconds, whole

MOST_REPEATS = 100
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load and those of GROUPS."""
    readers: dict[str, Callable[[str], Any]] = {
        "target": _target, "engines": parse_fleet, "metrics": _metrics, "drain": seconds,
        "repeat": whole(1, MOST_REPEATS), "compare": parse_compared, "max-model-len": whole(16, 10_000_000),
    }  # fmt: skip
    add_groups(parser, GROUPS, readers)


def _target(text: str) -> tuple[str, Address]:
    name, equals, url = text.partition("=")
    if not equals or "/" in name:
        address = parse_url(text)
        name = re.sub(r"[^a-z0-9_.-]", "-", (address.unix or address.name).lower()).strip("-.")
        return name, address
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of lower-case letters, digits, _ . and -")
    return name, parse_url(url)


def _metrics(text: str) -> tuple[str, Address]:
    name, equals, url = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r}: write NAME=URL, with the name of a target")
    return name, parse_url(url.removesuffix("/metrics"))
