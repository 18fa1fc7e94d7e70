"""State file: its content survives, and no damage to it prevents serving."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sidecar.residency.state_file
from sidecar.core.addresses import EngineAddress
from sidecar.core.engine_records import EngineFacts, EngineRecord, ProcessRecord
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson, Measured
from sidecar.core.sleep import MeasuredSleep
from sidecar.core.step_times import StepTimes, Times
from sidecar.core.vllm import Completion
from sidecar.residency.state_file import (
    MAX_BYTES,
    Locked,
    SavedState,
    StateError,
    StateFile,
    decode,
    encode,
    replace,
)
from tests.sidecar.parts import opened

PROCESS = ProcessRecord(
    engine="box/m-1", pid=7, started=8, boot="b", log="/x", address=EngineAddress(uds="/run/m.sock")
)
RECORD = EngineRecord(
    process=PROCESS,
    gpus=(0, 1),
    size=Size(claim=5, share=0.5, arithmetic="5"),
    settings="a",
    told=EngineFacts(kv_tokens=3, canary=Completion("x", (1, 2))),
    level=2,
    host=7,
    first_residue=8,
)
MEASURED = Measured(settings="a", peak=3, settled=2, kv=1)
FULL = SavedState(
    engines={"m": RECORD},
    measured={"m": MEASURED},
    lessons={"m": Lesson(settings="a", rest=5, exact=True, sequences=3)},
    sleeps={"m": MeasuredSleep(settings="a", residue=5, wrong=True)},
    times={"m": Times(load=1.5, stages={"weights": 1.0}, disk=2e9), "n": Times(wake2=0.0)},
    off=("n",),
)


def test_what_is_known_of_profiles_that_are_gone_goes_with_them(tmp_path: Path) -> None:
    lesson = Lesson(settings="a", rest=5)
    known = SavedState(
        measured={"a": MEASURED, "gone": MEASURED}, lessons={"a": lesson, "gone": lesson}, off=("b", "gone")
    )
    (tmp_path / "sidecar.state").write_bytes(encode(known))
    (tmp_path / "sidecar.state").chmod(0o600)

    async def main() -> None:
        async with opened(tmp_path):
            pass

    asyncio.run(main())
    kept = decode((tmp_path / "sidecar.state").read_bytes())
    assert (list(kept.measured), list(kept.lessons), kept.off) == (["a"], ["a"], ("b",))


class Spoken(list[str]):
    """What was said of a state file."""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await scenario()
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(bounded())


# -- what it holds ----------------------------------------------------------------------------------------------------

GOOD = {"settings": "a", "peak": 3, "settled": 2, "kv": 1}
BAD = [
    (b"", "truncated"),
    (b"[]", "Expected `object`, got `array`"),
    (b'{"version": 1, "measured": {"\xff": 1}}', "codec can't decode|Invalid UTF-8"),
    (b'{"version": 2, "more": 1}', "Invalid enum value 2"),
    (b'{"version": 1, "measured": {"m": {"new": ' + b"[" * 100_000, "."),
    (b" " * (MAX_BYTES + 1), "4194305 bytes, expected at most 4194304"),
    (msgspec.json.encode({"version": 1, "measured": {"m": GOOD | {"settled": 4}}}), r"a peak of 3 bytes.*measured"),
    (msgspec.json.encode({"version": 1, "measured": {"": GOOD}}), "length >= 1"),
    (b'{"version": 1, "times": {"m": {"load": -1}}}', "Expected `float` >= 0"),
    (b'{"version": 1, "engines": {"m": {"gpus": [0]}}}', "missing required field `process`"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[message[:20] for _, message in BAD])
def test_bytes_that_are_no_state_say_why(data: bytes, message: str) -> None:
    with pytest.raises(StateError, match=message):
        decode(data)


def test_a_newer_sidecars_fields_are_skipped_and_its_engines_are_known() -> None:
    """Else the sidecar that comes back after an upgrade would end them all."""
    content = msgspec.json.decode(encode(FULL))
    newer = content | {"more": 1, "engines": {"m": content["engines"]["m"] | {"more": 1}}}
    assert decode(msgspec.json.encode(newer)) == FULL


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)
entries = st.fixed_dictionaries({}, optional=dict.fromkeys(("settings", "peak", "settled", "kv", "asleep"), json))
states = st.fixed_dictionaries(
    {"version": st.sampled_from([1, 2]), "measured": st.dictionaries(st.text(max_size=3), entries, max_size=3) | json}
)


@given(st.binary(max_size=64) | (json | states).map(msgspec.json.encode))
def test_whatever_a_state_file_holds_only_its_error_is_raised(data: bytes) -> None:
    try:
        found = decode(data)
    except StateError:
        return
    assert decode(encode(found)) == found


# -- the file ---------------------------------------------------------------------------------------------------------


def test_an_engines_address_is_where_earlier_sidecars_wrote_it() -> None:
    written = msgspec.json.decode(encode(SavedState(engines={"m": RECORD})))
    assert written["engines"]["m"]["process"]["place"]["uds"] == "/run/m.sock"


def test_what_is_saved_last_is_there_after_a_restart(tmp_path: Path) -> None:
    said = Spoken()
    path = tmp_path / "state"

    async def scenario() -> None:
        file = StateFile(path, said.append)
        assert file.load() == SavedState()
        await file.flush()
        for number in range(20):
            file.save(SavedState(times={"m": Times(load=float(number))}))
        file.save(FULL)
        await file.flush()
        assert file.error == ""
        file.close()

    run(scenario)
    assert StateFile(path, said.append).load() == FULL
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert said == []


def test_a_file_that_cannot_be_used_is_moved_aside_and_said_once(tmp_path: Path) -> None:
    said = Spoken()
    path = tmp_path / "state"
    path.write_bytes(b'{"version": 1, "engi')
    assert StateFile(path, said.append).load() == SavedState()
    assert StateFile(path, said.append).load() == SavedState()
    assert len(said) == 1
    assert f"cannot be used, it is now {path}.bad; starting without it: Input data was truncated" in said[0]
    assert (tmp_path / "state.bad").read_bytes() == b'{"version": 1, "engi'

    path.mkdir()
    assert StateFile(path, said.append).load() == SavedState()
    assert "Is a directory" in said[1]
    assert (tmp_path / "state.bad").is_file(), "a folder does not replace a file"


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device"])
def test_what_is_no_plain_file_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    file = StateFile(path, print)
    with pytest.raises(Locked, match="is no plain file: give this sidecar a state_file of its own"):
        file.lock()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert not path.is_file()


def test_a_fifo_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state")
    said = Spoken()
    assert StateFile(tmp_path / "state", said.append).load() == SavedState()
    assert len(said) == 1


def test_a_disk_that_is_full_is_said_once_and_once_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a limit on the size of files, which fails a write as a full disk does."""
    monkeypatch.setattr(sidecar.residency.state_file, "AGAIN", 0.01)
    said = Spoken()
    path = tmp_path / "state"
    path.write_bytes(encode(SavedState()))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    async def scenario() -> None:
        file = StateFile(path, said.append)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            for _ in range(3):
                file.save(FULL)
                await file.flush()
                assert file.error == "File too large"
                assert not (tmp_path / "state.new").exists()
            assert path.read_bytes() == encode(SavedState()), "what was there stays"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        while file.error:
            await asyncio.sleep(0.001)
        file.close()

    try:
        run(scenario)
    finally:
        signal.signal(signal.SIGXFSZ, old)
    assert StateFile(path, said.append).load() == FULL, "tried again without being asked to"
    assert [line.split("state ")[-1] for line in said] == [
        "cannot be written (File too large): a restart would not know its engines",
        "is written again",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_without_a_folder_it_goes_on(tmp_path: Path) -> None:
    said = Spoken()

    async def scenario() -> None:
        file = StateFile(tmp_path / "none" / "state", said.append)
        file.lock()
        assert file.load() == SavedState()
        file.save(FULL)
        await file.flush()
        assert file.error == "No such file or directory"
        file.close()
        await asyncio.sleep(0)

    run(scenario)
    assert len(said) == 2
    assert "nothing keeps a second sidecar from" in said[0]


def test_a_disk_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Spoken()
    answers = threading.Event()

    def hangs(path: Path, data: bytes) -> None:
        answers.wait(60.0)
        replace(path, data)

    monkeypatch.setattr(sidecar.residency.state_file, "LATE", 0.01)

    async def scenario() -> None:
        file = StateFile(tmp_path / "state", said.append, write=hangs)
        file.save(SavedState())
        while not file.error:
            await asyncio.sleep(0.001)
        file.save(FULL)
        await file.flush(0.01)
        answers.set()
        await file.flush(10.0)
        assert file.error == ""
        file.close()

    run(scenario)
    assert "no answer from the disk" in said[0]
    assert "is written again" in said[1]
    assert StateFile(tmp_path / "state", said.append).load() == FULL


# -- the lock ---------------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from sidecar.residency.state_file import StateFile
StateFile(Path(sys.argv[1]), print).lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_two_sidecars_never_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    file = StateFile(path, print)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(Locked, match=f"in use by the sidecar with process id {holder.pid}: stop that one"):
                file.lock()
        finally:
            holder.kill()
    file.lock()  # it went with its process
    with pytest.raises(Locked, match=f"process id {os.getpid()}:"):
        StateFile(path, print).lock()
    file.close()
    again = StateFile(path, print)
    again.lock()
    assert stat.S_IMODE((tmp_path / "state.lock").stat().st_mode) == 0o600
    again.close()


# -- whose it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_file_that_others_may_write_says_nothing(tmp_path: Path, mode: int) -> None:
    path, said = tmp_path / "state", Spoken()
    path.write_bytes(encode(FULL))
    path.chmod(mode)
    assert StateFile(path, said.append).load() == SavedState()
    (line,) = said
    assert f"others may write it (mode {mode:o}, expected 600)" in line
    assert not path.exists(), "it is moved aside"


def test_a_file_of_another_user_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said, own = tmp_path / "state", Spoken(), os.geteuid()
    path.write_bytes(encode(FULL))
    monkeypatch.setattr("sidecar.residency.state_file.os.geteuid", lambda: own + 1)
    assert StateFile(path, said.append).load() == SavedState()
    assert f"it belongs to user {own}, and this is user {own + 1}" in said[0]


def test_times_go_on_where_they_were() -> None:
    before, after = (StepTimes("m", "", eager=False, machine={}) for _ in range(2))
    before.loaded(20.0, {"process": 5.0, "weights": 10.0, "compile": 5.0}, Size(stored=30 * 2**30))
    before.took("wake2", 3.0)
    before.took("sleep", 4.0)
    before.took("stop", 5.0)
    after.seen = decode(encode(SavedState(times={"m": before.seen}))).times["m"]
    assert after.seen == before.seen
    assert (after.seen.disk, after.wake_seconds(Size())[1], after.stop_seconds) == (3.0 * 2**30, 3.0, 5.0)
