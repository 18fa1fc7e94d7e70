"""Trial of an edited policy: its load of recorded calls, who may ask, and the process, which ends with its watcher."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.control.console.stream import stream_answer
from gateway.control.console.trial import simulation
from gateway.control.console.trial.simulation import PolicyTrial, Recorded, Trials, recorded
from gateway.core.policy.file import decode
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import COPY, Record
from gateway.core.request.tenants import MIRROR
from gateway.decider.ended_calls import EndedCalls
from tests.control.parts import TOKEN, Parts, play

ADMIN = {"authorization": f"Bearer {TOKEN}"}
NOW = "tenants: {acme: {}, globex: {}}\n"


def record(number: int = 0, **facts: Any) -> Record:
    given: dict[str, Any] = {
        "class_name": "batch",
        "tenant": "acme",
        "model": "m",
        "outcome": Outcome.OK,
        "settled": True,
    }
    given |= {"prompt_tokens": 100, "completion_tokens": 20, "total": 1.0, "engine": "e"}
    return Record(request_id=str(number), route="/v1/chat/completions", **given | facts)


def load(calls: int = 40) -> Recorded:
    found = recorded([(n / 10, record(n, tenant="acme" if n % 4 else "globex")) for n in range(calls)])
    assert found is not None
    return found


def test_the_load_has_every_judged_call_at_its_time_and_shares_of_who_sent_them() -> None:
    found = recorded([
        (13.0, record(total=2.0, completion_tokens=30)),
        (11.5, record(total=1.5, tenant="globex", class_name="interactive")),
        (12.5, record(total=0.0, settled=False, outcome=Outcome.SHED, engine="", completion_tokens=0)),
        (12.0, record(outcome=Outcome.NOT_FOUND)),
        (12.0, record(outcome=Outcome.UNAUTHORIZED, class_name="", prompt_tokens=0)),
        (12.0, record(model="has a space")),
    ])  # fmt: skip
    assert found is not None
    assert (found.calls, found.seconds) == (3, 2.5)
    assert found.trace.decode().splitlines()[1:] == [
        "1970-01-01 00:00:00.000000,100,20",
        "1970-01-01 00:00:01.000000,100,30",
        "1970-01-01 00:00:02.500000,100,30",  # the median of its class
    ]
    workload = json.loads(found.scenario)["workload"]
    assert {kind["class"]: kind["share"] for kind in workload["mix"]} == {"batch": 2.0, "interactive": 1.0}
    assert workload["tenants"] == {"acme": {"weight": 666.67}, "globex": {"weight": 333.33}}


def test_without_judged_calls_or_counted_answers() -> None:
    assert recorded([(1.0, record(outcome=Outcome.NOT_FOUND))]) is None
    found = recorded([(1.0, record(settled=False, tenant="anonymous"))])
    assert found is not None
    assert found.trace.endswith(b",100,128\n")
    assert "tenants" not in json.loads(found.scenario)["workload"]


def test_a_trial_wants_the_admin_token_and_calls_to_be_tried_on() -> None:
    body = json.dumps({"policy": NOW})

    async def scene(gateway: Parts) -> None:
        address = gateway.port.address + "/policy/try"
        assert (await gateway.get("/policy/try")).status_code == 401
        assert (await gateway.client.post(address, content=body)).status_code == 401
        assert (await gateway.client.post(address, content=body, headers=ADMIN)).json()["error"]["code"] == "no_calls"
        for bad in (b"", b'{"policy": 1}', b'{"policy": "", "engines": 65}', b'{"policy": "", "profile": "../x"}'):
            assert (await gateway.client.post(address, content=bad, headers=ADMIN)).status_code == 400
        long = json.dumps({"policy": "x" * simulation.MOST_POLICY * 2})
        answer = await gateway.client.post(address, content=long, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_body")
        assert answer.json()["error"]["message"].endswith("bytes, sent within 10 s.")
        text = (await gateway.get("/policy/try", **ADMIN)).text
        assert "abab" not in text
        assert decode(text.encode()).tenants["acme"].keys == ()

    async def without_a_token(gateway: Parts) -> None:
        answer = await gateway.client.post(gateway.port.address + "/policy/try", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_trial")

    policy = decode(b"tenants: {acme: {keys: [" + b"ab" * 32 + b"]}}")
    copies = EndedCalls()
    copies.add(record(tenant=MIRROR, mirrored=COPY), time.monotonic())
    play(scene, TOKEN, policy, ended=copies)  # nobody has called: the gateway makes copies for a mirror itself
    play(without_a_token)


def told(policy: str, **fields: Any) -> list[tuple[str, Any]]:
    async def scene() -> list[bytes]:
        return [event async for event in Trials().run(PolicyTrial(policy=policy, **fields), NOW, load())]

    events = [event.decode().strip().split("\n") for event in asyncio.run(scene()) if event.startswith(b"event")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]


@pytest.mark.slow
def test_both_policies_are_simulated_on_the_calls_beside_each_other() -> None:
    events = told("tenants: {acme: {limits: {requests: 1/min}}, globex: {}}\n", engines=2)
    assert events[0] == ("begun", {"calls": 40, "seconds": 4})
    name, result = events[-1]
    assert name == "result"
    (_, now, edited), batch = result["rows"][0], result["rows"][1]
    assert (now["offered"], now["ok"], edited["offered"]) == (40, 40, 40)
    assert edited["ok"] < now["ok"]
    assert [outcome for outcome, _ in edited["endings"]] == ["rate_limited"]
    assert batch[0] == "batch"


@pytest.mark.slow
def test_a_policy_with_a_mistake_is_told_with_its_line() -> None:
    name, data = told("tenants:\n  acme: {limit: 3}\n")[-1]
    assert name == "failed"
    assert "edited.yaml:2" in data["text"]


def test_a_trial_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert told(NOW) == [
        ("failed", {"text": "There is no folder for its files, by TMPDIR: No such file or directory."})
    ]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert told(NOW) == [("failed", {"text": "It could not be run: No such file or directory."})]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leaves", ["at its start", "while it runs"])
def test_a_watcher_that_leaves_frees_the_trial_once_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    children: list[Any] = []
    ended: list[int | None] = []
    begin, remove = asyncio.create_subprocess_exec, shutil.rmtree
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def scene() -> None:
        trials, left = Trials(), asyncio.Event()

        async def begun(*argv: Any, **settings: Any) -> Any:
            children.append(await begin(*argv, **settings))
            left.set()
            return children[-1]

        def removed(folder: Path, **settings: Any) -> None:
            ended.extend(child.returncode for child in children)
            remove(folder, **settings)

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if leaves == "at its start":
                left.set()

        monkeypatch.setattr(asyncio, "create_subprocess_exec", begun)
        monkeypatch.setattr(shutil, "rmtree", removed)
        answer = stream_answer(trials.run(PolicyTrial(policy=NOW), NOW, load(5000)))
        async with asyncio.timeout(60):
            await answer({"type": "http"}, receive, send)
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        assert not trials.busy

    asyncio.run(scene())
    assert ended == [-9]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_process_ends_with_its_watcher_and_when_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Any] = []
    begin = asyncio.create_subprocess_exec

    async def begun(*argv: Any, **settings: Any) -> Any:
        children.append(await begin(*argv, **settings))
        return children[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begun)
    monkeypatch.setattr(simulation, "BEAT", 0.05)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def scene() -> None:
        trials = Trials()
        events = trials.run(PolicyTrial(policy=NOW), NOW, load(5000))
        await anext(events)
        assert await anext(events) == b":\n\n"  # it runs
        second = [event async for event in trials.run(PolicyTrial(policy=NOW), NOW, load())]
        assert [event.partition(b"\n")[0] for event in second] == [b"event: failed"]
        await events.aclose()
        assert children[0].returncode == -9
        assert not trials.busy
        monkeypatch.setattr(simulation, "WITHIN", 0.3)
        last = [event async for event in trials.run(PolicyTrial(policy=NOW), NOW, load(5000))][-1]
        assert b"more than 0.3 s" in last
        assert children[1].returncode == -9

    asyncio.run(scene())
    assert list(tmp_path.iterdir()) == []
