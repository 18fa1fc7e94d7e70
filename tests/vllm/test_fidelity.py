"""The simulated engine, calibrated on a real vLLM, against that vLLM under a load that nothing was fitted to."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from loadtest.fidelity import engine, measure, table_of
from tests.vllm.conftest import Place

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


def test_a_calibrated_simulation_is_as_fast_as_the_engine(tmp_path: Path, place: Place) -> None:
    """Throughput within 10 %, TTFT and ITL within 15 % at p50 and 30 % at p99: not always, so a miss is told as an
    expected failure, with the figures. More than three times the bound is a failure, unless rounds of one and the
    same load are as far apart."""
    place.close()  # one at a time
    console = Console(width=120)
    with engine(tmp_path) as vllm:
        figures = measure(tmp_path, vllm.url, rounds=2, seed=1, console=console)
    console.print(table_of(figures))
    assert len(figures) == 5
    missed = [figure for figure in figures if not figure.good]
    assert [one for one in missed if abs(one.error) > max(3.0 * one.bound, one.own)] == []
    if missed:
        told = (f"{figure.what} {figure.error:+.0%}, rounds {figure.own:.0%} apart" for figure in missed)
        pytest.xfail(f"farther off than it should be: {'; '.join(told)}")
