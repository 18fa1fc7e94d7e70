"""Each planted bug has its place: who changes the code of one is told by the fast tests, not by the slow ones."""

from __future__ import annotations

import pytest

from tests.simulation import mutants, relay_mutants, residency_mutants
from tests.simulation.mutants import Mutant

PLANTED = {
    name: mutant
    for module in (mutants, relay_mutants, residency_mutants)
    for name, mutant in vars(module).items()
    if isinstance(mutant, Mutant)
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_has_its_place(name: str) -> None:
    mutant = PLANTED[name]
    assert mutant.function().__name__ == mutant.name
