"""`sidecar logs`: the last lines that a model's engine has written, and those to come."""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from urllib.parse import quote

from gateway.shared.formatting import shown
from sidecar.cli.diagnose import in_words
from sidecar.cli.errors import Impossible
from sidecar.cli.files import File, add_config
from sidecar.control.api import MOST_LINES
from sidecar.core.diagnosis import LOOKED_AT, NONE, UNKNOWN, Diagnosis, diagnosis

POLL = 0.2  # seconds between two looks at a file that is followed
QUIET = 1.0  # seconds without output, after which it is looked at what the last ones say
TAIL = 8 * 1024 * 1024  # bytes of the file before its end

DESCRIPTION = "Show what a model's engine has written."
EXAMPLES = """\
The last lines that the model's engine has written, and after a failure what they say went wrong (on standard error).
Its file in `log_dir` has more.

With -f also what it writes from now on, until Ctrl-C: by `tail -F` of the file, so it goes on over restarts of the
engine and of the sidecar, and works without a sidecar.

examples:
  sidecar logs llama-3-8b
  sidecar logs llama-3-8b -n 1000
  sidecar logs llama-3-8b -f"""
PIECE = 1024 * 1024  # bytes read in one turn
LONGEST = 64 * 1024  # bytes of a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("model", metavar="MODEL", help="the name of its profile")
    parser.add_argument("-n", dest="lines", type=_lines, default=200, metavar="N", help="lines (default: %(default)s)")
    parser.add_argument("-f", "--follow", action="store_true", help="and what it writes from now on, until Ctrl-C")


def command(given: argparse.Namespace) -> int:
    """The last lines of a model's engine. Raises Mistake, Impossible."""
    file = File(given.config)
    profile = file.profile(given.model)
    if given.follow:
        return _follow(file, profile, given.lines)
    text = file.ask(f"/models/{quote(profile)}/logs?lines={given.lines}").decode(errors="replace")
    for line in text.split("\n")[:-1]:
        print(shown(line))
    _tell(diagnosis(text.split("\n")))
    if not text:
        print(f"sidecar: the engine of {profile} has written nothing, or there is none", file=sys.stderr)
    return 0


def _follow(file: File, profile: str, most: int) -> int:
    """Until Ctrl-C. Raises Impossible."""
    path = file.folder / file.config.log_dir / f"{profile}.log"
    last: deque[str] = deque(maxlen=LOOKED_AT)
    try:
        if not path.exists():
            print(f"sidecar: {path} is not there yet: waiting for it", file=sys.stderr, flush=True)
        while not path.exists():
            time.sleep(POLL)
        if not path.is_file():
            raise Impossible(f"{path}: not a plain file")
        with path.open("rb") as log:  # a failure may be above the lines that are shown
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            *whole, rest = log.read(TAIL).split(b"\n")
            last.extend(map(_line, whole))
            begin = log.tell() - len(rest) + 1  # of the line that is being written; tail counts from 1
        _print(list(last)[-most:])
        argv = ["tail", f"--pid={os.getpid()}", f"--bytes=+{begin}", "-F", "--", str(path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:  # noqa: S603 # no shell
            try:
                _watch(tail, last)
            finally:
                tail.kill()
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise Impossible(f"{error.filename or path}: {error.strerror}") from error
    raise Impossible(f"tail, which follows {path}, has ended")


def _watch(tail: subprocess.Popen[bytes], last: deque[str]) -> None:
    """Print what comes, and once it is quiet what went wrong, each failure once. Until tail ends."""
    assert tail.stdout is not None  # noqa: S101 # a pipe was asked for
    told, looked, rest = Diagnosis(NONE, ""), False, b""
    while True:
        if select.select([tail.stdout], [], [], None if looked else QUIET)[0]:
            data = os.read(tail.stdout.fileno(), PIECE)
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n")
            rest, looked = rest[-LONGEST:], False
            lines = list(map(_line, whole))
            last.extend(lines)
            _print(lines)
        else:
            looked, found = True, diagnosis(list(last))
            if (found.kind, found.line) != (told.kind, told.line):
                _tell(found)
            told = found


def _line(data: bytes) -> str:
    """A line as a terminal shows it once whole: of a progress bar, its last state."""
    return data.rstrip(b"\r").rpartition(b"\r")[2][:LONGEST].decode(errors="replace")


def _print(lines: Iterable[str]) -> None:
    print(*(f"{shown(line)}\n" for line in lines), sep="", end="", flush=True)


def _tell(found: Diagnosis) -> None:
    if found.kind not in (NONE, UNKNOWN):
        print(f"sidecar: {in_words(found)}", file=sys.stderr, flush=True)


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_LINES):
        raise argparse.ArgumentTypeError(f"a number from 1 to {MOST_LINES}, not {text!r}")
    return int(text)
