"""Routes of the console: its files, its stream of events, and orders for sidecars, which the gateway passes on."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.control.console.files import FOLDER, POLICY, File
from gateway.control.console.reading import ConsoleReading
from gateway.control.console.stream import WATCHERS, StreamAnswer, Streams
from gateway.control.guard import JSON, error

GiveOrder = Callable[[str, str, str], Awaitable[tuple[int, bytes]]]  # sidecar, profile, order -> status, body
ORDERS = ("ensure", "sleep", "wake", "stop", "drain", "off", "on")


class ConsoleRoutes:
    """The answers, one method a route. `order` None: this gateway has no sidecars."""

    def __init__(self, files: Mapping[str, File], reading: ConsoleReading, order: GiveOrder | None) -> None:
        self._files = files
        self._streams = Streams(reading)
        self._order = order

    def routes(self) -> list[Route]:
        return [
            Route("/", self.file),
            Route(FOLDER + "{name}", self.file),
            Route("/events", self.events),
            Route("/sidecars/{id}/models/{profile:path}/{order}", self.order, methods=["POST"]),
        ]

    async def file(self, request: Request) -> Response:
        found = self._files.get(request.url.path)
        if found is None:
            raise HTTPException(404)
        headers = {"content-security-policy": POLICY, "x-frame-options": "DENY", "content-type": found.type}
        return Response(found.body, headers=headers)

    async def events(self, request: Request) -> Response | StreamAnswer:
        """The stream; with `calls=SERIAL` it tells ended calls too, those after the one of that serial."""
        query = request.query_params
        after = query.get("calls", "")
        if set(query) - {"calls"} or not re.fullmatch(r"[0-9]{0,15}", after):
            return error(400, "bad_query", "The one query of /events is calls=SERIAL, a number from 0 on.")
        if self._streams.full:
            message = f"{WATCHERS} consoles are open already: close one."
            return error(503, "too_many_watchers", message, {"retry-after": "5"})
        return StreamAnswer(partial(self._streams.messages, int(after) if after else None))

    async def order(self, request: Request) -> Response:
        """The sidecar's own answer. 404 for one that is not known, 502 for one that does not answer."""
        asked = request.path_params
        if asked["order"] not in ORDERS:
            return error(404, "no_such_order", f"Orders are {', '.join(ORDERS)}.")
        if self._order is None:
            return error(404, "no_sidecars", "This gateway has no sidecars.")
        try:
            status, body = await self._order(asked["id"], asked["profile"], asked["order"])
        except LookupError as unknown:
            return error(404, "not_known", str(unknown.args[0]))
        except ConnectionError as silent:
            return error(502, "sidecar_failed", str(silent))
        return Response(body, status, media_type=JSON)
