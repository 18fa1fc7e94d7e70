"""Two sidecars on one machine, as processes: neither harms the other, whatever they share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from loadtest.processes import Child, until
from sidecar.core.lesson import Measured
from sidecar.gpus.simulated import SimulatedGPUs
from sidecar.residency.state_file import decode, encode, replace
from tests.sidecar.laid_out import lay_out
from tests.sidecar.served import GIB, Box, box


@contextlib.contextmanager
def neighbours(folder: Path, *, gpus: int = 1, select: bool = False) -> Iterator[tuple[Box, Box]]:
    """Two boxes with the same GPUs. `select`: the first has GPU 0 and the second GPU 1."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    with box(folder / "one") as one, box(folder / "two") as two:
        lay_out(one.gpus, [80 * GIB] * gpus)
        two.gpus = one.gpus
        if select:
            for index, machine in enumerate((one, two)):
                machine.file.write_text(f"{machine.file.read_text()}gpus: [{index}]\n")
        yield one, two


def held(machine: Box) -> dict[int, set[int]]:
    """The processes that hold memory of each GPU. No GPU has given more than it has."""
    gpus = SimulatedGPUs(machine.gpus).snapshot()
    assert all(sum(gpu.processes.values()) <= gpu.total for gpu in gpus)
    return {gpu.index: set(gpu.processes) for gpu in gpus}


def message(machine: Box, profile: str) -> str:
    """The reason that the status gives for a model's state."""
    models = machine.ask("GET", "/status")["models"]
    return next(str(model["message"]) for model in models if model["profile"] == profile)


def ended(machine: Box) -> list[str]:
    """The lines of a sidecar that does not start."""
    argv = machine.argv("serve", "--gpus-from", str(machine.gpus))
    with Child("sidecar", argv, machine.folder / "refused.log", env=machine.env) as child:
        assert child.process.wait(60) == 2
        return child.output().splitlines()


@pytest.mark.slow
def test_the_second_of_two_with_one_state_file_ends_with_one_line(tmp_path: Path) -> None:
    with box(tmp_path) as one, one.served() as first:
        one.awake("a")
        engines = one.engines()
        state = tmp_path / "sidecar.state"
        wanted = f"sidecar: {state} is in use by the sidecar with process id {first.pid}: stop that one, or give this"
        (line,) = ended(one)
        assert line.startswith(wanted)
        assert one.state("a") == "running"
        assert one.engines() == engines


@pytest.mark.slow
def test_the_second_of_two_on_one_port_ends_with_one_line(tmp_path: Path) -> None:
    with neighbours(tmp_path) as (one, two), one.served():
        one.awake("a")
        two.file.write_text(two.file.read_text().replace(two.listen, one.listen))
        (line,) = ended(two)
        assert line == f"sidecar: listen {one.listen}: Address already in use"
        assert one.state("a") == "running"
        assert one.serves("a")


@pytest.mark.slow
def test_each_has_gpus_of_its_own(tmp_path: Path) -> None:
    with neighbours(tmp_path, gpus=2, select=True) as (one, two), one.served(), two.served():
        for profile in ("a", "b"):
            for machine in (one, two):
                machine.awake(profile)
            # a ends for b on each alone: 40 % and 70 %.
            assert held(one) == {n: {pid for _, pid, _ in m.engines()} for n, m in enumerate((one, two))}
        assert [machine.state("b") for machine in (one, two)] == ["running", "running"]


@pytest.mark.slow
def test_on_one_gpu_the_others_engines_are_foreign_memory(tmp_path: Path) -> None:
    with neighbours(tmp_path) as (one, two), two.served() as second:
        with one.served() as first:
            one.awake("a")
            engines = one.engines()
            two.ask("POST", "/models/b/ensure")
            assert until(lambda: "other processes hold too much" in message(two, "b"), 60.0) is not None
            two.awake("a")
            assert held(one)[0] == {pid for machine in (one, two) for _, pid, _ in machine.engines()}
            first.process.kill()
            first.process.wait(60)
            assert one.engines() == engines
        second.stop()
        with two.served(), one.served():
            assert [machine.state("a") for machine in (one, two)] == ["running", "running"]
            assert one.engines() == engines
            one.ask("POST", "/models/a/stop")
            two.awake("b")
            # An engine gives its memory back, which is all that the other sidecar sees, a moment before it has ended.
            assert until(lambda: one.engines() == [], 60.0) is not None
            held(one)


@pytest.mark.slow
def test_two_that_start_engines_at_once_never_overrun_a_gpu(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        one, two = stack.enter_context(neighbours(tmp_path))
        for machine in (one, two):
            machine.env["WEIR_SIMULATED_SPEED"] = "20"  # seconds to load: neither sees the other's memory at its start
        sidecars = [stack.enter_context(machine.served()) for machine in (one, two)]
        for machine in (one, two):
            machine.ask("POST", "/models/b/ensure")

        def served() -> list[bool]:
            held(one)
            return [machine.state("b") == "running" for machine in (one, two)]

        assert until(lambda: any(served()), 60.0) is not None
        assert sum(served()) == 1
        loser, winner = (one, two) if two.state("b") == "running" else (two, one)
        winner.ask("POST", "/models/b/stop")
        assert until(lambda: loser.state("b") == "running", 60.0) is not None, message(loser, "b")
        held(one)
        assert all(sidecar.alive for sidecar in sidecars)


@pytest.mark.slow
def test_a_copied_state_file_gives_no_right_to_the_others_engines(tmp_path: Path) -> None:
    with neighbours(tmp_path) as (one, two), one.served() as first:
        one.awake("a")
        engines = one.engines()
        first.stop()  # its engines go on without it
        copied = decode((one.folder / "sidecar.state").read_bytes())
        assert list(copied.engines) == ["a"]
        copied = msgspec.structs.replace(copied, measured={"a": Measured(settings="s", peak=3, settled=2, kv=1)})
        state = two.folder / "sidecar.state"
        replace(state, encode(copied))
        assert two.run("stop", "--all")[0] == 0
        assert one.engines() == engines
        replace(state, encode(copied))
        with two.served() as second:
            second.says(f"is a copy of {one.folder}/sidecar.state: no engine in it is taken over or ended")
            assert sum("the state file" in line for line in second.output().splitlines()) == 1
            assert two.state("a") == "stopped"
            assert one.engines() == engines
            assert one.serves("a")
        own = decode(state.read_bytes())
        assert own.key != copied.key
        assert own.measured == copied.measured
        with one.served():
            assert one.state("a") == "running"
