"""Generation under way: the sequences of one request, and the pieces of its answer as they get on.

An API module parses its body and builds the prompt (`tokens.py`). `Generation` owns the sequences and the connection. A
`Form` writes the answer as the API has it. The server's driver tells each `Choice` when its sequence wrote a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loadtest.engine import tokens
from loadtest.engine.api.checks import BROKEN, ApiError, Limits
from loadtest.engine.api.http import Connection
from loadtest.engine.sequence import Sequence


class Choice:
    """Sequence of a request and the words it will say."""

    __slots__ = ("answer", "index", "reason", "sent", "sequence", "words")

    def __init__(self, index: int, words: list[bytes], sequence: Sequence, answer: Generation) -> None:
        self.index = index
        self.words = words
        self.sent = 0
        self.reason = sequence.reason
        self.sequence = sequence
        self.answer = answer
        sequence.owner = self


class Form(Protocol):
    """Form of an API's answer. Events are complete SSE events, framed as HTTP chunks. `model`: as it was asked."""

    model: str

    def opening(self, generation: Generation) -> bytes: ...
    def delta(self, choice: Choice, word: bytes) -> bytes: ...
    def last(self, choice: Choice, word: bytes) -> bytes: ...
    def closing(self, generation: Generation) -> bytes: ...
    def failure(self, error: ApiError) -> bytes: ...
    def whole(self, generation: Generation) -> bytes: ...


class Generation:
    """Generating request under way. `prompt` and `completion` are its tokens; `details`: None where not told."""

    def __init__(self, connection: Connection, form: Form, *, stream: bool, prompt: int, limits: Limits) -> None:
        self.connection = connection
        self.form = form
        self.stream = stream
        self.prompt = prompt
        self.limits = limits
        self.choices: list[Choice] = []
        self.left = 0
        self.prelude = b""  # events that a stream begins with before its prompt is read
        self._opened = False
        self.garbled = False
        self.told: Callable[[bytes], bytes] | None = None  # adds to a whole answer where its KV cache is kept

    def add(self, sequence: Sequence, words: list[bytes]) -> None:
        """Add a choice, in the order of their indices."""
        self.choices.append(Choice(len(self.choices), words, sequence, self))
        self.left += 1

    @property
    def completion(self) -> int:
        return sum(choice.sent for choice in self.choices)

    @property
    def cached(self) -> int | None:
        """Prompt tokens found in the cache; None where the server does not tell."""
        return max(0, self.choices[0].sequence.cached) if self.limits.prompt_details else None

    def begin(self) -> None:
        """Send what a stream begins with."""
        self.connection.start()
        self.connection.write(self.prelude)

    def token(self, choice: Choice) -> None:
        """The sequence wrote a token and goes on."""
        word = choice.words[choice.sent]
        choice.sent += 1
        if self.stream:
            self._open()
            self.connection.write(self.form.delta(choice, tokens.GARBAGE if self.garbled else word))

    def finished(self, choice: Choice) -> None:
        """The sequence wrote its last token, or its text has been read, of which nothing is written."""
        word = choice.words[choice.sent] if choice.words else b""
        choice.sent += 1
        self._end(choice, word)

    def aborted(self, choice: Choice) -> None:
        """The engine dropped the sequence: it is going to sleep. The choice ends where it is."""
        if not choice.words:  # half of a text is nothing
            if self.left:
                self.failed(ApiError(500, "The request was aborted.", type=BROKEN))
            return
        choice.reason = "abort"
        self._end(choice, b"")

    def failed(self, error: ApiError) -> None:
        """The engine died under it: an error, as an event where the answer has begun."""
        self.left = 0
        if self.stream:
            self.connection.write(self.form.failure(error))
            self.connection.end()
        else:
            self.connection.send(error.status, error.body())

    def text(self, choice: Choice) -> str:
        """Words that the choice has said so far."""
        if self.garbled:
            return (tokens.GARBAGE * choice.sent).decode()
        return b"".join(choice.words[: choice.sent]).decode()

    def _end(self, choice: Choice, word: bytes) -> None:
        self.left -= 1
        if self.stream:
            self._open()
            self.connection.write(self.form.last(choice, tokens.GARBAGE if self.garbled and word else word))
            if self.left == 0 and not self.connection.closed:
                self.connection.write(self.form.closing(self))
                self.connection.end()
        elif self.left == 0:
            whole = self.form.whole(self)
            self.connection.send(200, whole if self.told is None else self.told(whole))

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self.connection.write(self.form.opening(self))


class SharedFields(Protocol):
    """Fields that the bodies of all APIs have."""

    min_tokens: int
    ignore_eos: bool
    priority: int
    cache_salt: str | None


def spawn(
    generation: Generation,
    data: bytes,
    asked: SharedFields,
    *,
    most: int,
    copies: int = 1,
    said: list[bytes] | None = None,
) -> Generation:
    """Give the generation `copies` sequences over one prompt; the generation. `said`: exactly these words instead of
    free ones."""
    prompt, salt = tokens.count(data), (generation.form.model, asked.cache_salt)
    for _ in range(copies):
        index = len(generation.choices)
        if said is None:
            length, reason = tokens.output_length(
                data, index, most, least=asked.min_tokens, ignore_end=asked.ignore_eos
            )
            words = tokens.words(data, index, length)
            if reason == "stop":
                words[-1] = b""  # the end token is counted and says nothing
        else:
            words = [*said, b""][:most]
            reason = "stop" if len(words) > len(said) else "length"
        hashes = tokens.block_hashes(data + b"".join(words), salt)
        sequence = Sequence(prompt, len(words), hashes=hashes, reason=reason, priority=asked.priority)
        generation.add(sequence, words)
    return generation
