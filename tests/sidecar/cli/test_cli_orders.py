"""Orders on one model from the command line, given to a sidecar that runs: done, failed, refused and late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.processes import until
from sidecar.cli import main
from tests.sidecar.served import Box, box

pytestmark = pytest.mark.slow

MODELS = """
models:
  a: {model_path: /m/a, gpu_memory: 40%}
  b: {model_path: /m/b, gpu_memory: 40%, sleep: null}
  never: {model_path: /m/never, gpu_memory: 40%, engine: {simulated: no-such-profile}}
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Box]:
    with box(tmp_path, MODELS) as found, found.served("--end-engines"):
        yield found


def test_each_verb_waits_for_its_end(machine: Box) -> None:
    status, out, err = machine.run("ensure", "a")
    assert (status, out[:18]) == (0, "a: running (after ")
    assert err.startswith("a: ")
    assert "on its way" not in err
    assert machine.state("a") == "running"
    assert machine.run("sleep", "a")[1].startswith("a: sleeping at level ")
    assert machine.run("ensure", "a")[0] == 0
    assert machine.run("stop", "a")[1].startswith("a: stopped, ready in ")
    assert machine.state("a") == "stopped"


def test_off_outlasts_the_sidecar(machine: Box) -> None:
    machine.awake("a")
    for _ in range(2):
        status, out, _ = machine.run("off", "a")
        assert (status, out[:12]) == (0, "a: stopped: ")
    why = "a is off until an operator switches it on: sidecar on a"
    assert machine.run("ensure", "a")[::2] == (1, f"a: stopped: {why}\nsidecar: a: {why}\n")
    assert "stopped, off" in machine.run("status")[1]
    assert machine.run("sleep", "a")[::2] == (1, "sidecar: a is off: `on` comes first\n")
    assert machine.run("stop")[0] == 0
    with machine.served("--end-engines"):
        assert machine.run("ensure", "a")[0] == 1
        assert machine.run("on", "a")[0] == 0
        assert machine.run("ensure", "a")[0] == 0


def test_what_fails_says_why_and_what_takes_too_long_goes_on(machine: Box) -> None:
    assert machine.run("sleep", "b")[::2] == (1, "sidecar: b is stopped, not running\n")
    status, out, err = machine.run("ensure", "never", "--timeout", "2s")
    assert (status, out) == (3, "")
    assert "sidecar: never: not done after " in err
    assert "and it goes on: " in err
    assert until(lambda: machine.state("never") == "error", 60.0) is not None
    assert machine.run("off", "never")[0] == 0
    assert machine.ask("POST", "/models/b/ensure")["model"]["profile"] == "b"
    assert machine.run("stop", "b", "--timeout", "50s")[0] == 0
    assert until(lambda: machine.state("b") == "stopped", 60.0) is not None


def test_mistakes(machine: Box, capsys: pytest.CaptureFixture[str]) -> None:
    config = ("--config", str(machine.file))
    for argv, said in (
        (("ensure", "x", *config), "there is no profile 'x' (it has a, b, never)"),
        (("stop", "a", "--all", *config), "it takes no MODEL"),
        (("stop", "--timeout", "5s", *config), "--timeout is for `sidecar stop MODEL`"),
    ):
        assert main(argv) == 2
        assert said in capsys.readouterr().err
    for time in ("0", "-1s", "1 h", "x"):
        with pytest.raises(SystemExit):
            main(["ensure", "a", f"--timeout={time}", *config])
        assert "a time such as 90s" in capsys.readouterr().err
