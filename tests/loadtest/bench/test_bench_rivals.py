"""Rivals of `gateway bench --compare`: named, absent, and a real one before engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.fleet import Fleet, started
from loadtest.bench.rivals import absent, parse_compared, program
from loadtest.load.arrivals import Arrivals, Closed
from tests.loadtest.bench_servers import scenario_of, sent


def test_names_are_baselines_or_routers_with_a_policy() -> None:
    names = ("direct", "vllm-router", "vllm-router:round_robin")
    assert parse_compared(",".join((*names, "direct"))) == names
    for wrong in ("sglang", "vllm-router:", "vllm-router:best", ""):
        with pytest.raises(ValueError, match="is not one of direct, round_robin, vllm-router"):
            parse_compared(wrong)


def test_a_router_that_is_not_there_is_said_with_what_to_do(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    assert absent(nothing) == (
        "vllm-router is not on the PATH: pip install vllm-router in an environment of its own, and name its program in "
        "VLLM_ROUTER"
    )
    assert f"VLLM_ROUTER names {tmp_path}/r, which is no program" in (
        absent(nothing | {"VLLM_ROUTER": f"{tmp_path}/r"}) or ""
    )
    own = tmp_path / "r"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert program({"PATH": "", "VLLM_ROUTER": str(own)}) == str(own)


@pytest.mark.slow
@pytest.mark.skipif(program() is None, reason="no vllm-router on the PATH nor named by VLLM_ROUTER")
def test_calls_reach_engines_by_a_real_router(tmp_path: Path) -> None:
    fleet = Fleet(count=2, profile="h100-8b", models=("m",))
    with started(fleet, "r", before="vllm-router:round_robin", policy=None, seed=1, folder=tmp_path) as target:
        ran = sent(target.addresses[0], scenario_of(Arrivals(closed=Closed(clients=1, rounds=4)), 60.0))
    assert [result.outcome for result in ran.results] == ["ok"] * 4
