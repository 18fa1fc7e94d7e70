"""Thrift of `make check`: hypothesis tries a quarter of the examples, and garbage is collected seldom.

`make test` tries all examples. Signals have their defaults, whoever has started the tests.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from loadtest import processes
from loadtest.processes import Child
from tests.examples import QUICK, USUAL, WHOLE
from tests.nursery import Nurseries

# The same examples each time (`make fuzz` draws others), and none fails because the machine was busy.
settings.register_profile(
    WHOLE, max_examples=USUAL, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(WHOLE)
settings.register_profile(QUICK, max_examples=USUAL // 4)  # and else what has just been loaded

# Files that take longest, so that no worker has one to do when all others are done.
LONGEST = (
    "simulation/test_random_machines.py",
    "simulation/test_dst.py",
    "simulation/test_relays_dst.py",
    "serve/test_upgrades.py",
    "serve/test_processes.py",
    "batches/test_sidecar_away.py",
    "e2e/test_idle_connections.py",
    "batches/test_large_files.py",
    "loadtest/lab/test_figures.py",
    "e2e/loadtest/test_trace_replay.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Undo what children of the tests would inherit: a script's background jobs ignore SIGINT, nohup's SIGHUP. Let them
    keep temporary files in a folder that goes with the tests: a gateway that is killed removes none. Certificates of
    authorities are looked for there too: to read the system's takes each client of OpenAI's longer than a call. Each
    worker has ports of its own: another's server would take the place of one that is stopped."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    eighth = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    processes.ports = processes.walk(10_000 + 1250 * eighth, 11_250 + 1250 * eighth)
    nurseries = Nurseries()
    Child.started = staticmethod(nurseries.start)
    config.add_cleanup(nurseries.close)
    if not hasattr(config, "workerinput"):  # workers inherit it
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own folders stay
        folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        Path(folder.name).chmod(0o711)  # children of another user pass it
        os.environ["TMPDIR"] = os.environ["SSL_CERT_DIR"] = tempfile.tempdir = folder.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the longest files first, and else the order in which tests were found."""
    longest = {Path(__file__).parent / name for name in LONGEST}
    items.sort(key=lambda item: item.path not in longest)


def pytest_collection_finish() -> None:
    """Scan no more for garbage among ten thousand tests, which all live to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def its_own_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect garbage after a slow test: a socket that it forgot to close fails this test, not one of another file."""
    yield
    if request.node.get_closest_marker("slow"):
        gc.collect()
