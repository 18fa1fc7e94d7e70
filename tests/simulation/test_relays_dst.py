"""Deterministic simulation tests of relays and deciders that die, hang and are cut off: all laws hold, and planted bugs
are found.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from loadtest.lab.dst.case import Call, DeciderFault, MemberFault, RelayFault
from loadtest.lab.dst.command import attempt, main, relay_failures
from loadtest.lab.dst.policy import ROUTE
from loadtest.lab.dst.relays.draw import BEFALLS, ROUTES_FROM, STORES_FROM, relay_case
from tests.simulation import relay_mutants as planted
from tests.simulation.mutants import Mutant

FEW = range(4)
# Have failed, by a bug, by a law that asked too much, or by the simulation itself.
MENDED = (698, 1001, 1073, 1182, 1445, 1763, 1809, 4375, 5051, 6882, 8695, 9557, 12251, 17207, 18887, 20229, 20366)
DOZENS = range(60)
STORES = range(STORES_FROM, STORES_FROM + 60)
ROUTES = [*range(ROUTES_FROM, ROUTES_FROM + 60), ROUTES_FROM + 96]
MIRRORED = tuple(ROUTES_FROM + more for more in (283, 292, 299, 306, 488))  # copies for mirrors, the last one's slow
WITHIN = 900.0  # seconds until something hangs
FOUND: dict[str, tuple[Mutant, int | Sequence[int]]] = {  # and in how many seeds, for some room, or in which
    "settled twice": (planted.SETTLED_TWICE, 20),
    "opened anew": (planted.OPENED_ANEW, range(60, 80)),  # none of the first 62
    "held by the dead": (planted.HELD_BY_THE_DEAD, 20),
    "prompt kept": (planted.PROMPT_KEPT, range(285, 300)),  # none of the first 285
    "given away": (planted.GIVEN_AWAY, 20),
    "grants untold": (planted.GRANTS_UNTOLD, 20),
    "moves untold": (planted.MOVES_UNTOLD, range(255, 275)),  # none of the first 260
    "class gone": (planted.CLASS_GONE, range(100, 120)),  # none of the first 100
    "no fence": (planted.NO_FENCE, range(395, 410)),  # none of the first 402
    "waits for nobody": (planted.WAITS_FOR_NOBODY, range(20, 40)),  # none of the first 28
    "trusts emptied": (planted.TRUSTS_EMPTIED, (22180,)),  # no seed before it
    "epochs anew": (planted.EPOCHS_ANEW, range(115, 130)),  # none of the first 119
    "held untold": (planted.HELD_UNTOLD, 20),
    "old answer": (planted.OLD_ANSWER, range(480, 490)),  # none of the first 480
    "out of order": (planted.OUT_OF_ORDER, 60),
    "cancel lost": (planted.CANCEL_LOST, 20),
    "forgotten": (planted.FORGOTTEN, 20),
    "learned wrong": (planted.LEARNED_WRONG, 20),
    "never late": (planted.NEVER_LATE, 20),
    "taken for gone": (planted.TAKEN_FOR_GONE, STORES[15:]),  # none of the first 19 of them
    "copy of the caller's": (planted.COPY_OF_THE_CALLERS, MIRRORED),
    "copy charged": (planted.COPY_CHARGED, MIRRORED),
}


def test_everything_holds_for_a_few_seeds() -> None:
    assert relay_failures(FEW) == []


def test_one_seed_is_one_run() -> None:
    first, again = (attempt(relay_case(3)).log for _ in range(2))
    assert first == again
    assert any("grant" in line for line in first)


def test_a_run_does_not_depend_on_addresses_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bug by which the order of relays matters, where a set of them would have another in each run."""
    plant(planted.OUT_OF_ORDER, monkeypatch)
    for seed in (9, 18, 31, 43):
        first, again = (attempt(relay_case(seed)).log for _ in range(2))
        assert first == again


def test_relays_and_deciders_die_and_are_cut_off_in_those_seeds() -> None:
    events = [event for seed in DOZENS for event in relay_case(seed).events]
    faults = {(type(event), event.what) for event in events if isinstance(event, RelayFault | DeciderFault)}
    of_relays = {(RelayFault, what) for what in ("kill", "break", "hold", "echo")}
    assert faults == of_relays | {(DeciderFault, "kill"), (DeciderFault, "hang")}


def test_members_of_clusters_die_stop_and_are_cut_off_in_those_seeds() -> None:
    events = [event for seed in DOZENS for event in relay_case(seed).events]
    assert {event.what for event in events if isinstance(event, MemberFault)} == set(BEFALLS)


def test_calls_for_model_routes_are_answered_behind_relays() -> None:
    case = relay_case(ROUTES_FROM + 50)
    routed = {f"[{at}]" for at, event in enumerate(case.events) if isinstance(event, Call) and event.model == ROUTE}
    told = [line.split()[1:] for line in attempt(case).log if line.endswith("] ended: ok")]
    assert routed & {number for number, *_ in told}


def test_another_member_is_elected_when_the_leader_dies() -> None:
    case = next(each for each in map(relay_case, DOZENS) if each.members == 3)
    kill = MemberFault(at=3.0, what="reboot", member=-1, seconds=4.0)
    told = attempt(replace(case, events=(kill,), numbers=(0,))).log
    led = [line.split()[1:] for line in told if " leads in epoch " in line]
    assert len(led) == 2
    assert led[0][0] != led[1][0]


@pytest.mark.slow
@pytest.mark.timeout(WITHIN)
def test_everything_holds_for_dozens_of_seeds_and_those_that_have_failed() -> None:
    assert relay_failures([*DOZENS[:30], *STORES[:30], *ROUTES[-31:], *MIRRORED, *MENDED]) == []


@pytest.mark.slow
def test_a_run_that_is_over_tells_the_command_that_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.lab.seeds.CHUNK", 2)
    assert main(["--relays", "--first", "7", "--seeds", "1000", "--jobs", "1", "--within", "0"]) == 0
    *_, done, left = capsys.readouterr().out.splitlines()
    assert done.startswith("4 seeds from 7 on")  # what was begun at once: two chunks for each job
    assert left.endswith("--relays --first 11 --seeds 996 --jobs 1 --within 0")


@pytest.mark.slow
@pytest.mark.timeout(WITHIN)
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mutant, seeds = FOUND[name]
    plant(mutant, monkeypatch)
    looked = range(seeds) if isinstance(seeds, int) else seeds
    found = next((seed for seed in looked if attempt(relay_case(seed)).wrong), None)
    assert found is not None
    assert main(["--relays", "--seed", str(found)]) == 1
    assert f"seed {found}: " in capsys.readouterr().out


def plant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.function())
