"""`gateway status` on a real gateway: its page under a little load, its exit statuses, and its watch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.processes import Gateway, free_port, until
from tests.e2e.children import Call

TOKEN = "0123456789abcdef-of-this-test"  # noqa: S105 # a test's own
STATUS = [sys.executable, "-m", "gateway.cli", "status"]

pytestmark = pytest.mark.slow


def status(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        [*STATUS, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


@contextmanager
def load(gateway: Gateway) -> Iterator[None]:
    """Two long calls in flight, and three that have been answered when the body begins to run."""
    running = [Call(gateway.url, stream=True, max_tokens=6000) for _ in range(2)]
    try:
        for _ in range(3):
            assert Call(gateway.url, stream=False).read()[0] == 200
        yield
    finally:
        for call in running:
            call.close()
        assert until(gateway.idle, 60.0) is not None, "the next test finds nothing of it"


def test_the_page(gateway: Gateway) -> None:
    with load(gateway):
        ran = status("--url", gateway.control)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    lines = ran.stdout.splitlines()
    assert lines[0].startswith(f"weir 0.1.0 at {gateway.control}, policy: ")
    assert lines[2].startswith("No call of the last ")
    assert [line.split()[0] for line in lines if re.match("[A-Z]{4}", line)] == ["CLASS", "MODEL", "ENGINE"]
    (row,) = [line.split() for line in lines if line.startswith("default ")]
    assert (row[5], row[6]) == ("2", "0")  # running, queued
    assert re.search(r"^sim +normal +2 ", ran.stdout, re.MULTILINE)
    engines = re.findall(r"^127\.0\.0\.1:\d+ +up +(\d)/\d+ ", ran.stdout, re.MULTILINE)
    assert sorted(engines) in (["0", "2"], ["1", "1"])


def test_json_is_what_the_page_is_made_of(gateway: Gateway) -> None:
    with load(gateway):
        ran = status("--url", gateway.control, "--json")
    (view,) = map(json.loads, ran.stdout.splitlines())
    running = sum(row["running"] for row in view["classes"].values())
    assert running == sum(row["calls"] for row in view["engines"].values()) == 2


@pytest.mark.parametrize(
    ("port", "code", "why"),
    [
        ("url", 2, "this is not the control port of a gateway: it answers 404 to /status"),
        ("nowhere", 1, "no connection: no gateway has its control port there"),
    ],
)
def test_no_gateway_is_one_clear_line(gateway: Gateway, port: str, code: int, why: str) -> None:
    url = gateway.url if port == "url" else "http://127.0.0.1:9"
    ran = status("--url", url)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", f"gateway: {url}: {why}\n")


def test_the_token(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(TOKEN)
    wrong.write_text(TOKEN[::-1])
    with Gateway(tmp_path / "log", "--engine", "sim", "--admin-token-file", str(right), ready=False) as gateway:
        for arguments, code, why in (
            ([], 2, "it wants its admin token: give --token-file FILE or set WEIR_ADMIN_TOKEN"),
            (["--token-file", str(wrong)], 2, "it refuses the token"),
            (["--token-file", str(right)], 0, ""),
        ):
            ran = status("--url", gateway.control, *arguments)
            said = f"gateway: {gateway.control}: {why}\n" if why else ""
            assert (ran.returncode, ran.stderr) == (code, said)
        assert status("--url", gateway.control, env={"WEIR_ADMIN_TOKEN": TOKEN}).returncode == 0


def test_a_watch_goes_on_while_the_gateway_is_away_and_ends_with_its_reader(tmp_path: Path) -> None:
    control = f"127.0.0.1:{free_port()}"  # which the kernel gives to nobody else meanwhile
    with Gateway(tmp_path / "log", "--engine", "sim", "--control", control) as gateway:
        argv = [*STATUS, "--url", gateway.control, "--watch", "--json"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            assert watch.stderr is not None
            json.loads(watch.stdout.readline())
            gateway.child.kill()
            # One that it was just asking hangs up on it first.
            assert any("no connection" in line for line in watch.stderr)
            with Gateway(tmp_path / "again", "--engine", "sim", "--control", control):
                json.loads(watch.stdout.readline())
                watch.stdout.close()
                assert watch.wait(60) == 0
