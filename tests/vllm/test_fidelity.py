"""Fidelity of the simulated engine, calibrated on a real vLLM, under a load that it was not fitted to."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from loadtest.lab.vllm.fidelity import engine, measure, table_of
from tests.vllm.conftest import Place

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(480)]
SURE = 2.0  # standard errors


def test_a_calibrated_simulation_is_as_fast_as_the_engine(tmp_path: Path, place: Place) -> None:
    """Throughput within 10 %, TTFT and ITL within 15 % at p50 and 30 % at p99, as far as a machine whose speed changes
    by itself can tell: what may be farther off by chance is no failure."""
    place.close()  # one at a time
    console = Console(width=120)
    with engine(tmp_path) as vllm:
        figures = measure(tmp_path, vllm.url, laps=8, seed=1, console=console)
    console.print(table_of(figures))
    assert len(figures) == 5
    assert [one for one in figures if abs(one.error) > one.bound + SURE * one.own] == []
