"""Report of a run: a table for a terminal (`report_table`), and a folder to keep.

The folder gets `report.html` (a page that needs nothing else), `requests.csv` (a row for every request) and
`report.json` (SCHEMA, every summary, every request with its inter-token latencies). Each is written beside its place
and moved there when it is whole, the small ones first: a full disk costs the files that did not fit, and leaves none
that only looks whole.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

from loadtest.report.html import page
from loadtest.report.records import RequestResult, Run, Slo
from loadtest.report.report_table import table
from loadtest.report.stats import LAG_BOUND, OK, consistent, latency_of, met, slo_of
from loadtest.report.summary import Summary, missed, summarise

__all__ = ["WriteResult", "check", "refusal", "table", "write"]

SCHEMA = 1  # of report.json; higher where a reader of the one before would misread it
CHUNK = 1000  # requests encoded at once
COLUMNS = (
    "run", "rate", "partial", "repeat", "index", "target", "kind", "class_name", "tenant", "at", "sent", "first_byte",
    "first_token", "finished", "status", "outcome", "reason", "tries", "prompt_tokens", "completion_tokens",
    "cached_tokens", "measured", "met", "ttft", "tpot", "e2e", "itl_max",
)  # fmt: skip


class WriteResult(msgspec.Struct, frozen=True):
    """Files that came to the disk, and in one line why not all of them did ("": they all did)."""

    files: tuple[Path, ...]
    problem: str = ""


def refusal(folder: Path, *, force: bool) -> str:
    """Return the reason why nothing may be written into `folder`, in one line; "" if it may. Call before a run too,
    because the folder is made here: a folder that cannot be made is then known before an hour was spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not force and any(folder.iterdir()):
            return f"{folder}: there is something in it already; --force writes over reports in it"
    except FileExistsError:
        return f"{folder}: it is a file, expected a folder"
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder}: no permission to write into it"


def write(runs: Sequence[Run], folder: Path, *, force: bool = False, partial: bool = False) -> WriteResult:
    """Write every file of the report. `partial`: the runs were broken off, and every file says so.

    Raises nothing for what a disk does: `WriteResult.problem` says it.
    """
    problem = refusal(folder, force=force)
    if problem:
        return WriteResult((), problem)
    summaries = [summarise(run) for run in runs]
    writers: dict[str, Callable[[IO[bytes]], None]] = {
        "report.html": lambda file: _write_page(file, runs, summaries, partial=partial),
        "requests.csv": lambda file: _write_csv(file, runs, partial=partial),
        "report.json": lambda file: _write_json(file, runs, summaries, partial=partial),
    }
    files, problems = [], []
    for name, writer in writers.items():
        try:
            files.append(_put(folder / name, writer))
        except OSError as error:
            problems.append(f"{name} was not written: {error.strerror}")
            with suppress(OSError):  # nor does one of an earlier run stay among those of this
                (folder / name).unlink(missing_ok=True)
    return WriteResult(tuple(files), f"{folder}: {', '.join(problems)}" if problems else "")


def check(slos: Sequence[Slo], run: Run) -> list[str]:
    """List the SLOs that the run missed, an invalid run included; empty if all is well. SLOs other than the run's own
    are counted anew. Raises ValueError if that is impossible because the requests were not kept."""
    if list(slos) != list(run.slos):
        if run.tallies and next(iter(run.results), None) is None:
            raise ValueError(f"{run.name} was counted against other SLOs, and its requests were not kept")
        run = msgspec.structs.replace(run, slos=slos, tallies=())
    return missed(slos, summarise(run))


# -- files ------------------------------------------------------------------------------------------------------------


def _put(path: Path, writer: Callable[[IO[bytes]], None]) -> Path:
    """The file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            writer(file)
            file.flush()
            os.fsync(file.fileno())  # a disk may find out only now that it is full
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _write_page(file: IO[bytes], runs: Sequence[Run], summaries: Sequence[Summary], *, partial: bool) -> None:
    file.write(page(runs, summaries, partial=partial).encode("utf-8", "replace"))


def _write_json(file: IO[bytes], runs: Sequence[Run], summaries: Sequence[Summary], *, partial: bool) -> None:
    """Write one JSON object, with one request a line. `kept` in it: number of requests; 0 for a run that was only
    tallied."""
    encode = msgspec.json.Encoder(enc_hook=str).encode
    file.write(b'{"schema":%d,"partial":%b,"lag_bound":%b,"runs":[' % (SCHEMA, encode(partial), encode(LAG_BOUND)))
    for number, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        head = encode(summary).removesuffix(b"}")
        file.write(b'%b\n%b,"series":%b,"requests":[' % (b"," if number else b"", head, encode(run.series)))
        kept = 0
        for chunk in _chunks(run.results):
            file.write(b",\n" if kept else b"\n")
            file.write(b",\n".join(encode(_rounded(result)) for result in chunk))
            kept += len(chunk)
        file.write(b'],"kept":%d}' % kept)
    file.write(b"]}\n")


def _chunks(results: Iterable[RequestResult]) -> Iterator[list[RequestResult]]:
    rest = iter(results)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def _rounded(result: RequestResult) -> RequestResult:
    """With inter-token latencies in whole microseconds, which is half the bytes of a large report."""
    if not result.gaps:
        return result
    return msgspec.structs.replace(result, gaps=tuple([round(gap, 6) for gap in result.gaps]))


def _write_csv(file: IO[bytes], runs: Sequence[Run], *, partial: bool) -> None:
    """A row for every request, in seconds; empty where a thing did not happen."""
    file.write((",".join(COLUMNS) + "\n").encode())
    for run in runs:
        for chunk in _chunks(run.results):
            text = StringIO(newline="")
            rows = csv.writer(text, lineterminator="\n")
            rows.writerows(_row(run, one, slo_of(run.slos, one.class_name), partial=partial) for one in chunk)
            file.write(text.getvalue().encode("utf-8", "replace"))


def _row(run: Run, result: RequestResult, slo: Slo | None, *, partial: bool) -> tuple[object, ...]:
    latency = latency_of(result, result.at) if result.outcome == OK else None
    times = [f"{time:.6f}" if time else "" for time in
             (result.sent, result.first_byte, result.first_token, result.finished)]  # fmt: skip
    own: tuple[object, ...] = (0, "", "", "")
    if latency is not None:
        tpot = "" if latency.tpot is None else f"{latency.tpot:.6f}"
        own = (
            int(consistent(result, latency) and met(slo, latency)),
            f"{latency.ttft:.6f}",
            tpot,
            f"{latency.e2e:.6f}",
        )
    return (
        _plain(run.name), run.rate, int(partial), result.repeat, result.index, _plain(result.target), result.kind,
        _plain(result.class_name), _plain(result.tenant), f"{result.at:.6f}", *times, result.status, result.outcome,
        _plain(result.reason), result.tries, result.prompt_tokens, result.completion_tokens, result.cached_tokens,
        int(result.at in run.window), *own, f"{max(result.gaps):.6f}" if result.gaps else "",
    )  # fmt: skip


def _plain(text: str) -> str:
    """Return text that no spreadsheet takes for a formula, because a server's words must not run."""
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
