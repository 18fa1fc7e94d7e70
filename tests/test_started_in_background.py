"""Tests that are started by a script's background job, whose children would ignore Ctrl-C, pass as any other."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRESSES = "tests/loadtest/simulate/test_simulate.py"
IN_BACKGROUND = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "by a worker"])
def test_a_test_that_presses_ctrl_c(workers: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", IN_BACKGROUND, *workers, "-k", "ctrl_c_before", PRESSES],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stdout
    assert "1 passed" in found.stdout
