"""Routes of the console: its files, its stream of events, questions about the policy, and orders for sidecars,
which the gateway passes on."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.control.console.calls import life_of
from gateway.control.console.files import FOLDER, POLICY, File
from gateway.control.console.reading import ConsoleReading
from gateway.control.console.stream import WATCHERS, Streams, stream_answer
from gateway.control.guard import JSON, error
from gateway.control.parts import ControlParts
from gateway.control.policy_view import without_secrets
from gateway.core.history import STEP
from gateway.core.policy.file import explain
from gateway.shared.printable import printable

_NAMED = ("model", "engine", "sidecar", "tenant", "provider", "mirror")
KINDS = {kind: f"{kind}s" for kind in _NAMED} | {"class": "classes"}
LOG_LINES, MOST_LOG_LINES = 200, 2000
_HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)
ORDERS = ("ensure", "sleep", "stop", "off", "on")


def runbooks() -> Mapping[str, str]:
    """Sections of docs/runbooks.md in Markdown, by the names of their alerts in lower case. Reads the file, of an
    installed package or at the top of the source tree; raises OSError."""
    here = Path(__file__).parents[2]
    installed = here / "docs" / "runbooks.md"
    file = installed if installed.is_file() else here.parent / "docs" / "runbooks.md"
    _, *parts = _HEADING.split(file.read_text(encoding="utf-8"))
    return {name.lower(): text.strip() + "\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


class ConsoleRoutes:
    """The answers, one method a route."""

    def __init__(self, files: Mapping[str, File], parts: ControlParts) -> None:
        self._files = files
        self._parts = parts
        self._dispatch = parts.dispatch
        self._reading = ConsoleReading(parts)
        self._streams = Streams(self._reading)
        self._runbooks = runbooks()

    def routes(self) -> list[Route]:
        return [
            Route("/", self.file),
            Route(FOLDER + "{name}", self.file),
            Route("/events", self.events),
            Route("/status", self.status),
            Route("/calls/{serial}", self.life),
            Route("/policy/diff", self.diff),
            Route("/history", self.history),
            Route("/runbooks/{name}", self.runbook),
            Route("/sidecars/{id}/models/{profile:path}/logs", self.log),
            Route("/sidecars/{id}/models/{profile:path}/{order}", self.order, methods=["POST"]),
        ]

    async def file(self, request: Request) -> Response:
        found = self._files.get(request.url.path)
        if found is None:
            raise HTTPException(404)
        headers = {"content-security-policy": POLICY, "x-frame-options": "DENY", "content-type": found.type}
        return Response(found.body, headers=headers)

    async def status(self, _: Request) -> Response:
        """All that the first page shows, once: entries by kind and name."""
        found: dict[str, Any] = {"at": time.time(), **{name: {} for name in KINDS.values()}}
        for key, entry in self._reading.entries().items():
            kind, _slash, name = key.partition("/")
            if kind in KINDS:
                found[KINDS[kind]][name] = entry
            else:
                found[kind] = entry
        if self._parts.cluster is not None:
            found["cluster"] = self._parts.cluster()
        return Response(msgspec.json.encode(found), media_type=JSON)

    async def events(self, request: Request) -> Response:
        """The stream; with `calls=SERIAL` it tells ended calls too, those after the one of that serial."""
        query = request.query_params
        after = query.get("calls", "")
        if set(query) - {"calls"} or not re.fullmatch(r"[0-9]{0,15}", after):
            return error(400, "bad_query", "The one query of /events is calls=SERIAL, a number from 0 on.")
        if self._streams.full:
            message = f"{WATCHERS} consoles are open already: close one."
            return error(503, "too_many_watchers", message, {"retry-after": "5"})
        return stream_answer(self._streams.messages(int(after) if after else None))

    async def history(self, request: Request) -> Response:
        """The last hour: buckets after the first `after` ones, and what happened."""
        after = request.query_params.get("after", "0")
        if set(request.query_params) - {"after"} or not re.fullmatch(r"[0-9]{1,15}", after):
            return error(400, "bad_query", "The one query of /history is after=NUMBER, of buckets that are known.")
        kept = self._parts.observer.history
        return Response(
            msgspec.json.encode(
                {"step": STEP, "closed": kept.closed, "buckets": kept.after(int(after)), "events": list(kept.events)}
            ),
            media_type=JSON,
        )

    async def runbook(self, request: Request) -> Response:
        """Send the runbook of one alert, as text; 404 if there is none."""
        found = self._runbooks.get(request.path_params["name"].lower())
        if found is None:
            return error(404, "no_such_runbook", f"Runbooks are {', '.join(self._runbooks)}.")
        return _text(found)

    async def log(self, request: Request) -> Response:
        """The last lines of a model's engine, from its sidecar. 404 for one that is not known, 502 for a sidecar that
        does not answer."""
        lines = request.query_params.get("lines", str(LOG_LINES))
        if set(request.query_params) - {"lines"} or not re.fullmatch(r"[1-9][0-9]{0,3}", lines):
            return error(400, "bad_query", "The one query of logs is lines=N, from 1 to 2000.")
        asked = request.path_params
        most = min(int(lines), MOST_LOG_LINES)
        said = await _said(self._parts.read_log(asked["id"], asked["profile"], most))
        if isinstance(said, Response):
            return said
        status, body = said
        if status != 200:
            message = f"The sidecar does not give its log here: on its machine, `sidecar logs {asked['profile']}` does."
            return error(404, "no_log", message)
        return _text(printable(body.decode(errors="replace")))

    async def life(self, request: Request) -> Response:
        """The steps of an ended call's life. 404 for one that is not kept any more."""
        serial = request.path_params["serial"]
        known = re.fullmatch(r"[0-9]{1,15}", serial)
        steps = None if known is None else life_of(int(serial), self._parts.ended, self._dispatch)
        if steps is None:
            message = "There is no such call, or it ended so long ago that it is no longer kept."
            return error(404, "call_not_kept", message)
        return Response(msgspec.json.encode(steps), media_type=JSON)

    async def order(self, request: Request) -> Response:
        """The sidecar's own answer. 404 for one that is not known, 502 for one that does not answer."""
        asked = request.path_params
        if asked["order"] not in ORDERS:
            return error(404, "no_such_order", f"Orders are {', '.join(ORDERS)}.")
        said = await _said(self._parts.order(asked["id"], asked["profile"], asked["order"]))
        return said if isinstance(said, Response) else Response(said[1], said[0], media_type=JSON)

    async def diff(self, _: Request) -> Response:
        """Send the changes from the previous policy to this one, in the format of `diff -u`; empty if nothing
        changed."""
        previous = self._parts.previous()
        if previous is None:
            return _text("")
        before, now = (explain(without_secrets(each)).splitlines() for each in (previous, self._dispatch.policy))
        return _text("\n".join(difflib.unified_diff(before, now, "before", "now", lineterm="")))


async def _said(answer: Awaitable[tuple[int, bytes]]) -> tuple[int, bytes] | Response:
    """Status and body of a sidecar's answer; or the error, where nobody knows it or it does not answer."""
    try:
        return await answer
    except LookupError as unknown:
        return error(404, "not_known", str(unknown.args[0]))
    except ConnectionError as silent:
        return error(502, "sidecar_failed", str(silent))


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")
