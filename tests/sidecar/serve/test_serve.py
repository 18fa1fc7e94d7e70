"""`sidecar serve` as a process: adoption, leftovers and shutdown, for every way in which it ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from loadtest.processes import Child, until
from sidecar.cli import main
from sidecar.residency.report import explained
from tests.sidecar.parts import opened
from tests.sidecar.served import Box, box


@pytest.mark.slow
def test_engines_go_on_without_the_sidecar_and_the_next_one_takes_them_over(tmp_path: Path) -> None:
    with box(tmp_path) as machine:
        with machine.served() as first:
            first.says("of 80.0 GiB used")
            downloads = {"download": str(tmp_path / "weights"), "download_seconds": 10.0}
            # The start is not over before the order comes.
            (machine.gpus / "org%2FA.faults").write_text(json.dumps(downloads))
            assert machine.ask("POST", "/models/a/ensure")["model"]["pending"] == "start"
            refusal = httpx.post(f"http://{machine.listen}/models/a/sleep", trust_env=False, timeout=60.0)
            assert (refusal.status_code, int(refusal.headers["retry-after"]) > 0) == (503, True)
            assert refusal.json()["error"]["message"] == "a has a start under way"
            machine.awake("a")
            assert first.stop(60.0) == 0
            said = first.output()
            assert "the sidecar has ended; its engines go on: a (unix://" in said
            assert f"sidecar stop --all --config {machine.file}` ends them" in said
        assert machine.serves("a")
        engine = machine.engines()
        with machine.served() as second:
            second.says("a runs already and is taken over")
            assert machine.state("a") == "running"
            second.process.kill()
            second.process.wait(60)
        assert machine.serves("a")
        with machine.served() as third:
            assert machine.state("a") == "running"
            assert machine.engines() == engine
            machine.awake("b")
            assert machine.state("a") == "sleeping"
            third.says("a sleeps at level")


@pytest.mark.slow
def test_engines_end_with_the_sidecar_where_that_is_asked_for(tmp_path: Path) -> None:
    with box(tmp_path) as machine, machine.served("--end-engines") as sidecar:
        machine.awake("a")
        assert sidecar.stop(60.0) == 0
        assert "ending with 1 engine" in sidecar.output()
        assert machine.engines() == []


@pytest.mark.slow
def test_with_its_parent_it_ends_with_all_engines(tmp_path: Path) -> None:
    with box(tmp_path) as machine, (tmp_path / "log").open("wb") as log:
        argv = machine.argv("serve", "--gpus-from", str(machine.gpus), "--end-with-parent", "--end-engines")
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=machine.env)
        assert child.stdin is not None
        try:
            assert until(lambda: b"control API" in (tmp_path / "log").read_bytes(), 60.0) is not None
            machine.awake("a")
            child.stdin.close()
            assert child.wait(60) == 0
        finally:
            child.stdin.close()
            child.kill()
            child.wait(60)
        assert machine.engines() == []


@pytest.mark.slow
def test_a_second_signal_kills_engines_that_do_not_end(tmp_path: Path) -> None:
    with box(tmp_path) as machine, machine.served("--end-engines") as sidecar:
        machine.awake("a")
        machine.fault("a", hang_end=True)
        sidecar.process.send_signal(signal.SIGTERM)
        sidecar.says("ending with 1 engine")
        sidecar.process.send_signal(signal.SIGTERM)
        assert sidecar.process.wait(60) == 0
        assert machine.engines() == []


@pytest.mark.slow
def test_a_machine_without_gpus_runs_what_needs_none(tmp_path: Path) -> None:
    models = """
models:
  a: {model_path: /m/a, sleep: null, engine: {simulated: h100-8b, device: cpu}}
  b: {model_path: /m/b}
"""
    with box(tmp_path, models) as machine:
        machine.env["CUDA_VISIBLE_DEVICES"] = ""
        argv = machine.argv("serve", "--end-engines")
        with Child("sidecar", argv, tmp_path / "log", env=machine.env) as sidecar:
            sidecar.line("^(control API)", 60.0)
            machine.awake("a")
            sidecar.says("no GPU")
            sidecar.says("needs a GPU, the sidecar has none")
            assert sidecar.stop(60.0) == 0


def test_gpus_are_left_alone_where_no_model_needs_one(tmp_path: Path) -> None:
    async def main() -> None:
        models = "models: {a: {model_path: /m/a, engine: {simulated: h100-8b, device: cpu}}}"
        async with opened(tmp_path, models) as manager:
            assert manager.gpus() == ()
            assert explained(manager.machine, "a").splitlines()[-1].startswith("1. start a")

    asyncio.run(main())


@pytest.fixture
def machine(tmp_path: Path) -> Box:
    return Box(tmp_path)


def refused(machine: Box, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a sidecar that does not start."""
    assert main(["serve", "--config", str(machine.file), "--gpus-from", str(machine.gpus)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1]


def test_two_sidecars_do_not_share_a_state_file(machine: Box, capsys: pytest.CaptureFixture[str]) -> None:
    with (machine.folder / "sidecar.state.lock").open("w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        assert "is in use by the sidecar with process id 4711: stop that one" in refused(machine, capsys)


def test_an_address_in_use_is_told(machine: Box, capsys: pytest.CaptureFixture[str]) -> None:
    host, port = machine.listen.split(":")
    with socket.create_server((host, int(port))):
        assert refused(machine, capsys) == f"sidecar: listen {machine.listen}: Address already in use"


def test_gpus_that_are_not_there_are_told(machine: Box, capsys: pytest.CaptureFixture[str]) -> None:
    machine.file.write_text(machine.file.read_text() + "gpus: [0, 3]\n")
    assert refused(machine, capsys).startswith("sidecar: gpus: there is no GPU 3")
