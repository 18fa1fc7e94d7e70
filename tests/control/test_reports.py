"""POST /sidecars/report over a real socket: authentication, accepted reports, and their effect on /fleet."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from gateway.control.app import control_app, is_local
from gateway.core.policy.policy import FleetPolicy, Policy, SidecarsPolicy
from gateway.core.request.record import Record
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.shared.control.http1 import ControlPort
from gateway.shared.protocol import MAX_BYTES, CapacityReport, GPUReport, ModelReport, demand_report, encode
from gateway.shared.tokens import AcceptedTokens, Tokens
from tests.control.parts import control_parts
from tests.plain_http import NOBODY

TOKEN = "sixteen-and-some-characters"  # noqa: S105 # a test's own
ADMIN = "another-one-of-the-operator"
RUNNING = ModelReport(
    profile="p", model="m", state="running", url="http://127.0.0.1:1", ready_in=0.0, gpus=(0,), held=15
)
ASLEEP = ModelReport(profile="q", model="n", state="sleeping", ready_in=4.0)
GPU = GPUReport(index=0, total=80, used=20, free=60)


def report(*models: ModelReport, sequence: int = 1, **fields: Any) -> bytes:
    given = {"sidecar": "box", "boot": "b", "control": "http://127.0.0.1:2", "gpus": (GPU,)} | fields
    return encode(CapacityReport(sequence=sequence, models=models or (RUNNING, ASLEEP), **given))


class Site:
    """A gateway's control port, and a client that is a sidecar."""

    def __init__(self, policy: SidecarsPolicy | None, tokens: Tokens, admin: str | None) -> None:
        self.lines: list[str] = []
        self.gateway = Gateway(
            Configuration(Policy(fleet=FleetPolicy(sidecars=policy)), sidecar_tokens=tokens), (), None,
            random.Random(1), say=self.lines.append,
        )  # fmt: skip
        parts = control_parts(
            self.gateway.dispatch, exposition=self.gateway.metrics.exposition,
            is_user_key="sk-weir-user".__eq__, sidecars=self.gateway.sidecars, drain_engine=self.gateway.engines.drain,
            observer=self.gateway.observer,
        )  # fmt: skip
        self.port = ControlPort(control_app(parts, AcceptedTokens([admin] if admin else ())), "127.0.0.1:0")
        self.client = httpx.AsyncClient(trust_env=False, verify=NOBODY, timeout=60.0)

    async def post(
        self, body: bytes, token: str | None = TOKEN, path: str = "/sidecars/report", host: str = ""
    ) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        headers |= {"host": host} if host else {}
        return await self.client.post(self.port.address + path, content=body, headers=headers)

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(self.port.address + path)


def play(
    scene: Callable[[Site], Awaitable[None]],
    policy: SidecarsPolicy | None = SidecarsPolicy(),  # noqa: B008 # it is frozen
    token: str | None = TOKEN,
    admin: str | None = None,
) -> None:
    async def main() -> None:
        site = Site(policy, (token,) if token else (), admin)
        await site.port.start()
        try:
            await scene(site)
        finally:
            await site.client.aclose()
            await site.port.aclose()
            await site.gateway.aclose()

    asyncio.run(main())


def test_a_report_is_answered_with_the_demand() -> None:
    async def scene(site: Site) -> None:
        answer = await site.post(report(sequence=7))
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        demand = demand_report(answer.content)
        assert (demand.boot, demand.sequence) == ("b", 7)
        assert demand.gateway.startswith("gateway-")
        assert [(each.profile, each.in_flight, each.withdrawn) for each in demand.demands] == [
            ("p", 0, False),
            ("q", 0, True),
        ]
        again = await site.post(report(sequence=7))
        assert (again.status_code, demand_report(again.content).demands) == (200, demand.demands), "and not taken twice"

    play(scene)


def test_the_fleet_and_the_metrics_show_what_sidecars_say() -> None:
    async def scene(site: Site) -> None:
        assert (await site.get("/readyz")).text == "no engine is up\n"
        outside = ModelReport(profile="r", model="o", state="running", url="http://8.8.8.8:1", ready_in=0.0)
        cannot = ModelReport(profile="s", model="s", state="error", why="error", message="it fails", last_error="boom")
        assert (await site.post(report(RUNNING, ASLEEP, outside, cannot))).status_code == 200
        assert (await site.get("/readyz")).text == "ok, 1 of 1 engines are up, 2 models can be had from sidecars\n"
        view = json.loads((await site.get("/fleet")).content)
        (sidecar,) = view["sidecars"]
        assert sidecar["gpus"] == [{"index": 0, "total": 80, "used": 20, "free": 60, "held": {"p": 15}, "refused": ""}]
        assert (sidecar["id"], sidecar["stale"]) == ("box", False)
        assert [(m["profile"], m["state"], m["engine"], m["ready_in_s"], m["why"]) for m in sidecar["models"]] == [
            ("p", "running", "127.0.0.1:1", 0.0, ""),
            ("q", "sleeping", None, 4.0, ""),
            ("r", "running", None, 0.0, ""),
            ("s", "error", None, None, "it fails"),
        ]
        assert sidecar["refused"] == {"http://8.8.8.8:1": "not in a network of fleet.sidecars.allow"}
        assert site.lines == [
            "engine p@box is up; serves m",
            "sidecar box: 'http://8.8.8.8:1' is not used: not in a network of fleet.sidecars.allow",
        ]
        assert [engine["id"] for engine in view["engines"]] == ["127.0.0.1:1"]
        assert [(model["id"], model["engines"]) for model in view["models"]] == [("m", ["p@box"]), ("n", [])]
        site.gateway.dispatch.waiting.for_models.woken("default", 3.0)
        for name in ("n", "invented"):
            site.gateway.recorder.observe(Record(request_id="r", route="/v1/x", model=name))
        text = (await site.get("/metrics")).text
        for line in (
            'weir_sidecars{state="heard"} 1.0',
            'weir_sidecar_reports_total{result="taken"} 1.0',
            'weir_sidecar_reports_total{result="address_refused"} 1.0',
            'weir_sidecar_ensures_total{result="begun"} 0.0',
            'weir_sidecar_models{model="m",state="awake"} 1.0',
            'weir_sidecar_models{model="n",state="can_be_had"} 1.0',
            'weir_sidecar_models{model="s",state="cannot_be_had"} 1.0',
            'weir_wake_wait_seconds_count{class="default"} 1.0',
            'vllm_requests_total{model_id="n"} 1.0',
            'vllm_requests_total{model_id="other"} 1.0',
        ):
            assert line in text, line
        answer = await site.client.request("DELETE", f"{site.port.address}/engines/p@box/drain")
        assert (answer.status_code, answer.json()["draining"]) == (200, False)

    play(scene)


@pytest.mark.parametrize("body", [b"", b"{}", b"nonsense", b"[" * 10_000, report()[:-1], report(RUNNING, RUNNING)])
def test_what_cannot_be_read_is_said_to_be_so(body: bytes) -> None:
    async def scene(site: Site) -> None:
        answer = await site.post(body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_report")
        assert not site.gateway.fleet.engines

    play(scene)


def test_a_report_of_another_version_names_both() -> None:
    async def scene(site: Site) -> None:
        answer = await site.post(report(version=2))
        assert "version 2, expected 1" in answer.json()["error"]["message"]

    play(scene)


def test_a_body_is_bounded() -> None:
    async def scene(site: Site) -> None:
        answer = await site.post(b" " * (MAX_BYTES + 1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        answer = await site.post(b" " * (MAX_BYTES - len(report())) + report())
        assert answer.status_code == 200

    play(scene)


@pytest.mark.parametrize("token", [None, "x", TOKEN[:-1], TOKEN + "x", ADMIN, "sixteen-and-some-character\xe4"])
def test_without_the_token_nothing_is_taken(token: str | None) -> None:
    async def scene(site: Site) -> None:
        headers = {} if token is None else {"authorization": f"Bearer {token}".encode("latin-1")}
        answer = await site.client.post(site.port.address + "/sidecars/report", content=report(), headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert not site.gateway.fleet.engines
        assert (await site.post(report(), TOKEN)).status_code == 200, "the admin token is not asked for here"
        assert (await site.post(b"", TOKEN, "/policy/reload")).status_code == 401, "and this one opens nothing else"

    play(scene, SidecarsPolicy(), TOKEN, ADMIN)


def test_users_of_the_data_port_are_no_sidecars() -> None:
    async def scene(site: Site) -> None:
        assert (await site.post(report(), "sk-weir-user")).status_code == 403

    play(scene)


def test_no_sidecar_is_heard_unless_the_policy_says_so() -> None:
    async def scene(site: Site) -> None:
        answer = await site.post(report())
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_token")
        assert "no fleet.sidecars" in answer.json()["error"]["message"]
        site.gateway.apply(Configuration(Policy(fleet=FleetPolicy(sidecars=SidecarsPolicy())), {}, (TOKEN,)))
        assert (await site.post(report(), None)).status_code == 401
        site.gateway.sidecars.admit(TOKEN.encode())
        assert (await site.post(report(), TOKEN)).status_code == 200, "the token is reloaded with the policy"

    play(scene, None)


def test_without_a_token_nobody_is_heard() -> None:
    async def scene(site: Site) -> None:
        for token in (None, TOKEN):
            answer = await site.post(report(), token)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_token")
            assert "no fleet.sidecars.token_file" in answer.json()["error"]["message"]
        assert not site.gateway.fleet.engines

    play(scene, token=None)


def test_a_report_with_the_token_may_come_by_any_name_and_a_page_has_no_token() -> None:
    async def scene(site: Site) -> None:
        hosts = ("127.0.0.1", "[::1]:8001", "10.0.0.5:8001", "gateway.internal:8001", "evil.example")
        for number, host in enumerate(hosts):
            assert (await site.post(report(sequence=number), None, host=host)).status_code == 401, host
            assert (await site.post(report(sequence=number), host=host)).status_code == 200, host

    play(scene, admin=ADMIN)


def test_a_name_that_is_taken_is_refused_and_said_to_be_so() -> None:
    async def scene(site: Site) -> None:
        assert (await site.post(report(key="own"))).status_code == 200
        forged = encode(
            CapacityReport(sidecar="box", boot="z", sequence=2**53, control="http://127.0.0.1:2", key="guess")
        )
        answer = await site.post(forged)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "id_taken")
        assert [engine.id for engine in site.gateway.fleet] == ["127.0.0.1:1"]
        assert (await site.post(report(key="own", boot="restarted"))).status_code == 200
        text = (await site.get("/metrics")).text
        assert 'weir_sidecar_reports_total{result="refused"} 1.0' in text

    play(scene)


def test_sockets_are_used_only_in_a_folder_that_a_sidecar_has_made() -> None:
    async def scene(site: Site) -> None:
        urls = ["unix:///run/docker.sock", "unix:///proc/self/fd/1", "http://127.0.0.1:1"]
        models = [
            ModelReport(profile=f"p{n}", model="m", state="running", url=u, ready_in=0.0) for n, u in enumerate(urls)
        ]
        assert (await site.post(report(*models))).status_code == 200
        assert [engine.id for engine in site.gateway.fleet] == ["127.0.0.1:1"]
        assert sum("is not used: " in line for line in site.lines) == 2

    play(scene)


@pytest.mark.parametrize(
    ("client", "server", "local"),
    [
        (("127.0.0.1", 1), ("127.0.0.1", 2), True),
        (("::ffff:127.0.0.1", 1), ("::", 2), True),
        (("10.0.0.5", 1), ("10.0.0.5", 2), True),
        (("10.0.0.6", 1), ("10.0.0.5", 2), False),
        (("10.0.0.6", 1), None, False),
        (None, None, False),
    ],
)
def test_who_is_on_this_machine(client: Any, server: Any, local: bool) -> None:
    assert is_local({"type": "http", "client": client, "server": server}) is local


def test_a_start_that_failed_and_one_that_calls_wait_for_are_told_on_the_first_page() -> None:
    async def scene(site: Site) -> None:
        failed = ModelReport(profile="p", model="m", state="error", why="error", message="it fails", last_error="boom")
        starting = ModelReport(profile="q", model="n", state="starting", pending="start", ready_in=0.0)
        assert (await site.post(report(failed, starting))).status_code == 200
        site.gateway.observer.look()
        began = site.gateway.observer.states["box", "p"][2]
        (line,) = (await site.get("/status")).json()["headline"]
        assert line["what"] == "The start of p@box failed; its model cannot be called."
        assert (line["why"], line["engines"], line["runbook"]) == ("boom", ["p@box"], "WeirStartFailing")
        assert line["since"] == round(began, 1)
        again = msgspec.structs.replace(failed, state="starting", pending="start")
        assert (await site.post(report(again, starting, sequence=2))).status_code == 200
        (line,) = (await site.get("/status")).json()["headline"]
        assert (line["what"], line["level"]) == ("The start of p@box failed, and is tried again.", "warn")
        awake = msgspec.structs.replace(RUNNING, last_error="")
        assert (await site.post(report(awake, starting, sequence=3))).status_code == 200
        site.gateway.observer.look()
        texts = [event.text for event in site.gateway.observer.history.events]
        assert "the start of p@box failed: boom" in texts
        assert texts[-1] == "p@box is awake"

    play(scene)
