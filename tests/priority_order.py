"""Order in which an engine that runs one sequence at a time answers, where the gateway tells it of priorities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from loadtest.processes import Gateway, total, until
from tests.beside import beside
from tests.e2e.children import PATIENCE, post

BATCH = 4  # calls that are there first


def policy(folder: Path, url: str, scheduling_policy: str) -> Path:
    """A policy whose one engine runs by `scheduling_policy`; no call waits in the gateway."""
    entry = {"url": url, "scheduling_policy": scheduling_policy}
    tree = {"version": 1, "fleet": {"poll": "100ms", "health": "100ms", "engines": [entry]}}
    tree["classes"] = {name: {"deadline": f"{PATIENCE:.0f}s"} for name in ("interactive", "default", "batch")}
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def answered(
    gateway: Gateway, engine: str, model: str, max_tokens: int, all_there: Callable[[], object] | None = None
) -> list[tuple[str, int]]:
    """The class and the status of each call, in the order of their answers: BATCH of batch, then an interactive one.

    `engine`: URL of the gateway's one engine. `all_there`, called once that has them all, lets a slowed one go on."""
    ended: list[tuple[str, int]] = []

    def ask(name: str, tokens: int) -> None:
        body = {"model": model, "prompt": f"{name} call", "max_tokens": tokens, "ignore_eos": True}
        status, _, _ = post(f"{gateway.url}/v1/completions", body, **{"x-weir-class": name})
        ended.append((name, status))

    def has(calls: int) -> bool:
        states = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(total(f"{engine}/metrics", state) for state in states) == calls

    with beside(*[partial(ask, "batch", max_tokens)] * BATCH):
        # The engine has them all: one that is granted may still be on its way, and the next call overtake it.
        assert until(lambda: has(BATCH), PATIENCE) is not None
        with beside(partial(ask, "interactive", 4)):
            if all_there is not None:
                assert until(lambda: has(BATCH + 1), PATIENCE) is not None
                all_there()
    return ended
