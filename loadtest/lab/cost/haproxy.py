"""HAProxy as a server under test: by itself, and with calls that a gateway decides (deploy/haproxy)."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from loadtest.lab.operate.debian import HAPROXY, NoProgram

EXAMPLE = Path(__file__).parents[3] / "deploy/haproxy"
DECIDED = "haproxy, decided"
PLAIN = """global
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen clients
    bind 127.0.0.1:{port}
    server engine 127.0.0.1:{engine}
"""


def commands(folder: Path, engine: int) -> dict[str, Callable[[int], list[str]]]:
    """Commands by name; none where HAProxy is not installed. `engine`: the engine's port."""
    try:
        program = HAPROXY.command()
    except NoProgram:
        return {}

    def plain(port: int) -> list[str]:
        config = folder / f"haproxy-{port}.cfg"
        config.write_text(PLAIN.format(port=port, engine=engine))
        return [*program, "-db", "-f", str(config)]

    def deciding(port: int) -> list[str]:
        """HAProxy, and as its child the gateway that decides."""
        socket, config = folder / f"decide-{port}", folder / f"haproxy-{port}.cfg"
        changes = {
            "bind 127.0.0.1:8080": f"bind 127.0.0.1:{port}",
            "/etc/haproxy/weir.lua": str(EXAMPLE / "weir.lua"),
            "unix@/run/weir/decide.sock": f"unix@{socket}",
        }
        text = (EXAMPLE / "haproxy.cfg").read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        config.write_text(text)
        gateway = [
            *(
                sys.executable,
                "-m",
                "gateway.cli",
                "serve",
                "--engine",
                f"http://127.0.0.1:{engine}",
                "--log",
                os.devnull,
            ),
            *("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--decide", f"unix:{socket}"),
        ]
        haproxy = [*program, "-db", "-f", str(config)]
        return ["sh", "-c", f"{shlex.join(gateway)} & exec {shlex.join(haproxy)}"]

    return {"haproxy": plain, DECIDED: deciding}
