"""Figures of the console: first paint, bytes at rest, and frames with 1,000 engines and 50 calls a second."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.processes import Child, Gateway
from tests.console.conftest import Console
from tests.console.traffic import Traffic, call, chat

pytestmark = [pytest.mark.slow, pytest.mark.console]

ENGINES = 1000
SECONDS = 10
LONGEST = 50.0  # milliseconds of processor time: others on this machine take none of it
AT_REST = 5000  # bytes a second
WATCH = """() => {
  window.frames_ = [];
  let last = performance.now();
  const next = (now) => { window.frames_.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with 1,000 engines: one simulated engine, under as many addresses of loopback."""
    folder: Path = tmp_path_factory.mktemp("many")
    argv = [sys.executable, "-m", "loadtest.engine", "--host", "0.0.0.0", "--profile", "h100-8b"]  # noqa: S104
    with Child("engine", argv, folder / "engine") as engine:
        port = engine.line(r"^ready http://\S+:(\d+)", 30.0)
        urls = [f"http://127.1.{n // 250}.{n % 250 + 1}:{port}" for n in range(ENGINES)]
        lines = "".join(f"    - {{url: '{url}'}}\n" for url in urls)
        (folder / "policy.yaml").write_text(f"fleet:\n  poll: 10s\n  health: 10s\n  engines:\n{lines}")
        with Gateway(folder / "log", "--policy", str(folder / "policy.yaml"), timeout=120) as gateway:
            yield gateway


def test_little_is_told_at_rest(many: Gateway) -> None:
    heard, began = 0, time.monotonic()
    with httpx.stream("GET", f"{many.control}/events", trust_env=False, timeout=20) as answer:
        for chunk in answer.iter_bytes():
            if time.monotonic() - began < 3.0:  # the first of all
                continue
            heard += len(chunk)
            if time.monotonic() - began > 3.0 + SECONDS:
                break
    print(f"\nat rest, {ENGINES} engines: {heard / SECONDS:.0f} bytes/s (most wanted: {AT_REST})")
    assert heard / SECONDS < AT_REST


def test_the_first_paint_is_soon(many: Gateway, console: Callable[..., Console]) -> None:
    page = console(many.control).open()
    found = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print(f"\nfirst contentful paint {found:.0f} ms (wanted: 300)")
    assert found < 1000


def tasks(trace: bytes) -> list[float]:
    """Milliseconds of processor time of each task of the pages' main threads."""
    events = json.loads(trace)["traceEvents"]
    mains = {(it["pid"], it["tid"]) for it in events if it.get("args", {}).get("name") == "CrRendererMain"}
    done = [it for it in events if it["name"].endswith("RunTask") and (it["pid"], it["tid"]) in mains]
    return [it["tdur"] / 1000 for it in done if "tdur" in it]


def test_a_thousand_engines_and_fifty_calls_a_second_drop_no_frame(
    many: Gateway, browser: Any, console: Callable[..., Console]
) -> None:
    numbers = itertools.count()
    with Traffic(lambda: call(many.url, chat("sim", 8, words=next(numbers) % 50 + 5)), rate=50, threads=25):
        for view, selector in (("now", ".engine"), ("calls", ".row .call")):
            page = console(many.control).open(view)
            page.locator(selector).first.wait_for()
            page.wait_for_timeout(2000)
            page.evaluate(WATCH)
            browser.start_tracing(page=page, categories=["toplevel"])
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                page.evaluate("document.querySelectorAll('.list').forEach(it => { it.scrollTop += 900; })")
                page.wait_for_timeout(100)
            taken = tasks(browser.stop_tracing())
            frames = sorted(page.evaluate("window.frames_"))
            assert len(taken) > len(frames) > 0
            print(
                f"\n{view}: {len(frames)} frames, median {frames[len(frames) // 2]:.0f} ms, "
                f"p99 {frames[len(frames) * 99 // 100]:.0f} ms, longest {frames[-1]:.0f} ms; "
                f"longest task {max(taken):.0f} ms of processor time (most wanted: {LONGEST:.0f})"
            )
            assert max(taken) < LONGEST
            rows = page.evaluate("document.querySelectorAll('.list > .row').length")
            assert rows < 100
