"""Gateway with a shadow policy: clients notice nothing, /metrics counts the differences."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.core.policy.file import decode
from gateway.core.shadow.shadow import Shadow
from loadtest.processes import Gateway, get, samples, until
from tests.e2e.children import post
from tests.e2e.traffic import CHAT, MESSAGES, QUICK, Tree, sha256
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, request, settled

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

ACME, GLOBEX, INITECH = "weir-key-of-acme", "weir-key-of-globex", "weir-key-of-initech"
ENFORCED: Tree = {
    "tenants": {"acme": {"keys": [sha256(ACME)]}, "globex": {"keys": [sha256(GLOBEX)]}},
    "fleet": QUICK,
}
SHADOW: Tree = {
    "tenants": {
        "acme": {"keys": [sha256(ACME)], "class": "batch", "limits": {"requests": {"rate": "1/h", "burst": 3}}},
        "initech": {"keys": [sha256(INITECH)]},
    },
    # A mode that is reached at the first reading, and caps every answer.
    "modes": {"tight": {"enter": {"waiting": 0}, "leave": {}}},
    "shaping": [{"mode": "tight", "max_tokens": 20, "except": []}],
}


class Pair:
    """A gateway with a policy and a shadow, and one client of it."""

    def __init__(self, folder: Path, gateway: Gateway) -> None:
        self.file = folder / "shadow.yaml"
        self.gateway = gateway
        self.model = next(model for engine in gateway.fleet()["engines"] for model in engine["models"])

    def ask(self, key: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        fields = {"model": self.model, "messages": MESSAGES, "max_tokens": 24, "ignore_eos": True}
        status, lines, body = post(self.gateway.url + CHAT, fields, authorization=f"Bearer {key}", **headers)
        return status, {name.lower(): value for name, value in lines.items()}, body

    def counted(self, decision: str) -> dict[tuple[str, str], float]:
        """Calls by what was enforced and what the shadow would have done."""
        found = samples(f"{self.gateway.control}/metrics", "weir_shadow_decisions_total")
        return {(has["enforced"], has["shadow"]): calls for has, calls in found if has["decision"] == decision}

    def added(self, decision: str, act: Callable[[], object]) -> dict[tuple[str, str], float]:
        before = self.counted(decision)
        act()
        return {
            words: calls - before.get(words, 0.0)
            for words, calls in self.counted(decision).items()
            if calls > before.get(words, 0.0)
        }

    def logged(self, text: str) -> bool:
        return until(lambda: text in self.gateway.child.output(), 5.0) is not None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("shadow")
    files = [folder / "policy.yaml", folder / "shadow.yaml"]
    for file, policy in zip(files, (ENFORCED, SHADOW), strict=True):
        file.write_text(json.dumps(policy))
    arguments = ("--policy", str(files[0]), "--shadow", str(files[1]), "--engine", "sim:1", "--log", "none")
    with Gateway(folder / "gateway.log", *arguments) as running:
        yield Pair(folder, running)
        assert running.total("weir_shadow_failures_total") == 0
        assert running.child.alive, running.child.output()
        assert "Traceback" not in running.child.output()


def test_another_class_and_a_limit_that_is_not_enforced(pair: Pair) -> None:
    def burst() -> None:
        for _ in range(5):
            status, headers, _ = pair.ask(ACME)
            assert status == 200
            assert headers["x-weir-class"] == "default"
            assert not [name for name in headers if "ratelimit" in name], "the shadow's limits are not told"

    assert pair.added("limit", burst) == {("passed", "passed"): 3, ("passed", "refused"): 2}
    assert pair.counted("class") == {("default", "batch"): 5}
    assert pair.counted("deadline") == {("less", "more"): 5}
    assert pair.counted("outcome") == {("admitted", "admitted"): 3, ("admitted", "rate_limited"): 2}
    told = pair.gateway.total("weir_shadow_differences_total", decision="class")
    assert told == 5


def test_a_tenant_that_only_one_of_them_knows(pair: Pair) -> None:
    assert pair.added("account", lambda: pair.ask(GLOBEX)) == {("passed", "refused"): 1}
    status, _, _ = pair.ask(GLOBEX)
    assert status == 200
    assert pair.added("account", lambda: pair.ask(INITECH)) == {("refused", "passed"): 1}
    assert pair.ask(INITECH)[0] == 401
    assert pair.added("account", lambda: pair.ask("nobody's")) == {("refused", "refused"): 1}


def test_a_reload_then_shorter_answers_and_a_bad_file(pair: Pair) -> None:
    pair.file.write_text(json.dumps(SHADOW | {"tenants": ENFORCED["tenants"]}))
    assert pair.logged("shadow policy: version 2 is active"), pair.gateway.child.output()
    assert pair.added("class", lambda: pair.ask(ACME)) == {("default", "default"): 1}

    def shorter() -> bool:
        return pair.added("max_tokens", lambda: pair.ask(ACME)) == {("more", "less"): 1}

    assert until(shorter, 5.0) is not None, pair.counted("max_tokens")
    status, headers, body = pair.ask(ACME)
    assert status == 200
    assert "x-weir-max-tokens" not in headers
    assert json.loads(body)["usage"]["completion_tokens"] == 24

    pair.file.write_text("tenants: {acme: {clas: batch}}\n")
    assert pair.logged("shadow policy: version 2 stays active"), pair.gateway.child.output()
    assert "unknown field 'clas'" in pair.gateway.child.output()
    assert pair.ask(ACME)[0] == 200


def test_without_a_shadow_there_is_nothing_of_it(gateway: Gateway, tmp_path: Path) -> None:
    assert b"weir_shadow" not in get(f"{gateway.control}/metrics")[1]
    bad = tmp_path / "bad.yaml"
    bad.write_text("classes: 3\n")
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--engine", "sim:1", "--shadow", str(bad)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert "bad.yaml:1: classes" in ended.stderr


BEHAVIOURS = ["good", "good", "die_before_headers", "die_mid_body", "500", "400", "stall", "no_done", "late_end"]
CROWDED = """
timeouts: {first_byte: 200ms, stall: 200ms}
budget: {max_concurrency: 2}
classes: {high: {max_queue: 2}, default: {max_queue: 4, ttft: 1s}, low: {max_queue: 1}}
limits: {per_tenant: {requests: {rate: 1/h, burst: 30}, tokens: {rate: 1/h, burst: 900}}}
"""


def test_the_same_policy_as_a_shadow_never_differs_and_counts_the_same() -> None:
    """Whatever engines and clients do: each bucket of the shadow is where the enforced policy's own is."""
    policy, failures = decode(CROWDED.encode(), "p.yaml"), []
    rng = random.Random(7)

    async def client(port: int) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        sent = request(rng.random() < 0.5, model=rng.choice(["m", "m", "m", "unknown"]), user="x" * 50)
        try:
            async with asyncio.timeout(rng.choice([0.02, 5.0, 5.0])):  # some leave early
                await ask(port, sent)
        except TimeoutError:
            return

    async def main() -> None:
        engines = [ScriptedEngine(BEHAVIOURS) for _ in range(2)]
        async with AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.running())
            gateway = await stack.enter_async_context(gateway_over(engines, policy))
            shadow = gateway.decider.shadow = Shadow(policy, failures.append)
            await asyncio.gather(*(client(port_of(gateway)) for _ in range(150)))
            await settled(gateway)
            assert not failures
            assert set(shadow.differences().values()) == {0}, shadow.counts()
            counts = shadow.counts()
            assert all(("outcome", word, word) in counts for word in ("admitted", "rate_limited", "not_found")), counts
            levels = [
                {key: bucket.level for key, bucket in book._buckets.items()} for book in (gateway.limits, shadow.limits)
            ]
            assert levels[0].keys() == levels[1].keys()
            assert all(abs(level - levels[1][key]) < 0.01 for key, level in levels[0].items()), levels

    asyncio.run(main())
