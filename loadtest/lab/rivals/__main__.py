"""Weir with no policy beside vllm-router, coding agents on four simulated engines, all as processes. `--help` tells."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from loadtest.load.agents import ANSWER, SESSIONS, THINK, prompts
from loadtest.processes import Child, ChildError, free_port, total

ENGINES = 4
BLOCK = 16  # tokens
CACHES = {"agents-tight": 32_000, "agents-ample": 64_000}  # tokens an engine
TIMEOUT = 60.0
RIVALS = ("weir", "cache_aware", "round_robin")
HELP = """\
Runs each load over four simulated engines (h100-8b), fresh for each run, behind each rival, and prints medians.

  agents-tight    20 sessions of 8 turns, prompts from 2,000 to 10,000 tokens, a closed loop with 0.7 s to think;
                  32,000 tokens of cache an engine
  agents-ample    the same with 64,000

  weir            `gateway serve` with no policy
  cache_aware     vllm-router with its default; on the PATH, or named by $VLLM_ROUTER, else it is left out
  round_robin     vllm-router with that

  python -m loadtest.lab.rivals --only agents-tight --rivals weir,cache_aware --rounds 3
  python -m loadtest.lab.rivals --tree ../other      another checkout of Weir too, by its own .venv
"""


class AgentCall(msgspec.Struct, frozen=True):
    """One answered or refused call, in seconds; `first` is None where there was no token."""

    status: int
    first: float | None
    end: float


class RivalRow(msgspec.Struct, frozen=True):
    """One run of a load behind a rival; times in seconds, `cpu` the seconds of generator, engines and rival."""

    hits: float
    mean: float
    p50: float
    p90: float
    p99: float
    e2e: float
    refused: int
    cpu: tuple[float, float, float]


def row(calls: Sequence[AgentCall], hits: float, cpu: tuple[float, float, float]) -> RivalRow:
    """The figures of a run. Raises ValueError where no call has a first token."""
    first = sorted(call.first for call in calls if call.first is not None)
    if not first:
        raise ValueError(f"no call was answered: statuses {sorted({call.status for call in calls})}")
    p50, p90, p99 = (first[min(len(first) - 1, int(len(first) * share))] for share in (0.5, 0.9, 0.99))
    e2e = statistics.fmean(call.end for call in calls if call.first is not None)
    return RivalRow(hits, statistics.fmean(first), p50, p90, p99, e2e, len(calls) - len(first), cpu)


def line(name: str, rows: Sequence[RivalRow]) -> str:
    """A rival's line: medians, and the least and most mean TTFT of its rounds."""
    middle = [statistics.median(getattr(r, f) for r in rows) for f in ("hits", "mean", "p50", "p90", "p99", "e2e")]
    means = [r.mean for r in rows]
    cpu = " ".join(f"{statistics.median(r.cpu[part] for r in rows):5.0f}" for part in range(3))
    times = " ".join(f"{value:7.2f}" for value in middle[1:])
    return (
        f"{name:24} {middle[0]:5.0%} {times} {sum(r.refused for r in rows):8} {min(means):6.2f}-{max(means):.2f}  {cpu}"
    )


def _call(address: str, prompt: bytes) -> AgentCall:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT)
    messages = [{"role": "user", "content": prompt.decode()}]
    body = {"model": "sim", "messages": messages, "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
    begun, first = time.monotonic(), None
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        for chunk in answer:
            if first is None and b'"content":"' in chunk.replace(b" ", b"") and b'"content":""' not in chunk:
                first = time.monotonic() - begun
        return AgentCall(answer.status, first if answer.status == 200 else None, time.monotonic() - begun)
    except (OSError, http.client.HTTPException):
        return AgentCall(0, None, time.monotonic() - begun)
    finally:
        connection.close()


def _command(rival: str, port: int, engines: Sequence[str], tree: Path | None) -> list[str]:
    if rival in ("weir", "tree"):
        own = [sys.executable, "-m", "gateway.cli"]
        start = own if rival == "weir" or tree is None else [str(tree / ".venv/bin/gateway")]
        named = [word for url in engines for word in ("--engine", url)]
        return [*start, "serve", *named, "--listen", f"127.0.0.1:{port}", "--control", "127.0.0.1:0", "--log", "none"]
    ends = ("--log-level", "error", "--prometheus-port", str(free_port()))
    return [
        _router() or "",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        rival,
        "--worker-urls",
        *engines,
        *ends,
    ]


def _router() -> str | None:
    return os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")


def run(load: str, rival: str, seed: int, tree: Path | None, folder: Path, sessions: int = SESSIONS) -> RivalRow:
    """One load behind one rival. Raises ChildError where a process does not come up."""
    with ExitStack() as stack:
        children = []
        for number in range(ENGINES):
            argv = [sys.executable, "-m", "loadtest.engine", "--num-gpu-blocks", str(CACHES[load] // BLOCK)]
            argv += ["--seed", str(seed * ENGINES + number)]
            children.append(stack.enter_context(Child(f"engine {number}", argv, folder / f"engine-{number}.log")))
        engines = [child.line(r"^ready (http://\S+)", 30.0) for child in children]
        port = free_port()
        server = Child(rival, _command(rival, port, engines, tree), folder / f"{rival}.log")
        stack.enter_context(server)
        server.wait(lambda: _call(f"http://127.0.0.1:{port}", b"x").first is not None, 60.0, "an answered call")
        calls: list[AgentCall] = []

        def session(number: int) -> None:
            draw = random.Random(seed * 1000 + number)  # noqa: S311 - as above
            time.sleep(draw.uniform(0.0, THINK))
            for prompt in prompts(number, seed):
                calls.append(_call(f"http://127.0.0.1:{port}", prompt))
                time.sleep(THINK)

        before = [sum(c.cpu() for c in children), server.cpu(), time.process_time()]
        threads = [threading.Thread(target=session, args=(number,), daemon=True) for number in range(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cpu = (time.process_time() - before[2], sum(c.cpu() for c in children) - before[0], server.cpu() - before[1])
        found, asked = (
            sum(total(f"{url}/metrics", f"vllm:prefix_cache_{what}_total") for url in engines)
            for what in ("hits", "queries")
        )
        return row(calls, found / max(asked, 1.0), cpu)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status: 1 where a process failed, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.rivals", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CACHES), help="loads (default: %(default)s)")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="in this order (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--tree", type=Path, help="another checkout of Weir, as the rival `tree`")
    given = parser.parse_args(argv)
    loads, rivals = given.only.split(","), given.rivals.split(",")
    if set(loads) - set(CACHES) or set(rivals) - set(RIVALS) or given.rounds < 1:
        parser.error(f"loads are {', '.join(CACHES)}; rivals {', '.join(RIVALS)}; --rounds at least 1")
    if _router() is None:
        print("vllm-router is left out: it is not on the PATH, nor named by $VLLM_ROUTER", file=sys.stderr)
        rivals = [name for name in rivals if name == "weir"]
    rivals += ["tree"] if given.tree else []
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        for load in loads:
            rows: dict[str, list[RivalRow]] = {name: [] for name in rivals}
            for seed in range(given.rounds):
                for name in rivals:
                    try:
                        rows[name].append(run(load, name, seed, given.tree, Path(folder)))
                    except (ChildError, ValueError) as error:
                        print(f"loadtest.lab.rivals: {name}: {error}", file=sys.stderr)
                        return 1
            print(
                f"{load:24}  hits    mean     p50     p90     p99     e2e "
                " refused  mean, spread  CPU s: load, engines, rival"
            )
            for name, measured in rows.items():
                print(line(name, measured), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
