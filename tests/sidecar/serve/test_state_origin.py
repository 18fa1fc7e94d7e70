"""Origin of a state file: of another machine's or another sidecar's no engine is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sidecar.core.addresses import EngineAddress
from sidecar.core.engine_records import EngineRecord, ProcessRecord
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson, Measured
from sidecar.core.step_times import Times
from sidecar.process import process_family
from sidecar.residency.state_file import Origin, SavedState, encode, machine, own_state
from tests.sidecar.served import box

HERE = process_family.boot_id()


def record(pid: int = 1, started: int = 1, boot: str = HERE) -> EngineRecord:
    process = ProcessRecord(
        engine="box-1/a-1", pid=pid, started=started, boot=boot, log="a.log", address=EngineAddress(port=1)
    )
    return EngineRecord(process=process, gpus=(0,), size=Size(claim=1), settings="s")


KNOWN = SavedState(
    key="k",
    engines={"a": record()},
    measured={"a": Measured(settings="s", peak=3, settled=2, kv=1)},
    lessons={"a": Lesson(settings="s", rest=5)},
    times={"a": Times(load=1.0)},
    off=("a",),
)
LEARNT = SavedState(measured=KNOWN.measured, lessons=KNOWN.lessons)


def own(known: SavedState, path: Path) -> tuple[SavedState, list[str]]:
    said: list[str] = []
    return own_state(known, path, said.append), said


def test_a_file_of_this_sidecar_is_used_whole_under_a_new_name_too(tmp_path: Path) -> None:
    first, said = own(KNOWN, tmp_path / "state")
    assert msgspec.structs.replace(first, origin=Origin()) == KNOWN
    assert first.origin == Origin(machine=machine(), path=str(tmp_path / "state"))
    second, more = own(first, tmp_path / "moved")  # nothing is at the old path
    assert msgspec.structs.replace(second, origin=Origin()) == KNOWN
    (tmp_path / "moved").write_bytes(b"")
    (tmp_path / "state").symlink_to("moved")
    assert own(first, tmp_path / "moved")[1] == said == more == []


def test_of_another_machines_file_only_measurements_stay(tmp_path: Path) -> None:
    path = tmp_path / "state"
    known = msgspec.structs.replace(KNOWN, origin=Origin(machine="another", path=str(path)))
    found, said = own(known, path)
    if not machine():
        pytest.skip("this machine has no id")
    assert msgspec.structs.replace(found, origin=Origin()) == LEARNT
    assert said == [
        f"the state file {path} was written on another machine: no engine in it is taken over or ended; "
        "what models were measured to take is kept"
    ]


def test_of_a_copy_only_measurements_stay(tmp_path: Path) -> None:
    first, _ = own(KNOWN, tmp_path / "state")
    (tmp_path / "state").write_bytes(encode(first))
    found, said = own(first, tmp_path / "copy")
    assert msgspec.structs.replace(found, origin=Origin()) == LEARNT
    (line,) = said
    assert line.startswith(f"the state file {tmp_path}/copy is a copy of {tmp_path}/state: no engine")


def test_engines_of_another_boot_are_said_in_one_line(tmp_path: Path) -> None:
    engines = {"a": record(boot="x"), "b": record(), "c": record(boot="y")}
    found, (line,) = own(msgspec.structs.replace(KNOWN, engines=engines), tmp_path / "state")
    assert set(found.engines) == {"b"}
    assert (found.key, found.off, found.times) == (KNOWN.key, KNOWN.off, KNOWN.times)
    assert line.endswith("no engine of that time is taken over or ended (a, c)")


def test_a_machine_without_an_id_is_like_any_other(tmp_path: Path) -> None:
    assert machine(tmp_path / "none") == ""
    (tmp_path / "empty").write_text("\n")
    assert machine(tmp_path / "empty") == ""
    (tmp_path / "id").write_text("0123\n")
    assert len(machine(tmp_path / "id")) == 32
    assert "0123" not in machine(tmp_path / "id")


@pytest.mark.slow
@pytest.mark.parametrize("boot", [HERE, "another"])
def test_a_program_with_the_number_of_another_machines_engine_runs_on(tmp_path: Path, boot: str) -> None:
    """Of the boot of this machine, and with an engine's mark, it could not be told from one of this sidecar's."""
    marked = process_family.marked(os.environ, "box-1/a-1")
    with (
        box(tmp_path) as there,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=marked) as other,
    ):
        try:
            seen = process_family.look(other.pid)
            assert seen is not None
            origin = Origin(machine="another" if boot == HERE else "", path=str(tmp_path / "sidecar.state"))
            engines = {name: record(other.pid, seen.started, boot) for name in ("a", "gone")}
            state = tmp_path / "sidecar.state"
            state.write_bytes(encode(msgspec.structs.replace(KNOWN, engines=engines, origin=origin, off=())))
            state.chmod(0o600)
            with there.served() as sidecar:
                assert there.state("a") == "stopped"
                sidecar.says("another machine")
                said = [line for line in sidecar.output().splitlines() if "state file" in line or "taken over" in line]
                assert len(said) == 1
                assert "from another machine" in said[0] or "on another machine" in said[0]
                there.awake("a")
            assert other.poll() is None
        finally:
            other.kill()
