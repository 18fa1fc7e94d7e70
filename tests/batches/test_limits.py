"""Requests for files and batches are counted by their tenant's limits, logged and counted as any other."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from loadtest.processes import Gateway, until
from tests.batches.conftest import client
from tests.e2e.traffic import CHAT, body, sha256

pytestmark = pytest.mark.slow

POLICY = f"""
storage: kept
batches: {{}}
tenants:
  acme: {{keys: [{sha256("acme")}], limits: {{requests: 5/h}}}}
  globex: {{keys: [{sha256("globex")}]}}
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_for_files_and_batches_count(tmp_path: Path, workers: int) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    log = tmp_path / "calls.jsonl"
    arguments = ("--policy", str(tmp_path / "policy.yaml"), "--workers", str(workers), "--log", str(log))
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body(model="none")})
    with (
        Gateway(tmp_path / "log", "--engine", "sim:1", *arguments) as gateway,
        client(gateway, "acme") as acme,
        client(gateway, "globex") as globex,
    ):
        file = acme.files.create(file=("in", line.encode()), purpose="batch")
        acme.files.list()
        acme.files.retrieve(file.id)
        acme.files.content(file.id)
        with pytest.raises(openai.NotFoundError):
            acme.batches.retrieve("batch_none")
        kept = sorted((tmp_path / "kept/files").iterdir())
        for ask in (
            acme.files.list,
            lambda: acme.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
            lambda: acme.files.create(file=("in", line.encode() * 10_000), purpose="batch"),
        ):
            with pytest.raises(openai.RateLimitError, match="5/h requests") as refused:
                ask()
            assert "retry-after" in refused.value.response.headers
        assert until(lambda: sorted((tmp_path / "kept/files").iterdir()) == kept, 60.0) is not None
        assert globex.files.list().data == []
        with pytest.raises(openai.BadRequestError, match="from 1 to 1000"):
            globex.files.list(limit=1001)
        assert until(lambda: gateway.total("weir_tenant_requests_total", tenant="acme") == 8, 60.0) is not None
        assert gateway.total("weir_tenant_requests_total", tenant="acme", outcome="rate_limited") == 3

        def logged() -> list[tuple[str, str, int]]:
            entries = [json.loads(each) for each in log.read_text().splitlines() if log.exists()]
            return [(each["method"], each["route"], each["status"]) for each in entries if each["tenant"] == "acme"]

        assert until(lambda: len(logged()) == 8, 60.0) is not None
        assert logged()[:5] == [
            ("POST", "/v1/files", 200),
            ("GET", "/v1/files", 200),
            ("GET", "/v1/files/{id}", 200),
            ("GET", "/v1/files/{id}/content", 200),
            ("GET", "/v1/batches/{id}", 404),
        ]
        assert [status for _, _, status in logged()[5:]] == [429] * 3
        assert "Traceback" not in gateway.child.output()
