"""Control API of the sidecar over a real socket: routes, access, and limits on its callers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.shared import protocol
from gateway.shared.control.http1 import ControlPort
from gateway.shared.tokens import AcceptedTokens
from sidecar.control import api
from sidecar.control.api import Api, control_app
from sidecar.control.status_table import table
from sidecar.core.status import GatewayStatus, RelayUse, Status
from sidecar.residency import state_file
from sidecar.residency.manager import Manager
from sidecar.residency.state_file import decode
from tests.plain_http import NOBODY
from tests.sidecar.parts import FILE, opened

TOKEN = "correct-horse-battery-staple"  # noqa: S105 # a test's own


class Door:
    """The control API of a manager whose models are not run, and a client."""

    def __init__(self, manager: Manager, token: str | None) -> None:
        self.manager = manager
        self.stopped: list[bool] = []
        self.leaving = False
        api = Api(
            manager=manager, view=self.status,
            end=self.stopped.append, leaving=lambda: self.leaving,
        )  # fmt: skip
        self.port = ControlPort(control_app(api, AcceptedTokens([token] if token else ())), "127.0.0.1:0")
        self.client = httpx.AsyncClient(trust_env=False, verify=NOBODY, timeout=60.0)

    def status(self) -> Status:
        manager = self.manager
        begun = tuple([msgspec.structs.replace(each, phase="loading weights, 40%") for each in manager.models()])
        return Status(
            sidecar="box", version="0", pid=1, boot="b", config="f", control="c", up_s=100.0, gpus=manager.gpus(),
            models=begun, gateways=(GatewayStatus(url="http://g", taken=False, error="gone", failures=3),),
            calls={name: manager.requests_active(name) or 2 for name in manager.entries},
            relay=RelayUse(3, {"answered": 5, "left": 1}), troubles=("the disk is full",),
        )  # fmt: skip

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.client.request(method, f"{self.port.address}{path}", **more)

    async def refused(self, method: str, path: str, **more: Any) -> tuple[int, str]:
        answer = await self.ask(method, path, **more)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "code"}
        return answer.status_code, error["message"]


def play(folder: Path, scene: Callable[[Door], Awaitable[None]], token: str | None = None, text: str = FILE) -> None:
    async def main() -> None:
        async with opened(folder, text) as manager:
            door = Door(manager, token)
            await door.port.start()
            try:
                async with asyncio.timeout(60):
                    await scene(door)
            finally:
                await door.client.aclose()
                await door.port.aclose()

    asyncio.run(main())


def test_what_there_is_to_see(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        assert (await door.ask("GET", "/healthz")).text == "ok\n"
        status = msgspec.json.decode((await door.ask("GET", "/status")).content, type=Status)
        assert [model.model for model in status.models] == ["org/A", "b", "big"]
        assert [gpu.total for gpu in status.gpus] == [80 << 30]
        shown = table(status)
        assert "GPU 0  0.0 GiB of 80.0 GiB used, 80.0 GiB free" in shown
        assert "gateway http://g  takes no reports, since 0.0 s: gone" in shown
        assert "trouble: the disk is full" in shown
        assert "needs 4 GPUs" in shown
        assert re.search(r"^a +stopped +-, loading weights, 40% +2 ", shown, re.MULTILINE)
        assert (await door.ask("GET", "/models/a/logs?lines=5")).text == ""
        plan = (await door.ask("GET", "/models/a/plan")).text
        assert "1. start a on GPU 0" in plan
        assert (await door.ask("GET", "/metrics")).headers["content-type"].startswith("text/plain; version=0.0.4")

    play(tmp_path, scene)


def test_what_is_asked_of_one_model_costs_no_plan_of_all_others(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        began = time.process_time()
        door.manager.models()
        of_all, began = time.process_time() - began, time.process_time()
        for _ in range(20):
            assert (await door.ask("GET", "/models/m7/logs")).status_code == 200
        assert time.process_time() - began < 10 * of_all, "20 times as much before"

    models = "".join(f"  m{number}: {{model_path: /m/m}}\n" for number in range(250))
    play(tmp_path, scene, text=f"engine: {{simulated: h100-8b}}\nmodels:\n{models}")


def test_metrics_have_the_names_that_dashboards_know(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        door.manager.heard(
            protocol.DemandReport(
                gateway="g", boot="b", sequence=1, demands=(protocol.Demand(profile="a", in_flight=3),)
            )
        )
        lines = (await door.ask("GET", "/metrics")).text.splitlines()
        assert 'vllm_gpu_memory_total_mb{gpu_id="0"} 81920.0' in lines
        assert 'vllm_gpu_memory_used_mb{gpu_id="0"} 0.0' in lines
        assert 'vllm_model_loaded{model_id="org/A"} 0.0' in lines
        assert 'vllm_model_requests_active{model_id="org/A"} 3.0' in lines
        assert 'weir_sidecar_model_state{profile="big",state="error"} 1.0' in lines
        assert 'weir_sidecar_report_failures_total{gateway="http://g"} 3.0' in lines
        assert "weir_sidecar_state_file_bad 0.0" in lines
        assert 'weir_sidecar_relay_requests_total{outcome="answered"} 5.0' in lines
        assert "weir_sidecar_relay_connections 3.0" in lines

    play(tmp_path, scene)


SHARED = """
id: box
engine: {simulated: h100-8b}
models:
  a: {model_path: /m/a, served_name: org/A, gpu_memory: 40%}
  b: {model_path: /m/a, served_name: org/A, gpu_memory: 40%}
"""


def test_no_metric_is_there_twice(tmp_path: Path) -> None:
    """Two profiles of one model; a scrape with a series twice is refused whole by Prometheus."""

    async def scene(door: Door) -> None:
        model = door.manager.entries["a"]
        model.evictions["sleep", "room"] += 2
        model.starts += 3
        model.failed_starts["oom"] += 1
        door.manager.orders.give("b", "off")
        lines = [line for line in (await door.ask("GET", "/metrics")).text.splitlines() if line[0] != "#"]
        series = [line.rpartition(" ")[0] for line in lines]
        assert len(set(series)) == len(series)
        assert 'vllm_model_loaded{model_id="org/A"} 0.0' in lines
        assert 'weir_sidecar_evictions_total{kind="sleep",profile="a",reason="room"} 2.0' in lines
        assert 'weir_sidecar_starts_total{profile="a"} 3.0' in lines
        assert 'weir_sidecar_start_failures_total{kind="oom",profile="a"} 1.0' in lines
        assert 'weir_sidecar_model_off{profile="b"} 1.0' in lines
        assert 'weir_sidecar_claim_bytes{profile="a"} 3.4359738368e+10' in lines
        assert 'weir_sidecar_host_memory_bytes{profile="a"} 0.0' in lines
        (limit,) = (line for line in lines if line.startswith("weir_sidecar_host_memory_limit_bytes "))
        assert float(limit.split()[1]) == door.manager.machine.host_bound
        assert 'weir_sidecar_residue_bytes{profile="a"} 1.073741824e+09' in lines
        assert "weir_sidecar_gpu_processes_hidden 0.0" in lines

    play(tmp_path, scene, text=SHARED)


def test_off_is_kept_before_it_is_answered_and_who_cannot_keep_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "AGAIN", 0.1)

    async def scene(door: Door) -> None:
        report = protocol.ensured((await door.ask("POST", "/models/a/off")).content).model
        assert (report.ready_in, report.why) == (None, "off")
        assert decode((tmp_path / "sidecar.state").read_bytes()).off == ("a",)
        assert await door.refused("POST", "/models/a/sleep") == (409, "a is off: `on` comes first")
        assert protocol.ensured((await door.ask("POST", "/models/a/ensure")).content).model.why == "off"
        assert "stopped, off" in table(msgspec.structs.replace(door.status(), models=door.manager.models()))
        assert protocol.ensured((await door.ask("POST", "/models/a/on")).content).model.ready_in
        assert decode((tmp_path / "sidecar.state").read_bytes()).off == ()
        (tmp_path / "sidecar.state.new").mkdir()
        assert await door.refused("POST", "/models/a/off") == (
            503,
            "a is off, and a restart would not know it: Is a directory",
        )
        (tmp_path / "sidecar.state.new").rmdir()

    play(tmp_path, scene)


def test_orders_are_answered_at_once(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        for body in (b"", b"{}", b" {} "):
            answer = await door.ask("POST", "/models/big/ensure", content=body)
            report = protocol.ensured(answer.content).model
            assert (report.profile, report.ready_in, report.why) == ("big", None, "error")
            assert "needs 4 GPUs" in report.message
        assert door.manager.entries["big"].wanted_since is not None
        status, message = await door.refused("POST", "/models/a/sleep")
        assert (status, message) == (409, "a is stopped, not running")
        assert protocol.ensured((await door.ask("POST", "/models/a/stop")).content).model.state == "stopped"
        assert (await door.ask("POST", "/stop", content=b'{"engines": true}')).json() == {
            "engines": True,
            "running": [],
        }
        assert (await door.ask("POST", "/stop")).json()["engines"] is False
        assert door.stopped == [True, False]
        door.leaving = True
        assert (await door.ask("GET", "/healthz")).status_code == 503
        answer = await door.ask("POST", "/models/a/ensure")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")

    play(tmp_path, scene)


def test_callers_name_profiles_and_nothing_else(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        for more in (
            {"json": {"model_path": "/etc"}},
            {"json": {"flags": {"host": "0.0.0.0"}}},  # noqa: S104 # refused
            {"json": []},
            {"json": "a"},
            {"content": b"{"},
            {"content": b"\xff"},
            {"content": b"[" * 5000},
            {"params": {"env": "LD_PRELOAD=/x"}},
            {"params": {"url": "http://169.254.169.254"}},
        ):
            for order in ("ensure", "sleep", "stop", "off", "on"):
                status, message = await door.refused("POST", f"/models/a/{order}", **more)
                assert (status, message[:26]) == (400, "Callers name profiles only")
        assert door.manager.entries["a"].wanted_since is None
        for path in ("/stop?engines=true", "/models/a/plan?x=1"):
            assert (await door.refused("POST" if path[1] == "s" else "GET", path))[0] == 400
        assert (await door.refused("POST", "/stop", content=b'{"engines": 1}'))[0] == 400
        for query in ("lines=0", "lines=x", "lines=999999", "lines=1&lines=2", "path=/etc/passwd", "lines=%D9%A1"):
            assert (await door.refused("GET", f"/models/a/logs?{query}"))[0] == 400
        assert door.stopped == []

    play(tmp_path, scene)


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "BODY_WITHIN", 0.05)

    async def scene(door: Door) -> None:
        assert await door.refused("POST", "/models/org/A/ensure") == (
            404,
            "There is no profile 'org/A'. Did you mean a?",
        )
        assert await door.refused("GET", "/models/bigg/plan") == (404, "There is no profile 'bigg'. Did you mean big?")
        assert (await door.refused("GET", "/models/zz/logs"))[1] == (
            "There is no profile 'zz'. Its profiles are a, b, big."
        )
        assert (await door.refused("POST", "/models/../../etc/passwd/ensure"))[0] == 404
        assert (await door.refused("GET", "/models/a/ensure"))[0] == 405
        assert (await door.refused("GET", "/nothing"))[0] == 404
        assert (await door.refused("POST", "/models/a/ensure", content=b"{}" + b" " * 70_000))[0] == 413

        reader, writer = await asyncio.open_connection("127.0.0.1", door.port.port)
        writer.write(b"POST /models/a/ensure HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()

    play(tmp_path, scene)


@pytest.mark.slow
def test_with_a_token_nothing_but_health_is_answered_without_it(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        assert (await door.ask("GET", "/healthz")).status_code == 200
        for path in ("/status", "/metrics", "/models/a/logs", "/models/a/plan", "/nothing"):
            for given in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Basic {TOKEN}"}):
                answer = await door.ask("GET", path, headers=given)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/models/a/ensure", "/stop"):
            assert (await door.ask("POST", path)).status_code == 401
        good = {"authorization": f"bearer {TOKEN}", "host": "sidecar.example"}
        answer = await door.ask("GET", "/status", headers=good)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")

    play(tmp_path, scene, TOKEN)


def test_without_a_token_no_page_in_a_browser_is_answered(tmp_path: Path) -> None:
    async def scene(door: Door) -> None:
        for host in ("evil.example", "evil.example:8002", "127.0.0.1.evil.example"):
            assert (await door.refused("GET", "/healthz", headers={"host": host}))[0] == 421
        for host in ("localhost:8002", "[::1]:8002", "127.0.0.1"):
            assert (await door.ask("GET", "/status", headers={"host": host})).status_code == 200
        for given in ({"origin": "http://127.0.0.1:8002"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            assert (await door.refused("POST", "/models/a/stop", headers=given))[0] == 403

    play(tmp_path, scene)


def test_only_this_machine_is_answered_without_a_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as manager:
            door, sent = Door(manager, None), []

            async def send(message: Any) -> None:
                sent.append(message)

            async def receive() -> Any:
                return {"type": "http.request"}

            scope = {"type": "http", "method": "GET", "path": "/status", "headers": [], "client": ("10.0.0.9", 5)}
            await door.port._app(scope, receive, send)
            assert sent[0]["status"] == 403
            await door.client.aclose()

    asyncio.run(main())
