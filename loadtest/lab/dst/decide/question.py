"""Request to a decide port in memory, and its answer, as a proxy reads it."""

from __future__ import annotations

from collections.abc import Callable

Fields = dict[bytes, bytes]
Hear = Callable[[int, Fields, bytes], None]


class Question:
    """Connection of one request: the transport a Responder writes to, and its owner. `hear` gets the whole answer."""

    write_paused = False

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._written = bytearray()

    def write(self, data: bytes) -> None:
        self._written += data

    def keeps_alive(self, request: object) -> bool:
        return True

    def answered(self, close: bool) -> None:
        head, _, body = bytes(self._written).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        fields = {name.lower(): value for name, _, value in [line.partition(b": ") for line in lines[1:]]}
        self._hear(int(lines[0][9:12]), fields, body)

    def abandoned(self) -> None:
        """Do nothing: no client hears of it."""
