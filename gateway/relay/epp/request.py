"""Client's request as a proxy tells of it: its head, and the headers that an engine is to be sent."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Container, Iterable, Mapping

from gateway.core.request.outcome import error_body
from gateway.relay.wire.messages import CHUNKED, Request, answer

OUTSIDE, INSIDE, FORWARDED = b"x-envoy-external-address", b"x-envoy-internal", b"x-forwarded-for"
UNKNOWN = "proxy"  # in place of a client's address
OBJECTIVE, CLASS = b"x-gateway-inference-objective", b"x-weir-class"
# Headers of a client's that the proxy itself needs or sets; an engine is sent no other that the picker does not set.
_OF_PROXY = frozenset({b"host", b"content-length", b"content-type", b"transfer-encoding", b"te", b"x-request-id"})
_OF_PROXY_TOO = (b"x-envoy-", b"x-forwarded-")


class BadHead(ValueError):
    """A head that is no request's; the message says why."""


def request_of(head: Mapping[bytes, bytes], classes: Container[str], *, ended: bool) -> Request:
    """Return the request of a head, pseudo headers among it. Its body is to come, unless it has `ended`. An objective
    that is one of the `classes` asks for that class. Raises BadHead."""
    method, target = head.get(b":method", b""), head.get(b":path", b"")
    if not method or not target.startswith(b"/"):
        raise BadHead("request_headers: :method or :path is missing")
    fields = {name: value for name, value in head.items() if not name.startswith(b":")}
    if (objective := fields.get(OBJECTIVE, b"")).decode("latin-1") in classes:
        fields.setdefault(CLASS, objective)
    path, _, query = target.partition(b"?")
    length = fields.get(b"content-length", b"")
    size = 0 if ended else int(length) if length.isdigit() and len(length) < 19 else CHUNKED
    # HTTP/1.0, so that an answer is written without chunks.
    request = Request(method, path, query, fields, 0, size, False)
    request.peer = _client(fields)
    request.at = asyncio.get_running_loop().time()
    return request


def unwanted(request: Request, wanted: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return names of the client's headers that the engine is not to be sent, its key for this gateway among them."""
    kept = {name for name, _ in wanted}
    return [
        name
        for name in request.fields
        if name not in kept and name not in _OF_PROXY and not name.startswith(_OF_PROXY_TOO)
    ]


def unusable_mode(mode: str) -> bytes:
    """Return the answer to a client whose proxy does not pass whole bodies to the picker."""
    message = (
        f"The proxy's external processing sends request bodies as {mode}: its operator must set request_body_mode to "
        "FULL_DUPLEX_STREAMED or BUFFERED, so that the endpoint picker can read the prompt."
    )
    return answer(500, b"content-type: application/json\r\n", error_body(message, "server_error", "proxy_settings"))


def _client(fields: dict[bytes, bytes]) -> str:
    """Return the client's address as the proxy saw it: the last one that it has noted. Of a client that Envoy counts
    as internal, it passes the client's own word for an outside address on."""
    outside = b"" if fields.get(INSIDE) == b"true" else fields.get(OUTSIDE)
    text = outside or fields.get(FORWARDED, b"").rpartition(b",")[2].strip()
    try:
        return str(ipaddress.ip_address(text.decode("latin-1")))
    except ValueError:
        return UNKNOWN
