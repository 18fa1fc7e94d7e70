"""`sidecar diagnose`: what an engine's output says went wrong."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO

import msgspec

from gateway.shared.command_line import Mistake
from gateway.shared.files.plain_file import open_plain
from sidecar.core.diagnosis import LOOKED_AT, NONE, READ, Diagnosis, diagnosis

DESCRIPTION = "Say what an engine's output says went wrong."
EXAMPLES = """\
Reads what a vLLM has written and names the kind of failure, the line that tells it, its numbers and what to do. The
cause wins over what follows from it, such as `Engine core initialization failed`. A healthy or unfinished log has none.
Exit status 1 if there is a failure, 0 if there is none.

examples:
  sidecar diagnose logs/llama-3-8b.log
  sidecar diagnose --json logs/llama-3-8b.log      an object: kind, line, advice, numbers (GiB), phase
  docker logs vllm 2>&1 | sidecar diagnose -       standard input"""
TAIL = 8 * 1024**2  # bytes of a file that are looked at: the last ones
PIECE = 64 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE|-", help="what an engine has written; -: standard input")
    parser.add_argument("--json", action="store_true", help="as JSON")


def command(given: argparse.Namespace) -> int:
    """Print the diagnosis; 1 for a failure. Raises Mistake for a file that cannot be read."""
    if given.file == "-":
        found = diagnosed(sys.stdin.buffer)
    else:
        try:
            with open_plain(Path(given.file), pipes=True) as file:
                _skip(file)
                found = diagnosed(file)
        except OSError as error:
            raise Mistake(f"{given.file}: {error.strerror}") from error
    print(msgspec.json.encode(found).decode() if given.json else in_words(found))
    return int(found.kind != NONE)


def diagnosed(output: BinaryIO) -> Diagnosis:
    """The diagnosis of the last lines of some output, in bounded memory; without a line where nothing is wrong."""
    lines: deque[str] = deque(maxlen=LOOKED_AT)
    while line := output.readline(PIECE):
        lines.append(line[:READ].decode(errors="replace"))
    found = diagnosis(list(lines))
    return msgspec.structs.replace(found, line="") if found.kind == NONE else found


def in_words(found: Diagnosis) -> str:
    """A diagnosis for a person."""
    if found.kind == NONE:
        return "none: the output tells of no failure"
    numbers = ", ".join(f"{name} {value:g}" for name, value in found.numbers.items())
    return "\n".join(filter(None, (f"{found.kind}: {found.line}", numbers, found.advice)))


def _skip(file: BinaryIO) -> None:
    """Go to the last TAIL bytes of a regular file; a pipe is read from where it is."""
    if file.seekable():
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL))
