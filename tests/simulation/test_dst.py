"""Deterministic simulation tests of the whole gateway: all invariants hold for hundreds of seeds, and planted bugs are
found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import msgspec
import pytest

from gateway.core.policy.file import decode
from loadtest.lab.dst.case import Call, Case, EngineSpec, Event, Reload, SidecarSpec
from loadtest.lab.dst.command import Outcome, attempt, case, command, failures, kind, main, shrink
from loadtest.lab.dst.policy import DAYS, read_json
from loadtest.lab.seeds import explore
from loadtest.simulate.simulation import Fault
from tests.simulation.mutants import (
    ANOTHERS_ACCOUNT,
    LATE_AT_ONCE,
    LEAKED_HOLD,
    LOST_WAKE_UP,
    NEVER_EVICTED,
    NO_TTL,
    NO_TTL_BEGUN,
    PREDICTED_AT_ONCE,
    REFUNDED_EXPIRY,
    SET_ASIDE,
    UNCHARGED,
    UNFILLED_GAP,
    UNSETTLED,
    Mutant,
)

SEEDS = 200  # `make dst` tries a thousand
WITHIN = 900.0  # seconds until something hangs: it takes 20 on two quiet cores, and neighbours take their part
SEVERAL = 2
FEW = 60  # seeds that find each planted bug several times
MORE = 240  # for those that need more: an idle engine predicted as too slow, a class with headroom
FOUND = {  # the words, and the first seeds that find it
    "leaked hold": (LEAKED_HOLD, "and still holds", (1, 2)),
    "lost wake-up": (LOST_WAKE_UP, "a lost wake-up", (9, 24)),
    "unfilled gap": (UNFILLED_GAP, "a lost wake-up", (38, 60)),
    "late at once": (LATE_AT_ONCE, "past its deadline", (17, 18)),
    "uncharged": (UNCHARGED, "which is unfair by", (1, 9)),
    "another's account": (ANOTHERS_ACCOUNT, "is the tenant", (12, 24)),
    "refunded expiry": (REFUNDED_EXPIRY, "tokens written for it, and nothing was charged", (1, 2)),
    "never evicted": (NEVER_EVICTED, "are taken for cached", (2, 3)),
    "predicted at once": (PREDICTED_AT_ONCE, "is not granted at once though", (3, 24)),
    "no TTL": (NO_TTL, "its hold was not given back", (1, 4)),
    "no TTL after the first byte": (NO_TTL_BEGUN, "its hold was not given back", (1, 13)),
    "unsettled": (UNSETTLED, "tokens written for it, and nothing was charged", (16, 40)),
}


@pytest.mark.slow
@pytest.mark.timeout(WITHIN)
def test_everything_holds_for_hundreds_of_seeds() -> None:
    failed = []
    for _, more in explore(range(SEEDS), os.cpu_count() or 1, failures):
        failed += more
    commands = [f"python -m loadtest.lab.dst --seed {each.seed}  # {each.wrong}" for each in failed]
    assert not failed, "\n".join(commands)


@pytest.mark.slow
@pytest.mark.timeout(WITHIN)
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found_by_several_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len([*found(name, monkeypatch, SEVERAL)]) == SEVERAL


@pytest.mark.slow
@pytest.mark.timeout(WITHIN)
@pytest.mark.parametrize("seed", [171, 197])
def test_a_call_that_waits_for_its_full_engine_without_end_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SET_ASIDE.owner, SET_ASIDE.name, SET_ASIDE.function())
    assert "is set aside for" in attempt(case(seed)).wrong


@pytest.mark.slow
@pytest.mark.timeout(WITHIN)
def test_the_seed_of_a_planted_bug_is_made_smaller_and_its_command_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((whole, wrong),) = found("leaked hold", monkeypatch, 1)
    small = shrink(whole, wrong)
    assert 0 < len(small.events) < len(whole.events) / 2
    typed = command(small).split()[3:]
    assert main(typed) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "and still holds" in lines[-1]
    assert sum("] Call(" in line for line in lines) == sum(isinstance(event, Call) for event in small.events)


def found(name: str, monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[tuple[Case, str]]:
    """Plant a bug; the first cases that fail by it, at most `count`, and how each fails."""
    mutant, words, known = FOUND[name]
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.function())
    many = mutant in (LOST_WAKE_UP, PREDICTED_AT_ONCE, UNFILLED_GAP)
    cases = map(case, dict.fromkeys((*known, *range(MORE if many else FEW))))
    failed = ((each, attempt(each).wrong) for each in cases)
    return islice(((each, wrong) for each, wrong in failed if words in wrong), count)


def test_a_mutant_whose_place_is_gone_is_an_error() -> None:
    owner = LEAKED_HOLD.owner
    with pytest.raises(ValueError, match="0 times"):
        Mutant(owner, LEAKED_HOLD.name, "what is not there", "pass").function()


def test_one_seed_is_one_run() -> None:
    first, again = (attempt(case(4)).log for _ in range(2))
    assert first == again
    assert any("grant" in line for line in first)


def test_what_a_simulation_raises_is_told_with_its_seed() -> None:
    broken = msgspec.structs.replace(of_events(), policy='{"version": 9}')
    assert "version" in attempt(broken).wrong


def test_a_cases_policy_is_read_as_a_file_is() -> None:
    drawn = [text.encode() for seed in range(6) for text in policies(case(seed))]
    assert len(drawn) > 6
    assert all(read_json(text) == decode(text) for text in drawn)


def policies(whole: Case) -> list[str]:
    return [whole.policy, *(event.policy for event in whole.events if isinstance(event, Reload))]


@pytest.mark.slow
def test_a_seed_that_fails_in_a_worker_fails_for_whoever_types_the_command() -> None:
    """Texts have other hashes in every process; no order may depend on them. A route's member does: it goes by the hash
    of its prompt's beginning."""
    fit = (seed for seed in count() if len(case(seed).sidecars) == 2 and '"members"' not in case(seed).policy)
    for seed in islice(fit, 2):
        typed = [sys.executable, "-m", "loadtest.lab.dst", "--seed", str(seed)]
        runs = [
            subprocess.run(
                typed, check=False, env=os.environ | {"PYTHONHASHSEED": hashes}, capture_output=True, timeout=60
            )
            for hashes in "12"
        ]
        assert runs[0].returncode == 0
        assert runs[0].stdout == runs[1].stdout


def test_a_failure_is_made_smaller_while_it_is_the_same() -> None:
    whole = case(1)
    needed = {whole.numbers[2], whole.numbers[-1]}

    def run(what: Case) -> Outcome:
        fails = needed <= set(what.numbers)
        return Outcome(f"at {len(what.numbers)}.5 s: call 3b is lost" if fails else "at 1 s: another", [])

    small = shrink(whole, "at 9.25 s: call 7 is lost", run)
    assert set(small.numbers) == needed
    assert command(small) == f"python -m loadtest.lab.dst --seed 1 --only {whole.numbers[2]},{whole.numbers[-1]}"
    assert command(whole) == "python -m loadtest.lab.dst --seed 1"


def test_the_same_failure_is_known_by_its_words() -> None:
    assert kind("at 3.2500 s: call 3b ended") == kind("at 17.1 s: call 4 ended") != kind("at 3.2500 s: call 3b waits")


@pytest.mark.parametrize("argv", [["--only", "3"], ["--seeds", "0"], ["--seed", "x"], ["--seed", "1", "--only", "b"]])
def test_what_cannot_be_understood_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "loadtest.lab.dst: error" in capsys.readouterr().err


# -- what has been found ----------------------------------------------------------------------------------------------

MACHINE = EngineSpec(model="sim", blocks=40, sequences=4, step=1 / 32, prefill=0.0, jitter=0.0)
POLICY: dict[str, Any] = {
    "version": 1,
    "limits": {"global": {"requests": DAYS, "tokens": DAYS}},
    "fleet": {"poll": "20s"},
    "budget": {"max_concurrency": 1},
    "retries": "100%",
    "routing": {"slow_start": "0s"},
}


def of_events(*events: Event, engines: int = 1, **sections: Any) -> Case:
    """So many engines of one call at a time, and these events."""
    return Case(
        seed=0,
        policy=msgspec.json.encode(POLICY | sections).decode(),
        fixed=(MACHINE,) * engines,
        extra=(),
        sidecars=(),
        events=events,
        numbers=tuple(range(len(events))),
        cancels=True,
    )


CALL = Call(at=1.0, class_name="default", key="", model="sim", prompt=16, asked=16, stream=True, group=0)


def a_call(**fields: Any) -> Call:
    """16 tokens, a 32nd of a second each."""
    return msgspec.structs.replace(CALL, **fields)


def told(case: Case, word: str) -> list[str]:
    """What a case in which nothing is wrong has to tell of grants, or of records: times and lines."""
    outcome = attempt(case)
    assert outcome.wrong == ""
    return [" ".join(line.split()) for line in outcome.log if f"  {word} " in line]


def test_a_call_whose_client_leaves_before_its_first_turn_has_a_record() -> None:
    assert told(of_events(a_call(leaves=0.0)), "record") == ["1.0000 record 1 client_gone after 0.0000 s: client_gone"]


def test_an_answer_that_ends_in_the_moment_of_its_deadline_is_whole_and_followed_by_nothing() -> None:
    assert told(of_events(a_call(within=0.5)), "record") == ["1.5000 record 1 ok after 0.5000 s: deadline"]


def test_a_class_that_must_pause_holds_up_nobody_for_another_model() -> None:
    events = (
        a_call(asked=200),
        a_call(at=1.25, class_name="batch", asked=370, within=1.4),  # does not fit beside it; soon nothing passes it
        a_call(at=2.0),
        a_call(at=2.5, class_name="batch", model="m1"),  # now its class has all it may
    )
    what = of_events(
        *events,
        classes={"default": {}, "batch": {"max_concurrency": 1}},
        budget={"max_concurrency": 8},
        lengths="100%",
        deadlines="run",
    )
    other = msgspec.structs.replace(MACHINE, model="m1")
    assert told(msgspec.structs.replace(what, fixed=(MACHINE, other), cancels=False), "grant")[:3] == [
        "1.0000 grant 1 on engine-0:8000",
        "2.5000 grant 4 on engine-1:8000",
        "2.5000 grant 3 on engine-0:8000",
    ]


def test_who_waits_for_an_engine_that_turns_out_to_be_gone_goes_elsewhere_at_once() -> None:
    events = (
        Fault(at=0.5, what="errors", engines=(1,), value=1.0, status=503),
        a_call(asked=64),
        a_call(at=1.25),  # both have been refused by the second engine, and wait for the first
        a_call(at=1.25),
        Fault(at=1.75, what="recover", engines=(1,)),
        Fault(at=2.125, what="die", engines=(0,)),
    )
    grants = told(of_events(*events, engines=2), "grant")
    assert [line for line in grants if line.startswith("2.1250")] == [
        "2.1250 grant 2 on engine-0:8000",
        "2.1250 grant 3 on engine-1:8000",
    ]


def test_who_waits_for_a_sidecars_model_is_told_when_a_reload_hears_no_sidecar_any_more() -> None:
    fleet = {"poll": "20s"}
    without = msgspec.json.encode(POLICY | {"fleet": fleet}).decode()
    what = of_events(a_call(), Reload(at=2.0, policy=without), engines=0, fleet=fleet | {"sidecars": {}})
    helper = SidecarSpec(engines=(MACHINE,), running=(False,), takes=6.0)
    records = told(msgspec.structs.replace(what, sidecars=(helper,)), "record")
    assert [line.split(":")[0] for line in records] == ["2.0000 record 1 no_engine after 1.0000 s"]
