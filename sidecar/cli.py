"""`sidecar check`: finds every mistake in the file that tells a machine's sidecar what it may run.

A mistake is one clear line and exit status 2. What starts and stops engines is not there yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from sidecar.core.config import MAX_BYTES, InvalidFile, SidecarConfig, decode, explain

DESCRIPTION = """\
Weir's sidecar: decides which models are resident on one machine's GPUs.

Its file names the models that may run, each with a profile: where its weights are, how much memory it gets, when it
sleeps or stops, what vLLM is told. This version checks such files; it does not start, sleep or evict engines yet."""

EXAMPLES = """\
examples:
  sidecar check sidecar.yaml                     find every mistake in the file before it is used
  sidecar check sidecar.yaml --explain           the file in full, every default written out

sidecar/example.yaml shows and explains every field. The smallest file that will do:
  models:
    llama-3-8b: {model_path: /models/llama-3-8b}"""

CHECK_EXAMPLES = """\
Prints `FILE: ok`, or one line for every mistake: FILE:LINE: field: what was found, what was expected. Exit status 2
if there is any. Nothing is started, no GPU is looked at, and whether the installed vLLM knows a flag is not asked.

examples:
  sidecar check sidecar.yaml
  sidecar check machines/*.yaml
  sidecar check sidecar.yaml --explain           the file in full, every default written out"""


class Mistake(Exception):
    """Something a person can correct; each line says what and where."""


class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, where it has a paragraph."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for a mistake in a flag or a file."""
    given = _parser().parse_args(argv)
    return _check(given.files, full=given.explain)


def _parser() -> Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    top = Parser(
        prog="sidecar", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=formatter, allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"weir {version('weir')}")
    commands = top.add_subparsers(title="commands", required=True, metavar="check")
    check = commands.add_parser(
        "check",
        help="find the mistakes in sidecar files",
        description="Read sidecar files and report every mistake.",
        epilog=CHECK_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    check.add_argument("files", nargs="+", metavar="FILE", help="what a sidecar would be started with")
    check.add_argument("--explain", action="store_true", help="print the whole effective file, defaults included")
    return top


def _check(names: Sequence[str], *, full: bool) -> int:
    bad = 0
    for name in names:
        try:
            config = _checked(Path(name))
        except Mistake as mistake:
            bad += 1
            print("\n".join(f"sidecar: {line}" for line in str(mistake).splitlines()), file=sys.stderr)
            continue
        print(explain(config) if full else f"{name}: ok", end="" if full else "\n")
    return 2 if bad else 0


def _checked(path: Path) -> SidecarConfig:
    try:
        with path.open("rb") as file:
            return decode(file.read(MAX_BYTES + 1), str(path))
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from error
    except InvalidFile as error:
        raise Mistake(str(error)) from error
