"""Child processes: nothing is left behind, and a child that fails gives the reason."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from loadtest.processes import Child, ChildError, until

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(60)
print("ready http://here", flush=True)
time.sleep(600)
"""
LEAVES_A_CHILD = """
import os, time
if os.fork() == 0:
    time.sleep(60)
print("ready http://here", flush=True)
time.sleep(600)
"""
STARTS_ANOTHER = """
import sys, time
from pathlib import Path
from loadtest.processes import Child
started = Child("child", [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                Path(sys.argv[1]))
started.line("(up)", 10.0)
print("started", started.pid, flush=True)
time.sleep(600)
"""


def child(tmp_path: Path, program: str) -> Child:
    return Child("child", [sys.executable, "-c", program], tmp_path / "log")


@pytest.mark.parametrize(("program", "status"), [(STUBBORN, -signal.SIGKILL), (LEAVES_A_CHILD, -signal.SIGTERM)])
def test_stop_ends_the_whole_group(tmp_path: Path, program: str, status: int) -> None:
    started = child(tmp_path, program)
    assert started.line(r"^ready (\S+)", 60.0) == "http://here"
    assert until(lambda: len(started.group()) == 2, 60.0) is not None
    assert started.stop(grace=0.2) == status
    assert started.group() == []
    assert not started.alive


def test_a_child_that_dies_says_why(tmp_path: Path) -> None:
    with (
        child(tmp_path, "import sys; sys.exit('out of cheese')") as started,
        pytest.raises(ChildError, match=r"(?s)ended before the line.*out of cheese"),
    ):
        started.line("ready", 60.0)
    assert started.process.returncode == 1


def test_what_a_child_has_said_before_it_ended_is_heard(tmp_path: Path) -> None:
    with child(tmp_path, "print('done')") as started:
        assert started.process.wait(60.0) == 0
        assert started.line("(done)", 60.0) == "done"


def test_a_child_that_is_not_ready_in_time(tmp_path: Path) -> None:
    with (
        child(tmp_path, "import time; time.sleep(60)") as started,
        pytest.raises(ChildError, match="did not get to the line"),
    ):
        started.line("ready", 0.1)
    assert started.group() == []


@pytest.mark.slow
def test_a_child_ends_with_whoever_started_it_killed_or_not(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", STARTS_ANOTHER, str(tmp_path / "child")]
    with Child("starter", argv, tmp_path / "log") as starter:
        pid = int(starter.line(r"^started (\d+)", 60.0))
        os.kill(starter.pid, signal.SIGKILL)
    assert until(lambda: not Path(f"/proc/{pid}").exists(), 60.0) is not None


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with (
        Child("child", ["no-such-program"], tmp_path / "log") as started,
        pytest.raises(ChildError, match="no-such-program: No such file or directory"),
    ):
        started.line("ready", 60.0)
