"""`sidecar logs`: the last lines that a model's engine has written, and those to come."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from gateway.shared.formatting import shown
from sidecar.cli.diagnose import in_words
from sidecar.cli.errors import Impossible
from sidecar.cli.files import File, add_config
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
PIECE = 1024 * 1024  # bytes read in one turn
MARK = 4096  # bytes before the place in the file that are remembered
BEFORE = 32 * 1024 * 1024  # bytes of PATH.1 that are looked at
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


class LogFile:
    """Log file at `path`, followed as it grows: through the sidecar's rotation, a move, and engines that come and go.

    The sidecar rotates a file by copying its end to `PATH.1` and cutting it in place (`sidecar.process.output`). So
    what was not read before the cut is found in `PATH.1`, behind the last bytes that were read. `lost`: whether lines
    were passed over since it was last asked, as more came than is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = False
        self._fd: int | None = None
        self._at = 0
        self._mark = b""
        self._rest = b""  # of the line that is being written

    def open(self, tail: int) -> bool:
        """Open it, not more than `tail` bytes before its end. Whether it is there. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._fd = _opened(self.path)
            self._at = max(0, os.fstat(self._fd).st_size - tail)
        return self._fd is not None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def lines(self) -> list[str]:
        """The whole lines that came since the last look, some of them where there are many. Raises OSError."""
        *whole, self._rest = (self._rest + b"".join(self._new())).split(b"\n")
        self._rest = self._rest[-LONGEST:]
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2][:LONGEST] for line in whole)
        return [line.decode(errors="replace") for line in shown]

    def _new(self) -> Iterator[bytes]:
        assert self._fd is not None  # noqa: S101 - it is open
        if self._cut():
            yield self._missed()
            self._at, self._mark = 0, b""
        data = os.pread(self._fd, PIECE, self._at)
        self._at += len(data)
        self._mark = (self._mark + data)[-MARK:]
        yield data
        if not data and self._moved():
            self.close()
            if self.open(0):
                self._at, self._mark = 0, b""

    def _cut(self) -> bool:
        """Whether it was cut since the last look, even if it is as long again by now."""
        assert self._fd is not None  # noqa: S101 - it is open
        before = os.pread(self._fd, len(self._mark), self._at - len(self._mark))
        return os.fstat(self._fd).st_size < self._at or before != self._mark

    def _missed(self) -> bytes:
        """Return the bytes that were written between the last look and the cut; if they are gone, set `lost` and end
        the line."""
        with contextlib.suppress(OSError):
            fd = _opened(Path(f"{self.path}.1"))
            with open(fd, "rb") as file:
                file.seek(max(0, os.fstat(fd).st_size - BEFORE))
                _, found, after = file.read(BEFORE).rpartition(self._mark)
                if found:
                    return after
        self.lost = True
        return b"\n"  # ends the line that was being written

    def _moved(self) -> bool:
        """Whether another file is at its path now. While there is none, it is still this one."""
        assert self._fd is not None  # noqa: S101 - it is open
        with contextlib.suppress(FileNotFoundError):
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        return False


def _opened(path: Path) -> int:
    """Raises OSError also for what is no plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(0, "not a plain file", str(path))
