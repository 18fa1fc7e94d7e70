"""Commands beside `sidecar serve`: with a running sidecar, without one, and after a person's mistakes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from gateway.shared.formatting import columns, seconds
from loadtest.processes import until
from sidecar import cli
from sidecar.cli import parser_for, stop
from sidecar.reporting import gateway_link
from sidecar.residency import state_file
from sidecar.residency.state_file import SavedState, encode
from sidecar.serve import run
from tests.layout import loaded
from tests.sidecar.served import MODELS, Box, box

TOKEN = "0123456789abcdef"  # noqa: S105 # a test's own


class Ran:
    """What `main` did: its status and its two outputs."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        try:
            status = cli.main(argv)
        except SystemExit as end:
            status = int(str(end.code))
        out, err = self._capsys.readouterr()
        return status, out, err


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    return Ran(capsys)


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "status",
        "plan",
        "logs",
        "diagnose",
        "stop",
        "check",
        "ensure",
        "sleep",
        "off",
        "on",
    ],
)
def test_help_teaches_by_examples_that_parse(ran: Ran, command: str) -> None:
    status, out, err = ran(command, "--help")
    assert (status, err) == (0, "")
    examples = [line.strip() for line in out.splitlines() if re.match(r"\s+sidecar \w+", line)]
    assert examples
    for line in examples:
        words = shlex.split(re.split(r"\s{3,}", line)[0])[1:]
        parser_for(words).parse_args(words)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("command", [("status",), ("logs", "a"), ("stop",), ("stop", "--all"), ("plan", "a")])
def test_where_no_sidecar_runs(ran: Ran, tmp_path: Path, command: tuple[str, ...]) -> None:
    machine = Box(tmp_path)
    status, out, err = ran(*command, "--config", str(machine.file))
    nobody = f"sidecar: no sidecar answers at {machine.listen}"
    match command:
        case ("stop",):
            assert (status, out) == (0, "")
            assert err == f"{nobody}: nothing to stop (--all ends engines that one has left)\n"
        case ("stop", "--all"):
            assert (status, out, err) == (0, "no engine was running\n", "")
        case _:
            instead = ", or sidecar plan a --gpu 80GiB, which asks none" if command[0] == "plan" else ""
            assert (status, out) == (1, "")
            assert err == f"{nobody}; start one: sidecar serve --config {machine.file}{instead}\n"


@pytest.mark.parametrize("command", [("status",), ("logs", "a"), ("stop", "--all")])
def test_a_state_file_that_a_command_cannot_use_stays_for_the_next_sidecar(
    ran: Ran, tmp_path: Path, command: tuple[str, ...]
) -> None:
    machine = Box(tmp_path)
    state, data = tmp_path / "sidecar.state", encode(SavedState(off=("a",)))
    state.write_bytes(data)
    state.chmod(0o660)  # as little this user's as one of another user
    ran(*command, "--config", str(machine.file))
    assert state.read_bytes() == data


@pytest.mark.parametrize("field", ["ca_file: [1]", "ca_file: gone.pem", "state_file: [1]", "gateways: 7"])
def test_status_asks_whatever_else_is_wrong_with_the_file(ran: Ran, tmp_path: Path, field: str) -> None:
    machine = Box(tmp_path)
    machine.file.write_text(f"{machine.file.read_text()}\n{field}\n")
    status, _, err = ran("status", "--config", str(machine.file))
    assert (status, err.startswith(f"sidecar: no sidecar answers at {machine.listen}; ")) == (1, True), err


def test_status_needs_the_token_that_it_shows(ran: Ran, tmp_path: Path) -> None:
    machine = Box(tmp_path)
    machine.file.write_text(f"{machine.file.read_text()}\norder_token_file: [1]\n")
    status, _, err = ran("status", "--config", str(machine.file))
    assert (status, "order_token_file" in err) == (2, True), err


def test_mistakes_are_one_line(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ran("status") == (2, "", "sidecar: sidecar.yaml: No such file or directory\n")
    machine = Box(tmp_path)
    assert ran("plan", "c") == (2, "", "sidecar: sidecar.yaml: there is no profile 'c' (it has a, b)\n")
    assert ran("logs", "org/A")[2] == "sidecar: sidecar.yaml: there is no profile 'org/A' (did you mean a?)\n"
    assert ran("serve", "--gpus-from", "x")[2] == "sidecar: --gpus-from x: there is no such folder\n"
    assert "a number from 1 to 2000, not '0'" in ran("logs", "a", "-n", "0")[2]
    text = machine.file.read_text()
    machine.file.write_text(text + "token_file: token\n")
    assert ran("status")[2] == "sidecar: token_file token: No such file or directory\n"
    (tmp_path / "token").write_text("short\n")
    assert (
        ran("status")[2]
        == "sidecar: token_file token: a token is at least 16 visible ASCII characters; 2 at most, one a line\n"
    )
    machine.file.write_text(text + 'token_file: t\ngateways: ["http://h:99999"]\n')
    assert "gateways[0]: found http://h:99999, expected a port from 1 to 65535" in ran("check", "sidecar.yaml")[2]


def test_the_words_of_a_table() -> None:
    assert list(map(seconds, (0.04, 9.94, 59.6, 119.4, 150.0, 5400.0, 7200.0, 200_000.0))) == [
        "0.0 s", "9.9 s", "60 s", "119 s", "2 min", "90 min", "2.0 h", "2 days",
    ]  # fmt: skip
    assert columns([("A", "BB"), ("ccc", "d")]) == ["A    BB", "ccc  d"]


@pytest.mark.slow
def test_a_sidecar_that_runs_is_asked(tmp_path: Path) -> None:
    with box(tmp_path) as machine:
        (tmp_path / "token").write_text(TOKEN)
        machine.file.write_text(machine.file.read_text() + "token_file: token\n")
        with machine.served() as sidecar:
            assert machine.ask("GET", "/status")["error"]["code"] == "invalid_api_key"
            status, out, err = machine.run("status", "--json")
            assert (status, err) == (0, "")
            assert json.loads(out)["sidecar"] == machine.id
            status, out, _ = machine.run("status")
            assert status == 0
            assert re.search(r"^a +stopped +- +0 +\d+ s", out, re.MULTILINE)
            assert machine.run("plan", "a")[1].splitlines()[-1].startswith("1. start a on GPU 0")
            assert machine.run("logs", "a")[2] == "sidecar: the engine of a has written nothing, or there is none\n"
            (tmp_path / "token").write_text(TOKEN + "x")
            assert until(lambda: machine.run("status")[0] == 0, 30.0) is not None
            status, out, _ = machine.run("stop", "--all")
            assert (status, out) == (0, "the sidecar has ended; no engine was running\n")
            assert sidecar.process.wait(60) == 0


HUGE = "  c: {model_path: x, tensor_parallel: 2}\n"


@pytest.mark.slow
def test_a_plan_for_what_cannot_be_run_fails(tmp_path: Path) -> None:
    with box(tmp_path, MODELS + HUGE) as machine, machine.served():
        status, out, err = machine.run("plan", "c")
        assert (status, out) == (1, "")
        assert err.splitlines() == [
            "sidecar: c: stopped",
            "sidecar: cannot be run: needs 2 GPUs (tensor_parallel), the sidecar has 1",
        ]
        assert machine.run("plan", "a")[0] == 0


@pytest.mark.slow
def test_stop_ends_engines_with_the_sidecar_or_after_it(tmp_path: Path) -> None:
    with box(tmp_path) as machine:
        with machine.served():
            machine.awake("a")
            assert "ready unix://" in machine.run("logs", "a", "-n", "5")[1]
            assert machine.run("stop") == (0, "the sidecar has ended; engines that go on: a\n", "")
        assert machine.serves("a")
        assert "engines it has left may still run: a" in machine.run("status")[2]
        assert machine.run("stop", "--all") == (0, "ended a\n", "")
        assert machine.engines() == []
        with machine.served():
            machine.awake("a")
            assert machine.run("stop", "--all") == (0, "the sidecar has ended with its engines: a\n", "")
        assert machine.engines() == []


def test_help_imports_no_command() -> None:
    table = {"gateway", "gateway.shared", "gateway.shared.command_line"}
    assert loaded("--help", program="sidecar") == table | {"sidecar", "sidecar.cli"}


def test_stop_waits_as_long_as_a_sidecar_may_take_to_end() -> None:
    calls_and_engines, last_words = run.DRAIN_WITHIN + run.CLOSE_WITHIN, state_file.LATE + gateway_link.LAST_WITHIN
    assert calls_and_engines + last_words < stop.STOP_WITHIN
