"""What a caller is told whose path or method is no route of the data port: what he asked for, and what there is."""

from __future__ import annotations

from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.routes import ROUTES, Route, route_of

SHOWN = 100  # characters of a path
CONTROL = frozenset({b"/", b"/livez", b"/readyz", b"/metrics", b"/fleet", b"/calls", b"/summary", b"/policy"})
OLLAMA = {
    b"/api/chat": "/v1/chat/completions",
    b"/api/generate": "/v1/completions",
    b"/api/embed": "/v1/embeddings",
    b"/api/embeddings": "/v1/embeddings",
    b"/api/tags": "/v1/models",
    b"/api/ps": "/v1/models",
    b"/api/show": "/v1/models",
}
THERE_ARE = ", ".join(row.path for row in ROUTES.values())


def canonical(path: bytes) -> bytes:
    """A route's path as its table has it: one slash at the end of it is forgiven. Any other path as it is."""
    return path[:-1] if path[-1:] == b"/" and path[:-1] in ROUTES else path


def no_route(method: bytes, path: bytes) -> Refused:
    """Nothing is there for any method."""
    shown = path.decode("latin-1")
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    message = f"{method.decode('latin-1')} {shown} is not offered here"
    return Refused(Outcome.NOT_FOUND, f"{message}. {_hint(canonical(path))}.", code="route_not_found")


def _hint(path: bytes) -> str:
    if path in OLLAMA:
        return f"This gateway speaks OpenAI's API, not Ollama's: use {OLLAMA[path]}, with a base URL that ends in /v1"
    within = path.removeprefix(b"/v1")
    if within != path and route_of(within) is not None and within.startswith(b"/v1/"):
        return f"Did you mean {within.decode('latin-1')[:SHOWN]}? The client's base URL has /v1 twice"
    if route_of(b"/v1" + path) is not None:
        return f"Did you mean /v1{path.decode('latin-1')[:SHOWN]}? The client's base URL has to end in /v1"
    if path in CONTROL:
        return "It is a path of the control port, whose address the gateway prints when it starts"
    return f"This gateway answers {THERE_ARE}"


def no_method(method: bytes, route: Route) -> Refused:
    """The route is there, for other methods."""
    methods = ", ".join(route.methods)
    message = f"{method.decode('latin-1')} {route.path} is not offered here: it takes {methods}."
    return Refused(Outcome.METHOD_NOT_ALLOWED, message, headers=b"allow: %b\r\n" % methods.encode())
