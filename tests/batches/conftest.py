"""A gateway that offers batches to two tenants, on a simulated engine, and OpenAI's own client of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from loadtest.processes import Gateway
from tests.e2e.children import SimEngine
from tests.e2e.traffic import sha256

POLICY = f"""
storage: kept
batches: {{per_tenant: 2000KiB}}
tenants:
  acme: {{keys: [{sha256("acme")}]}}
  globex: {{keys: [{sha256("globex")}]}}
fleet: {{poll: 200ms, health: 500ms}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SimEngine]:
    started = SimEngine(folder / "engine.log", "--model", "sim")
    with started.child:
        yield started


@pytest.fixture(scope="module")
def gateway(folder: Path, engine: SimEngine) -> Iterator[Gateway]:
    (folder / "policy.yaml").write_text(POLICY)
    with Gateway(folder / "log", "--engine", engine.url, "--policy", str(folder / "policy.yaml")) as running:
        yield running
        assert running.child.alive, running.child.output()
        assert "Traceback" not in running.child.output(), running.child.output()


def client(gateway: Gateway, tenant: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=tenant, max_retries=0, timeout=60.0)


@pytest.fixture
def acme(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with client(gateway, "acme") as ready:
        yield ready


@pytest.fixture
def globex(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with client(gateway, "globex") as ready:
        yield ready
