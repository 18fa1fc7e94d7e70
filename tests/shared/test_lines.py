"""Line writer on outputs that are full, slow, gone or moved: callers never wait, and losses are reported."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.call_log import CallLog
from gateway.shared import lines
from gateway.shared.lines import LineWriter, say, standard_error
from gateway.shared.notice import Notice
from tests.beside import beside


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        for end in (read, write):
            with contextlib.suppress(OSError):
                os.close(end)


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def told(data: bytes) -> list[int]:
    """The numbers of lost lines that an output tells of."""
    return [json.loads(line)["dropped_lines"] for line in data.splitlines() if b"dropped_lines" in line]


def test_lines_appear_without_being_asked_for() -> None:
    with pipe() as (read, write):
        LineWriter(write).write(b"one\n")
        assert select.select([read], [], [], 10)[0]
        assert os.read(read, 100) == b"one\n"


def test_a_pipe_that_nobody_reads_blocks_nobody_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LIMIT", 200_000)
    with pipe() as (read, write):
        writer = LineWriter(write)
        line = b"x" * 999 + b"\n"
        writer.write(line * 100, hurry=True)  # more than a pipe holds: the thread is stuck once it has taken this
        until(lambda: not writer._lines)
        for _ in range(2000):
            writer.write(line)
        assert writer._size < 205_000
        assert 1000 < writer.lost < 2000
        lost, data = writer.lost, b""
        while data.count(b"\n") < 2100 - lost + 1:
            assert select.select([read], [], [], 10)[0]
            data += os.read(read, 1 << 20)
        assert told(data) == [lost]
        assert writer.lost == lost


def test_a_pipe_that_nobody_reads_does_not_keep_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CLOSE_WITHIN", 0.1)
    with pipe() as (read, write):
        writer = LineWriter(write)
        writer.write(b"x" * 100_000 + b"\n")
        writer.drain()
        asyncio.run(writer.adrain())
        left = 100_001
        while left:
            left -= len(os.read(read, left))
        until(lambda: not writer._lines and not writer._writing)


def test_a_descriptor_that_others_made_non_blocking_is_waited_for() -> None:
    with pipe() as (read, write):
        os.set_blocking(write, False)
        writer = LineWriter(write)
        writer.write(b"x" * 200_000 + b"\n", hurry=True)
        data = b""
        while not data.endswith(b"\n"):
            assert select.select([read], [], [], 10)[0]
            data += os.read(read, 65536)
        assert (len(data), writer.lost) == (200_001, 0)


def test_a_named_pipe_that_nobody_reads_is_refused_at_once_and_one_that_is_read_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="nobody reads this pipe"):
        LineWriter.at(tmp_path / "log", say)
    read = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = LineWriter.at(tmp_path / "log", say)
        writer.write(b"line\n", hurry=True)
        assert select.select([read], [], [], 10)[0]
        assert os.read(read, 100) == b"line\n"
    finally:
        os.close(read)


def test_a_reader_that_went_away_costs_its_lines_and_they_are_counted() -> None:
    with pipe() as (read, write):
        os.close(read)
        writer = LineWriter(write)
        for _ in range(3):
            writer.write(b"gone\n")
            writer.drain()
        assert writer.lost == 3


def test_a_full_disk_is_told_once_and_no_line_stays_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [17]
    real = os.write

    def write(fd: int, data: Any) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(fd, bytes(data)[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(lines.os, "write", write)
    said: list[str] = []
    path = tmp_path / "log"
    writer = LineWriter.at(path, said.append)
    writer.write(b"0123456\n")
    writer.drain()
    writer.write(b"abcdefghijklmn\n")
    writer.drain()
    for _ in range(3):
        writer.write(b"lost as well\n")
        writer.drain()
    assert (path.read_bytes(), writer.lost) == (b"0123456\nabcdefghi", 4)
    room[0] = 1 << 20
    writer.write(b"again\n")
    writer.drain()
    first, torn, note, last = path.read_bytes().splitlines()
    assert (first, torn, last) == (b"0123456", b"abcdefghi", b"again")
    assert {key: value for key, value in json.loads(note).items() if key != "ts"} == {
        "level": "warning",
        "event": "lines_lost",
        "dropped_lines": 4,
        "error": "No space left on device",
    }
    writer.write(b"and again\n")
    writer.drain()
    assert told(path.read_bytes()) == [4]
    assert said == [
        f"{path}: cannot be written: No space left on device; lines are lost until it can",
        f"{path}: can be written again; 4 lines were lost",
    ]


def test_the_torn_line_of_an_earlier_process_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for before, after in ((b"torn", b"torn\nnew\n"), (b"whole\n", b"whole\nnew\n"), (b"", b"new\n")):
        path.write_bytes(before)
        writer = LineWriter.at(path, print)
        writer.write(b"new\n")
        writer.drain()
        assert path.read_bytes() == after


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_file_that_was_rotated_away_is_opened_anew(tmp_path: Path, how: str) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    writer = LineWriter.at(path, print)
    writer.write(b"before\n")
    writer.drain()
    if how == "deleted":
        path.unlink()
    else:
        path.rename(moved)
        assert moved.read_bytes() == b"before\n"
    if how == "replaced":
        path.touch()
    writer.write(b"after\n")
    writer.drain()
    assert path.read_bytes() == b"after\n"
    assert how == "deleted" or moved.read_bytes() == b"before\n"


def test_a_file_is_opened_anew_on_request_though_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = LineWriter.at(path, print)
    path.unlink()
    writer.look()
    until(path.exists)


def test_a_file_that_cannot_be_opened_anew_is_written_on(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "logs"
    folder.mkdir()
    writer = LineWriter.at(folder / "log", said.append)
    folder.rename(tmp_path / "moved")
    for _ in range(2):
        writer.write(b"line\n")
        writer.drain()
    assert (tmp_path / "moved" / "log").read_bytes() == b"line\nline\n"
    assert len(said) == 1
    assert "cannot be opened again: No such file" in said[0]


def test_whatever_goes_to_standard_error_goes_through_the_writer(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    with standard_error(text=False) as writer:
        print("printed", "in pieces", file=sys.stderr, flush=True)
        logging.lastResort.handle(logging.makeLogRecord({"msg": "logged", "levelno": logging.ERROR}))  # type: ignore[union-attr]
        with beside(*[lambda: print("a" * 50, "b" * 50, file=sys.stderr)] * 8):
            pass
        assert not sys.stderr.isatty()
    assert sys.stderr is before
    found = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["message"] for line in found] == ["printed in pieces", "logged", *[f"{'a' * 50} {'b' * 50}"] * 8]
    assert {(line["level"], line["event"]) for line in found} == {("error", "stderr")}
    assert writer.lost == 0


@pytest.mark.parametrize("text", [False, True])
def test_every_line_of_a_stream_has_time_level_and_event(capfd: pytest.CaptureFixture[str], *, text: bool) -> None:
    with standard_error(text=text) as writer:
        say("plain \x1b[2J")
        say(Notice("the file cannot be used:\nline 3", "policy_refused", "error"))
        print("from a library", file=sys.stderr)
        CallLog(writer, text=text).write(
            Record(request_id="r", route="/v1", outcome=Outcome.TRUNCATED, status=200), 1.0
        )
    lines = capfd.readouterr().err.splitlines()
    if text:
        found = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z (\w+) (\w+): (.*)", line) for line in lines]
        told = [match.groups() for match in found if match is not None]
        assert len(told) == len(lines)
        assert told[1:3] == [("error", "policy_refused", text) for text in ("the file cannot be used:", "line 3")]
    else:
        told = [(line["level"], line["event"], line.get("message", "")) for line in map(json.loads, lines)]
        assert told[1] == ("error", "policy_refused", "the file cannot be used:\nline 3")
    assert told[0] == ("info", "notice", "plain ?[2J")
    assert told[-2] == ("error", "stderr", "from a library")
    assert told[-1][:2] == ("error", "call")


def test_why_lines_are_lost_and_since_when_is_told_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]
    write = os.write

    def writing(fd: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    said: list[str] = []
    writer = LineWriter.at(tmp_path / "log", said.append, text=True)
    monkeypatch.setattr(os, "write", writing)
    before = time.time()
    for _ in range(2):
        writer.write(b"line\n")
        writer.drain()
    assert writer.trouble is not None
    why, since = writer.trouble
    assert why == "No space left on device"
    assert before <= since <= time.time()
    full[0] = False
    writer.write(b"line\n")
    writer.drain()
    assert writer.trouble is None
    note, line = (tmp_path / "log").read_text().splitlines()
    assert line == "line"
    assert note.endswith(" warning lines_lost: 2 lines were lost: No space left on device")
    assert [(each.event, each.level) for each in said if isinstance(each, Notice)] == [
        ("log_failed", "error"),
        ("log_written", "info"),
    ]
