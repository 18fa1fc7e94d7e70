"""Machines of a cluster whose way to the store a test may slow down or cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.proxy import Proxy
from tests.cluster.site import Site, known, site


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Site, list[Proxy]]]:
    """Two machines, each with a proxy of its own before the store."""
    with site(tmp_path) as made, contextlib.ExitStack() as stack:
        proxies = [Proxy(made.store.port) for _ in range(2)]
        for proxy in proxies:
            stack.callback(proxy.close)
            made.machine(f"valkey://127.0.0.1:{proxy.port}/0")
        known(made)
        yield made, proxies
