"""Bytes that a client has taken of what was written to it, as its kernel acknowledges them.

A transport's own buffer is a poor witness: a kernel keeps up to megabytes in front of it, so for a client that reads
slowly it may not move for a minute. Linux counts the acknowledged bytes of a TCP connection (`tcpi_bytes_acked`).
Elsewhere, and on unix sockets, there is only what is still buffered: it changes when the client takes something.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from typing import Final

_ACKED: Final = 120  # offset of tcpi_bytes_acked, an unsigned 64-bit number, in Linux's struct tcp_info


def taken(transport: asyncio.Transport) -> int:
    """A number that changes when the client takes bytes; of TCP on Linux it grows by as many."""
    sock = transport.get_extra_info("socket")
    buffered = transport.get_write_buffer_size()
    if sock is None or not sys.platform.startswith("linux"):
        return -buffered
    try:
        if sock.family == socket.AF_UNIX:
            (kept,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))
            return -buffered - int(kept)
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED + 8)
    except OSError:
        return -buffered
    return int(struct.unpack_from("Q", info, _ACKED)[0]) if len(info) >= _ACKED + 8 else -buffered
