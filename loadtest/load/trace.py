"""Readers of recorded traffic: Azure's LLM inference traces of 2023 and 2024, BurstGPT (CSV), Mooncake (JSONL), and the
gateway's own call log (JSONL).

A file is read line by line and never held: ten million rows take the memory of REORDER. Rows that are a little out of
order are put right; the first to be sent is at 0 s. Every row that cannot be used is named with its line and what was
expected there, for a trace with a hole would be another load than the recorded one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from heapq import heappop, heappush
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal, TextIO, TypeVar

import msgspec

from gateway.shared.files.plain_file import open_plain

T = TypeVar("T")
Format = Literal["azure", "burstgpt", "mooncake", "weir"]

REORDER = 16_384  # rows that are held to be put in order: a call log has them by their ends
BLOCK = 512  # tokens for which a Mooncake trace has one hash
MOST = 10_000_000  # tokens of one prompt or answer
LONGEST_LINE = 1 << 20  # characters; a Mooncake row of a million tokens has 20,000

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Request of a recorded trace: `at` in seconds after the first, sizes in tokens; some failed requests were recorded
    with 0 tokens. `blocks` are the hashes of each BLOCK tokens of its prompt, empty if none were recorded: two prompts
    whose hashes begin alike begin with the same text. `turns`: requests that go on from this one, of `conversations`.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    turns: tuple[Arrival, ...] = ()


class TraceError(Exception):
    """The file is not the trace it should be. The message names file and line, and what was expected."""


class _Mooncake(msgspec.Struct):
    """A line of a Mooncake trace; milliseconds and tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Annotated[int, msgspec.Meta(ge=0, le=MOST)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST)]
    hash_ids: tuple[int, ...] = ()


class _Logged(msgspec.Struct):
    """A line of a call log. `ts`: the call's end, seconds since 1970; `total`: seconds since its first byte.
    `dropped_lines`: of a line that tells of lost ones. `event`: call, or of a line for the operator; None: of before
    there were events. `mirrored`: copy: no caller's, but made by the gateway."""

    ts: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    total: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST)] | None = None
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0
    dropped_lines: int | None = None
    event: str | None = None
    mirrored: str | None = None


_MOONCAKE = msgspec.json.Decoder(_Mooncake)
_LOGGED = msgspec.json.Decoder(_Logged)


def read(path: Path, trace_format: Format | None = None, *, speed: float = 1.0) -> Iterator[Arrival]:
    """The rows of a trace in order, `speed` times faster than recorded. The format left out: what its first line
    looks like. Raises TraceError for a line that cannot be used, OSError where the file cannot be read."""
    start = None
    rows: list[tuple[float, int, Arrival]] = []  # a heap, whose entries never compare beyond the line
    with TextIOWrapper(open_plain(path), "utf-8-sig", "replace", newline="") as file:
        lines = _lines(file, path)
        passed = -math.inf
        for number, row in _parsed(lines, path, trace_format):
            if row.at < passed:
                expected = f"at most {REORDER} rows out of order; sort the trace by time"
                raise TraceError(
                    f"{path}, line {number}: {passed - row.at:g} s too late in the file, expected {expected}"
                )
            heappush(rows, (row.at, number, row))
            if len(rows) > REORDER:
                passed, _, first = heappop(rows)
                start = passed if start is None else start
                yield _after(first, start, speed)
    if not rows:
        raise TraceError(f"{path} has no rows")
    start = rows[0][0] if start is None else start
    while rows:
        yield _after(heappop(rows)[2], start, speed)


def conversations(rows: Iterable[Arrival], path: Path) -> Iterator[Arrival]:
    """The first request of each conversation, with its further turns. A request is the next turn of the latest one
    whose whole blocks its prompt begins with. All rows are held. Raises TraceError where no row has hashes."""
    found: list[list[Arrival]] = []
    open_: dict[int, list[Arrival]] = {}  # by the last whole block of their latest prompts
    for row in rows:
        whole = row.blocks[: row.prompt_tokens // BLOCK]
        turns = next((open_.pop(block) for block in reversed(whole) if block in open_), None)
        if turns is None:
            found.append(turns := [])
        turns.append(row)
        if whole:
            open_[whole[-1]] = turns
    if not open_:
        raise TraceError(f"{path} tells no turns: no prompt has a whole block with a hash, expected hash_ids")
    for first, *others in found:
        yield msgspec.structs.replace(first, turns=tuple(others))


def _after(row: Arrival, start: float, speed: float) -> Arrival:
    return Arrival((row.at - start) / speed, row.prompt_tokens, row.output_tokens, row.blocks)


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines, none of which is read whole if it does not end."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise TraceError(f"{path}, line {number}: over {LONGEST_LINE} characters, expected a row")
        yield line


def _parsed(lines: Iterator[str], path: Path, wanted: Format | None) -> Iterator[tuple[int, Arrival]]:
    """Rows as they stand in the file, each with its line's number; their times may begin anywhere."""
    first = next(lines, "")
    found = _format_of(first)
    if found is None or wanted not in (None, found):
        expected = {
            "azure": f"the header {','.join(AZURE)} (Azure)",
            "burstgpt": f"a header with {', '.join(BURSTGPT)} (BurstGPT)",
            "mooncake": "an object with timestamp, input_length, output_length and hash_ids (Mooncake)",
            "weir": "an object with ts, total, prompt_tokens and completion_tokens (the gateway's call log)",
        }
        what = ", or ".join(expected.values()) if wanted is None else expected[wanted]
        raise TraceError(f"{path}, line 1: {_shown(first)}, expected {what}")
    if found == "mooncake":
        return _mooncake(first, lines, path)
    if found == "weir":
        return _logged(first, lines, path)
    header = [name.strip() for name in next(csv.reader([first]))]
    if found == "azure":
        return _csv(lines, path, header, AZURE, _azure_time, "a time such as 2023-11-16 18:15:46.68")
    return _csv(lines, path, header, BURSTGPT, _seconds, "a time in seconds")


def _format_of(first: str) -> Format | None:
    if first.lstrip().startswith("{"):
        return "weir" if '"ts":' in first else "mooncake"
    try:
        names = {name.strip() for name in next(csv.reader([first]), ())}
    except csv.Error:
        return None
    return "azure" if names.issuperset(AZURE) else "burstgpt" if names.issuperset(BURSTGPT) else None


def _shown(text: str) -> str:
    text = text.rstrip("\r\n")
    return repr(text if len(text) <= 80 else text[:77] + "...") if text else "nothing"


# -- rows -------------------------------------------------------------------------------------------------------------


def _csv(
    lines: Iterator[str], path: Path, header: list[str], names: tuple[str, str, str],
    time_of: Callable[[str], float | None], time: str,
) -> Iterator[tuple[int, Arrival]]:  # fmt: skip
    at, prompt, output = (header.index(name) for name in names)
    reader = csv.reader(lines)

    def wrong(what: str) -> TraceError:
        return TraceError(f"{path}, line {reader.line_num + 1}: {what}")

    try:
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise wrong(f"{len(row)} columns, expected {len(header)}, as in the header")
            seconds, asked, said = time_of(row[at]), _tokens(row[prompt]), _tokens(row[output])
            if seconds is None:
                raise wrong(f"{names[0]} is {_shown(row[at])}, expected {time}")
            if asked is None or said is None:
                name, text = (names[1], row[prompt]) if asked is None else (names[2], row[output])
                raise wrong(f"{name} is {_shown(text)}, expected a number of tokens, 0 to {MOST}")
            yield reader.line_num + 1, Arrival(seconds, asked, said)
    except csv.Error as error:
        raise wrong(f"{error}, expected a row of CSV") from error


def _azure_time(text: str) -> float | None:
    """Seconds since 1970: with a time zone as in 2024, or without as in 2023, when it is taken as UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _seconds(text: str) -> float | None:
    try:
        at = float(text)
    except ValueError:
        return None
    return at if 0.0 <= at <= 1e12 else None


def _tokens(text: str) -> int | None:
    """A number of tokens; some editions write it as a fraction of 1, `18.0`."""
    digits = text.strip().removesuffix(".0")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 8):
        return None
    value = int(digits)
    return value if value <= MOST else None


def _mooncake(first: str, lines: Iterator[str], path: Path) -> Iterator[tuple[int, Arrival]]:
    expected = "an object with timestamp (ms), input_length, output_length and hash_ids"
    for number, row in _objects(first, lines, path, _MOONCAKE, expected):
        if row.hash_ids and len(row.hash_ids) != -(-row.input_length // BLOCK):
            raise TraceError(
                f"{path}, line {number}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens, "
                f"expected {-(-row.input_length // BLOCK)}, one for each {BLOCK}"
            )
        yield number, Arrival(row.timestamp / 1000.0, row.input_length, row.output_length, row.hash_ids)


def _logged(first: str, lines: Iterator[str], path: Path) -> Iterator[tuple[int, Arrival]]:
    """Calls by their first bytes. A request that was refused before it was read has no prompt, and is none here."""
    expected = "an object with ts (s), total (s), prompt_tokens and completion_tokens"
    for number, row in _objects(first, lines, path, _LOGGED, expected):
        if row.event not in (None, "call") and row.dropped_lines is None:
            continue  # for the operator
        if row.dropped_lines is not None:
            raise TraceError(f"{path}, line {number}: {row.dropped_lines} lines were lost, expected all calls")
        if row.prompt_tokens and row.mirrored != "copy":
            yield number, Arrival(row.ts - row.total, row.prompt_tokens, row.completion_tokens)


def _objects(
    first: str, lines: Iterator[str], path: Path, decoder: msgspec.json.Decoder[T], expected: str
) -> Iterator[tuple[int, T]]:
    """The rows of a file with a JSON object in each line, with the numbers of their lines."""
    number, line = 1, first
    while line:
        if not line.isspace():
            try:
                row = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}, line {number}: {error}, expected {expected}") from error
            yield number, row
        number, line = number + 1, next(lines, "")
