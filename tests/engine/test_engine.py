"""Simulated engine: step times, statistics, sleep, and invariants under random schedules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.engine.engine import Engine
from loadtest.engine.engine_config import engine_config
from loadtest.engine.latency import Profile
from loadtest.engine.profile_file import profiles
from loadtest.engine.sequence import BLOCK, Sequence, SequenceState
from tests.examples import examples

EXACT = Profile(
    base=0.01,
    prefill=0.001,
    decode=0.0001,
    context=0.00001,
    jitter=0.0,
    num_gpu_blocks=100,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=1000,
)


def engine(**limits: Any) -> Engine:
    return Engine(engine_config(EXACT, **limits))


def run(it: Engine, now: float = 0.0) -> float:
    """Until nothing is left to do; the time then."""
    for _ in range(100_000):
        if not it.busy:
            return now
        now = it.step(now).ends
    raise AssertionError("does not come to an end")


def test_a_step_takes_what_its_work_takes() -> None:
    it = engine()
    it.add(Sequence(20, 3), 0.0)
    first = it.step(0.0)
    assert first.duration == pytest.approx(0.01 + 20 * 0.001)
    second = it.step(first.ends)
    assert second.duration == pytest.approx(0.01 + 0.0001 + 21 * 0.00001)


def test_what_it_counts() -> None:
    it = engine()
    it.add(Sequence(20, 3, reason="stop"), 0.0)
    it.add(Sequence(20, 1), 0.0)
    it.add(Sequence(20, 0, reason="stop"), 0.0)
    run(it, 1.0)
    stats = it.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (60, 4)
    assert (stats.success["stop"], stats.success["length"]) == (2, 1)
    assert stats.steps == 3


def test_the_same_seed_gives_the_same_times() -> None:
    def times(seed: int) -> list[float]:
        it = Engine(engine_config(profiles()["h100-8b"], seed=seed))
        it.add(Sequence(100, 20), 0.0)
        return [it.step(0.0).duration for _ in range(20)]

    assert times(1) == times(1)
    assert times(1) != times(2)
    assert max(times(1)) < 1.1 * profiles()["h100-8b"].exact(100, 0, 0)


@pytest.mark.parametrize("name", list(profiles()))
def test_every_profile_is_an_engine(name: str) -> None:
    it = Engine(engine_config(profiles()[name]))
    it.add(Sequence(1000, 100), 0.0)
    assert 0.1 < run(it) < 10.0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, "every running sequence needs a token"),
        ({"num_gpu_blocks": 10, "max_model_len": 1000}, "more than the 144 tokens"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**limits)


def test_a_length_nobody_asked_for_shrinks_to_the_cache() -> None:
    assert engine(num_gpu_blocks=11).config.profile.max_model_len == 160
    assert engine(max_num_batched_tokens=2).config.profile.max_num_seqs == 2
    assert engine(max_num_seqs=100).config.profile.max_num_batched_tokens == 100


@pytest.mark.parametrize(("level", "weights"), [(1, "offloaded"), (2, "discarded")])
def test_sleep_aborts_what_runs_and_waits(level: int, weights: str) -> None:
    it = engine(max_num_seqs=1)
    running, waiting = Sequence(10, 10), Sequence(10, 10)
    it.add(running, 0.0)
    it.add(waiting, 0.0)
    it.step(0.0)
    assert it.sleep(level) == [running, waiting]
    assert (it.asleep, it.weights, it.busy, it.stats.success["abort"]) == (level, weights, False, 2)
    assert it.sleep(1) == [], "already asleep"
    assert it.asleep == level
    with pytest.raises(RuntimeError, match="sleeping engine"):
        it.step(1.0)


def test_sleep_drops_the_cache() -> None:
    it = engine()
    it.add(Sequence(64, 1, hashes=range(4)), 0.0)
    run(it)
    assert it.scheduler.blocks.idle == 4
    it.sleep(1)
    assert it.scheduler.blocks.idle == 0


def test_what_is_sent_to_a_sleeping_engine_is_in_no_gauge_and_runs_after_waking() -> None:
    it = engine()
    it.sleep(1)
    kept, gone = Sequence(10, 2), Sequence(10, 2)
    it.add(kept, 0.0)
    it.add(gone, 0.0)
    assert (it.scheduler.waiting, it.busy, it.unfinished()) == (0, False, [kept, gone])
    it.abort(gone)
    assert gone.state is SequenceState.ABORTED
    assert it.wake()
    run(it)
    assert (kept.state, gone.generated) == (SequenceState.FINISHED, 0)


def test_level_2_needs_its_weights_read_again() -> None:
    it = engine()
    it.sleep(2)
    with pytest.raises(RuntimeError, match="wake the tag weights"):
        it.reload_weights()
    assert not it.wake(["weights"])
    assert it.garbage
    it.reload_weights()
    assert not it.garbage
    assert it.wake(["kv_cache"])
    it.sleep(2)
    assert it.wake()
    assert it.garbage


def test_level_1_brings_its_weights_back() -> None:
    it = engine()
    it.sleep(1)
    assert not it.wake(["kv_cache"])
    assert it.wake(["weights"])
    assert (it.garbage, it.weights) == (False, "loaded")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 200),
            st.integers(0, 60),
            st.sampled_from((0, 100, 200)),
            st.integers(-1, 2),
        ),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("sleep")),
    ),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(ACTIONS, st.integers(18, 60), st.integers(1, 6), st.integers(8, 80), st.sampled_from(("fcfs", "priority")))
def test_nothing_is_lost_leaked_or_overdrawn(
    actions: list[tuple[Any, ...]], blocks: int, seqs: int, budget: int, policy: Any
) -> None:
    """Whatever comes: the budget and the batch hold, blocks add up after every step, every sequence ends."""
    it = engine(num_gpu_blocks=blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy)
    every: list[Sequence] = []
    now = 0.0

    def step() -> float:
        result = it.step(now)
        scheduler = it.scheduler
        assert result.decoded + result.prefill_tokens <= budget
        assert len(scheduler.running) <= seqs
        cached = scheduler.blocks
        assert cached.free >= 0
        assert cached.available + cached.used == cached.usable == blocks - 1
        held = sum(
            -(-(s.computed + (scheduler.step - s.since if s.ends_at >= 0 else 0)) // BLOCK) for s in scheduler.running
        )
        assert all(s in run.holders for s in scheduler.running for run in s.held)
        shared = sum(
            (len(run.holders) - 1) * len(run.hashes) for run in {run for s in scheduler.running for run in s.held}
        )
        assert held - shared == cached.used
        return result.ends

    for action in actions:
        if action[0] == "add":
            _, prompt, output, family, priority = action
            full = (prompt + output) // BLOCK
            hashes = range(family, family + full) if family else range(0)
            every.append(Sequence(prompt, output, hashes=hashes, priority=priority))
            it.add(every[-1], now)
        elif action[0] == "step":
            for _ in range(action[1]):
                if it.busy:
                    now = step()
        elif action[0] == "abort" and every:
            it.abort(every[action[1] % len(every)])
        elif action[0] == "sleep":
            it.sleep(1)
            it.wake()
    for _ in range(20_000):
        if not it.busy:
            break
        now = step()
    assert not it.unfinished()
    assert it.scheduler.blocks.used == 0
    for sequence in every:
        assert sequence.state in (SequenceState.FINISHED, SequenceState.ABORTED)
        assert sequence.generated == sequence.output or sequence.state is SequenceState.ABORTED
    assert it.scheduler._context == 0
    assert set(it.scheduler._boundary) == {0}
