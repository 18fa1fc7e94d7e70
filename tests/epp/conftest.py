"""Picker under test and engines behind it. The cases of `test_picker.py` know only this.

Another picker is tried by the addresses of pickers that run already:

    EPP_PICKER=127.0.0.1:9002 EPP_ENDPOINTS=10.0.0.1:8000,10.0.0.2:8000 EPP_MODEL=m pytest tests/epp/test_picker.py

EPP_SECOND is another picker over the same endpoints, EPP_DESERTED one without a ready endpoint, EPP_LIMITED one that
sheds the second call of a minute, and EPP_NARROW one that runs a single call at a time. Cases without theirs are
skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import msgspec
import pytest

from loadtest.processes import Gateway, free_port, get
from tests.e2e.children import SimEngine


class Site(msgspec.Struct):
    """A picker's address, and the endpoints and the model that it picks for. `gateway`: of the project's own."""

    address: str
    endpoints: list[str]
    model: str
    gateway: Gateway | None = None

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SimEngine]]:
    """Two engines; none where another picker is tried."""
    with ExitStack() as stack:
        if "EPP_PICKER" in os.environ:
            yield []
            return
        folder = tmp_path_factory.mktemp("engines")
        started = [SimEngine(folder / f"engine{number}.log", "--speed", "20") for number in range(2)]
        for engine in started:
            stack.enter_context(engine.child)
        yield started


def start(folder: Path, urls: list[str], policy: str = "", *more: str, ready: bool = True) -> Site:
    """Start a picker of the project's own. Its gateway must be stopped."""
    port = free_port()
    (folder / "policy.yaml").write_text(policy or "fleet: {poll: 100ms, health: 20s}\n")
    flags = [flag for url in urls for flag in ("--engine", url)]
    flags += ["--policy", str(folder / "policy.yaml"), "--epp", f"127.0.0.1:{port}"]
    gateway = Gateway(folder / "log", *flags, *more, ready=ready)
    if ready and len(urls) > 1:  # it is ready with one, and tests want each
        up = f"ok, {len(urls)} of {len(urls)} engines are up\n".encode()
        gateway.child.wait(lambda: get(f"{gateway.control}/readyz")[1] == up, 60.0, "every engine up")
    return Site(f"127.0.0.1:{port}", [url.partition("//")[2] for url in urls], "sim", gateway)


def _site(name: str, started: Site | None) -> Iterator[Site]:
    """The picker that the environment names, else the one that is started."""
    if "EPP_PICKER" in os.environ:
        address = os.environ.get(name)
        if address is None:
            pytest.skip(f"{name} names no picker")
        yield Site(address, os.environ["EPP_ENDPOINTS"].split(","), os.environ["EPP_MODEL"])
        return
    assert started is not None
    assert started.gateway is not None
    with started.gateway as gateway:
        yield started
        assert gateway.child.alive, gateway.child.output()
        assert "Traceback" not in gateway.child.output(), gateway.child.output()


def _own() -> bool:
    return "EPP_PICKER" not in os.environ


@pytest.fixture(scope="session")
def picker(engines: list[SimEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    urls = [engine.url for engine in engines]
    yield from _site("EPP_PICKER", start(tmp_path_factory.mktemp("picker"), urls) if _own() else None)


@pytest.fixture(scope="session")
def second(engines: list[SimEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    urls = [engine.url for engine in engines]
    yield from _site("EPP_SECOND", start(tmp_path_factory.mktemp("second"), urls) if _own() else None)


@pytest.fixture(scope="session")
def deserted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A picker whose only engine is not there."""
    folder = tmp_path_factory.mktemp("deserted")
    yield from _site("EPP_DESERTED", start(folder, ["http://127.0.0.1:9"], ready=False) if _own() else None)


@pytest.fixture(scope="session")
def limited(engines: list[SimEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A picker that takes one call a minute."""
    policy = "limits: {global: {requests: {rate: 1/min, burst: 1}}}\n"
    urls = [engine.url for engine in engines]
    yield from _site("EPP_LIMITED", start(tmp_path_factory.mktemp("limited"), urls, policy) if _own() else None)


@pytest.fixture(scope="session")
def narrow(engines: list[SimEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A picker of one engine that runs one call at a time."""
    if not _own():
        yield from _site("EPP_NARROW", None)
        return
    url = engines[0].url
    policy = f"fleet: {{poll: 100ms, health: 20s, engines: [{{url: '{url}', max_concurrency: 1}}]}}\n"
    site = start(tmp_path_factory.mktemp("narrow"), [], policy)
    site.endpoints = [url.partition("//")[2]]
    yield from _site("EPP_NARROW", site)
