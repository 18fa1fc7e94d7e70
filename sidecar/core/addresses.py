"""Addresses in the sidecar's file: the control API's, and the pool of ports or sockets for engines.

A Struct with `parse` is written as text in the file. `parse` and `str` are each other's reverse.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from gateway.shared.addresses import EVERY_INTERFACE

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
    """Address of one engine: on `port` of `host`, or on the unix socket `uds`."""

    host: str = LOOPBACK
    port: int = 0
    uds: str | None = None
    transfer_port: int = 0  # of LOOPBACK, by which engines find each other's KV caches; 0: it exchanges none

    @property
    def url(self) -> str:
        """URL by which gateways reach the engine."""
        return f"http://{self.host}:{self.port}" if self.uds is None else f"unix://{self.uds}"


class AddressPool(msgspec.Struct, frozen=True):
    """The pool that engines listen on: the ports `first` to `last` of `host`, or sockets in the folder `sockets`."""

    pattern: ClassVar[str] = rf"(?:({_HOST}):)?([0-9]{{1,5}})-([0-9]{{1,5}})|unix:(/[^\x00-\x20\x7f?#]{{0,99}})"
    what: ClassVar[str] = (
        "ports such as 8100-8199 or 10.0.0.11:8100-8199, or a folder for sockets such as unix:/run/weir"
    )

    host: str = LOOPBACK
    first: int = 8100
    last: int = 8199
    sockets: str | None = None

    @classmethod
    def parse(cls, text: str) -> AddressPool | None:
        """The pool; None where the text is none. 0.0.0.0 is none: it is no address that a gateway could call."""
        match = re.fullmatch(cls.pattern, text)
        if match is None:
            return None
        if match[4] is not None:
            return cls(sockets=match[4].rstrip("/") or "/")
        host, first, last = match[1] or LOOPBACK, int(match[2]), int(match[3])
        good = 0 < first <= last < 65_536 and host not in EVERY_INTERFACE
        return cls(host, first, last) if good else None

    def __str__(self) -> str:
        if self.sockets is not None:
            return f"unix:{self.sockets}"
        return f"{'' if self.host == LOOPBACK else self.host + ':'}{self.first}-{self.last}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports in order; none where engines listen on sockets."""
        return () if self.sockets is not None else tuple(range(self.first, self.last + 1))

    def on_socket(self, profile: str) -> EngineAddress:
        """Address of the engine of a profile if the pool is a folder of sockets."""
        return EngineAddress(uds=f"{(self.sockets or '').rstrip('/')}/{profile}{SUFFIX}")

    def on_port(self, port: int) -> EngineAddress:
        """Address of an engine that has been given one of `ports`."""
        return EngineAddress(host=self.host, port=port)
