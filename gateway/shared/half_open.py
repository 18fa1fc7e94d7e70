"""Half-open connections: those whose other machine is gone, or cannot be reached, without having said so."""

from __future__ import annotations

import socket


def find_half_open(each: socket.socket, timeout: float) -> None:
    """Find a peer that vanished within `timeout` seconds: by keep-alive probes when nothing is under way to it, by
    TCP_USER_TIMEOUT when something is. `each`: of a connection, or listening: what it accepts has the same."""
    every = max(1, int(timeout) // 3)
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", int(timeout * 1000)),
    ):
        if hasattr(socket, name):  # Linux has them all; elsewhere the system's defaults stay
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for level, option, value in options:
        each.setsockopt(level, option, value)
