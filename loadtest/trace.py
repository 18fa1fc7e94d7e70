"""Readers of recorded traffic. A trace is a list of arrivals, in order, the first at 0 s."""

from __future__ import annotations

import csv
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec


class Arrival(msgspec.Struct, frozen=True):
    """One recorded request: `at` in seconds after the first, sizes in tokens."""

    at: float
    prompt_tokens: int
    output_tokens: int


class TraceError(Exception):
    """The file is not the trace it should be. The message names file and line."""


def read_azure(path: Path, rows: int | None = None) -> list[Arrival]:
    """The first `rows` of an Azure LLM inference trace (CSV: TIMESTAMP, ContextTokens, GeneratedTokens).

    Raises TraceError for a bad line, OSError where the file cannot be read.
    """
    arrivals: list[Arrival] = []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        start: datetime | None = None
        for row in islice(reader, rows):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"])
                start = start or at
                seconds = (at - start).total_seconds()
                arrivals.append(Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(
                    f"{path}, line {reader.line_num}: not a row of an Azure LLM trace: {error!r}"
                ) from error
    if not arrivals:
        raise TraceError(f"{path} has no rows")
    return sorted(arrivals, key=lambda arrival: arrival.at)
