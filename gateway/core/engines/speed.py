"""Speed of one engine, learned from answers: prompt tokens read a second, seconds per output token."""

from __future__ import annotations

from collections import deque

from gateway.core.checkpoint import SavedEngine

FIRST_BYTES_REMEMBERED = 64
FIRST_BYTES_NEEDED = 8
PREFILL_RATE = 10_000.0  # tokens/s until first bytes teach better
TPOT = 0.03  # seconds per output token until answers teach better
PACE = 0.005  # seconds per output token at its fastest, until it is known
FASTEST = 0.0005  # seconds per output token of any sequence
PACE_WEIGHT = 0.02  # of one slower answer
TPOT_TOKENS = 8  # fewer say more of the network than of the engine
TPOT_ANSWERS = 10  # that are the first; one of more counts for a tenth
RATE_TOKENS = 64  # prompt tokens to be read; fewer teach nothing
MOST_SPREAD = 3.0  # one that stalls is no reason to doubt all
LEAST_READING = 0.25  # of the time to a first token, whatever a step takes
RATE_BELIEVED = 30.0  # seconds without a first byte after which a low rate is doubted


class Speed:
    """Learned rates of one engine."""

    def __init__(self) -> None:
        self.prefill_rate = PREFILL_RATE
        self.ttft_spread = 1.0  # how many times its prediction the slowest first token of ten takes
        self.tpot = TPOT
        self.pace = PACE  # seconds per output token of its fastest answers of late: what it can have written
        self._first_bytes: deque[float] = deque(maxlen=FIRST_BYTES_REMEMBERED)
        self._unsorted = 0  # first bytes since the rate was last computed
        self._untaught = 0  # samples since a first byte taught the rate
        self._idle = 0  # samples since a call ran
        self._answers = 0  # that have taught `tpot`, up to TPOT_ANSWERS

    def learn_first_byte(self, reading: float, seconds: float) -> None:
        """prefill_rate = median of tokens/s over the last 64 first bytes, once there are 8.

        Of the same work as `predicted_ttft` has it, what was ahead included, less the step that each waits for: so a
        prediction is right also where what is ahead does not wait to be read, but for a place in the batch. Little
        work says more of that step than of the rate.
        """
        if reading < RATE_TOKENS:
            return
        rates = self._first_bytes
        self._untaught = 0
        rates.append(reading / max(seconds - self.tpot, seconds * LEAST_READING, 1e-4))
        self._unsorted += 1
        if self._unsorted >= FIRST_BYTES_NEEDED:
            self._unsorted = 0
            known = sorted(rates)
            self.prefill_rate = max(1.0, known[len(known) // 2])
            self.ttft_spread = min(MOST_SPREAD, self.prefill_rate / known[len(known) // 10])

    def learn_tpot(self, tokens: float, seconds: float, *, timed: bool = True) -> None:
        """`tokens` of one sequence took `seconds` to write: a mean over answers, weights falling by a tenth. Of the
        first ones those that are faster than the mean count as in a plain one: what was assumed says nothing, and
        slower answers may be so by the load. Not `timed`: since its first token was expected, so it is never taken for
        one of the first. Below zero is an answer that was whole before that."""
        if tokens >= TPOT_TOKENS:
            each, weight = max(0.0, seconds / tokens), 1.0 / TPOT_ANSWERS
            if timed and each >= FASTEST and self._answers < TPOT_ANSWERS:
                self._answers += 1
                weight = 1.0 / self._answers if each < self.tpot else weight
            self.tpot += weight * (each - self.tpot)

    def learn_pace(self, tokens: float, seconds: float) -> None:
        """`tokens` of one sequence took `seconds` to write: the least of late, which a slower answer lifts a little. An
        answer that came to us all at once says little: it is taken for four times as fast as the mean."""
        if tokens >= TPOT_TOKENS:
            each, pace = seconds / tokens, self.pace
            if each > pace != PACE:
                self.pace = pace + PACE_WEIGHT * (each - pace)
                return
            each = max(each, self.tpot / 4, FASTEST)
            lower = each < pace or pace == PACE
            self.pace = each if lower else pace + PACE_WEIGHT * (each - pace)

    def sampled(self, poll: float, *, busy: bool) -> None:
        """Note a sample, one every `poll` seconds. Without a first byte for RATE_BELIEVED, a low rate is forgotten, and
        a long time per token where no call runs (`busy`), whose answer would teach it: what was learned in a bad moment
        would keep every call away, and so would never be mended."""
        self._untaught += 1
        self._idle = 0 if busy else self._idle + 1
        if self._untaught * poll > RATE_BELIEVED:
            self.prefill_rate = max(self.prefill_rate, PREFILL_RATE)
        if self._idle * poll > RATE_BELIEVED:
            self.tpot = min(self.tpot, TPOT)

    def restore(self, saved: SavedEngine) -> None:
        self.prefill_rate, self.ttft_spread = saved.prefill_rate, saved.ttft_spread
        self.tpot, self.pace = saved.tpot, saved.pace
        self._answers = TPOT_ANSWERS if saved.tpot != TPOT else 0
