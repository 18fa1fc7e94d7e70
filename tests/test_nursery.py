"""A child of a nursery is, to whoever looks at it, one that was executed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from loadtest.processes import Child, Gateway, executed, until
from tests.nursery import Forked, Nurseries

pytestmark = pytest.mark.slow
ENGINE = [sys.executable, "-m", "loadtest.engine"]


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Nurseries]:
    """Nurseries on a kernel that lets them fork children for the tests."""
    nurseries = Nurseries()
    with (tmp_path / "log").open("wb") as output:
        fit = forked(nurseries, output)
    if fit:
        yield nurseries
    nurseries.close()
    if not fit:
        pytest.skip("this kernel refuses CLONE_PARENT")


def forked(nurseries: Nurseries, output: IO[bytes]) -> bool:
    """Whether a child is forked. SIGTERM ends it, or whatever else has its number."""
    with nurseries.start(ENGINE, output, None) as process:
        process.terminate()
        process.wait(60.0)
    return isinstance(process, Forked)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    nurseries = Nurseries()
    monkeypatch.setattr(Child, "started", staticmethod(nurseries.start))
    yield monkeypatch
    nurseries.close()


def looks(pid: int) -> dict[str, object]:
    """Whatever of a process does not differ by its number or by chance."""
    process = Path(f"/proc/{pid}")
    _, parent, group, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    signals = re.findall(r"^(Sig(?:Blk|Ign|Cgt)|Umask|Uid|NoNewPrivs):\s+(.*)$", (process / "status").read_text(), re.M)
    return {
        "parent": int(parent) == os.getpid(),
        "its own session": (int(group), int(session)) == (pid, pid),
        "signals": signals,
        "folder": str((process / "cwd").readlink()),
        "limits": (process / "limits").read_text(),
        "descriptors": sorted(re.sub(r"\[?\d+\]?", "", str(each.readlink())) for each in (process / "fd").iterdir()),
        "threads": len(list((process / "task").iterdir())),
    }


def looks_at_rest(pid: int) -> dict[str, object]:
    """The looks of a process that looks so twice in a row: a health check of an engine has a socket for a moment."""
    seen: list[dict[str, object]] = []

    def rests() -> bool:
        with contextlib.suppress(FileNotFoundError):  # that socket was closed between the list and its look
            seen.append(looks(pid))
            return seen[-1:] == seen[-2:-1]
        return False

    assert until(rests, 60.0) is not None, seen[-2:]
    return seen[-1]


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_it_is_like_one_that_was_executed(
    tmp_path: Path, forks: Nurseries, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for way in (forks.start, executed):
        monkeypatch.setattr(Child, "started", staticmethod(way))
        with Gateway(tmp_path / "log", "--engine", "http://127.0.0.1:9", *words, ready=False) as gateway:
            assert isinstance(gateway.child.process, Forked) == (way is not executed)
            # One thread writes the log, another the ports: each line comes at its own time.
            gateway.child.says("engine_down")
            gateway.child.says("console http")
            said = re.sub(r"(:\d{4,}|\"ts\":[\d.]+)", "", gateway.child.output())
            found.append((looks_at_rest(gateway.child.pid), sorted(said.splitlines())))
    assert found[0] == found[1]
    assert gateway.child.process.returncode == 0


def test_its_words_and_its_environment_are_its_own(tmp_path: Path, starts: pytest.MonkeyPatch) -> None:
    told = []
    for way in (Child.started, executed):
        starts.setattr(Child, "started", staticmethod(way))
        argv = [*ENGINE, "--model", "m"]
        with Child("engine", argv, tmp_path / "log", env={**os.environ, "WEIR_SIMULATED_SPEED": "fast"}) as child:
            told.append((child.process.wait(60.0), child.output()))
    assert told[0] == told[1]
    assert told[0][0] == 2
    assert "'fast'" in told[0][1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_by_the_same_signals(tmp_path: Path, starts: pytest.MonkeyPatch, number: signal.Signals) -> None:
    with Child("engine", ENGINE, tmp_path / "log") as child:
        child.line(r"^ready (\S+)", 60.0)
        child.signal(number)
        assert child.process.wait(60.0) == (-number if number == signal.SIGKILL else 0)


def test_another_key_of_hashes_is_another_nursery(tmp_path: Path, starts: pytest.MonkeyPatch) -> None:
    nurseries = set()
    for seed in ("7", "8", "7"):
        with Child("engine", ENGINE, tmp_path / "log", env={**os.environ, "PYTHONHASHSEED": seed}) as child:
            child.line(r"^ready (\S+)", 60.0)
            environ = Path(f"/proc/{child.pid}/environ").read_text()  # the nursery's, as it was started
            assert f"PYTHONHASHSEED={seed}\0" in environ + "\0"
            nurseries.add(environ)
    assert len(nurseries) == 2


def test_where_a_nursery_has_ended_a_child_is_executed(tmp_path: Path, forks: Nurseries) -> None:
    (nursery,) = forks._made.values()
    nursery._process.kill()
    with (tmp_path / "log").open("wb") as output:
        assert not forked(forks, output)


def test_one_that_dies_before_its_start_is_none(tmp_path: Path, forks: Nurseries) -> None:
    (nursery,) = forks._made.values()
    words = {"argv": ENGINE, "env": {}, "folder": str(tmp_path / "nowhere"), "parent": os.getpid()}
    with (tmp_path / "log").open("w+b") as output:
        assert nursery.start(json.dumps(words).encode(), ENGINE, output) is None
        assert forked(forks, output), "the next child"


def test_a_nursery_that_answers_late_is_asked_no_more(tmp_path: Path, forks: Nurseries) -> None:
    (nursery,) = forks._made.values()
    nursery._way.settimeout(0.01)
    nursery._process.send_signal(signal.SIGSTOP)
    with (tmp_path / "log").open("wb") as output:
        assert not forked(forks, output)
        nursery._process.send_signal(signal.SIGCONT)
        assert nursery._process.wait(60.0) == 0, "its late child, which could tell nobody, has not ended it"
        assert not forked(forks, output)


def test_none_outlives_the_tests(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from loadtest.processes import Child
from tests.nursery import Nurseries
Child.started = staticmethod(Nurseries().start)
child = Child("engine", [sys.executable, "-m", "loadtest.engine"], Path({str(tmp_path / "log")!r}))
child.line("^ready (.*)", 60.0)
print("started", child.pid, flush=True)
time.sleep(600)
"""
    with Child("tests", [sys.executable, "-c", program], tmp_path / "tests") as tests:
        pid = int(tests.line(r"^started (\d+)", 60.0))
        os.kill(tests.pid, signal.SIGKILL)
    assert until(lambda: not Path(f"/proc/{pid}").exists(), 60.0) is not None
