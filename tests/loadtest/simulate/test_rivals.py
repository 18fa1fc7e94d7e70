"""Rules of rivals: what each chooses, what their router holds, and that one seed is one run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from gateway.cli import main
from loadtest.clients.calls import Try
from loadtest.clients.retries import Clients
from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import profile_of
from loadtest.load.arrivals import Arrivals, Closed
from loadtest.load.scenario import find, load, planned
from loadtest.load.workload import Planned
from loadtest.simulate import vtime
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.rivals.cache_aware import ABSOLUTE, EVERY, CacheAware
from loadtest.simulate.rivals.router import Choose, Prompt, Router, Rule, Worker
from loadtest.simulate.rivals.rules import MATCHED, RULES, direct, least_requests, llm_d, lmetric, lpwl, round_robin
from loadtest.simulate.simulation import SimulationRun


def workers(*requests: int, size: int = 1000) -> list[Worker]:
    made = [Worker(number, size) for number in range(len(requests))]
    for worker, count in zip(made, requests, strict=True):
        worker.requests = count
    return made


def prompt(*blocks: int, more: int = 0) -> Prompt:
    return Prompt(blocks, 16 * len(blocks) + more)


def chosen(choose: Choose, fleet: Sequence[Worker], prompts: Sequence[Prompt]) -> list[int]:
    return [choose(each, fleet).number for each in prompts]


def test_direct_keeps_a_conversation_where_chance_has_put_it() -> None:
    whose = [Prompt((), 0, f"s{number}") for number in range(50)]
    first = chosen(direct, workers(0, 0, 0), whose)
    assert set(first) == {0, 1, 2}
    assert chosen(direct, workers(9, 0, 0), whose) == first


def test_round_robin_takes_turns_whatever_is_there() -> None:
    assert chosen(round_robin(), workers(9, 0, 5), [prompt()] * 4) == [0, 1, 2, 0]


def test_least_requests_takes_turns_among_the_least() -> None:
    assert chosen(least_requests(), workers(2, 1, 1), [prompt()] * 3) == [1, 2, 1]


def test_compare_names_the_rules_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--compare", "cache_aware,nginx"])
    assert ended.value.code == 2
    assert f"'nginx' is not one of {', '.join(RULES)}" in capsys.readouterr().err


# -- cache_aware ------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("requests", "then", "where"),
    [
        ((0, 5), prompt(1, 2, 3), 0),  # all of it was routed there
        ((50, 0), prompt(1, 2, 3), 0),  # however much it has to do,
        ((ABSOLUTE + 1, 0), prompt(1, 2, 3), 1),  # up to a bound
        ((3 * ABSOLUTE + 3, 2 * ABSOLUTE + 2), prompt(1, 2, 3), 0),  # and by half as many again
        ((1, 0), prompt(1, 8, 9), 0),  # a third of it
        ((1, 0), prompt(1, 8, 9, more=16), 1),  # a quarter of it
        ((1, 0), prompt(8, 2, 3), 1),  # it ends as that did, and begins otherwise
    ],
)
def test_cache_aware_follows_the_text_while_load_is_even(requests: tuple[int, ...], then: Prompt, where: int) -> None:
    choose, fleet = CacheAware(Clock()).choose, workers(0, 0)
    assert chosen(choose, fleet, [prompt(1, 2, 3)]) == [0]
    for worker, count in zip(fleet, requests, strict=True):
        worker.requests = count
    assert chosen(choose, fleet, [then]) == [where]


def test_cache_aware_keeps_the_first_owner_of_a_text_that_was_sent_elsewhere_too() -> None:
    choose, fleet = CacheAware(Clock()).choose, workers(0, 0)
    choose(prompt(1, 2), fleet)
    fleet[0].requests = ABSOLUTE + 1
    assert chosen(choose, fleet, [prompt(1, 2)]) == [1]
    fleet[0].requests = ABSOLUTE
    assert chosen(choose, fleet, [prompt(1, 2)]) == [0]


def test_cache_aware_forgets_what_was_used_longest_ago_and_leaves_it_to_another_that_has_it() -> None:
    clock = Clock()
    choose, fleet = CacheAware(clock, most=3 * 64).choose, workers(0, 0)
    choose(prompt(1, 2), fleet)
    fleet[0].requests = ABSOLUTE + 1
    choose(prompt(1, 2), fleet)  # the second has it now, too
    fleet[0].requests = 0
    choose(prompt(7, 8), fleet)
    assert chosen(choose, fleet, [prompt(1, 2)]) == [0], "nothing is forgotten in between"
    choose(prompt(7, 8), fleet)
    clock.now = EVERY
    fleet[0].requests = 1
    assert chosen(choose, fleet, [prompt(1, 2)]) == [1], "the first engine has three blocks: 7, 8 and 1"


# -- llm-d ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "kv", "then", "where"),
    [
        ((0, 0), (0.4, 0.0), prompt(1, 2), 0),  # 3 + 2 + 1.2 over 0 + 2 + 2
        ((9, 0), (0.0, 0.0), prompt(1, 2), 0),  # 3 + 0 + 2 over 0 + 2 + 2
        ((9, 0), (0.6, 0.0), prompt(1, 2), 1),  # 3 + 0 + 0.8 over 0 + 2 + 2
        ((9, 0), (0.0, 0.0), prompt(1, 8), 1),  # 1.5 + 0 + 2 over 0 + 2 + 2
        ((0, 0), (0.1, 0.0), prompt(8, 9), 1),  # 0 + 2 + 1.8 over 0 + 2 + 2
    ],
)
def test_llm_d_adds_scores_up(waiting: tuple[int, ...], kv: tuple[float, ...], then: Prompt, where: int) -> None:
    choose, fleet = llm_d(), workers(0, 0)
    fleet[1].kv = 1.0
    assert chosen(choose, fleet, [prompt(1, 2)]) == [0]
    for worker, queued, used in zip(fleet, waiting, kv, strict=True):
        worker.waiting, worker.kv = queued, used
    assert chosen(choose, fleet, [then]) == [where]


def test_llm_d_looks_at_the_first_blocks_only_and_draws_among_equals() -> None:
    choose, fleet = llm_d(), workers(0, 0, size=10_000)
    fleet[1].kv = 1.0
    choose(prompt(*range(MATCHED)), fleet)
    fleet[1].kv = 0.0
    fleet[0].waiting = 9
    assert chosen(choose, fleet, [prompt(*range(MATCHED), *range(5000, 9000))]) == [0], (
        "all that counts was routed there"
    )
    others = [prompt(-number) for number in range(1, 41)]
    fleet[0].waiting = 0
    assert set(chosen(llm_d(), fleet, others)) == {0, 1}
    assert chosen(llm_d(), fleet, others) == chosen(llm_d(), fleet, others)


# -- work to read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "pending", "by_lmetric", "by_lpwl"),
    [
        ((2, 1), (0, 0), 0, 0),  # 16 x 2 and 48 x 1; 16 and 48
        ((4, 1), (0, 0), 1, 0),  # 16 x 4 and 48 x 1
        ((1, 1), (40, 0), 1, 1),  # 56 and 48
        ((1, 1), (30, 0), 0, 0),  # 46 and 48
        ((1, 0), (0, 0), 1, 0),  # an idle engine counts nothing, with LMetric
    ],
)
def test_rules_of_prefill_work(
    requests: tuple[int, ...], pending: tuple[int, ...], by_lmetric: int, by_lpwl: int
) -> None:
    fleet = workers(*requests)
    fleet[0].keep((1, 2), 1000)
    for worker, tokens in zip(fleet, pending, strict=True):
        worker.pending = tokens
    assert chosen(lmetric, fleet, [prompt(1, 2, 3)]) == [by_lmetric]
    assert chosen(lpwl(), fleet, [prompt(1, 2, 3)]) == [by_lpwl]


def test_lpwl_prefers_fewer_requests_and_then_takes_turns() -> None:
    assert chosen(lpwl(), workers(2, 3, 3), [prompt(1)] * 3) == [0, 0, 0]
    assert sorted(chosen(lpwl(), workers(0, 0, 0), [prompt(1)] * 3)) == [0, 1, 2]


def test_records_hold_what_was_used_last_and_beginnings_longer_than_ends() -> None:
    worker = Worker(0, 4)
    worker.keep((1, 2, 3), 4)
    worker.keep((7, 8), 4)
    assert (worker.cached((1, 2, 3)), worker.cached((7, 8, 9))) == (2, 2)
    worker.keep((1, 2, 3), 4)
    assert (worker.cached((1, 2, 3)), worker.cached((7, 8))) == (3, 1)


# -- their router -----------------------------------------------------------------------------------------------------


def fleet_of(number: int) -> list[MemoryEngine]:
    config = engine_config(profile_of("h100-8b"), num_gpu_blocks=2000, max_model_len=16_000)
    return [MemoryEngine(config, seed=each) for each in range(number)]


def agents(seed: int, sessions: int) -> Iterator[Planned]:
    """Coding agents: the scenario that is shipped, with fewer sessions."""
    scenario = load(find("agents"))
    closed = Closed(clients=sessions, within=0.7, rounds=1)
    return planned(msgspec.structs.replace(scenario, arrivals=Arrivals(closed=closed)), seed=seed)


def run(name: str, *, timeout: float = 600.0, dies: bool = False) -> tuple[list[Try], Sequence[Worker]]:
    """Coding agents behind a rule; all tries, and the workers that it was shown."""
    shown: list[Sequence[Worker]] = []

    def begin() -> Choose:
        choose = RULES[name].begin()

        def follow(prompt: Prompt, workers: Sequence[Worker]) -> Worker:
            shown[:] = [workers]
            return choose(prompt, workers)

        return follow

    async def main() -> tuple[list[Try], Sequence[Worker]]:
        engines = fleet_of(2)
        rule = msgspec.structs.replace(RULES[name], begin=begin)
        if dies:
            engines[1].die()
        clients = Clients(retries=0, timeout=timeout)
        made = SimulationRun(engines, Router(engines, rule), agents(1, 6), clients=clients, closed=6)
        result = await made.until(120.0, grace=600.0)
        return result.tries, shown[0]

    return vtime.run(main())


@pytest.mark.parametrize("name", RULES)
def test_a_router_answers_all_and_holds_nothing_afterwards(name: str) -> None:
    tries, seen = run(name)
    assert {tried.outcome for tried in tries} == {"ok"}
    assert len(tries) == 6 * 8
    assert [(worker.requests, worker.pending) for worker in seen] == [(0, 0)] * 2


@pytest.mark.parametrize(("timeout", "dies"), [(0.3, False), (600.0, True)])
def test_who_leaves_and_who_finds_no_engine_is_no_longer_counted(timeout: float, dies: bool) -> None:
    tries, seen = run("lpwl", timeout=timeout, dies=dies)
    assert {"unanswered" if dies else "timed_out"} <= {tried.outcome for tried in tries}
    assert [(worker.requests, worker.pending) for worker in seen] == [(0, 0)] * 2


@pytest.mark.parametrize("name", RULES)
def test_one_seed_is_one_run(name: str) -> None:
    assert run(name)[0] == run(name)[0]


def test_metrics_are_as_old_as_the_last_poll() -> None:
    seen: list[tuple[float, float]] = []

    def choose(prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        seen.append((asyncio.get_running_loop().time(), workers[0].kv))
        return workers[0]

    rule = Rule(lambda: choose, reads=False, polls=0.05)

    async def main() -> None:
        engines = fleet_of(1)
        calls = [msgspec.structs.replace(call, at=0.01 + 0.025 * n) for n, call in enumerate(agents(1, 3))]
        await SimulationRun(engines, Router(engines, rule), calls, clients=Clients()).until(0.07)

    vtime.run(main())
    assert [at for at, _ in seen] == pytest.approx([0.01, 0.035, 0.06])
    assert [kv > 0.0 for _, kv in seen] == [False, False, True]


def test_agents_come_back_a_pause_after_their_answers_with_longer_prompts() -> None:
    tries, _ = run("cache_aware")
    assert sorted(tried.prompt_tokens for tried in tries)[::47] == [2_000, 9_980]
    hits = sum(tried.cached_tokens for tried in tries) / sum(tried.prompt_tokens for tried in tries)
    assert hits > 0.5
