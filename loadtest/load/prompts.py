"""Texts and bodies of requests.

A token of the simulated tokenizer is four bytes (`engine/tokens.py`), and so is a word here, with the space before it.
Large vocabularies have each as one token (looked up: Mistral's Tekken of 131,072, and SentencePiece of 32,000, which is
Llama 2's size), so a prompt is as long for a real engine as for a simulated one, but for its chat template.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from loadtest.engine.tokens import BYTES, header

Route = Literal["chat", "completions", "embeddings", "rerank"]
PATHS: dict[str, bytes] = {
    "chat": b"/v1/chat/completions",
    "completions": b"/v1/completions",
    "embeddings": b"/v1/embeddings",
    "rerank": b"/v1/rerank",
}
HEADER = len(header("user")) // BYTES  # tokens that a chat template puts before each message
WORDS = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old see two "
    "way who did its let put say she too use big boy dog eat end far few got hot job key law lay lot low met net off "
    "yes act add age ago air art ask"
)  # 64 of them
POOL = 1 << 14  # words
MARK = 8  # words that tell texts apart: 48 bits

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbours land far apart


class Text:
    """Words to cut prompts from. Each text begins with a mark of its own, so none share blocks by chance."""

    def __init__(self, rng: random.Random) -> None:
        words = [f" {word}".encode() for word in WORDS.split()]
        self._pairs = [first + second for first in words for second in words]
        self._pool = b"".join(rng.choices(words, k=POOL))

    def cut(self, length: int, rng: random.Random) -> bytes:
        """`length` tokens of text, plain in JSON; a mark drawn from `rng`, and what follows in the pool."""
        return self._marked(rng.getrandbits(48), int(rng.random() * POOL), length)

    def block(self, name: int, length: int) -> bytes:
        """The text of a name, the same whenever it is asked for: its first `length` tokens."""
        mixed = (name * _GOLDEN) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 31)) * _GOLDEN) & 0xFFFFFFFFFFFFFFFF
        return self._marked(mixed >> 16, mixed % POOL, length)

    def _marked(self, mark: int, start: int, length: int) -> bytes:
        pairs = self._pairs
        head = pairs[mark >> 36] + pairs[mark >> 24 & 4095] + pairs[mark >> 12 & 4095] + pairs[mark & 4095]
        if length <= MARK:
            return head[: length * BYTES]
        rest = (length - MARK) * BYTES
        text = self._pool[start * BYTES : start * BYTES + rest]
        while len(text) < rest:
            text += self._pool[: rest - len(text)]
        return head + text


def message(role: bytes, text: bytes) -> bytes:
    """Message as JSON; `text` needs no escapes."""
    return b'{"role":"%b","content":"%b"}' % (role, text)


def body_of(
    messages: bytes, asked: int, *, model: bytes = b'"sim"', stream: bool = True, ignore_eos: bool = False
) -> bytes:
    """A chat request for `asked` tokens, which wants its usage. `messages`: the JSON array's inside; `model`: as JSON;
    `ignore_eos`: vLLM's word for an answer of exactly so many tokens."""
    return b'{"model":%b,"messages":[%b],%b}' % (model, messages, _generating(asked, stream, ignore_eos))


def completion_of(
    prompt: bytes, asked: int, *, model: bytes = b'"sim"', stream: bool = True, ignore_eos: bool = False
) -> bytes:
    """A text completion request, with the fields of `body_of`."""
    return b'{"model":%b,"prompt":"%b",%b}' % (model, prompt, _generating(asked, stream, ignore_eos))


def _generating(asked: int, stream: bool, ignore_eos: bool) -> bytes:
    fields = b'"max_tokens":%d,' % asked
    if ignore_eos:
        fields += b'"ignore_eos":true,'
    return fields + (b'"stream":true,"stream_options":{"include_usage":true}' if stream else b'"stream":false')


def embedding_of(texts: list[bytes], *, model: bytes = b'"sim"') -> bytes:
    """A request for the vectors of some texts."""
    return b'{"model":%b,"input":["%b"]}' % (model, b'","'.join(texts))


def rerank_of(query: bytes, documents: list[bytes], *, model: bytes = b'"sim"') -> bytes:
    """A request to order documents by a query."""
    return b'{"model":%b,"query":"%b","documents":["%b"]}' % (model, query, b'","'.join(documents))


def json_text(text: str) -> bytes:
    """A name from a file as JSON, quotes and all."""
    return msgspec.json.encode(text)
