"""Control port on real parts, with a client for it."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from gateway.control.app import control_app
from gateway.control.parts import ControlParts
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.retries import RetryBudget
from gateway.core.call_counts import CallCounts
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.history import History
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.core.sidecars.sidecar import Member
from gateway.decider.dispatch import Dispatch
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.observer import Observer
from gateway.decider.report_intake import ReportIntake
from gateway.shared.addresses import split_address
from gateway.shared.control.http1 import ControlPort
from gateway.shared.files.file_status import FileStatus
from gateway.shared.tokens import AcceptedTokens
from gateway.shared.vllm.answers import ModelCard
from tests.plain_http import NOBODY

TOKEN = "correct-horse-battery-staple"  # noqa: S105 # a test's own
USER_KEY = "sk-weir-a-user-of-the-data-port"


class Members:
    """Engines that no sidecar brings."""

    def join(self, member: Member) -> None: ...

    def update(self, member: Member) -> None: ...

    def leave(self, id: str) -> None: ...


async def nobody(*_: object) -> Any:
    """Nobody answers: there is no sidecar, and no other process."""
    raise LookupError("There is no sidecar of that name.")


async def nothing() -> Any:
    return []


def control_parts(dispatch: Dispatch, **settings: Any) -> ControlParts:
    """The parts of a gateway that has little. `settings` are those that it has in their place."""

    def drain(wanted: bool) -> None:
        dispatch.leaving = wanted or dispatch.draining

    def drain_engine(engine: Engine, wanted: bool) -> None:
        engine.draining = wanted
        dispatch.changed(engine)

    ended = settings.get("ended") or EndedCalls()
    found: dict[str, Any] = {
        "exposition": lambda: lambda: b"weir_up 1\n", "calls": tuple, "ended": ended,
        "drain": drain, "drain_engine": drain_engine, "is_user_key": USER_KEY.__eq__, "policy_status": FileStatus,
        "reload": None, "previous": lambda: None,
        "sidecars": ReportIntake(dispatch, Members(), lambda: None, print), "order": nobody, "read_log": nobody,
        "count": nothing, "processes": list, "cluster": None,
        "limits": LimitBook(dispatch.policy), "used": dict, "used_tokens": nothing, "spent": nothing,
        "observer": Observer(History(), dispatch.fleet, dispatch, CallCounts, ended, dispatch.clock),
        "log_trouble": lambda: None,
    }  # fmt: skip
    return ControlParts(dispatch=dispatch, **(found | settings))


class Parts:
    """`settings` are further fields of ControlParts."""

    def __init__(self, token: str | None = None, policy: Policy | None = None, **settings: Any) -> None:
        loop = asyncio.get_running_loop()
        policy = policy or Policy()
        self.fleet = Fleet()
        for index in range(2):
            self.fleet.add(Engine(f"e{index}", f"http://127.0.0.1:{index + 1}", policy))
        self.dispatch = Dispatch(
            self.fleet, policy, random.Random(1), loop.time, RetryBudget(Current(Snapshot(policy)))
        )
        app = control_app(control_parts(self.dispatch, **settings), AcceptedTokens([token] if token else ()))
        self.port = ControlPort(app, "127.0.0.1:0")
        self.client = httpx.AsyncClient(trust_env=False, verify=NOBODY, timeout=60.0)

    def up(self, id: str) -> Engine:
        engine = self.fleet.engines[id]
        self.fleet.has_models(engine, [ModelCard(id="m", max_model_len=4096)])
        engine.check(True, asyncio.get_running_loop().time())
        return engine

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.ask("GET", path, **headers)

    async def post(self, path: str, **headers: str) -> httpx.Response:
        return await self.ask("POST", path, **headers)

    async def ask(self, method: str, path: str, **headers: str) -> httpx.Response:
        """Underscores in the names of headers are dashes."""
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.request(method, self.port.address + path, headers=lines)

    def connect(self) -> socket.socket:
        host, port = split_address(self.port.address.removeprefix("http://"))
        return socket.create_connection((host, port), timeout=60)


def play(
    scene: Callable[[Parts], Awaitable[None]], token: str | None = None, policy: Policy | None = None, **settings: Any
) -> None:
    """Run a scene on a control port of its own."""

    async def main() -> None:
        parts = Parts(token, policy, **settings)
        await parts.port.start()
        try:
            await scene(parts)
        finally:
            await parts.client.aclose()
            await parts.port.aclose()

    asyncio.run(main())
