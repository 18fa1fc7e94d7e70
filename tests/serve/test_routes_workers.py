"""Model routes under `--workers`: a relay's calls get another of their route's models where one process gives it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from loadtest.processes import Gateway, get, until
from tests.e2e.children import SimEngine, post

pytestmark = pytest.mark.slow

POLICY = """
fleet: {poll: 100ms, health: 20s}
models: {support: {members: [small], fallback: [large]}}
retries: 100%
breaker: {failures: 1000}
batching: {embeddings: 50ms}
"""


class Site:
    """A gateway of two relays; engines of `small`, the route's member, and `large`, its fallback."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        names = ("small", "large")
        engines = [SimEngine(folder / f"{name}.log", "--model", name) for name in names]
        self.small, _ = engines
        for engine in engines:
            stack.callback(engine.child.stop)
        (folder / "policy.yaml").write_text(POLICY)
        words = [word for engine in engines for word in ("--engine", engine.url)]
        words += ["--workers", "2", "--policy", str(folder / "policy.yaml"), "--log", "none"]
        self.gateway = stack.enter_context(Gateway(folder / "gateway.log", *words))

        def models() -> set[str]:
            return {model for each in self.gateway.fleet()["engines"] for model in each["models"]}

        assert until(lambda: models() == set(names), 60.0) is not None, self.gateway.fleet()


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(folder, stack)


def test_merged_calls_whose_member_fails_get_the_fallback(tmp_path: Path) -> None:
    with site(tmp_path) as made, ThreadPoolExecutor(16) as callers:
        made.small.faults(errors=1.0, status=503)

        def embedded(number: int) -> tuple[int, str | None]:
            url, message = f"{made.gateway.url}/v1", {"role": "user", "content": "hello"}
            chat = {"model": "large", "messages": [message], "max_tokens": 1}
            assert post(f"{url}/chat/completions", chat)[0] == 200, "each allows a retry, as the merged request needs"
            status, headers, _ = post(f"{url}/embeddings", {"model": "support", "input": [f"text {number}"]})
            return status, headers["x-weir-model"]

        for _ in range(50):  # which calls meet in one relay within the window is chance
            assert list(callers.map(embedded, range(16))) == [(200, "large")] * 16
            again = made.gateway.total("weir_batch_resends_total")
            if again:
                break
        assert again, "a request of several calls failed, and each went again by itself"


ONE_SLOT = """
fleet:
  poll: 100ms
  health: 4s
  engines: [{{url: "{small}", name: left, max_concurrency: 1}}, {{url: "{large}"}}]
models: {{support: {{members: [small], fallback: [large]}}}}
routing: {{hold_unserved: 0s}}
retries: 100%
"""


def test_calls_that_wait_for_a_member_whose_engine_dies_go_to_the_next_model(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as callers:
        small, large = (SimEngine(tmp_path / f"{name}.log", "--model", name) for name in ("small", "large"))
        stack.callback(large.child.stop)
        stack.callback(small.child.stop)
        (tmp_path / "policy.yaml").write_text(ONE_SLOT.format(small=small.url, large=large.url))
        words = ("--workers", "2", "--policy", str(tmp_path / "policy.yaml"), "--log", "none")
        gateway = stack.enter_context(Gateway(tmp_path / "gateway.log", *words))

        def asked(model: str) -> tuple[int, str | None]:
            body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            status, headers, _ = post(f"{gateway.url}/v1/chat/completions", body)
            return status, headers["x-weir-model"]

        def models() -> set[str]:
            return {model for each in gateway.fleet()["engines"] for model in each["models"]}

        def calls(what: str) -> list[str]:
            return [call[what] for call in json.loads(get(f"{gateway.control}/calls")[1])["calls"]]

        def states() -> list[str]:
            return calls("state")

        assert until(lambda: models() == {"small", "large"}, 60.0) is not None, gateway.fleet()
        small.faults(hang=True)
        stuck = callers.submit(asked, "small")
        assert until(lambda: len(states()) == 1 and "queued" not in states(), 60.0) is not None, states()
        assert calls("engine") == ["left"], "as it is called everywhere"
        waiting = [callers.submit(asked, "support") for _ in range(6)]
        assert until(lambda: states().count("queued") == 6, 60.0) is not None, states()
        small.child.kill()
        assert [each.result() for each in waiting] == [(200, "large")] * 6
        assert stuck.result()[0] in (502, 503), "its model has no other engine"
        # A slot is free once the stuck call has failed: who gets that meets the dead engine, and is moved by its retry.
        moved = partial(gateway.total, "weir_model_route_calls_total", model="large")
        assert until(lambda: moved() == 6, 60.0) is not None
        assert moved(how="late") >= 1
        assert moved(how="late") + moved(how="failed") == 6
        assert until(gateway.idle, 30.0) is not None, gateway.fleet()
