"""Thrift of `make check`: hypothesis tries a quarter of the examples, and garbage is collected seldom.

`make test` tries all examples. Signals have their defaults, whoever has started the tests.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import QUICK, USUAL, WHOLE

# The same examples each time (`make fuzz` draws others), and none fails because the machine was busy.
settings.register_profile(
    WHOLE, max_examples=USUAL, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(WHOLE)
settings.register_profile(QUICK, max_examples=USUAL // 4)  # and else what has just been loaded


def pytest_configure() -> None:
    """Undo what children of the tests would inherit: a script's background jobs ignore SIGINT, nohup's SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


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
