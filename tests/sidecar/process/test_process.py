"""Child processes, and every way in which they fail to end."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sidecar.process.output import Ring
from sidecar.process.process import Process, Unkillable
from sidecar.process.process_family import SpawnFailed
from tests.sidecar.nothing_left import ADDRESS, gone, nothing_left, python, spawn

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

WITHIN = 60.0  # seconds that anything may take on a busy machine

# Lines are written whole: what `print` writes may have a handler's between its text and its end.
OBEYS = """
import os, signal, sys, time
def bye(*_):
    os.write(1, b"bye\\n")
    sys.exit(7)
signal.signal(signal.SIGTERM, bye)
os.write(1, b"ready\\n")
while True:
    time.sleep(60)
"""
IGNORES = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\\n"))
os.write(1, b"ready\\n")
while True:
    time.sleep(60)
"""
# A leader and a child of it, whose pid it prints. The child's session and environment are the test's to choose.
FORKS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"],
    stdout=subprocess.PIPE, **{})
child.stdout.readline()
print("child", child.pid)
while True:
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WITHIN):
            await scenario()

    asyncio.run(bounded())


async def line(process: Process, pattern: str) -> str:
    """The first group of a line of the output, waited for."""
    async with asyncio.timeout(WITHIN):
        while True:
            process.output.read()
            for text in process.output.ring.lines():
                if match := re.search(pattern, text):
                    return match[match.re.groups]
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "code"),
    [("", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
    ids=["exits 0", "exits 3", "is killed"],
)
def test_a_process_that_ends_by_itself(tmp_path: Path, program: str, code: int) -> None:
    async def scenario() -> None:
        process = spawn(f"print('here'); {program}", tmp_path / "log")
        assert process.alive
        assert await process.wait() == code
        assert await process.gone() == await process.terminate() == code
        assert f"exit {code}" in repr(process)
        assert gone(process.record.pid)
        assert process.output.ring.lines() == ["here"]

    run(scenario)


def test_what_a_child_is_given(tmp_path: Path) -> None:
    program = (
        "import os; print(open('/proc/self/environ').read().split(chr(0)));"
        "print(os.getcwd(), os.readlink('/proc/self/fd/0'));"
        "print(os.getsid(0) == os.getpid() == os.getpgrp()); print(sorted(os.listdir('/proc/self/fd'))[:-1])"
    )

    async def scenario() -> None:
        own, (leak, far) = os.dup(0), os.pipe()
        os.set_inheritable(leak, True)
        os.dup2(leak, 0)
        argv, env = python(program), {"A": "1"}
        log = tmp_path / "log"
        process = Process.spawn(argv, env=env, engine="box/a", address=ADDRESS, log=log, cwd=tmp_path)
        os.dup2(own, 0)
        assert await process.gone() == 0
        for fd in (own, leak, far):
            os.close(fd)
        assert process.output.ring.lines() == [
            "['A=1', 'WEIR_SIDECAR_ENGINE=box/a', 'SPT_NOENV=1', '']",
            f"{tmp_path} /dev/null",
            "True",
            "['0', '1', '2']",
        ]

    run(scenario)


def test_host_memory_is_that_of_all_its_processes_which_no_file_backs(tmp_path: Path) -> None:
    own = "import mmap; kept = bytearray(64 << 20); shared = mmap.mmap(-1, 32 << 20); shared.write(bytes(32 << 20))"

    async def scenario() -> None:
        process = spawn(f"{own}; print('own'); {FORKS.replace('**{}', '')}", tmp_path / "log")
        await line(process, "(own)")
        await line(process, r"child (\d+)")
        assert 96 << 20 < process.host_held() < 160 << 20
        await process.terminate(0.0)
        assert process.host_held() == 0

    run(scenario)


@pytest.mark.parametrize("argv", [["/nonexistent/vllm"], ["a\0b"]])
def test_a_program_that_cannot_be_started(tmp_path: Path, argv: list[str]) -> None:
    async def scenario() -> None:
        with pytest.raises(SpawnFailed, match="could not be started"):
            Process.spawn(argv, env={}, engine="box/a", address=ADDRESS, log=tmp_path / "log")

    run(scenario)


def test_for_want_of_descriptors_an_engine_is_not_started_at_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        outcomes = []
        for limit in range(3, 12 + max(map(int, os.listdir("/proc/self/fd")))):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            process = None
            try:
                process = spawn("import time; time.sleep(300)", tmp_path / "log")
            except SpawnFailed as failed:
                outcomes.append(str(failed))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if process is not None:
                outcomes.append("started")
                await process.terminate(WITHIN)
                break
        assert outcomes[-1] == "started"
        assert len(set(outcomes)) > 2
        assert all("Too many open files" in text for text in outcomes[:-1])

    run(scenario)


@pytest.mark.parametrize(
    ("program", "grace", "code"), [(OBEYS, WITHIN, 7), (IGNORES, 0.5, -9)], ids=["obeys", "ignores"]
)
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "no pidfd"])
def test_terminate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, grace: float, code: int, stopped: bool, pidfd: bool
) -> None:
    def none(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "not in this kernel")

    async def scenario() -> None:
        if not pidfd:
            monkeypatch.setattr(os, "pidfd_open", none)
        process = spawn(program, tmp_path / "log")
        await line(process, "ready")
        if stopped:
            os.kill(process.record.pid, signal.SIGSTOP)
        patient = asyncio.create_task(process.terminate(WITHIN))
        await line(process, "bye|no")  # it has heard SIGTERM: a busy machine may not let it within the shorter grace
        assert await asyncio.gather(patient, process.terminate(grace)) == [code, code]
        assert gone(process.record.pid)
        assert process.output.ring.lines() == ["ready", "bye" if code == 7 else "no"]

    run(scenario)


@pytest.mark.parametrize(
    "how", ["{}", "{'env': {}}", "{'start_new_session': True}"], ids=["inherits", "no marker", "own session"]
)
def test_what_outlives_its_killed_leader_is_ended(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        process = spawn(FORKS.replace("{}", how), tmp_path / "log")
        child = int(await line(process, r"child (\d+)"))
        os.kill(process.record.pid, signal.SIGKILL)
        assert await process.wait() == -9
        assert await process.gone() == -9
        assert gone(child)

    run(scenario)


def test_a_child_in_its_own_session_without_the_marker_is_found_by_its_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = spawn(FORKS.replace("{}", "{'env': {}, 'start_new_session': True}"), tmp_path / "log")
        child = int(await line(process, r"child (\d+)"))
        await process.terminate(WITHIN)
        assert gone(child)

    run(scenario)


def test_a_family_of_a_leader_that_exits_is_ended_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = spawn(FORKS.replace("while True", "while False"), tmp_path / "log")
        assert await process.gone() == 0
        assert gone(int(await line(process, r"child (\d+)")))

    run(scenario)


def test_terminate_cancelled_in_the_middle_kills_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = spawn(IGNORES, tmp_path / "log")
        await line(process, "ready")
        ending = asyncio.create_task(process.terminate(3600.0))
        await line(process, "no")
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert gone(process.record.pid)
        assert process.returncode == -9

    run(scenario)


def test_a_loop_that_ends_in_the_middle_of_an_ending_finishes_it(tmp_path: Path) -> None:
    started: list[Process] = []

    async def scenario() -> None:
        process = spawn(IGNORES, tmp_path / "log")
        started.append(process)
        await line(process, "ready")
        started_ending = asyncio.create_task(process.terminate(3600.0))
        await line(process, "no")
        assert not started_ending.done()

    run(scenario)
    assert gone(started[0].record.pid)


@pytest.mark.parametrize("how", ["leave", "the loop ends"])
def test_an_engine_outlives_its_sidecar(tmp_path: Path, how: str) -> None:
    started: list[Process] = []

    async def scenario() -> None:
        process = spawn(OBEYS, tmp_path / "log")
        started.append(process)
        await line(process, "ready")
        if how == "leave":
            await process.leave()

    run(scenario)
    pid = started[0].record.pid
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / "log").read_text() == "ready\nbye\n"


def test_a_child_that_another_reaps_has_no_exit_status(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = spawn(OBEYS, tmp_path / "log")
        await line(process, "ready")
        os.kill(process.record.pid, signal.SIGKILL)
        os.waitpid(process.record.pid, 0)  # noqa: ASYNC222 # it has got SIGKILL
        assert await process.gone() is None

    run(scenario)


def test_a_watch_that_fails_is_told_and_the_end_can_be_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        told: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        process = spawn(FORKS, tmp_path / "log")
        child = int(await line(process, r"child (\d+)"))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # /proc cannot be read
        try:
            os.kill(process.record.pid, signal.SIGKILL)
            with pytest.raises(Unkillable, match=f"SIGKILL did not end {process.record.pid}"):
                await process.gone()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        (context,) = told
        assert "Too many open files" in str(context["exception"])
        assert "stopped" in str(context["message"])
        assert await process.terminate(WITHIN) == -9
        assert gone(child)

    run(scenario)


def test_a_child_that_floods_costs_neither_memory_nor_the_loop(tmp_path: Path) -> None:
    most = 4 << 20
    block = "('x' * 99 + '\\n') * 10000"
    program = (
        f"import sys, time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: sys.stdout.write({block})\n"
    )
    program += "print('the last line')"
    slowest = 0.0

    async def scenario() -> None:
        nonlocal slowest
        loop = asyncio.get_running_loop()
        process = spawn(program, tmp_path / "log", log_most=most, ring=Ring(lines=500, size=64 << 10))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        waiting = asyncio.create_task(process.gone())
        while not waiting.done():
            began = loop.time()
            await asyncio.sleep(0.001)
            slowest = max(slowest, loop.time() - began)
        assert await waiting == 0
        output = process.output
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB
        assert len(output.ring.lines()) <= 500
        assert output.ring.lines(1) == ["the last line"]
        assert output.error is None
        assert (tmp_path / "log.1").stat().st_size <= most + (1 << 20)

    run(scenario)
    assert slowest < 8.0


HIDDEN = """
import os
from gateway.shared.process_start import born
from sidecar.process import process_family
os.setgroups([])
for become in os.setresgid, os.setresuid:
    become(*[2**31 - 7] * 3)  # nobody has this number, and so no process that would be seen
print(process_family.look(1), process_family.everyone(), process_family.orphans("x"), born(1))
"""


@pytest.mark.slow
def test_other_users_processes_may_be_hidden() -> None:
    """By hidepid=1, which refuses what hidepid=2 does not even show."""
    mount = 'mount -t proc -o hidepid=1 proc /proc || exit 9\nexec "$@"'
    argv = ("unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", HIDDEN)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 9 or "unshare failed" in done.stderr:
        pytest.skip("this user may not mount /proc")
    assert (done.stdout, done.stderr) == ("None [] [] 0\n", "")
