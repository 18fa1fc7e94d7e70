"""Decoder of vLLM's KV cache events (`--kv-events-config`), in all their shapes.

Only the fields that `core.engines` needs are decoded. Tokens, by far the most of a message, are skipped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

LONGEST_PATH = 107  # bytes of a unix socket's

Hash = int | bytes
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=65_536)]  # tokens


class EventsError(ValueError):
    """A batch of events that cannot be read; says why."""


def address_fault(url: str) -> str | None:
    """Describe what is expected instead of a policy's address that cannot work; None if it can. ZeroMQ reports such an
    address late or never."""
    scheme, _, place = url.partition("://")
    if scheme == "tcp" and not 1 <= int(place.rpartition(":")[2]) <= 65_535:
        return "a port from 1 to 65535"
    if scheme == "ipc" and len(place.encode()) > LONGEST_PATH:
        return f"a path of at most {LONGEST_PATH} bytes"
    return None


# -- the wire -------------------------------------------------------------------------------------------------------


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Full blocks that can be found from now on. Other fields of the event are not even decoded."""

    block_hashes: list[Hash]
    block_size: BlockSize
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Blocks that are not cached any more."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """The cache is empty: reset, or put to sleep."""


# Fields of an event by position, as vLLM before 0.24 tells them; later ones were appended.
POSITIONS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Changes that one step of the engine made to its cache, as a map. `ts`: by the engine's clock, not the
    gateway's."""

    ts: float
    events: list[msgspec.Raw]


class BatchArray(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The same by position."""

    ts: float
    events: list[msgspec.Raw]


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Kind(msgspec.Struct, frozen=True, gc=False):
    """An event of which only the name is read."""

    type: str


_BATCH = msgspec.msgpack.Decoder(Batch)
_BATCH_ARRAY = msgspec.msgpack.Decoder(BatchArray)
_EVENT: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_KIND = msgspec.msgpack.Decoder(Kind)
_NAME = msgspec.msgpack.Decoder(str)
_PARTS = msgspec.msgpack.Decoder(list[msgspec.Raw])


def events_from(payload: bytes) -> list[Event]:
    """The events of one message, of vLLM 0.9 to 0.33: batches and events are arrays, or maps (events since 0.24).

    Kinds of events nobody knows here are left out. Raises EventsError for what is none, or is broken.
    """
    try:
        batch = (_BATCH if _is_map(payload) else _BATCH_ARRAY).decode(payload)
        return [event for raw in batch.events if (event := _event(raw)) is not None]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EventsError(f"events that cannot be read: {error}") from error


def _event(raw: msgspec.Raw) -> Event | None:
    told = raw if _is_map(raw) else _as_map(raw)
    try:
        return _EVENT.decode(told)
    except msgspec.ValidationError:
        if _KIND.decode(told).type in POSITIONS:
            raise
        return None


def _as_map(raw: msgspec.Raw) -> bytes:
    """An event whose fields are told by position, with their names."""
    name, *values = _PARTS.decode(raw)
    fields = zip(POSITIONS.get(_NAME.decode(name), ()), values, strict=False)
    return msgspec.msgpack.encode({"type": name, **dict(fields)})


def _is_map(data: bytes | msgspec.Raw) -> bool:
    first = memoryview(data)[0] if data else 0
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)
