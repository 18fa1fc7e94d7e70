"""Priority of a call inside an engine that runs `--scheduling-policy priority`, written into its request.

vLLM handles lower numbers first, and preempts the highest. It reads the field `priority` of a body. A message's body
has no such field; for it recent versions of vLLM read a header. An engine with another policy refuses all but 0.
"""

from __future__ import annotations

from gateway.core.request.routes import Route


def with_priority(headers: bytes, body: bytes, route: Route, priority: int) -> tuple[bytes, bytes]:
    """Header lines and body, which was parsed for `route`, with the priority where the engine reads one. Of equal keys
    in JSON every reader takes the last."""
    if route.kind == "message":
        return headers + b"x-vllm-priority: %d\r\n" % priority, body
    if route.form or route.kind == "tokenize":
        return headers, body
    return headers, body.rstrip(b" \t\r\n")[:-1] + b',"priority":%d}' % priority
