"""Scheduler of the simulated engine: vLLM V1's rules, one example each. The numbers of a row are worked out by hand."""

from __future__ import annotations

from typing import Literal

import pytest

from loadtest.engine.blocks import Blocks
from loadtest.engine.scheduler import Scheduler
from loadtest.engine.sequence import BLOCK, Sequence, SequenceState


def scheduler(
    blocks: int = 1000, seqs: int = 8, budget: int = 512, policy: Literal["fcfs", "priority"] = "fcfs"
) -> Scheduler:
    return Scheduler(Blocks(blocks), max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy)


def added(to: Scheduler, prompt: int, output: int, *, hashes: range = range(0), priority: int = 0) -> Sequence:
    sequence = Sequence(prompt, output, hashes=hashes, priority=priority)
    to.add(sequence)
    return sequence


def test_a_sequence_from_start_to_end() -> None:
    it = scheduler()
    sequence = added(it, 20, 3)
    first = it.schedule()
    assert (first.prefill_tokens, first.decoded, first.prefilled, first.finished) == (20, 0, [sequence], [])
    assert (it.decoding(), it.blocks.used) == ([sequence], 2)
    second = it.schedule()
    assert (second.prefill_tokens, second.decoded, second.context, second.finished) == (0, 1, 21, [])
    third = it.schedule()
    assert (third.finished, sequence.state, sequence.generated) == ([sequence], SequenceState.FINISHED, 3)
    assert (it.blocks.used, it.running, it.schedule().decoded) == (0, {}, 0)


def test_one_token_asked_ends_with_the_prefill() -> None:
    it = scheduler()
    sequence = added(it, 20, 1)
    step = it.schedule()
    assert (step.prefilled, step.finished, sequence.generated, it.blocks.used) == ([sequence], [sequence], 1, 0)


def test_pooling_writes_nothing() -> None:
    it = scheduler()
    sequence = added(it, 600, 0)
    assert it.schedule().finished == []
    assert (it.schedule().finished, sequence.generated) == ([sequence], 0)


@pytest.mark.parametrize(("prompt", "steps"), [(15, 1), (16, 0), (17, 15), (31, 1), (32, 0)])
def test_a_block_is_taken_in_the_step_that_needs_it(prompt: int, steps: int) -> None:
    """The token written last is computed in the next step: a prompt of 16 needs its second block there."""
    it = scheduler()
    added(it, prompt, 100)
    it.schedule()
    before = -(-prompt // BLOCK)
    for _ in range(steps):
        assert it.blocks.used == before
        it.schedule()
    assert it.blocks.used == before
    it.schedule()
    assert it.blocks.used == before + 1


def test_a_prompt_longer_than_the_budget_is_read_in_chunks_beside_decoding() -> None:
    it = scheduler(budget=64)
    added(it, 10, 50)
    it.schedule()
    long = added(it, 150, 5)
    steps = [it.schedule() for _ in range(3)]
    seen = [(step.decoded, step.prefill_tokens, long in step.prefilled) for step in steps]
    assert seen == [(1, 63, False), (1, 63, False), (1, 24, True)]
    assert [step.pairs for step in steps] == [63 * 63 // 2, 63 * 63 + 63 * 63 // 2, 24 * 126 + 24 * 24 // 2]
    assert it.schedule().decoded == 2


def test_nobody_is_admitted_behind_a_prompt_that_takes_the_whole_budget() -> None:
    it = scheduler(budget=64)
    added(it, 100, 5)
    behind = added(it, 10, 5)
    it.schedule()
    assert behind.state is SequenceState.WAITING
    step = it.schedule()
    assert (step.prefill_tokens, behind.state) == (36 + 10, SequenceState.RUNNING)


def test_max_num_seqs() -> None:
    it = scheduler(seqs=2)
    first, second, third = (added(it, 10, count) for count in (2, 5, 5))
    it.schedule()
    assert (list(it.running), it.waiting, third.state) == ([first, second], 1, SequenceState.WAITING)
    it.schedule()
    assert list(it.running) == [second]
    it.schedule()
    assert list(it.running) == [second, third]


def test_a_prompt_is_admitted_only_where_all_of_it_fits() -> None:
    it = scheduler(blocks=11, budget=64)
    added(it, 64, 20)
    big = added(it, 100, 1)  # 7 blocks of which 6 are free, though its first chunk would fit
    small = added(it, 10, 1)
    it.schedule()
    it.schedule()
    assert (big.state, small.state) == (SequenceState.WAITING, SequenceState.WAITING), (
        "first come, first served: nobody overtakes"
    )


def test_a_prefix_is_found_and_its_last_token_is_computed_all_the_same() -> None:
    it = scheduler()
    added(it, 64, 1, hashes=range(4))
    it.schedule()
    again = added(it, 64, 1, hashes=range(4))
    longer = added(it, 80, 1, hashes=range(5))
    step = it.schedule()
    assert (again.cached, longer.cached, step.prefill_tokens) == (48, 64, 16 + 16)
    assert step.pairs == 16 * 48 + 16 * 64 + 2 * 16 * 16 // 2, "what was found is attended to"
    assert (it.queries, it.hits) == (64 + 64 + 80, 48 + 64)


def test_a_prefix_is_shared_by_sequences_admitted_in_the_same_step() -> None:
    it = scheduler()
    one, two = (added(it, 65, 9, hashes=range(4)) for _ in range(2))
    step = it.schedule()
    assert (one.cached, two.cached, step.prefill_tokens, it.blocks.used) == (0, 64, 66, 4 + 1 + 1)


def test_an_answer_is_found_by_the_turn_that_repeats_it() -> None:
    it = scheduler()
    first = added(it, 32, 33, hashes=range(4))
    while first.state is not SequenceState.FINISHED:
        it.schedule()
    follow = added(it, 100, 1, hashes=range(6))
    it.schedule()
    assert follow.cached == 64


def test_the_newest_is_preempted_and_starts_again_before_the_waiting() -> None:
    it = scheduler(blocks=7)
    old, new = added(it, 32, 40), added(it, 40, 40)
    waiting = added(it, 90, 1)
    it.schedule()
    assert (it.blocks.available, list(it.running)) == (1, [old, new])
    step = it.schedule()  # the old one's third block is the last free one
    assert (step.preempted, it.blocks.available) == (0, 0)
    while not step.preempted:
        step = it.schedule()
    assert (list(it.running), new.state, new.preemptions, old.preemptions) == ([old], SequenceState.WAITING, 1, 0)
    assert new.generated == 9  # 40 and 8 fill its three blocks; the token written last needs the fourth
    assert it.queued() == [new, waiting]
    while old.state is not SequenceState.FINISHED:
        it.schedule()
    it.schedule()
    assert (new.state, new.generated) == (SequenceState.RUNNING, 10)
    while new.state is not SequenceState.FINISHED:
        it.schedule()
    assert (new.generated, new.preemptions) == (40, 1)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    it = scheduler(blocks=7)
    added(it, 32, 40)
    added(it, 40, 40)
    step = it.schedule()
    short = added(it, 1, 1)
    it.abort(short)
    while not step.preempted:
        step = it.schedule()
        assert not step.prefilled or not step.preempted
    assert step.prefilled == []


def test_priority_orders_the_waiting_and_chooses_the_victim() -> None:
    it = scheduler(seqs=2, blocks=7, policy="priority")
    late, soon, mid = (added(it, 32, 40, priority=priority) for priority in (9, 1, 5))
    it.schedule()
    assert list(it.running) == [soon, mid]
    it.abort(soon)
    it.schedule()
    assert list(it.running) == [mid, late]
    urgent = added(it, 32, 1, priority=-1)
    step = it.schedule()
    assert urgent.state is SequenceState.WAITING, "the urgent do not push out the running"
    while not step.preempted:
        step = it.schedule()
    assert (late.state, mid.state) == (SequenceState.WAITING, SequenceState.RUNNING)
    assert it.queued() == [urgent, late]


def test_the_victim_may_be_older_than_the_one_who_needs() -> None:
    it = scheduler(blocks=7, policy="priority")
    late = added(it, 32, 40, priority=9)
    it.schedule()
    soon = added(it, 40, 40, priority=1)
    step = it.schedule()
    while not step.preempted:
        step = it.schedule()
    assert (late.state, list(it.running)) == (SequenceState.WAITING, [soon])


def test_fcfs_ignores_priority() -> None:
    it = scheduler(seqs=1)
    first = added(it, 10, 5, priority=9)
    added(it, 10, 5, priority=1)
    it.schedule()
    assert list(it.running) == [first]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_frees_at_once(steps: int) -> None:
    """Waiting, half read, decoding."""
    it = scheduler(budget=64)
    sequence = added(it, 100, 50, hashes=range(6))
    for _ in range(steps):
        it.schedule()
    it.abort(sequence)
    it.abort(sequence)
    assert (it.waiting, it.running, it.partial, it.blocks.used) == (0, {}, None, 0)
    for _ in range(60):
        step = it.schedule()
        assert (step.decoded, step.prefill_tokens, step.finished, step.context) == (0, 0, [], 0)


def test_the_aborted_do_not_pile_up_in_the_queue() -> None:
    it = scheduler(seqs=1)
    added(it, 10, 1000)
    it.schedule()
    for _ in range(1000):
        it.abort(added(it, 10, 10))
    assert (it.waiting, len(it._queue) < 200) == (0, True)


def test_idle_blocks_that_are_hit_are_not_room_for_the_rest() -> None:
    it = scheduler(blocks=7)
    cached = added(it, 64, 1, hashes=range(4))
    it.schedule()
    assert (cached.state, it.blocks.free, it.blocks.idle) == (SequenceState.FINISHED, 2, 4)
    held = added(it, 16, 50)
    it.schedule()
    longer = added(it, 96, 1, hashes=range(6))  # 4 of its 6 blocks are cached, one of the other 2 is free
    it.schedule()
    assert (longer.state, it.blocks.hits(range(6), 6)) == (SequenceState.WAITING, (4, 4))
    it.abort(held)
    it.schedule()
    assert longer.cached == 64
