"""Calibration: it recovers a simulated engine's constants, and its profile is usable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from gateway.serve.embedded import EmbeddedFleet, parse_embedded
from loadtest.bench.fleet import parse_fleet
from loadtest.calibrate.command import profile_from
from loadtest.calibrate.fit import Fit, Unfit, fit, played, with_front
from loadtest.calibrate.observations import Burst, EngineLimits, Observed, ObservedRequest, WorkRow
from loadtest.calibrate.probe import Probe
from loadtest.calibrate.steps import SLICE, between
from loadtest.engine.config import sim_config
from loadtest.engine.engine_config import engine_config
from loadtest.engine.latency import Front, Profile
from loadtest.engine.profile_file import ProfileFile, profile_of, profiles, text_of
from loadtest.load.prompts import Text, completion_of
from loadtest.report.records import TokenGaps
from loadtest.simulate import vtime
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_requests import Taker
from loadtest.simulate.step_times import Pace

TIMES = ("base", "prefill", "decode", "context", "front", "delay")
WORK = [  # of a step: prompt tokens, sequences that decode, KV tokens they read, pairs of tokens
    (0, 1, 100, 0),
    (0, 24, 24 * 600, 0),
    (100, 8, 8 * 200, 100**2 // 2),
    (1500, 0, 0, 1500**2 // 2),
]


class Answer:
    """One answer, as it comes."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.first = 0.0
        self.gaps: tuple[float, ...] = ()
        self.over = self.loop.create_future()

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        assert status == 200, data
        self.first = self.loop.time()

    def data(self, data: bytes) -> None:
        pass

    def end(self) -> None:
        self.over.set_result(None)

    def failed(self, kind: str, message: str) -> None:
        raise AssertionError(message)


class InMemory:
    """A simulated engine as calibration sees a live one."""

    def __init__(self, profile: Profile, rng: random.Random) -> None:
        def paced(taker: Taker, gaps: TokenGaps) -> None:
            assert isinstance(taker, Answer)
            taker.gaps = tuple(gaps)

        self.engine = MemoryEngine(engine_config(profile, seed=3), pace=Pace(paced))
        self.rng = rng
        self.text = Text(rng)

    async def ask(self, prompt: int, output: int) -> ObservedRequest:
        answer = Answer()
        sent = answer.loop.time()
        self.engine.post(
            b"/v1/completions", completion_of(self.text.cut(prompt, self.rng), output, ignore_eos=True), answer
        )
        await answer.over
        times = [answer.first]
        for gap in answer.gaps:
            times.append(times[-1] + gap)
        return ObservedRequest(prompt, prompt, sent, tuple(times))

    async def together(self, sizes: Sequence[tuple[int, int]]) -> list[ObservedRequest]:
        return list(await asyncio.gather(*(self.ask(prompt, output) for prompt, output in sizes)))


def observed(profile: Profile, budget: float) -> Observed:
    async def main() -> Observed:
        rng, clock = random.Random(1), asyncio.get_running_loop().time
        limits = EngineLimits(max_model_len=profile.max_model_len, num_gpu_blocks=profile.num_gpu_blocks)
        return await Probe(InMemory(profile, rng), limits, budget, rng, lambda done, what: None, clock).run()

    return vtime.run(main())


@pytest.mark.parametrize(
    "profile",
    [
        msgspec.structs.replace(profiles()["a100-8b"], max_num_seqs=100),
        msgspec.structs.replace(profiles()["cpu-tiny"], front=0.002, delay=0.004, max_num_seqs=48),
        msgspec.structs.replace(profiles()["a100-8b"], attention=40e-9, max_num_seqs=100),
    ],
    ids=["a100-8b", "cpu-tiny behind a server", "long prompts cost more"],
)
def test_the_constants_of_an_engine_are_found_from_outside(profile: Profile) -> None:
    seen = observed(profile, 40.0)
    found = profile_from(fit(seen.rows), seen)
    for work in WORK:
        assert found.exact(*work) == pytest.approx(profile.exact(*work), rel=0.03), work
    for name in TIMES:
        assert getattr(found, name) == pytest.approx(getattr(profile, name), rel=0.06, abs=20e-9), name
    assert found.attention == pytest.approx(profile.attention, rel=0.1, abs=2e-9)
    assert found.jitter == pytest.approx(profile.jitter, rel=0.3)
    for name in ("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert getattr(found, name) == getattr(profile, name)
    assert not seen.notes


def rows(pause: float = 1.0) -> list[WorkRow]:
    """Work of an engine whose step takes 4 ms + 16 us a prompt token + 130 us a sequence + 20 ns of context, behind a
    server of 5 ms; every tenth time `pause` times as long."""
    made = []
    for number in range(120):
        decoded = 2 ** (number % 6)
        if number % 3:
            work = WorkRow(0.0, 1.0, decoded=decoded, context=decoded * (50 + 900 * (number % 2)))
        else:
            work = WorkRow(0.0, 1.0, prompt=30 * decoded, ways=1.0)
        exact = 0.004 + 16e-6 * work.prompt + 130e-6 * work.decoded + 20e-9 * work.context + 0.005 * work.ways
        made.append(msgspec.structs.replace(work, seconds=exact * (1.0 if number % 10 else pause)))
    return made


def values(made: Fit) -> list[float]:
    return list(made.constants.values())


def test_least_squares_are_exact_and_pauses_do_not_move_them() -> None:
    expected = pytest.approx([0.004, 16e-6, 130e-6, 20e-9, 0.0, 0.005], rel=1e-6)
    exact = fit(rows())
    assert values(exact) == expected
    assert exact.explained == pytest.approx(1.0)
    assert values(fit(rows(pause=5.0))) == pytest.approx(values(exact), rel=1e-3)


def test_noise_makes_no_constant_smaller() -> None:
    rng = random.Random(1)
    noisy = [msgspec.structs.replace(row, seconds=row.seconds * rng.uniform(0.65, 1.35)) for row in 20 * rows()]
    exact = fit(rows())
    assert values(fit(noisy))[:2] == pytest.approx(values(exact)[:2], rel=0.03)


def test_attention_is_not_fitted_where_all_prompts_are_as_long() -> None:
    lone = WorkRow(0.004 + 0.001 + 0.005, 1.0, prompt=100.0, pairs=5000.0, ways=1.0)
    beside = [WorkRow(0.004 + 0.001 * many, 1.0, prompt=100.0 * many, pairs=5000.0 * many) for many in range(4)]
    found = fit([lone, *beside, lone, *beside]).constants
    assert {name: round(found[name], 9) for name in ("base", "prefill", "attention", "delay")} == {
        "base": 0.004, "prefill": 10e-6, "attention": 0.0, "delay": 0.005,
    }  # fmt: skip


def test_traffic_says_how_long_the_way_in_is_when_others_are_under_way() -> None:
    real = msgspec.structs.replace(profiles()["cpu-tiny"], front=0.0, delay=0.012)
    at = [0.011 * number for number in range(60)]
    sizes = [(50 + 7 * number % 300, 20) for number in range(60)]
    seen = Burst(at=at, sizes=sizes, first=[], seconds=0.0)
    seen = msgspec.structs.replace(seen, first=played(real, seen)[0])
    assert with_front(msgspec.structs.replace(real, delay=0.004), [], [seen]).delay == pytest.approx(0.012, rel=0.02)
    close = msgspec.structs.replace(real, delay=0.0121)
    assert with_front(close, [], [seen]).delay == pytest.approx(0.0121, rel=0.02)
    assert with_front(close, [], []) == close


def test_no_constant_is_below_nothing_and_what_cannot_be_told_apart_is_said() -> None:
    no_context = [msgspec.structs.replace(row, seconds=row.seconds - 30e-9 * row.context) for row in rows()]
    assert fit(no_context).constants["context"] == 0.0
    with pytest.raises(Unfit, match="cannot be told apart"):
        fit([WorkRow(0.01 * number, number, decoded=number) for number in range(1, 9)])


def test_a_server_lets_one_request_through_at_a_time() -> None:
    front = Front(msgspec.structs.replace(profiles()["cpu-tiny"], front=0.002, delay=0.01))
    assert [front.reaches(at) for at in (1.0, 1.0, 1.001, 2.0)] == pytest.approx([1.012, 1.014, 1.016, 2.012])


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_profile_in_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for known in profiles().values():
        profile = msgspec.structs.replace(known, front=0.00123, delay=0.0)
        file.write_text(text_of(ProfileFile(what='a "quoted" \\ name', profile=profile), ["how it was made"]))
        assert profile_of(str(file)) == profile
    fleet = parse_fleet(f"sim:3:{file}")
    assert (fleet.count, fleet.profile) == (3, str(file))
    assert parse_embedded(f"sim:3:{file}") == EmbeddedFleet(3, str(file))
    assert sim_config(str(file)).engine.profile == profile


def test_mistakes_in_a_profile_are_named_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("version: 1\nprofile:\n  base: 4\n  prefil: 3us\n")
    with pytest.raises(
        ValueError, match=r"mine.yaml:3: profile.base: found '4', expected a time such as 86ns"
    ) as error:
        profile_of(str(file))
    assert "(did you mean prefill?)" in str(error.value)
    with pytest.raises(ValueError, match="neither a file nor one of a100-8b, h100-8b"):
        profile_of(str(tmp_path))


def test_steps_are_seen_while_requests_come_and_go_beside_one_that_decodes() -> None:
    beside = ObservedRequest(20, 20, 0.0, tuple(float(at) for at in range(1, 2 * SLICE + 2)))
    early = ObservedRequest(100, 100, 0.0, (1.0, 2.0))  # read before the first slice begins, with one token more in it
    late = ObservedRequest(
        50, 60, 3.0, (9.0, 10.0, 11.0)
    )  # ten of its prompt were cached; read at the end of the first slice
    first, second = between(beside, [late, early])
    own = [20 + number for number in range(1, 2 * SLICE + 1)]  # KV tokens before each of its tokens
    assert first == WorkRow(8.0, 8.0, 50.0, decoded=9.0, context=float(sum(own[:8]) + 101), pairs=50.0 * 35)
    assert second == WorkRow(8.0, 8.0, prompt=0.0, decoded=10.0, context=float(sum(own[8:]) + 61 + 62))
    assert between(ObservedRequest(20, 20, 0.0, (1.0,)), [late]) == []
