"""Embedded fleet: engines that start together, and end however the gateway ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gateway.serve import embedded as module
from gateway.serve.embedded import EmbeddedFleet, embedded, parse_embedded
from loadtest.processes import Gateway, answers, until
from sidecar.process.process_family import everyone
from tests.serve.test_processes import runs

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them


def children(pid: int) -> list[int]:
    return [seen.pid for seen in everyone() if seen.parent == pid]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sim", EmbeddedFleet(2, "h100-8b")),
        ("sim:1", EmbeddedFleet(1, "h100-8b")),
        ("sim:64:cpu-tiny", EmbeddedFleet(64, "cpu-tiny")),
        ("sim:1:", None),
        ("sim:-1", None),
        ("simple", None),
        ("http://sim:1", None),
    ],
)
def test_what_is_asked_for(text: str, expected: EmbeddedFleet | None) -> None:
    assert parse_embedded(text) == expected


def test_engines_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_WITHIN", 0.5)
    others = children(os.getpid())
    with embedded((EmbeddedFleet(1, "cpu-tiny"), EmbeddedFleet(1, "h100-8b"))) as urls:
        pids = [pid for pid in children(os.getpid()) if pid not in others]
        assert len(set(urls)) == len(pids) == 2
        assert until(lambda: all(answers(f"{url}/health") for url in urls), 60.0) is not None
        os.kill(pids[0], signal.SIGSTOP)  # one that does not listen is ended too
    assert not any(runs(pid) for pid in pids)


def test_one_that_does_not_come_up_is_told_and_leaves_none() -> None:
    others = set(children(os.getpid()))
    with (
        pytest.raises(RuntimeError, match=r"the simulated engine \(abacus\) did not start: exit code"),
        embedded((EmbeddedFleet(2, "abacus"),)),
    ):
        pass
    assert set(children(os.getpid())) <= others


def engines_of(gateway: Gateway) -> list[int]:
    return [
        pid for pid in children(gateway.child.pid)
        if b"loadtest.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engines_end_with_the_gateway_however_it_ends(
    tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    with Gateway(tmp_path / "log", "--engine", "sim:2:cpu-tiny", *words) as gateway:
        engines = engines_of(gateway)
        assert len(engines) == 2
        os.kill(gateway.child.pid, number)
        assert gateway.child.process.wait(60) == (-number if number == signal.SIGKILL else 0)
        assert until(lambda: not any(map(runs, engines)), 60.0) is not None
