"""SIGKILLs at random moments of batches: no line's result may be lost or doubled, and none may be another line's.

    python -m loadtest.lab.batch_kills [--kills 200] [--lines 1000] [--seed 1] [--workers N]

A real gateway over a simulated engine, which outlives it. Each life of the gateway ends by SIGKILL at a random moment:
while its file is judged, while lines are sent and results kept, while the files of results are written, and during an
upload. With several processes (`--workers 2` or more) single relays and deciders are killed meanwhile too. A batch that
is over is compared, line by line, with what was asked; then the next one is sent. Exit status 1 where a result is
missing, doubled or another line's, or where the folder has a file that nobody knows.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadtest.processes import Child, Gateway, get, until

POLICY = "storage: state\nbatches: {in_flight: 32}\nfleet: {poll: 200ms, health: 500ms}\n"
LONGEST_LIFE = 0.8  # seconds
BATCH_WITHIN = 120.0  # seconds of a life without a kill
UPLOADS_KILLED = 0.1  # of lives
PROCESSES_KILLED = 3  # of each life, at most
CLEARED_WITHIN = 5.0  # seconds, by whichever relay works
TYPE = "multipart/form-data; boundary=B"
OVER = frozenset({"completed", "failed", "expired", "cancelled"})


class Kills(msgspec.Struct):
    """Results of all batches, beside what was asked for."""

    kills: int = 0
    batches: int = 0
    lines: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    unknown_files: int = 0

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with any result."""
        return not (self.lost or self.doubled or self.wrong or self.unknown_files)


class KilledBatches:
    """Batches of `lines` lines each, in `folder`, with one gateway after another, each of so many `workers`."""

    def __init__(self, folder: Path, engine: str, lines: int, rng: random.Random, workers: int = 1) -> None:
        self.seen = Kills()
        self._folder = folder
        self._engine = engine
        self._lines = lines
        self._rng = rng
        self._workers = workers
        self._lives = 0
        self._batch = ""  # the id of the one that is not compared yet
        (folder / "policy.yaml").write_text(POLICY)

    def run(self, kills: int, say: Callable[[str], None]) -> Kills:
        """Send so many SIGKILLs, then run the last batch to its end."""
        while self.seen.kills < kills:
            with self._gateway() as gateway:
                if self._batch and self._status(gateway.url) in OVER:
                    self._compare(gateway)
                if not self._batch:
                    self._batch = self._send(gateway.url)
                self._live(gateway)
            if self._lives % 20 == 0:
                seen = self.seen
                say(f"{seen.kills} kills, {seen.batches} batches over, {seen.lost} lost, {seen.doubled} doubled")
        with self._gateway() as gateway:
            if until(lambda: self._status(gateway.url) in OVER, BATCH_WITHIN) is None:
                raise gateway.child.failure(f"does not get {self._batch} over")
            self._compare(gateway)
        return self.seen

    def _live(self, gateway: Gateway) -> None:
        """A random moment later, SIGKILL."""
        began, length = time.monotonic(), self._rng.uniform(0.0, LONGEST_LIFE)
        if self._rng.random() < UPLOADS_KILLED:
            _half_an_upload(gateway.url)
        if self._workers > 1:
            processes = json.loads(get(f"{gateway.control}/processes")[1])["processes"]
            pids = [each["pid"] for each in processes if each["role"] != "parent"]
            killed = self._rng.sample(pids, min(len(pids), self._rng.randrange(PROCESSES_KILLED + 1)))
            for number, pid in enumerate(killed, 1):
                _sleep_until(began + length * number / (len(killed) + 1))
                os.kill(pid, signal.SIGKILL)
                self.seen.kills += 1
        _sleep_until(began + length)
        gateway.child.kill()
        self.seen.kills += 1

    def _gateway(self) -> Gateway:
        self._lives += 1
        log = self._folder / f"gateway-{self._lives}.log"
        arguments = ("--policy", str(self._folder / "policy.yaml"), "--log", "none", "--workers", str(self._workers))
        return Gateway(log, "--engine", self._engine, *arguments)

    def _send(self, url: str) -> str:
        lines = [
            {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": {
                "model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": f"line {number}"}]}}
            for number in range(1, self._lines + 1)
        ]  # fmt: skip
        text = "\n".join(json.dumps(line) for line in lines)
        form = (
            f'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n{_file_head()}{text}\r\n--B--\r\n'
        )
        file = _ask("POST", f"{url}/v1/files", form.encode(), TYPE)["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(_ask("POST", f"{url}/v1/batches", json.dumps(asked).encode())["id"])

    def _status(self, url: str) -> str:
        return str(_ask("GET", f"{url}/v1/batches/{self._batch}")["status"])

    def _unknown(self, gateway: Gateway) -> set[str]:
        """Files that the folder has and the gateway does not tell, or the other way round."""
        stored = {file["id"] for file in _ask("GET", f"{gateway.url}/v1/files?limit=1000")["data"]}
        return {path.name for path in (self._folder / "state/files").iterdir()} ^ stored

    def _compare(self, gateway: Gateway) -> None:
        """Look at each line of the files of a batch that is over."""
        seen = self.seen
        batch = _ask("GET", f"{gateway.url}/v1/batches/{self._batch}")
        found: Counter[str] = Counter()
        for file in (batch["output_file_id"], batch["error_file_id"]):
            if file is not None:
                for line in get(f"{gateway.url}/v1/files/{file}/content", timeout=30.0)[1].splitlines():
                    result = json.loads(line)
                    found[result["custom_id"]] += 1
                    seen.wrong += not _is_of(result)
        until(lambda: not self._unknown(gateway), CLEARED_WITHIN)
        seen.unknown_files += len(self._unknown(gateway))
        asked = {f"c{number}" for number in range(1, self._lines + 1)}
        counts = batch["request_counts"]
        seen.wrong += (counts["completed"], counts["total"], batch["status"]) != (len(asked), len(asked), "completed")
        seen.batches += 1
        seen.lines += len(asked)
        seen.lost += len(asked - found.keys())
        seen.doubled += sum(count - 1 for count in found.values())
        self._batch = ""


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _is_of(result: dict[str, Any]) -> bool:
    """Whether the answer is the one to this line: the simulated engine puts the request's id into its own."""
    number = result["custom_id"].removeprefix("c")
    response = result["response"]
    return bool(response) and response["status_code"] == 200 and response["body"]["id"].endswith(f"_{number}")


def _file_head() -> str:
    return '--B\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'


def _half_an_upload(url: str) -> None:
    parts = urlsplit(url)
    head = f"POST /v1/files HTTP/1.1\r\nhost: weir\r\ncontent-type: {TYPE}\r\ncontent-length: 9000000\r\n\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0), 10.0) as connection:
        connection.sendall((head + _file_head()).encode() + bytes(300_000))


def _ask(method: str, url: str, body: bytes = b"", content_type: str = "application/json") -> Any:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30.0)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, body or None, {"content-type": content_type})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{method} {parts.path}: {response.status} {text[:500]!r}")
    return json.loads(text)


def killed(kills: int, lines: int, seed: int, workers: int = 1, say: Callable[[str], None] = lambda _: None) -> Kills:
    """The results of batches over so many SIGKILLs."""
    with tempfile.TemporaryDirectory(prefix="weir-kills-") as folder:
        argv = [sys.executable, "-m", "loadtest.engine", "--profile", "h100-8b", "--speed", "1", "--model", "sim"]
        engine = Child("engine", argv, Path(folder) / "engine.log")
        with engine:
            rng = random.Random(seed)  # noqa: S311 # moments of kills
            batches = KilledBatches(Path(folder), engine.line(r"^ready (\S+)", 30.0), lines, rng, workers)
            return batches.run(kills, say)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs of the gateway (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=1000, help="lines of each batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="draws the moments (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="relays of the gateway (default: %(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    seen = killed(
        options.kills,
        options.lines,
        options.seed,
        options.workers,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(f"{seen.kills} SIGKILLs, {seen.batches} batches of {options.lines} lines, {time.monotonic() - began:.0f} s")
    print(f"results lost {seen.lost}, doubled {seen.doubled}, of another line {seen.wrong}; ", end="")
    print(f"files that nobody knows {seen.unknown_files}")
    return 0 if seen.good else 1


if __name__ == "__main__":
    sys.exit(main())
