"""Upgrades while batches run and files come and go: no line is lost or doubled, and no client notices."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtest.processes import until
from tests.beside import beside
from tests.e2e.traffic import CHAT, body
from tests.serve.test_upgrades import World, world

pytestmark = pytest.mark.slow

POLICY = "fleet: {poll: 100ms, health: 200ms}\nstorage: kept\nbatches: {in_flight: 4}\ntimeouts: {drain: 20s}\n"
LINES = 400
UPGRADES = 3
OTHERS = 1 << 20  # bytes of a file that comes and goes meanwhile


def lines_of(number: int) -> bytes:
    asked = [
        {"custom_id": f"c{each}", "method": "POST", "url": CHAT, "body": body(model="sim", max_tokens=12)}
        for each in range(number)
    ]
    return "\n".join(map(json.dumps, asked)).encode()


class Others:
    """Callers of the Files and Batch API, one after another until they are told to stop: on connections that are kept,
    and on one for each call. `ended`: how their calls have."""

    def __init__(self, made: World, batch: str) -> None:
        self.ended: Counter[str] = Counter()
        self._over = threading.Event()
        fresh = openai.DefaultHttpxClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=60.0)
        common: Any = {"base_url": f"{made.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60.0}
        self._clients = openai.OpenAI(**common), openai.OpenAI(http_client=fresh, **common)
        self._calling = beside(
            *(partial(self._again, call, on) for call in (self._asks(batch), self._file) for on in self._clients)
        )

    def __enter__(self) -> Others:
        self._calling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        with self._clients[0], self._clients[1]:
            self._calling.__exit__(*error)

    def _again(self, call: Callable[[openai.OpenAI], None], client: openai.OpenAI) -> None:
        while not self._over.wait(0.02):
            try:
                call(client)
            except openai.OpenAIError as error:
                self.ended[f"{type(error).__name__}: {error} {error.__cause__!r}"] += 1
            else:
                self.ended["ok"] += 1

    @staticmethod
    def _asks(batch: str) -> Callable[[openai.OpenAI], None]:
        def ask(client: openai.OpenAI) -> None:
            assert client.batches.retrieve(batch).request_counts is not None

        return ask

    @staticmethod
    def _file(client: openai.OpenAI) -> None:
        text = bytes(OTHERS)
        file = client.files.create(file=("zeros", text), purpose="batch")
        assert client.files.content(file.id).read() == text
        client.files.delete(file.id)


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_upgrades_in_the_middle_of_a_batch_lose_and_double_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    with (
        world(tmp_path, *words, policy=POLICY) as made,
        openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client,
    ):
        made.engine.faults(slow=5.0)  # the batch is to outlast all upgrades
        file = client.files.create(file=("in", lines_of(LINES)), purpose="batch")
        id = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
        done = 0
        with Others(made, id) as others:
            for _ in range(UPGRADES):
                done += 30
                assert until(lambda least=done: _completed(client, id) >= least, 60.0) is not None, made.output()
                assert made.signalled() is not None, made.output()
                assert _completed(client, id) < LINES, "the batch is to be under way"
        made.engine.faults()
        assert set(others.ended) == {"ok"}, others.ended
        assert until(lambda: client.batches.retrieve(id).status == "completed", 60.0) is not None, made.output()
        batch = client.batches.retrieve(id)
        found = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).text.splitlines()]
        found.sort(key=lambda each: int(each["custom_id"][1:]))
        assert [each["custom_id"] for each in found] == [f"c{number}" for number in range(LINES)]
        assert all(each["response"]["body"]["id"].endswith(f"_{n}") for n, each in enumerate(found, 1))
        assert batch.error_file_id is None
        stored = {each.id for each in client.files.list()}
        assert {path.name for path in (tmp_path / "kept/files").iterdir()} == stored


def _completed(client: openai.OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed
