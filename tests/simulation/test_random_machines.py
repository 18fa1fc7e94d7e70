"""Laws of the sidecar over random machines with wrong estimates and faults, and the planted bugs that they find."""

from __future__ import annotations

import os
import re
from itertools import chain

import pytest

from loadtest.lab.residency import laws
from loadtest.lab.residency.__main__ import main
from loadtest.lab.residency.laws import had, lived, lives, repeated
from loadtest.lab.residency.random_machine import drawn
from loadtest.lab.residency.residents import Model, TriedStart
from loadtest.lab.residency.site import GIB, Site, file
from loadtest.lab.seeds import explore
from loadtest.simulate import vtime
from sidecar.core.inventory import Size
from sidecar.core.lifecycle import FIRST_REST, MOST_FAILURES
from tests.simulation.mutants import Mutant
from tests.simulation.residency_mutants import (
    LEFT_PENDING,
    LEFT_RUNNING,
    RESTS_FOR_EVER,
    SHARED_GPU,
    UNDRAINED,
    UNTAUGHT,
    WAITED_FOR,
)

MACHINES = 31  # each planted bug is found on one of them
SOME = 60  # that find each planted bug
FOUND = {  # and from which seed on: none before it does, or only after hours in which nothing can be had
    "left pending": (LEFT_PENDING, "nobody sees to", 19),
    "untaught": (UNTAUGHT, "was started so again", 2),
    "shared GPU": (SHARED_GPU, " while ", 1),
    "left running": (LEFT_RUNNING, "are held by engine", 30),
    "undrained": (UNDRAINED, "is ended with", 18),
    "waited for": (WAITED_FOR, "hangs since", 16),
}


@pytest.mark.parametrize("seed", range(1))
def test_every_law_holds(seed: int) -> None:
    life = lived(seed)
    assert life.wrong == ()
    assert sum(life.calls.values()) > 10


@pytest.mark.parametrize(
    ("failed", "free", "broken"),
    [("oom", 20, True), ("oom", 21, False), ("free_memory_too_low", 21, False), ("no_kv", 21, True)],
)
def test_a_full_gpu_may_be_tried_with_the_same_claim_once_more_is_free(failed: str, free: int, broken: bool) -> None:
    before = TriedStart(0.0, "a", (0,), Size(claim=10), free=30, failed=failed, left=20)
    after = TriedStart(9.0, "a", (0,), Size(claim=10), free=free, failed="no_kv")
    assert repeated([before, after], []) == [before] * broken


@pytest.mark.slow
def test_every_law_holds_for_many_machines() -> None:
    found = chain.from_iterable(more for _, more in explore(range(MACHINES), os.cpu_count() or 1, lives))
    assert [f"--machine {life.seed}: {life.wrong[0]}" for life in found if life.wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, words, first = FOUND[name]
    _plant(monkeypatch, mutant)
    monkeypatch.setattr(laws, "HAD_WITHIN", 300.0)  # what is never had again is another law's
    assert any(words in wrong for seed in range(first, first + SOME) for wrong in lived(seed).wrong)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_a_model_that_rests_for_ever_is_found(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted:
        _plant(monkeypatch, RESTS_FOR_EVER)
    machine = drawn(0)
    name = min(machine.models)

    async def run() -> list[str]:
        async with Site(file(name), {name: Model(weights=GIB, claim=2 * GIB)}, 16 * GIB) as site:
            site.machine.faults.fail_start = MOST_FAILURES
            return await had(site, machine, name, 2 * FIRST_REST)

    found = vtime.run(run())
    assert bool(found) is planted
    assert all("no call has" in words for words in found)


def _plant(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.function())


def test_machines_are_unlike_each_other_and_the_same_for_a_seed() -> None:
    drawn_ones = [drawn(seed) for seed in range(100)]
    assert drawn_ones[7] == drawn(7)
    assert {each.listing for each in drawn_ones} == {"own", "host", "none"}
    assert {len(each.totals) for each in drawn_ones} == {1, 2, 3, 4}
    assert {several for each in drawn_ones for several in each.tensor_parallel.values()} == {1, 2, 4}


@pytest.mark.slow
def test_a_machine_on_which_a_law_is_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, so that the planted bug is there.
    monkeypatch.setattr(laws, "explore", lambda seeds, workers, run: [(len(seeds), run(seeds))])
    assert laws.survey(range(1)) == 0
    mutant, _, first = FOUND["undrained"]  # the cheapest of them
    _plant(monkeypatch, mutant)
    broken = next(seed for seed in range(first, first + SOME) if lived(seed).wrong)
    assert laws.survey(range(broken, broken + 1)) == 1
    assert f"--machine {broken}: " in capsys.readouterr().out


@pytest.mark.slow
def test_one_machine_is_shown_with_all_that_befell_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "3"]) == 0
    told = capsys.readouterr().out
    assert told.endswith("every law held\n")
    assert re.search(r"^ +[\d.]+ a starts on GPU", told, re.MULTILINE)
