"""Fixtures with one real vLLM and one gateway before it. Absent vLLM: skipped, or failed where CI requires it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.processes import Gateway, free_port
from tests.vllm import install
from tests.vllm.real_vllm import Vllm

PATIENCE = 300.0  # seconds: five times what a busy machine of two cores takes for the slowest answer
POLICY = "routing: {hold_unserved: 20s}\n"
FLAGS = ("--max-num-seqs", "64", "--enable-prompt-tokens-details", "--uvicorn-log-level", "warning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests that need the machine alone come last, so that all others share one start of vLLM."""
    items.sort(key=lambda item: "alone" in getattr(item, "fixturenames", ()))


class Place:
    """A port on which one vLLM after another may listen. `engine()` is the one that lives, started if none does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.starts = 0
        self._vllm: Vllm | None = None

    def engine(self) -> Vllm:
        if self._vllm is None or not self._vllm.child.alive:
            self.close()
            self.starts += 1
            self._vllm = Vllm(self.folder / f"vllm-{self.starts}.log", self.port, *FLAGS)
            print(f"vLLM ready in {self._vllm.started_in:.0f} s")
        return self._vllm

    def close(self) -> None:
        if self._vllm is not None:
            self._vllm.stop()
            self._vllm = None


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    here = Place(tmp_path_factory.mktemp("vllm"))
    yield here
    here.close()


@pytest.fixture(scope="module")
def alone(place: Place) -> None:
    """The vLLM of the others is ended: there may be two cores."""
    place.close()


@pytest.fixture
def vllm(place: Place) -> Vllm:
    return place.engine()


@pytest.fixture(scope="session")
def session_gateway(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    place.engine()
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "policy.yaml").write_text(POLICY)
    with Gateway(folder / "log", "--policy", str(folder / "policy.yaml"), "--engine", place.url) as running:
        yield running


@pytest.fixture
def gateway(vllm: Vllm, session_gateway: Gateway) -> Gateway:
    """The gateway, ready: it has seen that `vllm` answers."""
    session_gateway.child.wait(
        lambda: all(engine["up"] for engine in session_gateway.fleet()["engines"]), PATIENCE, "an engine that is up"
    )
    return session_gateway
