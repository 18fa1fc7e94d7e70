"""Requests that the relay passes on: those that a gateway sends to engines, and no other.

A target is `/engines/PROFILE` before one of an engine's own paths. It is compared as it came, byte for byte: no escape
is undone, no dot segment removed, no slash merged, so each target has one spelling. What reaches the engine is the
table's own path, never a caller's bytes. vLLM's other routes (sleep, collective_rpc, adapters, shutdown) are not in it.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from gateway.core.request.routes import ROUTES
from gateway.shared.protocol import ENGINES_PATH

Kind = Literal["call", "look", "ensure", "log"]

_ENGINES: Final = ENGINES_PATH.encode()
_MODELS: Final = b"/models/"
_ENSURE: Final = b"ensure"
_LOG: Final = b"logs"
MOST_LINES: Final = 2000  # of a log, in one answer
_LINES: Final = re.compile(rb"lines=([1-9][0-9]{0,3})")
CALLS: Final = frozenset(path for path, route in ROUTES.items() if not route.here)
LOOKS: Final = frozenset({b"/health", b"/v1/models", b"/metrics"})


class RelayTarget(msgspec.Struct, frozen=True):
    """Target of a request for a profile. `call`: inference; `look`: a query that a sleeping engine answers too;
    `ensure`: the order, and `log`: the last `lines` lines of an engine, both for the sidecar itself. `path`: path at
    the engine; empty for these two."""

    kind: Kind
    profile: str
    path: bytes = b""
    lines: int = 0


def target_of(method: bytes, path: bytes, query: bytes) -> RelayTarget | None:
    """The target of a request; None: the relay has no such."""
    if method == b"GET" and path.startswith(_MODELS):
        name, _, rest = path[len(_MODELS) :].partition(b"/")
        lines = _LINES.fullmatch(query)
        if rest != _LOG or lines is None or int(lines[1]) > MOST_LINES:
            return None
        return RelayTarget("log", name.decode("latin-1"), lines=int(lines[1]))
    if query:
        return None
    if path.startswith(_ENGINES):
        name, slash, rest = path[len(_ENGINES) :].partition(b"/")
        asked = slash + rest
        if method == b"POST" and asked in CALLS:
            return RelayTarget("call", name.decode("latin-1"), asked)
        if method == b"GET" and asked in LOOKS:
            return RelayTarget("look", name.decode("latin-1"), asked)
    elif method == b"POST" and path.startswith(_MODELS):
        name, _, rest = path[len(_MODELS) :].partition(b"/")
        if rest == _ENSURE:
            return RelayTarget("ensure", name.decode("latin-1"))
    return None
