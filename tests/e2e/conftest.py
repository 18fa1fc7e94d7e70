"""Gateway process on simulated engines, one for each test file, ended by its pid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.processes import Gateway, get
from tests.e2e.children import SimEngine
from tests.e2e.traffic import Site


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway") / "log", "--engine", "sim:2") as running:
        yield running
        assert running.child.alive, running.child.output()
        assert "Traceback" not in running.child.output()


@pytest.fixture(scope="module")
def model(gateway: Gateway) -> str:
    """The model that the simulated engines serve."""
    (found,) = {engine_model for engine in gateway.fleet()["engines"] for engine_model in engine["models"]}
    return str(found)


@pytest.fixture(scope="module")
def deserted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose only engine is not there: nobody listens on the discard port."""
    log = tmp_path_factory.mktemp("deserted") / "log"
    with Gateway(log, "--engine", "http://127.0.0.1:9", ready=False) as running:
        assert get(f"{running.control}/readyz")[0] == 503
        yield running


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SimEngine]:
    """A simulated engine of the test's own."""
    started = SimEngine(tmp_path / "engine.log")
    with started.child:
        yield started


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway for the tests of the traffic policy: each file gives it a policy of its own.

    Its engine has two models, room for 32,768 tokens, and takes 0.4 ms for each.
    """
    folder = tmp_path_factory.mktemp("shared")
    arguments = ("--num-gpu-blocks", "2048", "--speed", "20", "--model", "sim", "--model", "other")
    started = SimEngine(folder / "engine.log", *arguments)
    with started.child, Site(folder, {}, started) as running:
        yield running
