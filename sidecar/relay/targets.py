"""Requests that the relay passes on: those that a gateway sends to engines, and no other.

A target is `/engines/PROFILE` before one of an engine's own paths. It is compared as it came, byte for byte: no escape
is undone, no dot segment removed, no slash merged, so each target has one spelling. What reaches the engine is the
table's own path, never a caller's bytes. vLLM's other routes (sleep, collective_rpc, adapters, shutdown) are not in it.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from gateway.core.request.routes import ROUTES
from gateway.shared.protocol import ENGINES_PATH

Kind = Literal["call", "look", "ensure"]

_ENGINES: Final = ENGINES_PATH.encode()
_MODELS: Final = b"/models/"
_ENSURE: Final = b"ensure"
CALLS: Final = frozenset(path for path, route in ROUTES.items() if not route.here)
LOOKS: Final = frozenset({b"/health", b"/v1/models", b"/metrics"})


class RelayTarget(msgspec.Struct, frozen=True):
    """Target of a request for a profile. `call`: inference; `look`: a query that a sleeping engine answers too;
    `ensure`: the order, for the sidecar itself. `path`: path at the engine; empty for the order."""

    kind: Kind
    profile: str
    path: bytes = b""


def target_of(method: bytes, path: bytes, query: bytes) -> RelayTarget | None:
    """The target of a request; None: the relay has no such."""
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
