"""`sidecar logs -f`: no line is told twice, through rotation, moves and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.processes import until
from sidecar.process.output import Output

TELLS = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (1.5 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.0 GiB)."
)


class Following:
    """`sidecar logs m -f -n 2` in a folder, as a child process. `with` kills it."""

    def __init__(self, folder: Path) -> None:
        config = folder / "sidecar.yaml"
        config.write_text("models: {m: {model_path: /m}}")
        self.log = folder / "sidecar-logs" / "m.log"
        self.log.parent.mkdir(exist_ok=True)
        self._out, self._err = folder / "out", folder / "err"
        argv = [sys.executable, "-m", "sidecar.cli", "logs", "m", "-f", "-n", "2", "--config", str(config)]
        with self._out.open("wb") as to, self._err.open("wb") as told:
            self.child = subprocess.Popen(argv, stdout=to, stderr=told)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.wait(60)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def shows(self, text: str) -> bool:
        """Whether it has printed this and nothing else, in the end."""
        return until(lambda: self.out == text, 60.0) is not None


@pytest.mark.slow
def test_following_goes_on_over_the_rotation_of_an_engines_log(tmp_path: Path) -> None:
    """By the very code that rotates the files of engines."""
    path = tmp_path / "sidecar-logs" / "m.log"
    path.parent.mkdir()

    async def main() -> None:
        output = Output(path, most=10_000)
        follow = asyncio.ensure_future(output.follow())
        try:
            for number in range(400):
                os.write(output.fd, b"line %06d, which is some words longer than it has to be\n" % number)
                await asyncio.sleep(0.005)
                if number % 50 == 49:  # a file that is rotated twice between two looks is not all told
                    last = [f"line {each:06d}" for each in range(number - 49, number + 1)]
                    told = lambda last=last: any(each in followed.out for each in last)  # noqa: E731
                    assert await asyncio.to_thread(until, told, 60.0) is not None, followed.err
            assert await asyncio.to_thread(until, lambda: "line 000399" in followed.out, 60.0) is not None
        finally:
            follow.cancel()
            await asyncio.wait((follow,))
            output.close()

    path.write_text("first\n")
    with Following(tmp_path) as followed:
        assert followed.shows("first\n")
        asyncio.run(main())
        numbers = [int(line[5:11]) for line in followed.out.splitlines() if line.startswith("line ")]
    assert path.with_name("m.log.1").exists()
    assert numbers == sorted(set(numbers)), "no line is told twice"
    assert len(numbers) > 300, "nearly all are told"


@pytest.mark.slow
def test_lines_come_whole_and_once_also_of_a_file_in_the_place_of_one_that_was_moved(tmp_path: Path) -> None:
    with Following(tmp_path) as followed:
        followed.log.with_suffix(".new").write_text("one\ntwo\nthr")
        followed.log.with_suffix(".new").rename(followed.log)
        assert followed.shows("one\ntwo\n")
        with followed.log.open("ab") as file:
            file.write(b"ee\n10%\r20%\r100%\r\nfour\xff\n")
        before = "one\ntwo\nthree\n100%\nfour\ufffd\n"
        assert followed.shows(before)
        followed.log.rename(tmp_path / "old")
        followed.log.write_text("five\n")
        assert followed.shows(f"{before}five\n")


@pytest.mark.slow
def test_a_failure_above_the_lines_that_are_shown_is_told(tmp_path: Path) -> None:
    (tmp_path / "sidecar-logs").mkdir()
    (tmp_path / "sidecar-logs" / "m.log").write_text(f"{TELLS}\na\nb\n")
    with Following(tmp_path) as followed:
        assert until(lambda: "sidecar: kv_too_small: ValueError" in followed.err, 60.0) is not None
        assert followed.out == "a\nb\n"


@pytest.mark.slow
def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "sidecar-logs").mkdir()
    os.mkfifo(tmp_path / "sidecar-logs" / "m.log")
    with Following(tmp_path) as followed:
        assert followed.child.wait(60) == 1
        assert "not a plain file" in followed.err


@pytest.mark.slow
def test_a_log_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sidecar-logs").mkdir()
    log = tmp_path / "sidecar-logs" / "m.log"
    log.touch(0o000)
    if os.access(log, os.R_OK):
        pytest.skip("root may read every file")
    with Following(tmp_path) as followed:
        assert followed.child.wait(60) == 1
        assert "m.log: Permission denied" in followed.err


@pytest.mark.slow
def test_the_command_follows_tells_a_failure_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    with Following(tmp_path) as followed:
        assert until(lambda: "is not there yet: waiting" in followed.err, 60.0) is not None
        followed.log.with_suffix(".new").write_text("a\nb\n\x1b[31mc\n")
        followed.log.with_suffix(".new").rename(followed.log)
        assert followed.shows("b\n [31mc\n")
        with followed.log.open("a") as file:
            file.write(f"{TELLS}\n")
        assert until(lambda: "sidecar: kv_too_small: ValueError" in followed.err, 60.0) is not None
        assert until(lambda: "To serve at least one request" in followed.out, 60.0) is not None
        followed.child.send_signal(signal.SIGINT)
        assert followed.child.wait(60) == 130
        assert "Traceback" not in followed.err
