"""Output of an engine: its ring buffer and its file, bounds, cuts, and files that cannot be opened."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.process.output import LINE_MOST, Output, Ring
from tests.sidecar.nothing_left import nothing_left, spawn

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize(
    ("fed", "expected"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\n\ntw", b"o"], ["one", "", "two"]),
        ([b"  1%\r 50%\r100%\r\nnext\r\n"], ["100%", "next"]),
        ([b"  1%\r 50%\r"], [" 50%"]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"a\nb\nc\nd\ne\nf\ng"], ["c", "d", "e", "f", "g"]),
        ([b"x" * 70 + b"\n", b"y" * 50 + b"\n"], ["y" * 50]),
        ([b"z" * 300], ["z" * 100]),
        ([b"a\nb\nc\nd\n", b"e\nf", b"\n"], ["b", "c", "d", "e", "f"]),
    ],
)
def test_a_ring_keeps_the_last_lines_and_the_one_being_written(fed: list[bytes], expected: list[str]) -> None:
    ring = Ring(lines=5 if fed[0].startswith(b"a") else 100, size=100)
    for data in fed:
        ring.feed(data)
    assert ring.lines() == expected
    assert ring.lines(2) == ring.lines()[-2:]
    assert ring.lines(0) == []


@pytest.mark.parametrize("step", [1000, 64 * 1024, 10**9])
def test_what_is_overwritten_pushes_no_line_out(step: int) -> None:
    bar = b"".join(b"\rLoading: %3d%% |%s|" % (update // 2, b"#" * 40) for update in range(200))
    written = b"".join(bar + b"\r\r\nerror %d\n" % number for number in range(40))
    ring = Ring(size=64 * 1024)
    for at in range(0, len(written), step):
        ring.feed(written[at : at + step])
    last = f"Loading:  99% |{'#' * 40}|"
    assert ring.lines() == [line for number in range(40) for line in (last, f"error {number}")]


def test_a_long_line_is_cut_and_a_gap_ends_a_line() -> None:
    ring = Ring()
    ring.feed(b"w" * 3 * LINE_MOST + b"\n" + b"beginn")
    ring.skip()
    ring.feed(b"end\n")
    assert ring.lines() == ["w" * LINE_MOST, "beginn", "end"]


async def followed(output: Output, path: Path, writes: list[bytes], most: int = 1000) -> None:
    """Each of `writes` is written while `output` follows, and waited for until it is read and the file is bounded."""
    follower = asyncio.create_task(output.follow())
    for data in writes:
        with path.open("ab") as file:
            file.write(data)
        async with asyncio.timeout(60):
            while data.splitlines()[-1].decode() not in output.ring.lines() or os.stat(path).st_size > most:
                await asyncio.sleep(0.01)
    follower.cancel()
    await asyncio.wait([follower])
    output.close()


def test_a_file_past_its_bound_is_cut_and_its_end_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"of an earlier engine\n")
    output = Output(path, most=1000)
    writes = [b"a" * 600 + b"\nfirst\n", b"b" * 600 + b"\nsecond\n", b"third\n", b"c" * 1500 + b"\nfourth\n"]
    asyncio.run(followed(output, path, writes))
    assert path.stat().st_size <= 1000
    assert "of an earlier engine" not in output.ring.lines()
    everything = b"of an earlier engine\n" + b"".join(writes)
    kept = Path(f"{path}.1").read_bytes() + path.read_bytes()
    assert everything.endswith(kept)
    assert 1000 <= len(kept) <= 2000
    assert output.error is None


def test_a_file_before_that_cannot_be_written_is_told_and_the_bound_holds(tmp_path: Path) -> None:
    path = tmp_path / "log"
    Path(f"{path}.1").mkdir()
    output = Output(path, most=1000)
    asyncio.run(followed(output, path, [b"e" * 4000 + b"\nend\n", b"after\n"]))
    assert path.stat().st_size <= 1000
    assert output.error == f"{path}.1 cannot be written: Is a directory"


def test_what_comes_while_the_file_is_copied_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "log"
    before = Path(f"{path}.1")

    async def meanwhile(output: Output) -> None:
        while not os.access(before, os.F_OK):
            await asyncio.sleep(0)
        os.write(output.fd, b"meanwhile\n")

    async def scenario() -> None:
        output = Output(path, most=1000)
        writer = asyncio.create_task(meanwhile(output))
        await followed(output, path, [b"i" * 900 + b"\n", b"j" * 200 + b"\nend\n"])
        await writer
        assert output.ring.lines(2) == ["end", "meanwhile"]

    asyncio.run(scenario())
    assert before.read_bytes().endswith(b"end\nmeanwhile\n")
    assert path.read_bytes() == b""


def test_a_file_that_somebody_else_cuts_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    output = Output(path)
    os.write(output.fd, b"before\n")
    output.read()
    os.truncate(path, 0)
    output.read()
    os.write(output.fd, b"after\n")
    output.close()
    assert output.ring.lines() == ["before", "after"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("full", "Too many levels of symbolic links"),
        ("missing/log", "No such file or directory"),
        ("folder", "Is a directory"),
        ("file/log", "Not a directory"),
        ("fifo", "not a regular file of this user's own"),
    ],
)
def test_an_engine_runs_on_where_its_file_cannot_be_had(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")

    async def scenario() -> None:
        process = spawn("print('x' * 100000); print('it runs', flush=True)", tmp_path / name, ring=Ring(size=10_000))
        assert await process.gone() == 0
        output = process.output
        assert output.ring.lines(1) == ["it runs"]
        assert output.path is None
        assert output.error == f"{tmp_path / name} cannot take the engine's output: {why}"

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["log", "log.1"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_link_is_followed(tmp_path: Path, name: str, link: Callable[[Path, Path], None]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of somebody else\n")
    link(precious, tmp_path / name)

    async def scenario() -> None:
        output = Output(tmp_path / "log", ring=Ring(size=1000), most=10_000)
        os.write(output.fd, b"f" * 20_000 + b"\n")
        follower = asyncio.create_task(output.follow())
        async with asyncio.timeout(60):
            while os.fstat(output.fd).st_size:
                await asyncio.sleep(0.01)
        follower.cancel()
        output.close()
        assert output.error is not None

    asyncio.run(scenario())
    assert precious.read_text() == "of somebody else\n"


def test_a_file_of_another_user_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("of somebody else\n")
    stranger = os.geteuid() + 1
    monkeypatch.setattr("sidecar.process.output.os.geteuid", lambda: stranger)
    output = Output(tmp_path / "log")
    os.write(output.fd, b"line\n")
    output.close()
    assert output.path is None
    assert (tmp_path / "log").read_text() == "of somebody else\n"


def test_memory_in_the_place_of_a_file_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        output = Output(tmp_path / "missing" / "log", ring=Ring(size=1000))
        follower = asyncio.create_task(output.follow())
        os.write(output.fd, b"f" * 10_000 + b"\n")
        async with asyncio.timeout(60):
            while os.fstat(output.fd).st_size:
                await asyncio.sleep(0.01)
        os.write(output.fd, b"after\n")
        output.read()
        follower.cancel()
        await asyncio.wait([follower])
        output.close()
        assert output.ring.lines(1) == ["after"]

    asyncio.run(scenario())


# In a mount namespace of its own, gone with its process: a disk of 1 MiB that is full, or gets full later.
SMALL_DISK = """
import asyncio, os, sys
from pathlib import Path
from sidecar.process.output import Output
from tests.sidecar.process.test_output import followed
folder, when = Path(sys.argv[1]), sys.argv[2]
rest = lambda: os.statvfs(folder).f_bavail * 4096
if when == "before":
    (folder / "fill").write_bytes(b"0" * rest())
output = Output(folder / "log", most=400_000)
if when == "later":
    (folder / "fill").write_bytes(b"0" * rest())
    lines = [b"g" * 80_000 + bytes(b"%d" % n) + b"\\nline %d\\n" % n for n in range(7)]
    asyncio.run(followed(output, folder / "log", lines, 400_000))
    (folder / "more").write_bytes(b"0" * rest())
    with (folder / "log").open("ab", buffering=0) as file:
        assert file.write(b"i" * 300_000) == 300_000
    print(output.path.name, output.error, output.ring.lines(1))
else:
    print(output.path, output.error, os.write(output.fd, b"h" * 10_000))
    output.close()
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.call(["unshare", "-rm", "true"]) != 0,  # noqa: S607
    reason="a small disk needs a mount namespace",
)
@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("before", "None {log} cannot take the engine's output: No space left on device 10000"),
        ("later", "log {log}.1 cannot be written: No space left on device ['line 6']"),
    ],
)
def test_a_full_disk_is_told_and_no_write_fails(tmp_path: Path, when: str, expected: str) -> None:
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1" "$4"'
    argv = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, SMALL_DISK, when]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == expected.format(log=tmp_path / "log"), done.stderr
