"""Files as large as the policy allows, through OpenAI's own client: what they take of the gateway's memory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from loadtest.processes import Gateway, until
from tests.batches.conftest import client
from tests.e2e.children import SimEngine
from tests.e2e.traffic import CHAT, body

pytestmark = pytest.mark.slow

LINES = 50_000
LARGE = 1 << 30  # bytes
POLICY = "storage: kept\nbatches: {}\n"
MOST = 96 * 2**20  # bytes by which the gateway may grow


def asked(id: str, text: str) -> str:
    request = body(model="sim", max_tokens=1, messages=[{"role": "user", "content": text}])
    return json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": request})


def most_memory(gateway: Gateway) -> int:
    """Bytes of memory that the gateway has had at most."""
    status = Path(f"/proc/{gateway.child.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def over(openai: openai.OpenAI, file: str) -> openai.types.Batch:
    id = openai.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id
    assert until(lambda: openai.batches.retrieve(id).status == "failed", 120.0) is not None, openai.batches.retrieve(id)
    return openai.batches.retrieve(id)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Gone after the test: pytest keeps its own for days."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as made:
        yield Path(made)


def test_bad_lines_among_many_and_a_file_of_a_gigabyte(folder: Path) -> None:
    """One bad line, and an id that comes twice, among 50,000; then 1 GiB, of which the last line is bad."""
    many, large = folder / "many", folder / "large"
    lines = [asked(f"c{number}", "x") for number in range(1, LINES + 1)]
    lines[30_000] = '{"custom_id": "c30001", '
    lines[40_000] = asked("c7", "x")
    many.write_text("\n".join(lines))
    (folder / "policy.yaml").write_text(POLICY)
    engine = SimEngine(folder / "engine.log", "--model", "sim")
    arguments = ("--engine", engine.url, "--policy", str(folder / "policy.yaml"))
    with engine.child, Gateway(folder / "log", *arguments) as gateway, client(gateway, "none") as openai:
        before = most_memory(gateway)
        with many.open("rb") as file:
            batch = over(openai, openai.files.create(file=file, purpose="batch").id)
        assert batch.errors is not None
        assert [(each.code, each.line) for each in batch.errors.data or []] == [
            ("invalid_json_line", 30_001), ("duplicate_custom_id", 40_001),
        ]  # fmt: skip
        judged = most_memory(gateway)
        with large.open("wb") as file:
            line = asked("%07d", "x" * (1 << 20)).encode() + b"\n"
            while file.tell() + len(line) <= LARGE - 10:
                file.write(line % (file.tell() // len(line)))
            file.write(b"bad\n")
        began = time.monotonic()
        with large.open("rb") as file:
            id = openai.files.create(file=file, purpose="batch").id
        sent = time.monotonic()
        batch = over(openai, id)
        assert [each.code for each in (batch.errors and batch.errors.data) or []] == ["invalid_json_line"]
        looked = time.monotonic()
        with openai.files.with_streaming_response.content(id) as content:
            assert sum(len(piece) for piece in content.iter_bytes()) == large.stat().st_size
        fetched, grown = time.monotonic(), most_memory(gateway) - before
        print(f"\n{LINES} lines: {(judged - before) / 2**20:.0f} MiB more")
        print(f"1 GiB: sent in {sent - began:.1f} s, judged in {looked - sent:.1f}, fetched in {fetched - looked:.1f}")
        print(f"{grown / 2**20:.0f} MiB more in all")
        assert grown < MOST
        assert "Traceback" not in gateway.child.output()
