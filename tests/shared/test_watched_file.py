"""Hot reload under everything that happens to files: saved, renamed, swapped, half-written, gone, back again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import InvalidFile
from gateway.shared.watched_file import LIMIT, POLL, SETTLE, UNFORESEEN, Read, WatchedFile

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

WITHIN = 60.0  # seconds; how soon it really is, is test_how_soon's business


class StartError(Exception):
    """What applying a policy raises when something else it needs is not there."""


def text(number: int, *more: str) -> str:
    """A good policy, told apart by a number."""
    return "\n".join([f"version: 1\nserver: {{max_connections: {number}}}", *more, ""])


class Watched:
    """A policy file, what was applied of it, and what was logged."""

    def __init__(self, path: Path, *, poll: float = 0.02, settle: float = 0.05) -> None:
        self.path = path
        self.applied: list[int] = []
        self.lines: list[str] = []
        self.refuse: Exception | None = None
        self.loads = 0
        self.bug: BaseException | None = None
        self.transient = False
        self.meanwhile: Callable[[], object] | None = None
        self.file = WatchedFile(
            path, self.load, self.lines.append, failures=(InvalidFile, OSError, StartError), poll=poll, settle=settle
        )

    def load(self, read: Read) -> Policy:
        self.loads += 1
        if self.transient:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "x")
        data = read(self.path)
        meanwhile = self.meanwhile  # the test's thread takes it away at any moment
        if meanwhile is not None:
            meanwhile()
        policy = decode(data, self.path.name)
        if self.bug is not None:
            raise self.bug
        if policy.keys_file is not None:
            read(self.path.parent / policy.keys_file)
        return policy

    def apply(self, policy: Policy) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.applied.append(policy.server.max_connections)

    @property
    def error(self) -> str:
        return self.file.status.error or ""

    async def until(self, condition: Callable[[], bool], within: float = WITHIN) -> None:
        async with asyncio.timeout(within):
            while not condition():
                await asyncio.sleep(0.005)

    async def active(self, number: int) -> None:
        await self.until(lambda: self.applied[-1:] == [number] and not self.error)


Scene = Callable[[Watched], Awaitable[None]]


def threads() -> int:
    return sum(thread.name == "weir-watch" for thread in threading.enumerate())


def play(path: Path, scene: Scene, *, poll: float = 0.02, settle: float = 0.05) -> Watched:
    """Start with policy 1, or with what is there; after the scene the watch must end and leave nothing behind."""
    if not path.exists():
        path.write_text(text(1))
    watched = Watched(path, poll=poll, settle=settle)

    async def main() -> None:
        watched.file.first()
        watched.file.start(watched.apply)
        try:
            await scene(watched)
        finally:
            await watched.file.aclose()
        await watched.until(lambda: not threads())

    asyncio.run(main())
    return watched


# -- ways to save a file ----------------------------------------------------------------------------------------------


def in_place(path: Path, data: str) -> None:
    """Write a file in place. The file is empty for a moment, and is read so where its writer is held up."""
    path.write_text(data)


def delete(path: Path) -> None:
    path.unlink()


def renamed_over(path: Path, data: str) -> None:
    other = path.with_name("policy.yaml.tmp")
    other.write_text(data)
    other.replace(path)


def as_vim(path: Path, data: str) -> None:
    path.rename(path.with_name("policy.yaml~"))
    path.write_text(data)
    path.with_name("policy.yaml~").unlink()


def deleted_and_created(path: Path, data: str) -> None:
    path.unlink()
    path.write_text(data)


def in_pieces(path: Path, data: str) -> None:
    """Write a file in pieces. A piece is read by itself where its writer is held up."""
    with path.open("w") as file:
        for character in data:
            file.write(character)
            file.flush()


def folder_replaced(path: Path, data: str) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    path.write_text(data)


SAVES = [in_place, renamed_over, as_vim, deleted_and_created, in_pieces, folder_replaced]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    return folder / "policy.yaml"


@pytest.mark.parametrize("save", SAVES)
def test_a_saved_file_is_active_soon(path: Path, save: Callable[[Path, str], None]) -> None:
    def whole(number: int) -> str:
        return f"{{version: 1, server: {{max_connections: {number}}}}}"  # no part of it is a policy

    async def scene(watched: Watched) -> None:
        assert watched.file.status.version == 1
        for number in (2, 3):
            save(path, whole(number))
            await watched.active(number)
        status = watched.file.status
        assert (status.version, status.reloads, status.error, status.file) == (3, 2, None, str(path))
        assert status.digest == hashlib.sha256(whole(3).encode()).hexdigest()[:12]

    assert play(path, scene).applied == [2, 3]


def test_how_soon(path: Path) -> None:
    """With the real intervals: a look, a rest, and the reading itself."""

    async def scene(watched: Watched) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        renamed_over(path, text(2))
        await watched.active(2)
        took = loop.time() - began
        print(f"active after {took:.3f} s")

    assert POLL + SETTLE <= 0.5
    play(path, scene, poll=POLL, settle=SETTLE)


def swap(volume: Path, name: str, files: dict[str, str]) -> None:
    """As Kubernetes updates a mounted ConfigMap: a new folder, and `..data` renamed over to point to it."""
    folder = volume / name
    folder.mkdir()
    for file, data in files.items():
        (folder / file).write_text(data)
        os.utime(folder / file, (1, 1))  # nothing but the inode tells one version from the next
    link = volume / "..data_tmp"
    link.symlink_to(name)
    before = (volume / "..data").resolve()
    link.replace(volume / "..data")
    if before.name != "..data":
        shutil.rmtree(before)


def test_a_config_map_is_followed_through_its_symbolic_links(tmp_path: Path) -> None:
    swap(tmp_path, "..2026_01", {"policy.yaml": text(1, "keys_file: keys.txt"), "keys.txt": "a"})
    for name in ("policy.yaml", "keys.txt"):
        (tmp_path / name).symlink_to(f"..data/{name}")

    async def scene(watched: Watched) -> None:
        swap(tmp_path, "..2026_02", {"policy.yaml": text(2, "keys_file: keys.txt"), "keys.txt": "a"})
        await watched.active(2)
        swap(tmp_path, "..2026_03", {"policy.yaml": text(2, "keys_file: keys.txt"), "keys.txt": "b"})
        await watched.until(lambda: watched.file.status.version == 3)

    assert play(tmp_path / "policy.yaml", scene).applied == [2, 2]


def test_every_file_the_policy_is_made_of_is_watched(path: Path) -> None:
    keys = path.with_name("keys.txt")

    async def scene(watched: Watched) -> None:
        in_place(path, text(2, "keys_file: keys.txt"))
        await watched.until(lambda: "keys.txt: No such file" in watched.error)
        assert watched.applied == []
        renamed_over(keys, "one")  # each is read once: an empty one would be another version
        await watched.active(2)
        renamed_over(keys, "two")
        await watched.until(lambda: watched.applied == [2, 2])
        keys.unlink()
        await watched.until(lambda: "keys.txt" in watched.error)
        renamed_over(keys, "two")
        await watched.until(lambda: not watched.error)
        assert watched.file.status.version == 3, "the same content is no new version"

    play(path, scene)


def test_a_file_that_may_be_missing_is_watched_all_the_same(path: Path) -> None:
    extra = path.with_name("extra.txt")

    async def scene(watched: Watched) -> None:
        load = watched.load

        def with_extra(read: Read) -> Policy:
            policy = load(read)
            with contextlib.suppress(FileNotFoundError):
                read(extra)
            return policy

        watched.file._load = with_extra
        await watched.file.reload_now()
        in_place(extra, "here")
        await watched.until(lambda: watched.file.status.version == 2)

    play(path, scene)


def test_an_error_with_a_file_error_behind_it_is_tried_again_too(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        load = watched.load

        def wrapped(read: Read) -> Policy:
            try:
                return load(read)
            except OSError as error:
                raise StartError("keys_file: there is none") from error

        watched.file._load = wrapped
        watched.transient = True
        in_place(path, text(2))
        await watched.until(lambda: watched.error == "keys_file: there is none")
        watched.transient = False
        await watched.active(2)

    play(path, scene)


# -- bad files --------------------------------------------------------------------------------------------------------


def test_a_bad_file_changes_nothing_and_says_all_that_is_wrong(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        renamed_over(path, "version: 1\nserver: {max_connections: none}\nbudget: {kv_target: 900%}\n")
        await watched.until(lambda: bool(watched.error))
        status = watched.file.status
        assert status.error is not None
        assert status.error.startswith("policy.yaml:2: server.max_connections: found 'none'")
        assert "\npolicy.yaml:3: budget.kv_target: found '900%'" in status.error
        assert (status.version, status.failures, watched.applied) == (1, 1, [])
        assert status.error_at is not None
        for _ in range(3):
            await watched.file.reload_now()
        assert watched.file.status == status, "it is counted and logged once"
        assert len(watched.lines) == 1
        assert status.error in watched.lines[0]
        renamed_over(path, "version: 1\nserver: {max_connections: none}\nbudget: {kv_target: 900%}  # why?\n")
        await watched.until(lambda: watched.file.status.failures == 2)
        renamed_over(path, text(2))
        await watched.active(2)
        assert (watched.file.status.error, watched.file.status.error_at) == (None, None)
        assert watched.file.status.failures == 2
        assert len(watched.lines) == 3

    play(path, scene)


def test_back_to_what_is_active_is_no_reload(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        in_place(path, "nonsense")
        await watched.until(lambda: bool(watched.error))
        in_place(path, text(1))
        await watched.until(lambda: not watched.error)
        assert (watched.file.status.version, watched.file.status.reloads) == (1, 0)
        assert "again what is active" in watched.lines[-1]
        loads, lines = watched.loads, len(watched.lines)
        renamed_over(path, text(1))
        await watched.until(lambda: watched.loads > loads)
        await watched.file.reload_now()
        assert len(watched.lines) == lines

    assert play(path, scene).applied == []


def test_a_file_that_is_gone_is_an_error_until_it_is_back(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        delete(path)
        await watched.until(lambda: watched.error == f"{path}: No such file or directory")
        shutil.rmtree(path.parent)
        await watched.file.reload_now()
        assert watched.file.status.failures == 1
        path.parent.mkdir()
        in_place(path, text(2))
        await watched.active(2)

    play(path, scene)


@pytest.mark.parametrize(
    "half",
    [
        "version: 1\nserver: {max_conn",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("version: 1\n", marks=pytest.mark.slow),
    ],
)
def test_a_half_written_file_is_not_read(path: Path, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that would be good as far as it goes."""
    monkeypatch.setattr("gateway.shared.watched_file.PATIENCE", WITHIN)

    async def scene(watched: Watched) -> None:
        with path.open("w") as file:
            for piece in (half, "", text(2).removeprefix(half)):
                file.write(piece)
                file.flush()
                os.utime(file.fileno())  # an empty piece leaves no trace of its own
                await asyncio.sleep(0.8)  # it must rest for longer, by what a busy machine takes
        await watched.active(2)
        assert watched.file.status.failures == 0

    assert play(path, scene, settle=4.0).applied == [2]


def test_what_is_mended_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.shared.watched_file.PATIENCE", WITHIN)

    async def scene(watched: Watched) -> None:
        watched.meanwhile = lambda: in_place(path, text(2))
        in_place(path, "version: 1\nserver: {max_conn")
        await watched.until(lambda: watched.loads > 2)
        watched.meanwhile = None
        await watched.active(2)
        assert watched.file.status.failures == 0

    play(path, scene)


def test_who_asks_waits_for_a_half_written_file_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.shared.watched_file.PATIENCE", WITHIN)

    async def scene(watched: Watched) -> None:
        in_place(path, text(2)[:20])
        asking = asyncio.ensure_future(watched.file.reload_now())
        await asyncio.sleep(0.1)
        in_place(path, text(2))
        status = await asking
        assert (status.version, status.failures) == (2, 0)

    play(path, scene, poll=60.0, settle=4.0)


def test_an_empty_file_is_no_policy(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        in_place(path, "")
        await watched.until(lambda: watched.error == f"{path}: the file is empty")

    assert play(path, scene).applied == []


def test_what_does_not_change_is_not_read_again(path: Path) -> None:
    path.with_name("target").write_text(text(1))
    path.symlink_to("target")

    async def scene(watched: Watched) -> None:
        await watched.file.reload_now()
        assert watched.loads == 2
        await asyncio.sleep(0.2)  # ten looks
        assert watched.loads == 2

    play(path, scene)


def test_what_could_not_be_read_is_tried_again_without_a_change(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        watched.transient = True
        in_place(path, text(2))
        await watched.until(lambda: watched.error == "x: Too many open files")
        loads = watched.loads
        await watched.until(lambda: watched.loads > loads + 3)
        assert (watched.file.status.failures, len(watched.lines)) == (1, 1)
        watched.transient = False
        await watched.active(2)

    play(path, scene)


def test_a_file_that_never_rests_is_read_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.shared.watched_file.PATIENCE", 0.3)

    async def scene(watched: Watched) -> None:
        number = 1
        while not watched.applied:
            number += 1
            in_place(path, text(number))
            await asyncio.sleep(0.02)

    play(path, scene, settle=0.2)


def test_what_applying_refuses_changes_nothing(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        watched.refuse = StartError("api_key_file of http://e: no such file")
        renamed_over(path, text(2))
        await watched.until(lambda: watched.error == "api_key_file of http://e: no such file")
        assert (watched.file.status.version, watched.file.status.failures) == (1, 1)
        await watched.file.reload_now()
        assert watched.file.status.failures == 1
        watched.refuse = None
        status = await watched.file.reload_now()
        assert (status.version, status.error, watched.applied) == (2, None, [2])

    play(path, scene)


def test_a_bug_in_applying_is_not_taken_for_success(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        seen: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
        watched.refuse = bug = LookupError("a bug")
        in_place(path, text(2))
        await watched.until(lambda: watched.error == UNFORESEEN)
        assert seen == [bug]
        assert watched.file.status.version == 1
        watched.refuse = None
        in_place(path, text(3))
        await watched.active(3)

    play(path, scene)


class Panic(BaseException):
    """Stand-in for the panic that a library in Rust raises: no Exception."""


@pytest.mark.parametrize("bug", [LookupError("a bug"), MemoryError(), Panic()])
def test_a_bug_in_loading_does_not_end_the_watch(path: Path, bug: BaseException) -> None:
    async def scene(watched: Watched) -> None:
        watched.bug = bug
        in_place(path, text(2))
        await watched.until(lambda: watched.error == UNFORESEEN)
        assert (await watched.file.reload_now()).error == UNFORESEEN
        watched.bug = None
        in_place(path, text(3))
        await watched.active(3)

    play(path, scene)


def test_a_look_without_memory_does_not_end_the_watch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look fails for a while, asked for or not; then the file is what it was, and what it becomes is read."""
    stat, failing = os.stat, threading.Event()

    def status(at: Any, *args: Any, **more: Any) -> os.stat_result:
        if failing.is_set() and threading.current_thread().name == "weir-watch":
            raise MemoryError
        return stat(at, *args, **more)

    monkeypatch.setattr(os, "stat", status)

    async def scene(watched: Watched) -> None:
        failing.set()
        await watched.until(lambda: watched.error == UNFORESEEN)
        async with asyncio.timeout(WITHIN):
            assert (await watched.file.reload_now()).error == UNFORESEEN
        assert (watched.file.status.failures, len(watched.lines)) == (1, 1)
        failing.clear()
        await watched.until(lambda: not watched.error)
        in_place(path, text(2))
        await watched.active(2)

    play(path, scene)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Path.mkdir, os.strerror(errno.EISDIR)),
        (os.mkfifo, "not a plain file"),
        (lambda path: path.symlink_to(path.name), os.strerror(errno.ELOOP)),
        (lambda path: path.symlink_to("/dev/zero"), "not a plain file"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), LIMIT + 1), f"larger than {LIMIT} bytes"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "expected UTF-8 text"),
    ],
)
def test_what_is_no_policy_file_is_an_error_and_no_end(path: Path, make: Callable[[Path], object], found: str) -> None:
    async def scene(watched: Watched) -> None:
        delete(path)
        make(path)
        await watched.until(lambda: found in watched.error)
        folder_replaced(path, text(2))
        await watched.active(2)

    play(path, scene)


# -- asking -----------------------------------------------------------------------------------------------------------


def test_who_asks_is_answered_for_the_file_as_it_is_now(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        for number in range(2, 12):
            in_place(path, text(number))
            status = await watched.file.reload_now()
            assert (status.version, watched.applied[-1]) == (number, number)
        in_place(path, "nonsense")
        statuses = await asyncio.gather(*(watched.file.reload_now() for _ in range(5)))
        assert all(status.error for status in statuses)
        assert statuses[0].failures == 1

    play(path, scene, poll=60.0)


def test_a_signal_asks_without_waiting(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        in_place(path, text(2))
        watched.file.ask()
        await watched.active(2)

    play(path, scene, poll=60.0)


def test_who_asks_and_leaves_does_no_harm(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        asking = asyncio.ensure_future(watched.file.reload_now())
        await asyncio.sleep(0)
        asking.cancel()
        renamed_over(path, text(2))
        assert (await watched.file.reload_now()).version == 2

    play(path, scene, poll=60.0)


# -- beginning and end ------------------------------------------------------------------------------------------------


def test_a_start_with_a_bad_file_is_the_caller_s_to_tell(path: Path) -> None:
    watched = Watched(path)
    with pytest.raises(FileNotFoundError):
        watched.file.first()
    in_place(path, "nonsense")
    with pytest.raises(InvalidFile):
        watched.file.first()
    asyncio.run(watched.file.aclose())
    assert not threads()


def test_a_change_between_the_first_reading_and_the_watch_is_seen(path: Path) -> None:
    in_place(path, text(1))
    watched = Watched(path)

    async def main() -> None:
        watched.file.first()
        in_place(path, text(2))
        watched.file.start(watched.apply)
        await watched.active(2)
        await watched.file.aclose()

    asyncio.run(main())


def test_nothing_is_applied_after_the_end(path: Path) -> None:
    async def scene(watched: Watched) -> None:
        in_place(path, text(2))
        asking = asyncio.ensure_future(watched.file.reload_now())
        await asyncio.sleep(0)
        await watched.file.aclose()
        assert (await asking).version == 1
        assert (await watched.file.reload_now()).version == 1

    assert play(path, scene, poll=60.0).applied == []  # it does not look before it is asked to


def test_a_hung_file_system_does_not_keep_the_gateway_from_ending(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.shared.watched_file.CLOSE_WITHIN", 0.1)
    release, began = threading.Event(), threading.Event()
    in_place(path, text(1))
    watched = Watched(path)
    load = watched.load

    async def main() -> None:
        watched.file.first()

        def hangs(read: Read) -> Policy:
            began.set()
            release.wait(WITHIN)
            return load(read)

        watched.file._load = hangs
        watched.file.start(watched.apply)
        asking = asyncio.ensure_future(watched.file.reload_now())
        await watched.until(began.is_set)
        await watched.file.aclose()
        assert (await asking).version == 1

    asyncio.run(main())
    assert threads() == 1
    release.set()  # it finds its loop closed, and ends without a word
    for thread in threading.enumerate():
        if thread.name == "weir-watch":
            thread.join(WITHIN)
    assert not threads()


# -- anything at all --------------------------------------------------------------------------------------------------


def some_trouble(path: Path, rng: random.Random) -> None:
    """One thing that may happen to a file or its folder; each leaves some state, good, bad or none."""
    path.parent.mkdir(exist_ok=True)

    def clear() -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def elsewhere() -> None:
        clear()
        target = path.with_name(f"v{rng.randrange(3)}")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "p").write_text(text(rng.randrange(100, 200)))
        path.symlink_to(target / "p")

    def fresh(make: Callable[[Path], object]) -> None:
        clear()
        make(path)

    trouble: list[Callable[[], object]] = [
        clear,
        elsewhere,
        lambda: shutil.rmtree(path.parent),
        lambda: fresh(Path.mkdir),
        lambda: fresh(os.mkfifo),
        lambda: fresh(lambda path: path.symlink_to("nowhere")),
        lambda: fresh(lambda path: path.write_bytes(rng.randbytes(40))),
        lambda: fresh(lambda path: path.write_text("version: 2\n")),
        lambda: fresh(lambda path: path.write_text("")),
        lambda: fresh(lambda path: path.write_text(text(rng.randrange(100, 200), "keys_file: keys.txt"))),
        lambda: (clear(), renamed_over(path, text(rng.randrange(100, 200)))),
        lambda: path.is_file() and os.truncate(path, rng.randrange(20)),
        lambda: path.is_file() and path.chmod(rng.choice((0o000, 0o600))),
        lambda: path.is_file() and path.rename(path.with_name("other")),
    ]
    rng.choice(trouble)()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_whatever_happened_before_a_good_file_becomes_active(path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def scene(watched: Watched) -> None:
        for number in range(2, 8):
            for _ in range(rng.randrange(12)):
                some_trouble(path, rng)
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.03)))  # between looks, and across some
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir()
            rng.choice([in_place, renamed_over, in_pieces])(path, text(number))
            await watched.active(number)

    play(path, scene, poll=0.01, settle=0.01)
