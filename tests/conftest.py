"""Thrift of `make check`: hypothesis tries a quarter of the examples, and garbage is collected seldom.

`make slow` and `make coverage` try all examples.
"""

from __future__ import annotations

import gc

from hypothesis import settings

from tests.examples import QUICK, USUAL

settings.register_profile(QUICK, max_examples=USUAL // 4)


def pytest_collection_finish() -> None:
    """Scan no more for garbage among ten thousand tests, which all live to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
