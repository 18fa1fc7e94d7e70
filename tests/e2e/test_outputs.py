"""Gateway process with unread outputs, or with a log that is rotated."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.processes import free_port, get, until
from tests.e2e.children import SimEngine, gateway, post

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

CALL = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def test_full_pipes_at_both_outputs_stop_nothing(tmp_path: Path) -> None:
    """Where it listens, operator's lines and the call log go to the same pipe, and nobody reads it."""
    engine = SimEngine(tmp_path / "engine.log")
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\n")
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 65536)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x")
    os.set_blocking(write, True)
    data, control = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--policy", str(policy), "--engine", engine.url]
    argv += ["--listen", data.removeprefix("http://"), "--control", control.removeprefix("http://")]
    with engine.child, subprocess.Popen(argv, stdout=write, stderr=write) as process:
        try:

            def ready() -> bool:
                with contextlib.suppress(OSError):
                    return get(f"{control}/readyz")[0] == 200
                return False

            assert until(ready, 60.0) is not None
            for number in range(1, 4):
                policy.write_text(f"version: 1\nserver: {{max_connections: {100 + number}}}\n")
                process.send_signal(signal.SIGHUP)
                active = f"max_connections: {100 + number}".encode()
                assert until(lambda active=active: active in get(f"{control}/policy")[1], 60.0) is not None  # type: ignore[misc]
                assert post(f"{data}/v1/chat/completions", CALL)[0] == 200
                assert get(f"{control}/livez") == (200, b"ok\n")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    os.close(write)
    assert select.select([read], [], [], 10)[0]
    os.close(read)


def test_a_log_that_is_rotated_away_is_opened_anew(tmp_path: Path) -> None:
    engine, log = SimEngine(tmp_path / "engine.log"), tmp_path / "calls.jsonl"
    policy = "version: 1\n"
    with engine.child, gateway(tmp_path, engine, policy, "--log", str(log)) as running:
        assert post(f"{running.url}/v1/chat/completions", CALL)[0] == 200
        assert until(lambda: log.read_bytes().count(b"\n") == 1, 60.0) is not None
        log.rename(tmp_path / "calls.1")
        running.child.process.send_signal(signal.SIGHUP)
        assert until(log.exists, 60.0) is not None
        assert post(f"{running.url}/v1/chat/completions", CALL)[0] == 200
        assert until(lambda: log.read_bytes().count(b"\n") == 1, 60.0) is not None
        assert json.loads(log.read_text())["outcome"] == "ok"
        assert (tmp_path / "calls.1").read_bytes().count(b"\n") == 1
        assert running.total("weir_log_lines_lost_total") == 0


def test_lines_that_are_lost_are_counted(tmp_path: Path) -> None:
    engine = SimEngine(tmp_path / "engine.log")
    with engine.child, gateway(tmp_path, engine, "version: 1\n", "--log", "/dev/full") as running:
        assert post(f"{running.url}/v1/chat/completions", CALL)[0] == 200
        assert until(lambda: running.total("weir_log_lines_lost_total") == 1, 60.0) is not None
        assert running.child.line(r"(/dev/full: cannot be written: No space left on device)", 60.0)
