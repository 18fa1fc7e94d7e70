"""Packages that people use, each through a real gateway: a test for each cell of the table in docs/clients.md.

Each client's program runs once, in an environment of its own. The last test compares the page with what was seen;
`make clients-table` writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from loadtest.processes import Gateway, until
from tests.clients import install
from tests.clients.matrix import CLIENTS, PAGE, Client, table, written
from tests.e2e.traffic import sha256

pytestmark = [pytest.mark.clients, pytest.mark.slow]

KEYS = {"WEIR_KEY": "weir-key-of-everyday", "WEIR_SLOW_KEY": "weir-key-of-hurried"}
POLICY = {
    "storage": "kept",
    "batches": {},
    "tenants": {
        "everyday": {"keys": [sha256(KEYS["WEIR_KEY"])]},
        "hurried": {"keys": [sha256(KEYS["WEIR_SLOW_KEY"])], "limits": {"requests": {"rate": "1/s", "burst": 1}}},
    },
}


class Site:
    """A gateway, and what each client's program has told of it."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        (self.model,) = {model for engine in gateway.fleet()["engines"] for model in engine["models"]}
        self.ends: dict[tuple[str, str], str] = {}

    def end(self, client: Client, feature: str) -> str:
        """How a cell failed, empty if it did not."""
        if (client.name, feature) not in self.ends:
            gone, refused = self._counts()
            told = client.run({"WEIR_URL": self.gateway.url, "WEIR_MODEL": self.model} | KEYS)
            assert until(self.gateway.idle, 10.0) is not None, "an engine still works for a client that has ended"
            now_gone, now_refused = self._counts()
            if not told.get("cancel") and now_gone == gone:
                told["cancel"] = "the gateway did not see the client leave"
            if not told.get("errors") and now_refused < refused + 2:
                told["errors"] = "only the call without retries was refused: nothing was retried"
            for cell in client.cells:
                self.ends[client.name, cell] = told.get(cell, "its program has no such cell")
        return self.ends[client.name, feature]

    def _counts(self) -> tuple[float, float]:
        total = self.gateway.total
        gone = total("weir_requests_total", outcome="client_gone")
        return gone, total("weir_tenant_requests_total", outcome="rate_limited", tenant="hurried")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_CLIENTS") == "1":
            pytest.fail(reason)
        pytest.skip(f"{reason}: `make clients` installs what it can, and runs this")
    folder = tmp_path_factory.mktemp("clients")
    policy = folder / "policy.yaml"
    policy.write_text(json.dumps(POLICY))
    with Gateway(folder / "log", "--policy", str(policy), "--engine", "sim:2") as running:
        yield Site(running)
        assert "Traceback" not in running.child.output(), running.child.output()


@pytest.mark.parametrize(
    ("client", "feature"),
    [pytest.param(client, cell, id=f"{client.name}-{cell}") for client in CLIENTS for cell in client.cells],
)
def test_cell(site: Site, client: Client, feature: str) -> None:
    failure = site.end(client, feature)
    assert not failure, failure


def test_the_page_says_what_was_seen(site: Site) -> None:
    for client in CLIENTS:
        for feature in client.cells:
            site.end(client, feature)
    page = PAGE.read_text(encoding="utf-8")
    made = written(page, table(site.ends))
    if os.environ.get("WEIR_WRITE_CLIENTS") == "1":
        PAGE.write_text(made, encoding="utf-8")
        return
    assert page == made, "docs/clients.md is not what was seen: `make clients-table` writes it"
