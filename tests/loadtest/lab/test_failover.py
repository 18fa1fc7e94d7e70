"""A tiny part of `make failover`, and how it counts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from loadtest.lab.failover.clients import CallEnd
from loadtest.lab.failover.command import FaultFigures, longest, main
from loadtest.lab.failover.faults import FAULTS, QUICK
from loadtest.lab.failover.site import client_ports


def test_the_longest_time_without_a_beginning_counts_from_the_last_before_the_fault() -> None:
    assert longest([1.0, 1.2, 2.9, 3.0], since=1.5, to=3.2) == pytest.approx(1.7)
    assert longest([1.0], since=1.5, to=4.0) == pytest.approx(3.0), "nobody began again"
    assert longest([0.0], since=1.5, to=4.0) == pytest.approx(2.5), "0.0: it never began"


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [({}, False), ({"left": 5}, True), ({"left": -1}, True), ({"exact_after": None}, True),
     ({"failed": [CallEnd(kind="raw", began=0.0, failure="cut")]}, True),
     ({"own": [CallEnd(kind="raw", began=0.0, failure="cut")]}, False)],
)  # fmt: skip
def test_what_is_lost_is_wrong(changed: dict[str, object], wrong: bool) -> None:
    figures = FaultFigures(
        **{"calls": {}, "failed": [], "own": [], "before": 0.1, "without": 9.0, "left": 0, "exact_after": 9.0} | changed  # type: ignore[arg-type]
    )
    assert figures.wrong is wrong


@pytest.mark.parametrize("words", [("--faults", "flood"), ("--seconds", "-1")])
def test_bad_arguments_are_told(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_a_socket_that_listens_has_no_client() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        taken, _ = listening.accept()
        with taken:
            assert client.getsockname()[1] in client_ports(os.getpid())
            assert 0 not in client_ports(os.getpid()), "a call that never had a connection would be this process's"


def test_quick_is_some_of_all() -> None:
    assert set(QUICK) < FAULTS.keys()


@pytest.mark.slow
def test_signals_to_any_process_take_nothing_away_but_what_was_on_a_relay_that_ended() -> None:
    argv = [sys.executable, "-m", "loadtest.lab.failover", "--faults", "signals", "--seconds", "1", "--rounds", "6"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "lost" not in ran.stdout


@pytest.mark.slow
def test_a_decider_and_a_relay_die_under_load_and_no_call_fails() -> None:
    argv = [sys.executable, "-m", "loadtest.lab.failover", "--faults", "decider-kill,relay-kill", "--seconds", "1"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "SIGKILL of the decider" in ran.stdout
    assert "lost" not in ran.stdout
