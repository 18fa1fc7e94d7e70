"""The flags of `gateway bench`, and how each is read. What they say is in `bench_words.py`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from gateway.shared.files.units import SECONDS
from loadtest.bench.fleet import parse_baselines, parse_fleet
from loadtest.bench.help_text import GROUPS
from loadtest.clients.targets import Address, parse_url
from loadtest.load.arrivals import parse_rate
from loadtest.load.slo import parse_slo

MOST_REPEATS = 100
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, in groups, as GROUPS words them."""
    readers: dict[str, Callable[[str], Any]] = {
        "target": _target, "engines": parse_fleet, "compare": parse_baselines, "metrics": _metrics, "slo": parse_slo,
        "rate": parse_rate, "duration": seconds, "warmup": seconds, "cooldown": seconds, "timeout": seconds,
        "drain": seconds, "clients": whole(1, 100_000), "seed": whole(0, 1_000_000_000), "retries": whole(0, 10),
        "repeat": whole(1, MOST_REPEATS), "speed": factor,
    }  # fmt: skip
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, metavar, text in flags:
            if not metavar:
                group.add_argument(f"--{name}", action="store_true", help=text)
            elif name in ("target", "metrics", "policy"):
                group.add_argument(
                    f"--{name}",
                    action="append",
                    default=[],
                    metavar=metavar,
                    help=text,
                    type=told(readers.get(name)),
                )
            else:
                group.add_argument(f"--{name}", metavar=metavar, help=text, type=told(readers.get(name)))


def told(read: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """For argparse, which hides the message of a ValueError but shows that of an ArgumentTypeError."""

    def converted(text: str) -> Any:
        try:
            return read(text) if read is not None else text
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


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


def seconds(text: str) -> float:
    value = SECONDS.parse(text if text[-1:].isalpha() else f"{text}s")
    if value is None or value > 30 * 86_400:
        raise ValueError(f"{text!r} is not a time such as 90s, 5m or 1h")
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
            raise ValueError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read
