"""Open files of the process, shared out: clients may have what engines, the control port and files leave.

A call that runs needs a descriptor for its client and one for its engine: engines have half of what is left, up to
`ENGINES`, which is more than most fleets run at once. Beyond their own share clients are refused in words, as over
`server.max_connections`; a process without descriptors can only reset them, and reaches no engine either.
"""

from __future__ import annotations

import resource

from gateway.serve.starting import StartError

LEAST = 100  # files, of which clients have 12
FILES = 64  # the log, the policy and its keys, look-ups, engines' health checks
ENGINES = 4096  # connections
CONTROL = 1200  # connections of the control port, and an eighth of all at most


def shared_out(limit: int) -> tuple[int, int]:
    """Connections of clients and of the control port, in a process that may have `limit` files open."""
    control = max(1, min(CONTROL, limit // 8))
    rest = limit - FILES - control
    return max(1, rest - min(ENGINES, rest // 2)), control


def raised() -> int:
    """The hard limit of open files, which is then the soft one too: the usual 1,024 is there for users of select().
    Raises StartError for one that leaves no room to serve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST:
        needed = f"expected {LEAST} at least: raise it, as with LimitNOFILE= or ulimit -Hn"
        raise StartError(f"open files: the hard limit is {hard}, {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def warning(limit: int, wanted: int) -> str | None:
    """Return a line for the operator about a limit that leaves fewer clients than the policy's `wanted`."""
    clients, _ = shared_out(limit)
    if clients >= wanted:
        return None
    return (
        f"open files: the hard limit of {limit} leaves room for {clients} client connections, and the policy has "
        f"server.max_connections: {wanted}; raise it, as with LimitNOFILE= or ulimit -Hn, or lower that"
    )
