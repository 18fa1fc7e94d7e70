"""Answers of many megabytes: what they take of memory and disk, and what is told where that is too much."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import openai
import pytest

from loadtest.processes import Gateway, until
from tests.batches.conftest import client
from tests.e2e.traffic import CHAT, body

pytestmark = pytest.mark.slow

MIB = 2**20
LINES = 8
MOST = 110 * MIB  # bytes of the gateway's memory, with one answer's pages of its file among them
OVER = {"completed", "failed", "expired", "cancelled"}


class LongAnswers(BaseHTTPRequestHandler):
    """An engine whose answers are as long as its model is named: in MiB, in many lines."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        data = [{"id": f"{size}", "object": "model", "max_model_len": 8192} for size in (1, 8, 30, 65)]
        self._answer(json.dumps({"object": "list", "data": data}).encode() if "models" in self.path else b"")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        numbers = b"0.125,\n" * (int(asked["model"]) * MIB // 7)
        usage = b'"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}'
        self._answer(b'{"id": "a",\n"numbers": [' + numbers + b"1], " + usage + b"}")

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), LongAnswers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


class Numbers(msgspec.Struct):
    """Answer of LongAnswers: its JSON is looked at, and no million of numbers made of it."""

    numbers: msgspec.Raw


class Response(msgspec.Struct):
    body: Numbers


class Line(msgspec.Struct):
    """Line of a batch's output."""

    custom_id: str
    response: Response


def worked(openai: openai.OpenAI, model: str, lines: int) -> openai.types.Batch:
    """A batch of so many lines, once it is over."""
    asked = [{"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body(model=model, max_tokens=1)}
             for number in range(lines)]  # fmt: skip
    file = openai.files.create(file=("in", "\n".join(map(json.dumps, asked)).encode()), purpose="batch")
    id = openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
    assert until(lambda: openai.batches.retrieve(id).status in OVER, 100.0, every=0.2) is not None
    return openai.batches.retrieve(id)


def gateway_of(folder: Path, engine: str, batches: str, rest: str = "") -> Gateway:
    policy = folder / "policy.yaml"
    policy.write_text(f"storage: kept\nbatches: {{{batches}}}\n{rest}")
    return Gateway(folder / "log", "--engine", engine, "--policy", str(policy))


def memory(gateway: Gateway) -> int:
    """Bytes of memory that the gateway has had at most."""
    status = Path(f"/proc/{gateway.child.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("rest", ["", "body: {memory: 2MiB, max: 1MiB, max_media: 1MiB}\n"])
def test_long_answers_are_never_in_memory(tmp_path: Path, engine: str, rest: str) -> None:
    """Also where no memory is left for them: they come more slowly then."""
    with gateway_of(tmp_path, engine, "", rest) as gateway, client(gateway, "none") as openai:
        batch = worked(openai, "30", LINES)
        assert (batch.status, batch.request_counts.completed) == ("completed", LINES)
        assert memory(gateway) < MOST
        assert batch.output_file_id is not None
        with openai.files.with_streaming_response.content(batch.output_file_id) as answer:
            seen = set()
            for line in answer.iter_lines():
                result = msgspec.json.decode(line, type=Line)
                seen.add(result.custom_id)
                assert bytes(result.response.body.numbers).count(b",") == 30 * MIB // 7
        assert len(seen) == LINES
        assert (
            len(list((tmp_path / "kept/files").iterdir())) == 2
        )  # input and output: nothing is left of what was on its way
        assert "Traceback" not in gateway.child.output()


def test_an_answer_that_is_too_long_is_one_lines_error(tmp_path: Path, engine: str) -> None:
    with gateway_of(tmp_path, engine, "in_flight: 2") as gateway, client(gateway, "none") as openai:
        batch = worked(openai, "65", 2)
        assert (batch.status, batch.request_counts.failed) == ("completed", 2)
        for line in openai.files.content(str(batch.error_file_id)).text.splitlines():
            assert json.loads(line)["error"]["code"] == "answer_too_long"


def test_results_that_pass_what_a_tenant_may_keep_fail_the_batch(tmp_path: Path, engine: str) -> None:
    with gateway_of(tmp_path, engine, "per_tenant: 20MiB, in_flight: 2") as gateway, client(gateway, "none") as openai:
        batch = worked(openai, "8", 30)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [(each.code, "per_tenant" in (each.message or "")) for each in batch.errors.data] == [
            ("storage_full", True)
        ]
        assert batch.output_file_id is not None
        kept = sum(path.stat().st_size for path in (tmp_path / "kept").rglob("*") if path.is_file())
        assert 8 * MIB < kept < 40 * MIB
        assert worked(openai, "8", 1).status == "failed"
        openai.files.delete(batch.output_file_id)
        assert worked(openai, "1", 1).status == "completed"
