"""Requests that calibration sends to an engine, in their order, and the observations they give.

1. Lone requests of several lengths, for the way in and the prompt: only their first tokens count.
2. So many at once, 1, 2, 4 ..., short and long ones, for a step with so many sequences and so much KV cache. Steps are
   seen while all of them decode and nothing else does; where fewer ran at once, that is `max_num_seqs`.
3. Prompts of more tokens than a step takes, beside one that decodes: how long it stands still is how large a step is.
4. Traffic, thin and dense: requests that come and go beside one that decodes, for what a server does meanwhile on the
   same cores, and for how long the way in is when others are under way too.
5. Bursts of short requests, for the server's one thread; and one of mixed ones, only to check what was fitted.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from statistics import median

import msgspec

from loadtest.calibrate.observations import Asks, Burst, EngineLimits, Observed, ObservedRequest, Tell, WorkRow
from loadtest.calibrate.steps import SLICE, between, decoding, largest, ran_at_once
from loadtest.engine.sequence import BLOCK

SHORT = 24  # tokens
LONG = 1024
LENGTHS = 8  # of lone prompts
SPREAD = 2048  # tokens of the longest of them: what vLLM takes in one step by default, at least
STEPS = 40  # of a cell, at least
MOST_ROUNDS = 20
READING = 0.02  # of the budget, for the prompts of a cell
AT_ONCE = (4, 16, 64, 256, 1024)  # are tried
FEW = 4  # at once, whatever the time
DEFAULT_AT_ONCE = 256  # vLLM's, where memory is not plenty
CACHE = 0.8  # of the KV cache, that may be filled: preemptions and what waits for blocks are no steps
DEFAULT_STEP = 2048  # vLLM's
MOST_STEP = 16_384  # tokens of the largest step that is looked for
BURST = 64
BESIDE = (2, 8, 32)  # requests at once, about, in traffic; each in its turn
PLACES = 0.75  # of a batch, that traffic fills at most
BUSY = 0.4  # of the time at most, with prompts
TURN = 0.1  # of traffic's time, for one of them
PARTS = {"prompts": 0.12, "decoding": 0.35, "steps": 0.1, "traffic": 0.3, "bursts": 0.13}  # of the budget


class Probe:
    """Observes one engine for about `budget` seconds."""

    def __init__(
        self, live: Asks, limits: EngineLimits, budget: float, rng: random.Random, tell: Tell,
        clock: Callable[[], float] = time.monotonic, longest: int = SPREAD,
    ) -> None:  # fmt: skip
        self._live = live
        self._clock = clock
        self._longest = longest
        self._limits = limits
        self._budget = budget
        self._rng = rng
        self._tell = tell
        self._began = clock()
        self._rows: list[WorkRow] = []
        self._jitters: list[float] = []
        self._notes: list[str] = []
        self._bursts: list[Burst] = []
        self._passing: list[Burst] = []
        self._prompt = 0.0  # seconds for a prompt token, about
        self._alone = 0.01  # seconds for a step with one sequence, as last seen
        self._ran = 1  # at once, as far as was tried
        self._way = 0.0  # of a first token beside its prompt, about

    async def run(self) -> Observed:
        """Everything. Raises CalibrateError."""
        await self._prompts()
        await self._decoding()
        await self._steps()
        await self._traffic()
        check = await self._saturate()
        self._tell(1.0, "fitting")
        return Observed(
            rows=self._rows, jitter=median(self._jitters) if self._jitters else 0.0, limits=self._limits,
            bursts=self._bursts, traffic=self._passing, check=check, notes=self._notes,
        )  # fmt: skip

    def _until(self, part: str) -> float:
        """Return the time at which a part that begins now has to end. Earlier parts may have overrun their own
        budget."""
        return self._clock() + self._budget * PARTS[part]

    def _say(self, what: str) -> None:
        self._tell(min(1.0, (self._clock() - self._began) / self._budget), what)

    async def _prompts(self) -> None:
        limits = self._limits
        largest = min(self._longest, limits.max_num_batched_tokens or SPREAD, int(0.9 * limits.max_model_len))
        ratio = (largest / SHORT) ** (1 / (LENGTHS - 1))
        lengths = [round(SHORT * ratio**number) for number in range(LENGTHS)]
        seen: list[ObservedRequest] = []
        end = self._until("prompts")
        rounds = 0
        while rounds < 2 or (self._clock() < end and rounds < 20):
            for length in self._rng.sample(lengths, LENGTHS):
                self._say(f"prompts of {SHORT} to {largest} tokens")
                seen.append(await self._live.ask(length, 1))
            rounds += 1
        self._rows += [WorkRow(one.first, 1.0, prompt=one.computed, pairs=one.pairs, ways=1.0) for one in seen]
        short = [one.first for one in seen if one.computed < 2 * SHORT] or [seen[0].first]
        longest = max(one.computed for one in seen)
        long = [one.first for one in seen if one.computed > 0.8 * longest]
        self._prompt = max(1e-9, (median(long) - median(short)) / longest)
        self._way = median(short)

    # -- decoding ---------------------------------------------------------------------------------------------------

    async def _decoding(self) -> None:
        end = self._until("decoding")
        await self._cell(1, SHORT)
        await self._most_at_once(self._clock() + 0.5 * (end - self._clock()))
        cells = list(self._cells())
        rounds = 0
        while rounds < MOST_ROUNDS and (not rounds or self._clock() < end):
            # What disturbs the engine for a while should disturb no one cell; but first those that cannot be missed.
            for at_once, length in cells if not rounds else self._rng.sample(cells, len(cells)):
                if self._clock() > end and (rounds or at_once > FEW):
                    break
                await self._cell(at_once, length)
            rounds += 1

    def _cells(self) -> Iterator[tuple[int, int]]:
        """Numbers of requests at once, and the lengths of their prompts."""
        limits = self._limits
        most = min(limits.max_num_seqs, max(FEW, self._ran))
        for at_once in sorted({most, *(1 << power for power in range(most.bit_length()))}):
            yield at_once, SHORT
            fits = int(CACHE * limits.num_gpu_blocks * BLOCK / at_once) - 2 * STEPS
            length = min(LONG, limits.max_model_len // 2, int(READING * self._budget / self._prompt / at_once), fits)
            if length > 4 * SHORT:
                yield at_once, length

    async def _most_at_once(self, end: float) -> None:
        """See how many run at once, by sending ever more until some of them wait; that is `max_num_seqs`."""
        known = self._limits.max_num_seqs
        for wanted in AT_ONCE:
            at_once = min(wanted, known or wanted)
            seen = await self._cell(at_once, SHORT, 2 * SLICE) if self._clock() < end else 0
            self._ran = max(self._ran, seen)
            if not seen or at_once == known:
                break
            if seen < at_once:
                self._limits = msgspec.structs.replace(self._limits, max_num_seqs=seen)
                return
        if not known:
            assumed = max(self._ran, DEFAULT_AT_ONCE)
            self._limits = msgspec.structs.replace(self._limits, max_num_seqs=assumed)
            self._notes.append(
                f"{self._ran} ran at once and none waited; that {assumed} can is only assumed: give --max-num-seqs"
            )

    async def _cell(self, at_once: int, length: int, steps: int = STEPS) -> int:
        """Send `at_once` requests of one length at once, for `steps` steps. Return how many of them ran at once; 0:
        they do not fit into the cache together, and nothing was sent."""
        limits = self._limits
        # Who is first writes on while the prompts of others are read, a token in each step.
        reading = at_once * (length * self._prompt + max(0.0, self._way - self._alone)) / self._alone
        fits = int(CACHE * limits.num_gpu_blocks * BLOCK / at_once) - length - SHORT
        output = min(steps + int(reading), limits.max_model_len - length - SHORT, fits)
        if output < 2 * SLICE:
            return 0
        self._say(f"{at_once} at once, prompts of {length} tokens")
        seen = await self._live.together([(length, output)] * at_once)
        most = ran_at_once(seen)
        rows, jitter = decoding(seen) if most == at_once else ([], 0.0)
        if rows:
            self._rows += rows
            self._jitters.append(jitter)
            if at_once == 1:
                self._alone = median(row.seconds for row in rows)
        return most

    # -- size of a step -----------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        limits, over = self._limits, self._until("steps")
        if limits.max_num_batched_tokens:
            return
        self._say("prompts of more tokens than a step takes")
        length = min(2 * LONG, limits.max_model_len // 2)
        wanted = min(MOST_STEP * 2.5, 0.5 * PARTS["steps"] * self._budget / self._prompt) / length
        count = max(2, min(round(wanted), limits.max_num_seqs - 1, int(CACHE * limits.num_gpu_blocks * BLOCK / length)))
        output = 2 * STEPS + int(min(2000.0, 2.0 * count * length * self._prompt / self._alone))
        output = min(output, limits.max_model_len - 2 * SHORT)
        for number in range(3):
            wait = (1 + number) * (self._way + SLICE * self._alone)
            beside, seen = await self._beside(output, wait, [(length, 1)] * count)
            begin, end = seen[0].sent, max(one.tokens[0] for one in seen)
            if (beside.tokens[0] < begin and end < beside.tokens[-1]) or self._clock() > over:
                break
        found = largest(beside, seen, self._alone)
        if not found:
            found = 1 << math.ceil(math.log2(max(DEFAULT_STEP, sum(one.computed for one in seen))))
            self._notes.append(f"that a step takes {found} tokens is only assumed: give --max-num-batched-tokens")
        found = max(found, limits.max_num_seqs)
        self._limits = msgspec.structs.replace(self._limits, max_num_batched_tokens=found)

    async def _beside(
        self, output: int, wait: float, sizes: Sequence[tuple[int, int]]
    ) -> tuple[ObservedRequest, list[ObservedRequest]]:
        """Observe a request that decodes, and requests that arrive `wait` seconds later."""
        decoding = asyncio.ensure_future(self._live.ask(SHORT, output))
        try:
            await asyncio.sleep(wait)
            seen = await self._live.together(sizes)
            return await decoding, seen
        finally:
            decoding.cancel()

    # -- traffic ------------------------------------------------------------------------------------------------------

    async def _traffic(self) -> None:
        limits, end = self._limits, self._until("traffic")
        most = max(2 * SHORT, min(self._longest, LONG // 2, limits.max_model_len // 4))
        reading = (SHORT + most) / 2 * self._prompt
        fill = cycle(min(at_once, max(1, int(PLACES * limits.max_num_seqs))) for at_once in BESIDE)
        turn = max(4 * SLICE * self._alone, TURN * (end - self._clock()))
        while end - self._clock() > turn / 2:
            at_once = next(fill)
            rate = min(at_once / (reading + STEPS * self._alone), BUSY / reading)
            self._say(f"{rate:.3g} a second, prompts of {SHORT} to {most} tokens")
            output = min(int(turn / self._alone / 1.5), limits.max_model_len - 2 * SHORT)
            beside, seen = await self._beside_traffic(output, rate, limits.max_num_seqs - 1, most)
            self._rows += between(beside, seen)
            self._passing.append(_burst([beside, *seen]))

    async def _beside_traffic(
        self, output: int, rate: float, places: int, most: int
    ) -> tuple[ObservedRequest, list[ObservedRequest]]:
        """Observe a request that decodes, and requests that arrive at `rate` until it ends. An arrival is skipped while
        all `places` are taken."""
        beside = asyncio.ensure_future(self._live.ask(SHORT, output))
        sent: list[asyncio.Future[ObservedRequest]] = []
        try:
            while not beside.done():
                if sum(not one.done() for one in sent) < places:
                    size = self._rng.randint(SHORT, most), self._rng.randint(2, 2 * STEPS)
                    sent.append(asyncio.ensure_future(self._live.ask(*size)))
                await asyncio.wait({beside}, timeout=self._rng.expovariate(rate))
            return await beside, list(await asyncio.gather(*sent))
        finally:
            for one in (beside, *sent):
                one.cancel()
            await asyncio.gather(beside, *sent, return_exceptions=True)

    # -- bursts -------------------------------------------------------------------------------------------------------

    async def _saturate(self) -> Burst:
        end, count = self._until("bursts"), min(BURST, self._limits.max_num_seqs, max(FEW, self._ran))
        while len(self._bursts) < 2 or (
            self._clock() < end - 0.5 * PARTS["bursts"] * self._budget and len(self._bursts) < 8
        ):
            self._say(f"{count} short ones at once")
            self._bursts.append(_burst(await self._live.together([(SHORT, 1)] * count)))
        limits = self._limits
        most = min(LONG // 2, limits.max_model_len // 4, limits.num_gpu_blocks * BLOCK // 4 // limits.max_num_seqs)
        room = max(1.0, end - self._clock())
        cost = most / 2 * self._prompt + STEPS * self._alone / self._ran
        number = max(count, min(4 * limits.max_num_seqs, int(room / cost)))
        self._say(f"{number} mixed ones at once")
        sizes = [
            (self._rng.randint(SHORT, max(2 * SHORT, most)), self._rng.randint(2, 2 * STEPS)) for _ in range(number)
        ]
        return _burst(await self._live.together(sizes))


def _burst(seen: Sequence[ObservedRequest]) -> Burst:
    """Observations of some requests, as they can be played again."""
    began = min(one.sent for one in seen)
    return Burst(
        at=[one.sent - began for one in seen],
        sizes=[(one.computed, round(len(one.tokens) * one.together)) for one in seen],
        first=[one.first for one in seen],
        seconds=max(one.tokens[-1] for one in seen) - began,
    )
