"""Batches over restarts: SIGKILLs at random moments, an upgrade, and starts that are refused."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtest.lab.batch_kills import killed
from loadtest.processes import ChildError, Gateway


@pytest.mark.slow
def test_no_result_is_lost_or_doubled_by_sigkills() -> None:
    seen = killed(5, 300, seed=3)
    assert seen.good, seen
    assert seen.kills == 5
    assert seen.lines >= 300


@pytest.mark.slow
def test_several_processes_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("storage: {folder: kept}\nbatches: {}\n")
    with pytest.raises(ChildError, match="one process keeps and works them: leave --workers out"):
        Gateway(tmp_path / "log", "--engine", "sim:1", "--policy", str(tmp_path / "policy.yaml"), "--workers", "2")


@pytest.mark.slow
def test_without_batches_its_routes_say_who_may_offer_them(tmp_path: Path) -> None:
    with Gateway(tmp_path / "log", "--engine", "sim:1") as gateway:
        connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=10.0)
        connection.request("GET", "/v1/batches")
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        connection.close()
    assert (answer.status, error["code"]) == (404, "route_not_found")
    assert "`batches`" in error["message"]
