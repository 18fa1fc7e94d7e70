"""SIGKILLs at random moments of batches: no line's result may be lost or doubled, and none may be another line's.

A real gateway over a simulated engine, which outlives it. Each life of the gateway ends by SIGKILL at a random moment:
while its file is judged, while lines are sent and results kept, while the files of results are written, and during an
upload. What a kill may leave behind the results that count is left there each time. With several processes single
relays and deciders are killed meanwhile too. `KILLS=200` in the environment kills more often.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import OpenAI

from loadtest.processes import Gateway, get, until
from tests.batches.conftest import client
from tests.e2e.children import SimEngine
from tests.e2e.traffic import CHAT

KILLS = int(os.environ.get("KILLS", "5"))
LINES = 300
LONGEST_LIFE = 0.8  # seconds
UPLOADS_KILLED = 0.1  # of lives
PROCESSES_KILLED = 3  # of each life, at most
OVER = frozenset({"completed", "failed", "expired", "cancelled"})
ASKED = {f"c{number}": {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": {
    "model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": f"line {number}"}]}}
    for number in range(1, LINES + 1)}  # fmt: skip
POLICY = "storage: state\nbatches: {in_flight: 32}\nfleet: {poll: 200ms, health: 500ms}\n"


def sent(openai: OpenAI) -> str:
    """The id of another batch of all lines."""
    text = "\n".join(map(json.dumps, ASKED.values())).encode()
    file = openai.files.create(file=("in", text), purpose="batch")
    return openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id


def over(openai: OpenAI, id: str) -> bool:
    return openai.batches.retrieve(id).status in OVER


def live(gateway: Gateway, rng: random.Random) -> int:
    """Kill the gateway a random moment later, and some of its processes before that; the number of kills."""
    began, length = time.monotonic(), rng.uniform(0.0, LONGEST_LIFE)
    if rng.random() < UPLOADS_KILLED:
        half_an_upload(gateway.url)
    processes = json.loads(get(f"{gateway.control}/processes")[1])["processes"]
    pids = [each["pid"] for each in processes if each["role"] in ("decider", "relay")]
    killed = rng.sample(pids, min(len(pids), rng.randrange(PROCESSES_KILLED + 1)))
    for number, pid in enumerate(killed, 1):
        time.sleep(max(0.0, began + length * number / (len(killed) + 1) - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(max(0.0, began + length - time.monotonic()))
    gateway.child.kill()
    return len(killed) + 1


def append_uncommitted(files: Path) -> int:
    """Leave what a kill between the append of results and their transaction leaves, which is too short a moment to be
    met by chance: a whole line and half of one behind what counts. Returns the number of files."""
    found = list(files.glob("*-output.part"))
    for path in found:
        lines = path.read_bytes().splitlines(keepends=True)
        with path.open("ab") as file:
            file.writelines([line for line in lines[:1] if line.endswith(b"\n")])
            file.write(b'{"id": "half a li')
    return len(found)


def half_an_upload(url: str) -> None:
    parts = urlsplit(url)
    head = "POST /v1/files HTTP/1.1\r\nhost: weir\r\ncontent-type: multipart/form-data; boundary=B\r\n"
    file = '--B\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    with socket.create_connection((parts.hostname or "", parts.port or 0), 60.0) as connection:
        connection.sendall((f"{head}content-length: 9000000\r\n\r\n" + file).encode() + bytes(300_000))


def compare(openai: OpenAI, id: str, files: Path) -> None:
    """Each line has one result, which is its own: the simulated engine puts the request's id into its answer's."""
    batch = openai.batches.retrieve(id)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", LINES)
    found: Counter[str] = Counter()
    for file in filter(None, (batch.output_file_id, batch.error_file_id)):
        for line in openai.files.content(file).text.splitlines():
            result: dict[str, Any] = json.loads(line)
            found[result["custom_id"]] += 1
            assert result["response"]["status_code"] == 200
            assert result["response"]["body"]["id"].endswith(f"_{result['custom_id'].removeprefix('c')}"), result
    assert found == Counter(ASKED.keys()), "each line once"

    def strangers() -> set[str]:
        """Files that the folder has and the gateway does not tell, or the other way round."""
        return {path.name for path in files.iterdir()} ^ {file.id for file in openai.files.list(limit=1000).data}

    assert until(lambda: not strangers(), 60.0) is not None, strangers()


@pytest.mark.slow
@pytest.mark.timeout(600 + 8 * KILLS)
@pytest.mark.parametrize("workers", [1, 2])
def test_no_result_is_lost_or_doubled_by_sigkills(workers: int, tmp_path: Path) -> None:
    rng, uncommitted = random.Random(3), 0
    (tmp_path / "policy.yaml").write_text(POLICY)
    batch, kills = "", 0
    with SimEngine(tmp_path / "engine.log", "--model", "sim").child as engine:
        words = ("--engine", engine.line(r"^ready (\S+)", 60.0), "--policy", str(tmp_path / "policy.yaml"),
                 "--log", "none", "--workers", str(workers))  # fmt: skip
        more = lambda: kills < KILLS or not uncommitted  # noqa: E731 # on a slow machine, until one met results
        while batch or more():
            with Gateway(tmp_path / "log", *words) as gateway, client(gateway, "none") as openai:
                if not more():  # a life without a kill, for the last batch
                    assert until(partial(over, openai, batch), 60.0) is not None
                if batch and over(openai, batch):
                    compare(openai, batch, tmp_path / "state/files")
                    batch = ""
                if more():
                    batch = batch or sent(openai)
                    kills += live(gateway, rng)
            uncommitted += append_uncommitted(tmp_path / "state/files")
