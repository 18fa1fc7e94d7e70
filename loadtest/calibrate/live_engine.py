"""Client of a live engine that is calibrated: over its API alone, each request a stream whose tokens are timed.

Everything it can do wrong ends here, in one line that says whose fault it is and what to do.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
from collections.abc import Mapping, Sequence
from itertools import accumulate

from gateway.shared.vllm.answers import CACHE, AnswerError, capacity_of, series_of
from loadtest.calibrate.observations import EngineLimits, ObservedRequest
from loadtest.clients.answer import Answer
from loadtest.clients.target_metrics import page
from loadtest.clients.targets import Address, Server, models_of
from loadtest.engine.sequence import BLOCK
from loadtest.load.prompts import PATHS, Route, Text, body_of, completion_of, json_text, message

PATIENCE = 60.0  # seconds for one answer
ASKED = 10.0  # seconds for a page
MOST_TOGETHER = 1.5  # tokens in an event, of a lone request; one that is behind sends what came meanwhile in one
WARM = 8  # tokens of an answer
SAID = 300  # characters of an engine's own words


class CalibrateError(Exception):
    """A mistake of a person, or an engine that cannot be calibrated; says what and where. `unknown`: it knows no such
    route."""

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class Live:
    """An engine at an address. Prompts are random words, so that none is ever cached."""

    def __init__(
        self, address: Address, tls: ssl.SSLContext | None, headers: Mapping[bytes, bytes], rng: random.Random
    ) -> None:
        self.name = f"{'https' if address.tls else 'http'}://{address.name}" if not address.unix else address.unix
        self._address = address
        self._server = Server(address, tls)
        self._headers = b"".join(b"%b: %b\r\n" % field for field in headers.items())
        self._model = b""
        self._route: Route = "completions"  # chat where it has none: there vLLM sends nothing for a token without text
        self._rng = rng
        self._text = Text(rng)
        self._template = 0.0  # tokens of a prompt of no words
        self._per_word = 1.0

    def close(self) -> None:
        """No connection is left open."""
        self._server.close()

    async def told(self) -> tuple[tuple[str, ...], EngineLimits]:
        """Names of its models, and the limits that its pages tell. Raises CalibrateError where no models are listed."""
        body, problem = await page(self._server, self._request(b"GET", b"/v1/models"), patience=ASKED)
        if problem:
            raise CalibrateError(f"{self.name}: /v1/models: {problem}; {_remedy(problem)}")
        try:
            models = models_of(body)
        except ValueError:
            raise CalibrateError(
                f"{self.name}: /v1/models is no list of models: is this an OpenAI-compatible server?"
            ) from None
        metrics, _ = await page(self._server, self._request(b"GET", b"/metrics"), patience=ASKED)
        lengths = [model.max_model_len or 0 for model in models]
        limits = EngineLimits(max_model_len=max(lengths, default=0), num_gpu_blocks=_blocks(metrics))
        return tuple(model.id for model in models), limits

    async def meet(self, model: str) -> None:
        """Learn how long words are for its tokenizer, and warm it up. Raises CalibrateError."""
        self._model = json_text(model)
        try:
            await self._ask(16, WARM)
        except CalibrateError as error:
            if not error.unknown:
                raise
            self._route = "chat"
        fewest = math.inf
        for _ in range(3):
            short = await self._ask(16, WARM)
            long = await self._ask(144, WARM)
            fewest = min(fewest, short.together, long.together)
        if fewest > MOST_TOGETHER:
            raise CalibrateError(
                f"{self.name} sends {fewest:.1f} tokens in an event: tokens that come together cannot be timed "
                "(vLLM: --stream-interval 1)"
            )
        self._per_word = (long.prompt - short.prompt) / 128
        self._template = short.prompt - 16 * self._per_word
        if self._per_word <= 0.0:
            raise CalibrateError(
                f"{self.name} counts {short.prompt} tokens in 16 words and {long.prompt} in 144: its usage is wrong"
            )

    async def ask(self, prompt: int, output: int) -> ObservedRequest:
        """Send a request of about so many tokens, for exactly so many. Raises CalibrateError."""
        return await self._ask(max(1, round((prompt - self._template) / self._per_word)), output)

    async def together(self, sizes: Sequence[tuple[int, int]]) -> list[ObservedRequest]:
        """Requests sent at once, answered in their order here."""
        asked = [asyncio.ensure_future(self.ask(prompt, output)) for prompt, output in sizes]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()

    async def _ask(self, words: int, output: int) -> ObservedRequest:
        text = self._text.cut(words, self._rng)
        if self._route == "chat":
            body = body_of(message(b"user", text), output, model=self._model, ignore_eos=True)
        else:
            body = completion_of(text, output, model=self._model, ignore_eos=True)
        answer = Answer(expected="stream")
        exchange = self._server.send(self._request(b"POST", PATHS[self._route], body), answer)
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.shield(exchange.over)
        except TimeoutError:
            answer.timed_out = True
        finally:
            if not exchange.over.done():
                exchange.failed("")
        self._server.done(exchange)
        self._check(answer, output)
        times = list(accumulate(answer.gaps, initial=answer.first_event))
        if len(times) > output:  # the event with the role came with the first token's
            del times[1]
        together = (output - 1) / (len(times) - 1) if len(times) > 1 else float(output)
        computed = answer.prompt_tokens - answer.cached_tokens
        return ObservedRequest(computed, answer.prompt_tokens, answer.sent, tuple(times), together)

    def _check(self, answer: Answer, output: int) -> None:
        outcome, name = answer.outcome, self.name
        if outcome == "timed_out":
            raise CalibrateError(f"{name}: {answer.why} within {PATIENCE:.0f} s: is it overloaded, or asleep?")
        if outcome == "garbled":
            raise CalibrateError(f"{name} does not stream ({answer.why}): latencies of tokens cannot be seen")
        if outcome != "ok":
            own = " ".join(answer.error.split())[:SAID] if answer.status else answer.why
            status = f"{answer.status} " if answer.status else ""
            raise CalibrateError(
                f"{name}: {status}{outcome}: {own or answer.why}; {_remedy(str(answer.status or own))}",
                unknown=answer.status in (404, 405, 501),
            )
        if not answer.prompt_tokens:
            raise CalibrateError(
                f"{name} ends streams without a usage: it must know stream_options.include_usage, for prompts are "
                "counted by it"
            )
        if answer.completion_tokens != output:
            raise CalibrateError(
                f"{name} answered with {answer.completion_tokens} tokens where {output} were asked for: it must know "
                "vLLM's ignore_eos"
            )

    def _request(self, method: bytes, path: bytes, body: bytes = b"") -> bytes:
        headers = self._headers + b"content-type: application/json\r\n"
        return self._address.request(method, path, headers, body)


def _blocks(metrics: bytes) -> int:
    """The KV cache of the first engine core, in blocks of 16 tokens; 0: it is not told."""
    try:
        return (capacity_of(series_of(metrics, frozenset((CACHE,))).get(CACHE, [])[:1]) or 0) // BLOCK
    except AnswerError:
        return 0


def _remedy(said: str) -> str:
    if "401" in said or "403" in said:
        return "give its key with --key-env"
    if "404" in said:
        return "is the URL right, without /v1, and --model one of its models?"
    if "400" in said or "422" in said:
        return "it must take chat completions with stream, stream_options and vLLM's ignore_eos"
    if "429" in said or "503" in said:
        return "it must take what is sent: calibrate the engine itself, idle, not what stands before it"
    if said[:1] == "5":
        return "the fault is the engine's: its log says more"
    return "is it running there, and reachable from here?"
