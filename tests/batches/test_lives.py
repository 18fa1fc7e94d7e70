"""Batches over restarts: windows that end, files that change, and starts that are refused."""

from __future__ import annotations

import http.client
import json
import sqlite3
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import APIStatusError, NotFoundError, OpenAI

from loadtest.processes import Child, Gateway, until
from tests.batches.conftest import client
from tests.e2e.traffic import CHAT, body


@pytest.mark.slow
def test_what_is_not_done_within_the_window_is_told_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("storage: kept\nbatches: {}\n")
    arguments = ("--engine", "sim:1", "--policy", str(tmp_path / "policy.yaml"))
    asked = [{"custom_id": id, "method": "POST", "url": CHAT, "body": body(max_tokens=tokens)} for id, tokens in
             (("a", 1), ("b", 4000))]  # fmt: skip
    with Gateway(tmp_path / "log", *arguments) as gateway, client(gateway, "none") as openai:
        asked = [each | {"body": each["body"] | {"model": openai.models.list().data[0].id}} for each in asked]
        file = openai.files.create(file=("in", "\n".join(map(json.dumps, asked)).encode()), purpose="batch")
        id = openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
        assert until(lambda: "completed=1" in str(openai.batches.retrieve(id)), 60.0) is not None
    with sqlite3.connect(tmp_path / "kept/weir.db") as database:
        database.execute("UPDATE batches SET expires_at = created_at")
    database.close()
    with Gateway(tmp_path / "log2", *arguments) as gateway, client(gateway, "none") as openai:
        assert until(lambda: openai.batches.retrieve(id).status == "expired", 60.0) is not None
        batch = openai.batches.retrieve(id)
        assert json.loads(openai.files.content(str(batch.output_file_id)).text)["custom_id"] == "a"
        error = json.loads(openai.files.content(str(batch.error_file_id)).text)
        assert (error["custom_id"], error["error"]["code"]) == ("b", "batch_expired")


def begun(folder: Path, texts: list[bytes]) -> str:
    """The id of a batch of these lines, of which none has been answered when its gateway ends."""
    (folder / "policy.yaml").write_text("storage: kept\nbatches: {}\n")
    arguments = ("--engine", "http://127.0.0.1:9", "--policy", str(folder / "policy.yaml"))
    with Gateway(folder / "log", *arguments, ready=False) as gateway, client(gateway, "none") as openai:
        file = openai.files.create(file=("in", b"\n".join(texts)), purpose="batch")
        id = openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
        assert until(lambda: openai.batches.retrieve(id).status == "in_progress", 60.0) is not None
    return id


def asked_for(id: str) -> bytes:
    return json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": body(model="sim")}).encode()


@pytest.mark.slow
def test_a_clock_that_was_set_back_and_a_file_that_was_changed_cost_no_other_line(tmp_path: Path) -> None:
    id = begun(tmp_path, [asked_for("a"), asked_for("b"), asked_for("c")])
    with sqlite3.connect(tmp_path / "kept/weir.db") as database:
        database.execute("UPDATE batches SET expires_at = expires_at + 3600")
    database.close()
    (file,) = (path for path in (tmp_path / "kept/files").iterdir() if path.suffix != ".part")
    file.write_bytes(file.read_bytes().replace(asked_for("b"), b"x" * len(asked_for("b"))))
    arguments = ("--engine", "sim:1", "--policy", str(tmp_path / "policy.yaml"))
    with Gateway(tmp_path / "log2", *arguments) as gateway, client(gateway, "none") as openai:
        assert until(lambda: openai.batches.retrieve(id).status == "completed", 60.0) is not None
        batch = openai.batches.retrieve(id)
        good = [json.loads(each) for each in openai.files.content(str(batch.output_file_id)).text.splitlines()]
        error = json.loads(openai.files.content(str(batch.error_file_id)).text)
        assert {(each["custom_id"], each["response"]["status_code"]) for each in good} == {("a", 200), ("c", 200)}
        assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("b", "line_changed")
        assert "Traceback" not in gateway.child.output()


@pytest.mark.slow
def test_a_reload_that_renames_the_class_of_batches_costs_no_line(tmp_path: Path) -> None:
    id = begun(tmp_path, [asked_for(str(number)) for number in range(600)])
    file = tmp_path / "policy.yaml"
    one = "storage: kept\nbatches: {in_flight: 1"
    file.write_text(f"{one}}}\n")
    with (
        Gateway(tmp_path / "log2", "--engine", "sim:1", "--policy", str(file)) as gateway,
        client(gateway, "none") as openai,
    ):
        for text, said in (
            (f"{one}, class: bulk}}\nclasses: {{default: {{}}, bulk: {{}}}}\n", '"class_name":"bulk"'),
            ("storage: kept\nclasses: {default: {}}\n", '"class_name":"default"'),
        ):
            file.write_text(text)
            gateway.child.wait(partial(lambda said: said in gateway.child.output(), said), 60.0, said)
        batch = openai.batches.retrieve(id)
        assert batch.request_counts is not None
        assert batch.request_counts.failed == 0
        assert batch.status in {"in_progress", "finalizing", "completed"}  # many are in flight now


@pytest.mark.slow
def test_lines_wait_where_there_is_no_engine_at_all(tmp_path: Path) -> None:
    id = begun(tmp_path, [asked_for("a")])
    file = tmp_path / "policy.yaml"
    file.write_text("storage: kept\nbatches: {}\nfleet: {sidecars: {}}\n")
    with (
        Gateway(tmp_path / "log2", "--policy", str(file), ready=False) as gateway,
        client(gateway, "none") as openai,
    ):
        gateway.child.wait(lambda: unknown(gateway.url), 60.0, "404 for a model that no sidecar has reported")
        again = gateway.total("weir_batch_lines_total", result="again")
        gateway.child.wait(
            lambda: gateway.total("weir_batch_lines_total", result="again") >= again + 2, 60.0, "two more tries"
        )
        batch = openai.batches.retrieve(id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.failed) == ("in_progress", 0)


def unknown(url: str) -> bool:
    """Whether a call for the model is answered 404."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as openai:
        try:
            openai.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}])
        except NotFoundError:
            return True
        except APIStatusError:
            return False
    return False


@pytest.mark.slow
def test_a_batch_that_was_cancelled_before_its_file_was_judged_has_no_lines(tmp_path: Path) -> None:
    id = begun(tmp_path, [asked_for("a"), asked_for("b")])
    with sqlite3.connect(tmp_path / "kept/weir.db") as database:
        database.execute("UPDATE batches SET status = 'cancelling', times = '{}', total = 0")
    database.close()
    arguments = ("--engine", "sim:1", "--policy", str(tmp_path / "policy.yaml"))
    with Gateway(tmp_path / "log2", *arguments) as gateway, client(gateway, "none") as openai:
        assert until(lambda: openai.batches.retrieve(id).status == "cancelled", 60.0) is not None
        batch = openai.batches.retrieve(id)
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.failed, batch.error_file_id) == (0, 0, None)


AHEAD = """
import sys, time
from pathlib import Path
from gateway.cli import main
real, ahead = time.time, Path(sys.argv.pop(1))
time.time = lambda: real() + (86_400 if ahead.exists() else 0)
sys.exit(main())
"""


@pytest.mark.slow
def test_a_batch_whose_window_ends_by_a_clock_that_was_set_expires(tmp_path: Path) -> None:
    id = begun(tmp_path, [asked_for("a")])
    ports = ("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--engine", "http://127.0.0.1:9")
    argv = [
        sys.executable,
        "-c",
        AHEAD,
        str(tmp_path / "ahead"),
        "serve",
        *ports,
        "--policy",
        str(tmp_path / "policy.yaml"),
    ]
    with Child("gateway", argv, tmp_path / "log2") as gateway:
        url = gateway.line(r"^data port (http://\S+)", 60.0)
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as openai:
            assert openai.batches.retrieve(id).status == "in_progress"
            (tmp_path / "ahead").touch()
            gateway.wait(lambda: openai.batches.retrieve(id).status == "expired", 60.0, "the end of the batch")


@pytest.mark.slow
def test_without_batches_its_routes_say_who_may_offer_them(tmp_path: Path) -> None:
    with Gateway(tmp_path / "log", "--engine", "sim:1") as gateway:
        connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=60.0)
        connection.request("GET", "/v1/batches")
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        connection.close()
    assert (answer.status, error["code"]) == (404, "route_not_found")
    assert "`batches`" in error["message"]
