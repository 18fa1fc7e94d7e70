"""Addresses in the sidecar's file: the control API's, and the pool of ports or sockets for engines.

A Struct with `parse` is written as text in the file. `parse` and `str` are each other's reverse.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import ClassVar

import msgspec

LOOPBACK = "127.0.0.1"
LONGEST_SOCKET = 107  # bytes of a unix socket's path
SUFFIX = ".sock"
TRANSFER_PORTS = range(5600, 5700)  # vLLM's default is the first
SOCKETS = "sidecar-engines"  # the folder of engines' sockets, where nothing else is asked for
ELSEWHERE = "/tmp/weir-engines-"  # noqa: S108 # such folders are made for one user, and refused if they are another's

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]"


def own_sockets(folder: str, profiles: Iterable[str]) -> AddressPool:
    """The pool of sockets of a sidecar whose file is in `folder`: beside it, or in /tmp where paths get too long."""
    beside = AddressPool(sockets=f"{folder.rstrip('/')}/{SOCKETS}")
    if all(len(str(beside.on_socket(name).uds).encode()) <= LONGEST_SOCKET for name in profiles):
        return beside
    return AddressPool(sockets=ELSEWHERE + hashlib.sha256(folder.encode()).hexdigest()[:8])


class Address(msgspec.Struct, frozen=True):
    """`HOST:PORT`, the host of IPv6 in brackets."""

    pattern: ClassVar[str] = rf"({_HOST}):([0-9]{{1,5}})"
    what: ClassVar[str] = "HOST:PORT such as 127.0.0.1:8002"

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """The address; None where the text is not one."""
        match = re.fullmatch(cls.pattern, text)
        return cls(match[1], int(match[2])) if match and int(match[2]) < 65_536 else None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class EngineAddress(msgspec.Struct, frozen=True):
    """Address of one engine: on `port` of LOOPBACK, or on the unix socket `uds`."""

    port: int = 0
    uds: str | None = None
    transfer_port: int = 0  # of LOOPBACK, by which engines find each other's KV caches; 0: it exchanges none

    @property
    def url(self) -> str:
        """URL by which gateways reach the engine."""
        return f"http://{LOOPBACK}:{self.port}" if self.uds is None else f"unix://{self.uds}"


class AddressPool(msgspec.Struct, frozen=True):
    """The pool that engines listen on: the ports `first` to `last` of LOOPBACK, or sockets in the folder `sockets`.
    Other machines reach engines by the relay."""

    pattern: ClassVar[str] = r"(?:127\.0\.0\.1:)?([0-9]{1,5})-([0-9]{1,5})|unix:(/[^\x00-\x20\x7f?#]{0,99})"
    what: ClassVar[str] = "ports of 127.0.0.1 such as 8100-8199, or a folder for sockets such as unix:/run/weir"

    first: int = 8100
    last: int = 8199
    sockets: str | None = None

    @classmethod
    def parse(cls, text: str) -> AddressPool | None:
        """The pool; None where the text is none."""
        match = re.fullmatch(cls.pattern, text)
        if match is None:
            return None
        if match[3] is not None:
            return cls(sockets=match[3].rstrip("/") or "/")
        first, last = int(match[1]), int(match[2])
        return cls(first, last) if 0 < first <= last < 65_536 else None

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.sockets is None else f"unix:{self.sockets}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports in order; none where engines listen on sockets."""
        return () if self.sockets is not None else tuple(range(self.first, self.last + 1))

    def on_socket(self, profile: str) -> EngineAddress:
        """Address of the engine of a profile if the pool is a folder of sockets."""
        return EngineAddress(uds=f"{(self.sockets or '').rstrip('/')}/{profile}{SUFFIX}")
