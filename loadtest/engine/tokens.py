"""Stand-in for a tokenizer and for a model's text.

A token is four bytes of the text written in ASCII, anything else escaped as Python writes it: four letters of English,
two thirds of a Chinese character (1.5 tokens each), 2.5 tokens an emoji. Every message is rendered behind a header of
16 bytes (4 tokens) that names its role, and padded to a whole token; a generated token is a word of four bytes. So the
rendering of a conversation goes on exactly where the answer before it ended, and shares its KV blocks.

Nothing here depends on the engine: the same request has the same answer everywhere, which is what a canary needs.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Iterable
from itertools import accumulate
from statistics import NormalDist
from typing import Any

import msgspec

from loadtest.engine.sequence import BLOCK

BYTES = 4  # of a token
MEDIA_TOKENS = 256  # an image, a sound: what a small tile costs; its bytes are not looked at
MEDIAN_OUTPUT = 129  # tokens; the conversation trace of Azure's LLM inference data set, 2023
SIGMA_OUTPUT = 1.0  # of the logarithm
MOST_OUTPUT = 4096

WORDS: tuple[bytes, ...] = tuple(
    f" {first}{vowel}{last}".encode() for first in "bdfgklmnprstvwyz" for vowel in "aeio" for last in "nrst"
)
PLAIN = frozenset(WORDS)  # they need no escapes in JSON; words of structured answers may
GARBAGE = b" #!~"  # what weights that were never written say
_LENGTHS: tuple[int, ...] = tuple(
    min(MOST_OUTPUT, max(1, round(MEDIAN_OUTPUT * math.exp(SIGMA_OUTPUT * NormalDist().inv_cdf((step + 0.5) / 1024)))))
    for step in range(1024)
)
_encode = msgspec.json.Encoder().encode
_BLOCKS = re.compile(b".{%d}" % (BLOCK * BYTES), re.DOTALL)


def units(text: str) -> bytes:
    """The text as the tokenizer sees it, padded to whole tokens."""
    data = text.encode("ascii", "backslashreplace")
    return data + b"\0" * (-len(data) % BYTES)


def header(role: str) -> bytes:
    """The 16 bytes in front of a message."""
    return b"<|%-12.12s|>" % role.encode("ascii", "replace")


def content(value: Any) -> bytes:
    """A message's content as tokens: a string, or a list of parts of which text is read and the rest is counted."""
    if value is None:
        return b""
    if isinstance(value, str):
        return units(value)
    if not isinstance(value, list):
        return units(_encode(value).decode())
    return b"".join(map(_part, value))


def _part(part: Any) -> bytes:
    if isinstance(part, str):
        return units(part)
    if isinstance(part, dict):
        text = part.get("text")
        if isinstance(text, str):
            return units(text)
        kind = part.get("type")
        if kind in ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "file"):
            # What it shows matters only for telling two of them apart.
            return (b"%08x" % zlib.crc32(_encode(part))) * (MEDIA_TOKENS * BYTES // 8)
    return units(_encode(part).decode())


def chat(messages: Iterable[dict[str, Any]], *, tools: Any = None, system: Any = None) -> bytes:
    """A conversation as tokens, tools and system prompt first, ending with the header of the answer."""
    pieces = []
    if tools:
        pieces += [header("tools"), units(_encode(tools).decode())]
    if system:
        pieces += [header("system"), content(system)]
    for message in messages:
        pieces += [header(str(message.get("role", "user"))), content(message.get("content"))]
        if message.get("tool_calls"):
            pieces.append(units(_encode(message["tool_calls"]).decode()))
    pieces.append(header("assistant"))
    return b"".join(pieces)


def ids(tokens: list[int]) -> bytes:
    """Token ids given by the client: one token each."""
    return b"".join((token & 0xFFFFFFFF).to_bytes(BYTES, "little") for token in tokens)


def count(data: bytes) -> int:
    """Tokens in rendered data."""
    return len(data) // BYTES


def block_hashes(data: bytes, salt: object) -> list[int]:
    """The chained hashes of the full blocks of `data`; `salt` keeps models and tenants apart. Local to the process."""
    # A sum of hashes that each know their place tells two beginnings apart as a chain does, and never leaves C.
    _, *hashes = accumulate(map(hash, enumerate(_BLOCKS.findall(data))), initial=hash(salt))
    return hashes


def natural_length(data: bytes, index: int) -> int:
    """Tokens, the end token included, at which choice `index` of this prompt would stop by itself: log-normal."""
    return _LENGTHS[zlib.crc32(data, index) % len(_LENGTHS)]


def output_length(data: bytes, index: int, most: int, *, least: int = 0, ignore_end: bool = False) -> tuple[int, str]:
    """Return the number of tokens of a choice, and why it ends there: "length" (`most` were allowed) or "stop".

    A choice stops at its natural length, which depends on the prompt alone; not before `least` tokens (`min_tokens`),
    and never by itself with `ignore_eos`.
    """
    natural = max(natural_length(data, index), least + 1)
    if ignore_end or natural > most:
        return most, "length"
    return natural, "stop"


def words(data: bytes, index: int, length: int) -> list[bytes]:
    """The `length` words choice `index` of this prompt says: four bytes each, plain in JSON."""
    draws = hashlib.shake_128(b"%08x%d" % (zlib.crc32(data), index)).digest(length)
    return [WORDS[draw] for draw in draws]
