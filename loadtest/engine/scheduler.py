"""Continuous batching by vLLM V1's rules, at a cost that does not grow with the number of running sequences.

Running sequences come first: one token for each that decodes, then the rest of the token budget for the one whose
prompt is partly read (there is at most one, the last admitted: a prompt is cut only where the budget ends). When the
blocks do not suffice, the newest (under the priority policy: the least urgent) loses all of its own and waits at the
front, to be computed again. Then, unless somebody was preempted, the waiting are admitted in order while there is
budget, a place, and room for the whole prompt (`scheduler_reserve_full_isl`); the first that does not fit stops it.

Decoding is arithmetic. A decoding sequence writes a token in every step, so the step of its last token and the steps
at which it needs another block are known when it starts: `_endings` and `_boundary` hold them. A step touches only the
sequences that are admitted, end, or are preempted.
"""

from __future__ import annotations

import heapq
from typing import Literal

import msgspec

from loadtest.engine.blocks import Blocks
from loadtest.engine.sequence import BLOCK, Sequence, SequenceState, blocks_for

Policy = Literal["fcfs", "priority"]
COMPACT = 64  # dead entries in the queue before it is worth rebuilding


class EngineStep(msgspec.Struct, gc=False):
    """Work of one step. Numbers are tokens; `context` is the KV read by the sequences that decode, `pairs` counts each
    prompt token with each token before it.

    `prefilled` have had their prompt completed (each wrote a token, unless it is a pooling request), `finished` wrote
    their last token. A sequence may be in both. The tokens are to be handed out at `ends` (seconds, the driver's
    clock), `duration` after its begin: the engine sets them, by its profile.
    """

    prefilled: list[Sequence]
    finished: list[Sequence]
    prefill_tokens: int = 0
    decoded: int = 0
    context: int = 0
    pairs: int = 0
    preempted: int = 0
    duration: float = 0.0
    ends: float = 0.0


class Scheduler:
    """Queue, batch and cache of one engine. Counts only: it knows no clock and no latency."""

    def __init__(self, blocks: Blocks, *, max_num_seqs: int, max_num_batched_tokens: int, policy: Policy) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.step = 0  # the last step that was scheduled
        self.running: dict[Sequence, None] = {}  # oldest admission first
        self.partial: Sequence | None = None  # the one whose prompt is partly read
        self.waiting = 0
        self.queries = self.hits = 0  # prefix cache, in tokens, first admissions only
        self._queue: list[tuple[tuple[float, float, int], Sequence]] = []
        self._added = 0
        self._context = 0
        self._boundary = [0] * BLOCK
        self._endings: dict[int, list[Sequence]] = {}

    def __repr__(self) -> str:
        return f"<Scheduler step {self.step}: {len(self.running)} running, {self.waiting} waiting, {self.blocks!r}>"

    def add(self, sequence: Sequence) -> None:
        """Queue it, by arrival or by (priority, arrival)."""
        self._added += 1
        urgent = sequence.priority if self.policy == "priority" else 0
        arrived = sequence.arrived_at if self.policy == "priority" else 0.0
        self._enqueue(sequence, (float(urgent), arrived, self._added))

    def abort(self, sequence: Sequence) -> None:
        """Drop it wherever it is and free its blocks at once. A sequence that has ended is left as it is."""
        if sequence.state is SequenceState.RUNNING:
            self._leave(sequence)
            sequence.state = SequenceState.ABORTED
        elif sequence.state is SequenceState.WAITING:
            sequence.state = SequenceState.ABORTED
            self.waiting -= 1
            if len(self._queue) - self.waiting > max(COMPACT, self.waiting):
                self._queue = [entry for entry in self._queue if entry[1].state is SequenceState.WAITING]
                heapq.heapify(self._queue)

    def decoding(self) -> list[Sequence]:
        """The running sequences that wrote a token in the last step and go on, oldest first."""
        partial = self.partial
        return [sequence for sequence in self.running if sequence is not partial]

    def queued(self) -> list[Sequence]:
        """The waiting, next one first."""
        return [entry[1] for entry in sorted(self._queue) if entry[1].state is SequenceState.WAITING]

    def schedule(self) -> EngineStep:
        """Schedule and account for one step; what it wrote is in the answer."""
        at = self.step + 1
        result = EngineStep([], [])
        chunk = self._make_room(at, result)
        self.step = at
        partial = self.partial
        result.decoded = len(self.running) - (partial is not None)
        self._context += result.decoded
        result.context = self._context
        budget = self.max_num_batched_tokens - result.decoded - chunk
        result.prefill_tokens = chunk
        if partial is not None:
            self._read(partial, chunk, result)
        if not result.preempted:
            self._admit(budget, result)
        ending = self._endings.pop(at, None)
        if ending is not None:
            for sequence in ending:
                if sequence.ends_at == at:
                    result.finished.append(sequence)
                    self._leave(sequence, keep=sequence.keeps)
                    sequence.state = SequenceState.FINISHED
        return result

    def quiet(self, most: int) -> int:
        """Number of the next steps, at most, that would do nothing but decode the same sequences."""
        if self.waiting or self.partial is not None or not self.running:
            return 0
        at, endings = self.step, self._endings
        # A sequence needs a block every BLOCK steps.
        if (most // BLOCK + 1) * len(self.running) <= self.blocks.available:
            return next((number for number in range(most) if at + 1 + number in endings), most)
        need, room = 0, self.blocks.available
        for number in range(most):
            at += 1
            need += self._boundary[at % BLOCK]
            if at in endings or need > room:
                return number
        return most

    @property
    def context(self) -> int:
        """The KV that the last step's decoding sequences have read, in tokens."""
        return self._context

    def decode(self, steps: int) -> None:
        """Account for so many steps, all of them `quiet`."""
        boundary, at = self._boundary, self.step
        self.blocks.take(sum([boundary[step % BLOCK] for step in range(at + 1, at + 1 + steps)]))
        self.step = at + steps
        self._context += len(self.running) * steps

    def _make_room(self, at: int, result: EngineStep) -> int:
        """Preempt until the running have the blocks of step `at`, and take these; the partial prompt's tokens."""
        while True:
            need = self._boundary[at % BLOCK]
            chunk = 0
            partial = self.partial
            if partial is not None:
                budget = self.max_num_batched_tokens - len(self.running) + 1
                chunk = min(partial.prompt + partial.generated - partial.computed, budget)
                need += blocks_for(partial.computed + chunk) - partial.owns
            if need <= self.blocks.available:
                self.blocks.take(need)
                return chunk
            self._preempt(self._victim())
            result.preempted += 1

    def _victim(self) -> Sequence:
        if self.policy == "priority":
            return max(self.running, key=lambda sequence: sequence.key)
        return next(reversed(self.running))

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.preemptions += 1
        sequence.computed = sequence.loaded = 0
        self._added += 1
        key = sequence.key if self.policy == "priority" else (-1.0, 0.0, -self._added)
        self._enqueue(sequence, key)

    def _enqueue(self, sequence: Sequence, key: tuple[float, float, int]) -> None:
        sequence.state = SequenceState.WAITING
        sequence.key = key
        self.waiting += 1
        heapq.heappush(self._queue, (key, sequence))

    def _admit(self, budget: int, result: EngineStep) -> None:
        blocks, queue = self.blocks, self._queue
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = queue[0][1]
            if sequence.state is not SequenceState.WAITING:
                heapq.heappop(queue)
                continue
            tokens = sequence.prompt + sequence.generated
            # The last token is always computed: its logits are wanted.
            found, idle = blocks.hits(sequence.hashes, (tokens - 1) // BLOCK)
            if blocks_for(tokens) - found > blocks.available - idle:
                break
            heapq.heappop(queue)
            self.waiting -= 1
            self.running[sequence] = None
            sequence.state = SequenceState.RUNNING
            blocks.share(sequence, found)
            sequence.computed = max(found * BLOCK, min(sequence.loaded, tokens - 1))
            sequence.owns = found
            if sequence.cached < 0:
                sequence.cached = sequence.computed
                self.queries += tokens
                self.hits += sequence.computed
            chunk = min(tokens - sequence.computed, budget)
            budget -= chunk
            result.prefill_tokens += chunk
            blocks.take(blocks_for(sequence.computed + chunk) - found)
            self._read(sequence, chunk, result)

    def _read(self, sequence: Sequence, chunk: int, result: EngineStep) -> None:
        """Compute `chunk` tokens of a prompt, whose blocks are taken; the last chunk also writes a token."""
        result.pairs += chunk * sequence.computed + chunk * chunk // 2
        sequence.computed += chunk
        sequence.owns = blocks_for(sequence.computed)
        self.blocks.publish(sequence, sequence.computed // BLOCK)
        if sequence.computed < sequence.prompt + sequence.generated:
            self.partial = sequence
            return
        if sequence is self.partial:
            self.partial = None
        result.prefilled.append(sequence)
        if sequence.output:
            sequence.generated += 1
        if sequence.generated >= sequence.output:
            result.finished.append(sequence)
            self._leave(sequence, keep=sequence.keeps)
            sequence.state = SequenceState.FINISHED
            return
        sequence.since = self.step
        # Step `at` computes token number computed + (at - since): it opens a block where that is 1 modulo BLOCK.
        sequence.bucket = (self.step + 1 - sequence.computed) % BLOCK
        self._boundary[sequence.bucket] += 1
        sequence.ends_at = self.step + sequence.output - sequence.generated
        self._endings.setdefault(sequence.ends_at, []).append(sequence)
        self._context += sequence.computed

    def _leave(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Out of the batch, its counts brought up to date and its blocks given back, unless it is to `keep` them."""
        del self.running[sequence]
        if sequence is self.partial:
            self.partial = None
        if sequence.ends_at >= 0:
            steps = self.step - sequence.since
            sequence.generated += steps
            sequence.computed += steps
            sequence.since = self.step
            self._context -= sequence.computed
            self._boundary[sequence.bucket] -= 1
            sequence.ends_at = sequence.bucket = -1
            sequence.owns = blocks_for(sequence.computed)
            self.blocks.publish(sequence, sequence.computed // BLOCK)
        if not keep:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of a sequence that no longer runs."""
        self.blocks.give_back(sequence, sequence.owns)
        sequence.owns = 0
