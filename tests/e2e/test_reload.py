"""Reloads while calls run: none is dropped, engines come and go, an unusable file changes nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadtest.clients.answer import Answer
from loadtest.processes import SAMPLE, get, total, until
from tests.e2e.children import SimEngine, post
from tests.e2e.traffic import CHAT, QUICK, Site, Tree, body
from tests.raw_calls import chat, exchange

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

RELOADS = 60  # each of the mixes that `variant` has of what changes every 3, 4 and 5 turns
CLIENTS = 6
DELIBERATE = {"rate_limited", "queue_full", "shed", "deadline_unreachable"}  # what a policy may refuse here
COUNTERS = ("_total", "_count", "_bucket")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SimEngine]]:
    """Of the command line; two of the policy's; and one that has a model of its own."""
    folder = tmp_path_factory.mktemp("engines")
    started: list[SimEngine] = []
    try:
        for number, model in enumerate(("sim", "sim", "sim", "other")):
            started.append(SimEngine(folder / f"{number}.log", "--model", model, "--speed", "2"))
        yield started
    finally:
        for engine in started:
            engine.child.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, engines: list[SimEngine]) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("reload"), entries(), engines[0]) as running:
        yield running


def entries(*engines: SimEngine) -> Tree:
    return {"fleet": QUICK | {"engines": [{"url": engine.url} for engine in engines]}}


def ids(site: Site) -> set[str]:
    return {engine["url"] for engine in site.gateway.fleet()["engines"]}


# -- one thing at a time ----------------------------------------------------------------------------------------------


def test_a_saved_file_takes_effect_without_a_signal(site: Site) -> None:
    assert site.ask({"n": 2}).status_code == 200
    site.save(entries() | {"body": {"max_n": 1}})
    assert until(lambda: site.ask({"n": 2}).status_code == 400, 60.0) is not None


def leave_and_come_back(site: Site, engines: list[SimEngine], *, at_once: bool) -> None:
    """The policy loses an engine while it streams, and gets it back: at once, or when it is gone."""
    ours, theirs = engines[0], engines[3]
    both = entries(theirs)
    site.use(both)
    assert until(lambda: site.ask({"model": "other"}).status_code == 200, 60.0) is not None
    theirs.faults(slow=10.0)  # 20 s for the answer, so that it stands still in its middle
    with site.http.stream("POST", CHAT, json=body(model="other", max_tokens=600, stream=True)) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        theirs.faults(hang=True)
        site.use(entries())
        (leaving,) = (engine for engine in site.gateway.fleet()["engines"] if engine["url"] == theirs.url)
        assert (leaving["draining"], leaving["in_flight"]) == (True, 1)
        refused = site.ask({"model": "other"})
        assert (refused.status_code, refused.headers["x-weir-reason"]) == (503, "no_engine")
        assert site.ask().status_code == 200
        if at_once:
            site.use(both)
        theirs.faults()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) >= 599
    if not at_once:
        assert until(lambda: ids(site) == {ours.url}, 60.0) is not None
        assert site.ask({"model": "other"}).status_code == 404
        site.use(both)
    assert until(lambda: site.ask({"model": "other"}).status_code == 200, 60.0) is not None
    assert ids(site) == {ours.url, theirs.url}
    assert until(site.empty, 60.0) is not None


def test_a_stream_outlives_its_engine_in_the_policy(site: Site, engines: list[SimEngine]) -> None:
    leave_and_come_back(site, engines, at_once=False)


def test_an_engine_that_is_named_again_while_it_ends_its_calls_stays(site: Site, engines: list[SimEngine]) -> None:
    leave_and_come_back(site, engines, at_once=True)


def bad_files(engine: SimEngine) -> dict[str, str | None]:
    """What is in the file, None: there is none; by what the gateway must say of it."""
    return {
        "the file is empty": "",
        "expected": "version: 1\nclasses: [",
        "max_queu": "classes: {default: {max_queu: 5}}\n",
        "is there twice": json.dumps(entries(engine)),
        "nobodys.key": "fleet: {engines: [{url: 'http://127.0.0.1:9', api_key_file: nobodys.key}]}\n",
        "No such file": None,
        "7/fortnight": "limits: {global: {requests: 7/fortnight}}\n",
    }


def save_bad(site: Site, text: str | None) -> None:
    if text is None:
        site.file.unlink()
    else:
        site.save(text)


def reload(site: Site) -> tuple[int, Any]:
    status, _, answer = post(f"{site.gateway.control}/policy/reload", {})
    return status, json.loads(answer)


def test_what_cannot_be_used_changes_nothing_and_is_shown(site: Site, engines: list[SimEngine]) -> None:
    good = entries() | {"body": {"max_n": 3}}
    site.use(good)
    before = site.status()
    for says, text in bad_files(engines[0]).items():
        save_bad(site, text)
        status, answer = reload(site)
        assert status == 422, (says, answer)
        assert answer["error"]["code"] == "bad_policy"
        shown = site.status()
        assert says in answer["error"]["message"]
        assert says in shown["error"]
        assert (shown["version"], shown["policy"]) == (before["version"], before["policy"])
        assert says in get(f"{site.gateway.control}/policy")[1].decode()
        assert [site.ask({"n": n}).status_code for n in (3, 4)] == [200, 400]
    assert site.status()["failures"] == before["failures"] + len(bad_files(engines[0]))
    site.save(good)
    assert reload(site)[0] == 200
    assert (site.status()["version"], site.status()["error"]) == (before["version"], None)
    site.save(entries())
    assert reload(site)[1]["version"] == before["version"] + 1
    assert site.ask({"n": 4}).status_code == 200


# -- everything at once -----------------------------------------------------------------------------------------------


def variant(number: int, engines: list[SimEngine]) -> Tree:
    """One of many policies: weights, queues, limits, classes, tenants and engines all change, at different paces."""
    tight = number % 4 == 1
    classes: Tree = {
        "interactive": {"weight": 1 + number % 7, "deadline": "30s"},
        "default": {"weight": 4, "max_concurrency": 3 if number % 2 else 64, "max_queue": 2 if tight else 512},
    }
    if number % 3:
        classes["night"] = {"weight": 1, "max_queue": 64, "max_concurrency": 2}
    tenant: Tree = {"class": "night"} if number % 3 == 1 else {}
    limits: Tree = {"per_tenant": {"requests": {"rate": "20/s", "burst": 5}}} if number % 5 == 2 else {}
    chosen = [engines[1:2], engines[1:3], [], engines[2:3]][number % 4]
    return {
        "classes": classes,
        "service_tiers": {},
        "tenants": {"anonymous": tenant},
        "limits": limits,
        "body": {"max_n": 1 + number % 8, "max": 2**20 + 1024 * (number + 1)},  # no two alike
        "routing": {"hold_unserved": f"{60 + number % 3}s"},
        "modes": {"brownout": {"enter": {"kv": "93%"}, "leave": {"kv": "85%"}, "refuse": []}},
    } | entries(*chosen)


class Load:
    """Clients that call without a pause until they are told to stop; what became of each call."""

    def __init__(self, url: str, clients: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client(random.Random(number))) for number in range(clients)]
        self.answers: list[Answer] = []

    async def _client(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            stream = rng.random() < 0.6
            request = chat("localhost", "sim", f"call {rng.random()}", max_tokens=rng.randrange(2, 40), stream=stream)
            answer = Answer()
            self.answers.append(answer)
            await exchange(self._host, self._port, request, answer, limit=60.0)
            if answer.status != 200:
                await asyncio.sleep(0.02)

    async def end(self) -> Counter[str]:
        """Let what is under way end; how the calls ended."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        return Counter(answer.outcome for answer in self.answers)


def counters(site: Site) -> dict[str, float]:
    """Every counter the gateway has, by its name and labels."""
    text = get(f"{site.gateway.control}/metrics", timeout=60.0)[1].decode()
    found = (match for match in SAMPLE.finditer(text) if match["name"].endswith(COUNTERS))
    return {f"{match['name']}{match['labels']}": float(match["value"]) for match in found}


def fallen(before: dict[str, float], now: dict[str, float], engines: set[str]) -> list[str]:
    """The counters that are lower than before. Those of an engine that has left the fleet are gone with it."""
    hosts = [url.removeprefix("http://") for url in engines]
    gone = {name for name in before if 'engine="' in name and not any(f'"{host}"' in name for host in hosts)}
    return [name for name, value in before.items() if name not in gone and now.get(name, 0.0) < value]


def reload_once(site: Site, number: int, engines: list[SimEngine]) -> None:
    """The next policy, or in every fifth turn a bad one; in one of the three ways there are."""
    before = site.status()
    if number % 5 == 4:
        bad = list(bad_files(engines[0]).values())
        save_bad(site, bad[number // 5 % len(bad)])
        assert reload(site)[0] == 422
        after = site.status()
        assert after["error"] is not None
        assert (after["version"], after["policy"]) == (before["version"], before["policy"])
        return
    policy = variant(number, engines)
    wanted = before["version"] + 1
    site.save(policy)
    if number % 2:
        site.hang_up()
    elif number % 10:  # else nobody says anything: it is seen by itself
        status, answer = reload(site)
        assert (status, answer["version"]) == (200, wanted)
    assert until(lambda: site.version() >= wanted, 60.0) is not None
    shown = site.status()
    assert (shown["version"], shown["error"]) == (wanted, None)
    assert shown["policy"]["body"]["max"] == f"{1025 + number}KiB"
    there = {engines[0].url} | {entry["url"] for entry in policy["fleet"]["engines"]}
    assert until(lambda: ids(site) == there, 60.0) is not None, "those removed are gone once their calls have ended"


def takes_calls(engine: SimEngine) -> bool:
    """Whether an engine ends calls now."""
    ended = "vllm:request_success_total"
    before = total(f"{engine.url}/metrics", ended)
    return until(lambda: total(f"{engine.url}/metrics", ended) > before, 60.0) is not None


def test_many_reloads_under_load(site: Site, engines: list[SimEngine]) -> None:
    async def main() -> None:
        ended_before = calls_ended(site), calls_ended(site, outcome="ok")
        load = Load(site.gateway.url, CLIENTS)
        counted: dict[str, float] = {}
        for number in range(RELOADS):
            await asyncio.to_thread(reload_once, site, number, engines)
            before, counted = counted, await asyncio.to_thread(counters, site)
            assert not fallen(before, counted, ids(site))
        await asyncio.to_thread(site.use, entries())
        assert await asyncio.to_thread(until, lambda: ids(site) == {engines[0].url}, 60.0) is not None
        await asyncio.to_thread(site.use, entries(*engines[1:3]))
        for added in engines[1:3]:
            assert await asyncio.to_thread(takes_calls, added), site.gateway.fleet()["engines"]
        ended = await load.end()
        assert set(ended) <= {"ok"} | DELIBERATE, ended
        assert ended["ok"] > 10 * RELOADS
        refused = [answer for answer in load.answers if answer.outcome != "ok"]
        statuses = {"rate_limited": 429} | dict.fromkeys(DELIBERATE - {"rate_limited"}, 503)
        assert all(answer.status == statuses[answer.outcome] for answer in refused)
        assert ended["rate_limited"] > 0
        assert until(site.empty, 60.0) is not None
        assert calls_ended(site, outcome="ok") - ended_before[1] == ended["ok"]
        assert calls_ended(site) - ended_before[0] == ended.total()

    site.use(variant(RELOADS, engines))
    asyncio.run(main())


def calls_ended(site: Site, **labels: str) -> float:
    return site.gateway.total("weir_requests_total", **labels)
