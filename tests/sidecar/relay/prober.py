"""Prober in another network namespace: reads what to try as JSON on standard input, prints what came of it.

{"scan": ADDRESS} prints the TCP ports of the address that accept a connection. {"send": [ADDRESS, PORT, [TEXT, ...]]}
prints the first line of the answer to each text, sent on a connection of its own.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import sys

AT_ONCE = 512
WITHIN = 10.0  # seconds for one answer


def scan(address: str) -> list[int]:
    """Ports from 1 to 65535 that accept."""
    found, ports, polled = [], iter(range(1, 65_536)), select.poll()
    trying: dict[int, tuple[socket.socket, int]] = {}
    left = True
    while left or trying:
        while left and len(trying) < AT_ONCE:
            port = next(ports, None)
            if port is None:
                left = False
                break
            probe = socket.socket()
            probe.setblocking(False)
            if probe.connect_ex((address, port)) == errno.EINPROGRESS:
                trying[probe.fileno()] = probe, port
                polled.register(probe, select.POLLOUT)
            else:
                probe.close()  # refused at once
        for descriptor, _ in polled.poll(1000 * WITHIN):
            probe, port = trying.pop(descriptor)
            polled.unregister(descriptor)
            if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                found.append(port)
            probe.close()
    return found


def first_line(address: str, port: int, text: str) -> str:
    with socket.create_connection((address, port), WITHIN) as sock:
        sock.sendall(text.encode("latin-1"))
        with sock.makefile("rb") as answer:
            return answer.readline().decode("latin-1").strip()


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if "scan" in asked:
        print(json.dumps(scan(asked["scan"])))
    else:
        host, number, texts = asked["send"]
        print(json.dumps([first_line(host, number, text) for text in texts]))
