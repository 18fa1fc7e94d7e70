"""Streams of a proxy that end in the moment of their decision, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("grpc")

from gateway.relay.epp.endpoints import Endpoints
from gateway.relay.epp.server import PickerServer
from gateway.relay.epp.stream import PickerStream
from loadtest.simulate import vtime
from tests.epp.proxy import request_bodies, request_headers
from tests.flow.test_lending import PLAIN, Site

CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


class Channel:
    """Messages of a proxy that says no more, and goes on to listen."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)

    async def read(self) -> Any:
        if not self.messages:
            await asyncio.get_running_loop().create_future()
        return self.messages.pop(0)

    async def write(self, message: Any) -> None:
        """Take a message."""


def test_a_stream_that_is_cancelled_as_its_call_is_granted_holds_nothing() -> None:
    async def main() -> None:
        site = Site(PLAIN)
        gateway, port = site.gateway, site.port
        endpoints = Endpoints(
            lambda: ((id, each.origin) for id, each in gateway.engines.clients.items()), gateway.telemetry.names
        )
        server = PickerServer(
            port.pipeline,
            gateway.bodies,
            endpoints,
            lambda: gateway.server.settings,
            lambda: True,
            trusted=True,
        )
        channel = Channel(request_headers(), *request_bodies(json.dumps(CALL).encode(), 1 << 20))
        stream = asyncio.create_task(PickerStream(server._picker, channel).run())
        while not any(each.state == "running" for each in port.calls()):
            await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        while port.pipeline.tasks:
            await asyncio.sleep(0)
        assert (site.loop.time(), site.outcomes()) == (0.0, ["client_gone"])
        site.idle()
        await gateway.aclose()

    vtime.run(main())
