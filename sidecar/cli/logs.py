"""`sidecar logs`: the last lines that a model's engine has written, and those to come."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from urllib.parse import quote

from gateway.shared.formatting import shown
from sidecar.cli.diagnose import in_words
from sidecar.cli.errors import Impossible
from sidecar.cli.files import File, add_config
from sidecar.cli.log_follow import LogFile
from sidecar.control.api import MOST_LINES
from sidecar.core.diagnosis import LOOKED_AT, NONE, UNKNOWN, Diagnosis, diagnosis

POLL = 0.2  # seconds between two looks at a file that is followed
QUIET = 1.0  # seconds without a line, after which it is looked at what the last ones say
TAIL = 8 * 1024 * 1024  # bytes of the file before its end

DESCRIPTION = "Show what a model's engine has written."
EXAMPLES = """\
The last lines that the model's engine has written, and after a failure what they say went wrong (on standard error).
Its file in `log_dir` has more.

With -f also what it writes from now on, until Ctrl-C: read from the file, so it goes on over restarts of the engine and
of the sidecar, and works without a sidecar.

examples:
  sidecar logs llama-3-8b
  sidecar logs llama-3-8b -n 1000
  sidecar logs llama-3-8b -f"""


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
    log = LogFile(file.folder / file.config.log_dir / f"{profile}.log")
    try:
        if not (there := log.open(TAIL)):
            print(f"sidecar: {log.path} is not there yet: waiting for it", file=sys.stderr, flush=True)
        while not there:
            time.sleep(POLL)
            there = log.open(TAIL)
        last: deque[str] = deque(maxlen=LOOKED_AT)
        while lines := log.lines():
            last.extend(lines)
        print(*(f"{shown(line)}\n" for line in list(last)[-most:]), sep="", end="", flush=True)
        _watch(log, last)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise Impossible(f"{error.filename or log.path}: {error.strerror}") from error
    finally:
        log.close()
    return 0


def _watch(log: LogFile, last: deque[str]) -> None:
    """Print what comes, and once it is quiet what went wrong, each failure once. Never back by itself."""
    told, looked, since = Diagnosis(NONE, ""), False, time.monotonic()
    while True:
        if lines := log.lines():
            last.extend(lines)
            print(*(f"{shown(line)}\n" for line in lines), sep="", end="", flush=True)
            looked, since = False, time.monotonic()
        if log.lost:
            print("sidecar: some lines are passed over: more came than the file keeps", file=sys.stderr, flush=True)
            log.lost = False
        if not looked and time.monotonic() >= since + QUIET:
            looked, found = True, diagnosis(list(last))
            if (found.kind, found.line) != (told.kind, told.line):
                _tell(found)
            told = found
        if not lines:
            time.sleep(POLL)


def _tell(found: Diagnosis) -> None:
    if found.kind not in (NONE, UNKNOWN):
        print(f"sidecar: {in_words(found)}", file=sys.stderr, flush=True)


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_LINES):
        raise argparse.ArgumentTypeError(f"a number from 1 to {MOST_LINES}, not {text!r}")
    return int(text)
