"""Frames: a length in four bytes, then a MessagePack array of messages. Strict, and bounded both ways.

The messages of one turn of the event loop share a frame. What is too long, is no MessagePack, or is no message that
this side takes, is a FrameError; nothing of that frame is then used, since it is read whole before any of it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from gateway.frames.messages import FromDecider, FromRelay, Message

MOST_FROM_RELAY = 64 * 1024**2  # bytes of a frame; a relay's counts have 300 of each route, class, model and outcome
MOST_FROM_DECIDER = 64 * 1024**2  # a policy may have 100,000 keys
FULL = 128 * 1024  # bytes after which the next message begins another frame: of fewer than 65,536, none under 3 bytes

_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">IBH")  # length, MessagePack's array of 16 bits, messages
_ARRAY = 0xDC
T = TypeVar("T")
_FROM_RELAY = msgspec.msgpack.Decoder(list[FromRelay])
_FROM_DECIDER = msgspec.msgpack.Decoder(list[FromDecider])


def from_relay() -> FrameReader[FromRelay]:
    """The decider's reader of one relay's frames."""
    return FrameReader(_FROM_RELAY, MOST_FROM_RELAY)


def from_decider() -> FrameReader[FromDecider]:
    """A relay's reader of its decider's frames."""
    return FrameReader(_FROM_DECIDER, MOST_FROM_DECIDER)


class FrameError(Exception):
    """Bytes that no process of ours would send. The message is for the operator."""


class FrameWriter:
    """Gathers messages; `take` gives the bytes of those gathered since the last time."""

    __slots__ = ("_buffer", "_count", "_done", "_encode")

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode_into
        self._done: list[bytes] = []  # frames that are full
        self._buffer = bytearray(_HEAD.size)
        self._count = 0

    def add(self, message: Message) -> None:
        buffer = self._buffer
        self._encode(message, buffer, -1)
        self._count += 1
        if len(buffer) > FULL:
            self._done.append(self._frame())

    def take(self) -> bytes:
        last = self._frame() if self._count else b""
        if not self._done:
            return last
        done, self._done = self._done, []
        return b"".join((*done, last))

    def _frame(self) -> bytes:
        buffer = self._buffer
        _HEAD.pack_into(buffer, 0, len(buffer) - _LENGTH.size, _ARRAY, self._count)
        self._buffer, self._count = bytearray(_HEAD.size), 0
        return bytes(buffer)


class FrameReader(Generic[T]):
    """Bytes in, as they come; messages out, a frame's at a time. `most`: bytes of a frame."""

    __slots__ = ("_buffer", "_most", "_read")

    def __init__(self, read: msgspec.msgpack.Decoder[list[T]], most: int) -> None:
        self._buffer = bytearray()
        self._most = most
        self._read = read.decode

    def feed(self, data: bytes) -> Iterator[list[T]]:
        """Yield the messages of each frame that is whole now. Raises FrameError."""
        if not self._buffer and len(data) > _LENGTH.size and self._wanted(data) == len(data):  # as most come
            yield self._messages(memoryview(data)[_LENGTH.size :])
            return
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted(self._buffer):
                return
            data, self._buffer = bytes(self._buffer), bytearray()
        view, at = memoryview(data), 0
        while len(view) - at >= (end := self._wanted(view[at:])):
            yield self._messages(view[at + _LENGTH.size : at + end])
            at += end
        self._buffer += view[at:]

    def _wanted(self, data: bytes | bytearray | memoryview) -> int:
        """Bytes of the frame that begins here; of its length, where that is not whole. Raises FrameError."""
        if len(data) < _LENGTH.size:
            return _LENGTH.size + 1  # no frame is empty
        (length,) = _LENGTH.unpack_from(data)
        if not 0 < length <= self._most:
            raise FrameError(f"a frame of {length} bytes, where 1 to {self._most} are taken")
        return int(length) + _LENGTH.size

    def _messages(self, payload: memoryview) -> list[T]:
        try:
            return self._read(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"no frame of ours: {error}") from error
