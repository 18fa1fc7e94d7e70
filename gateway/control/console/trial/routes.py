"""Routes of a policy's trial, only where there is an admin token.

GET  /policy/try    the policy in force as text to edit, without keys
POST /policy/try    {"policy": TEXT, "engines": N, "profile": NAME}: both policies on the calls just recorded
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.control.console.body import decoded
from gateway.control.console.sources import Sources
from gateway.control.console.stream import StreamAnswer
from gateway.control.console.trial.recorded import recorded
from gateway.control.console.trial.simulation import MOST_POLICY, PolicyTrial, Trials
from gateway.control.guard import error
from gateway.core.policy.file import explain
from gateway.core.policy.policy import Policy
from gateway.decider.dispatch import Dispatch

HOUR = 3600.0  # seconds
BODY = 2 * MOST_POLICY  # bytes: JSON writes a newline as two


class TrialRoutes:
    """`allowed`: whether there is an admin token."""

    def __init__(self, dispatch: Dispatch, sources: Sources, *, allowed: bool) -> None:
        self._dispatch = dispatch
        self._ended = sources.ended
        self._allowed = allowed
        self._trials = Trials()

    def routes(self) -> list[Route]:
        return [Route("/policy/try", self.text), Route("/policy/try", self.run, methods=["POST"])]

    async def text(self, _: Request) -> Response:
        return Response(_text(self._dispatch.policy), media_type="application/yaml")

    async def run(self, request: Request) -> Response | StreamAnswer:
        """The events of the trial, see simulation.py; it ends with its watcher."""
        if not self._allowed:
            return error(404, "no_trial", "A policy is tried here only where there is an admin token.")
        trial = await decoded(request, PolicyTrial, BODY)
        if isinstance(trial, Response):
            return trial
        load = recorded(self._ended.since(asyncio.get_running_loop().time() - HOUR))
        if load is None:
            return error(409, "no_calls", "No call of the last hour was judged: there is nothing to try it on.")
        if self._trials.busy:
            return error(503, "busy", "Another policy is tried just now.", {"retry-after": "10"})
        return StreamAnswer(partial(self._trials.run, trial, _text(self._dispatch.policy), load))


def _text(policy: Policy) -> str:
    """The policy as a file, without its keys: a simulation has its own."""
    tenants = {name: msgspec.structs.replace(tenant, keys=()) for name, tenant in policy.tenants.items()}
    return explain(msgspec.structs.replace(policy, tenants=tenants))
