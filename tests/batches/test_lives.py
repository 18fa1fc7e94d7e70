"""Batches over restarts: SIGKILLs at random moments, an upgrade, and starts that are refused."""

from __future__ import annotations

import http.client
import json
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtest.lab.batch_kills import killed
from loadtest.processes import ChildError, Gateway, until
from tests.batches.conftest import client
from tests.e2e.traffic import CHAT, body


@pytest.mark.slow
def test_no_result_is_lost_or_doubled_by_sigkills() -> None:
    seen = killed(5, 300, seed=3)
    assert seen.good, seen
    assert seen.kills == 5
    assert seen.lines >= 300


@pytest.mark.slow
def test_what_is_not_done_within_the_window_is_told_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("storage: {folder: kept}\nbatches: {}\n")
    arguments = ("--engine", "sim:1", "--policy", str(tmp_path / "policy.yaml"))
    asked = [{"custom_id": id, "method": "POST", "url": CHAT, "body": body(max_tokens=tokens)} for id, tokens in
             (("a", 1), ("b", 4000))]  # fmt: skip
    with Gateway(tmp_path / "log", *arguments) as gateway, client(gateway, "none") as openai:
        asked = [each | {"body": each["body"] | {"model": openai.models.list().data[0].id}} for each in asked]
        file = openai.files.create(file=("in", "\n".join(map(json.dumps, asked)).encode()), purpose="batch")
        id = openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
        assert until(lambda: "completed=1" in str(openai.batches.retrieve(id)), 20.0) is not None
    with sqlite3.connect(tmp_path / "kept/weir.db") as database:
        database.execute("UPDATE batches SET expires_at = created_at")
    database.close()
    with Gateway(tmp_path / "log2", *arguments) as gateway, client(gateway, "none") as openai:
        assert until(lambda: openai.batches.retrieve(id).status == "expired", 20.0) is not None
        batch = openai.batches.retrieve(id)
        assert json.loads(openai.files.content(str(batch.output_file_id)).text)["custom_id"] == "a"
        error = json.loads(openai.files.content(str(batch.error_file_id)).text)
        assert (error["custom_id"], error["error"]["code"]) == ("b", "batch_expired")


@pytest.mark.slow
def test_several_processes_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("storage: {folder: kept}\nbatches: {}\n")
    with pytest.raises(ChildError, match="one process keeps and works them: leave --workers out"):
        Gateway(
            tmp_path / "log",
            "--engine",
            "http://127.0.0.1:9",
            "--policy",
            str(tmp_path / "policy.yaml"),
            "--workers",
            "2",
        )


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
