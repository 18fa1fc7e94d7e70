"""`sidecar logs -f`: no line is lost or told twice, through rotation, moves, floods and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.processes import until
from sidecar.cli.logs import LogFile
from sidecar.process.output import Output

TELLS = "ValueError: To serve at least one request with the model's max seq len (4096), (1.5 GiB KV cache is needed, "


def opened(path: Path, *, tail: int = 1 << 20) -> LogFile:
    found = LogFile(path)
    assert found.open(tail)
    return found


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(b"one\ntwo\nthr")
    log = opened(path)
    assert log.lines() == ["one", "two"]
    assert log.lines() == []
    with path.open("ab") as file:
        file.write(b"ee\n10%\r20%\r100%\r\nfour\xff\n")
    assert log.lines() == ["three", "100%", "four\ufffd"]
    log.close()


def test_it_begins_so_far_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(b"".join(b"%06d\n" % number for number in range(1000)))
    assert opened(path, tail=14).lines() == ["000998", "000999"]
    assert not LogFile(tmp_path / "none").open(1)


@pytest.mark.slow
def test_rotation_loses_nothing(tmp_path: Path) -> None:
    """By the very code that rotates the files of engines, faster than anybody looks."""
    path = tmp_path / "m.log"

    async def main() -> list[str]:
        output = Output(path, most=10_000)
        follow = asyncio.ensure_future(output.follow())
        log, seen = opened(path), []
        try:
            for number in range(4000):
                os.write(output.fd, b"line %06d\n" % number)
                if number % 100 == 99:  # 1,200 bytes, of 10,000 that are kept
                    await asyncio.sleep(0.02)
                if number % 400 == 399:
                    seen += log.lines()
            while lines := log.lines():
                seen += lines
            return seen
        finally:
            assert not log.lost
            follow.cancel()
            await asyncio.wait((follow,))
            output.close()
            log.close()

    assert asyncio.run(main()) == [f"line {number:06}" for number in range(4000)]
    assert (tmp_path / "m.log.1").exists()


def test_a_file_that_is_as_long_again_after_a_cut_is_seen_to_be_another(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(b"first\n" * 10)
    log = opened(path)
    assert len(log.lines()) == 10
    path.with_suffix(".log.1").write_bytes(b"first\n" * 10 + b"late\n")
    path.write_bytes(b"other\n" * 20)
    assert log.lines() == ["late", *["other"] * 20]
    assert not log.lost


def test_what_neither_file_has_any_more_is_said_to_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(b"first\nhalf")
    log = opened(path)
    log.lines()
    path.write_bytes(b"x\n")
    assert log.lines() == ["half", "x"]
    assert log.lost


def test_a_file_that_was_moved_is_read_to_its_end_and_then_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(b"one\n")
    log = opened(path)
    path.rename(tmp_path / "old")
    with (tmp_path / "old").open("ab") as file:
        file.write(b"two\n")
    assert log.lines() == ["one", "two"]
    assert log.lines() == [], "there is no other yet"
    path.write_bytes(b"three\n")
    assert log.lines() + log.lines() == ["three"]
    log.close()


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.log")
    with pytest.raises(OSError, match="not a plain file"):
        LogFile(tmp_path / "m.log").open(1)


@pytest.mark.slow
def test_the_command_follows_tells_a_failure_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "sidecar.yaml").write_text("models: {m: {model_path: /m}}")
    path, out, err = tmp_path / "sidecar-logs" / "m.log", tmp_path / "out", tmp_path / "err"
    argv = [
        sys.executable,
        "-m",
        "sidecar.cli",
        "logs",
        "m",
        "-f",
        "-n",
        "2",
        "--config",
        str(tmp_path / "sidecar.yaml"),
    ]
    with out.open("wb") as to, err.open("wb") as told:
        child = subprocess.Popen(argv, stdout=to, stderr=told)
    try:
        assert until(lambda: "is not there yet: waiting" in err.read_text(), 20.0) is not None
        path.parent.mkdir()
        path.write_text("a\nb\n\x1b[31mc\n")
        assert until(lambda: out.read_text() == "b\n [31mc\n", 20.0) is not None
        with path.open("a") as file:
            file.write(TELLS + "which is larger than the available KV cache memory (1.0 GiB).\n")
        assert until(lambda: "sidecar: kv_too_small: ValueError" in err.read_text(), 20.0) is not None
        assert "To serve at least one request" in out.read_text()
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130
        assert "Traceback" not in err.read_text()
    finally:
        child.kill()
        child.wait(10)
