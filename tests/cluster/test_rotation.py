"""Rotation of a cluster's token, with real processes: no member is sent away, and no call fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.processes import until
from tests.busy_callers import BusyCallers
from tests.cluster.site import SHOWN, Machine, Site, known, site
from tests.cluster.test_upgrades import together, upgraded

pytestmark = pytest.mark.slow
NEW = "another-token-of-the-cluster"


def written(made: Site, machine: Machine, text: str) -> None:
    """Write a machine's token file, and wait until it says that it has read it."""
    before = machine.output.count("is active")
    (made.folder / f"machine-{made.machines.index(machine) + 1}" / "token").write_text(text)
    assert until(lambda: machine.output.count("is active") > before, 60.0) is not None, machine.output


def rotate(made: Site) -> None:
    """Of two machines one is upgraded while it shows the new token and the other one shows the old one."""
    for text in (f"{SHOWN}\n{NEW}\n", f"{NEW}\n{SHOWN}\n", f"{NEW}\n"):
        for machine in reversed(made.machines):
            written(made, machine, text)
            if text.endswith(f"{SHOWN}\n") and machine is made.machines[1]:
                upgraded(machine)
            assert until(lambda: together(made), 60.0) is not None, machine.output


def test_a_clusters_token_is_rotated_with_an_overlap_and_nothing_fails(tmp_path: Path) -> None:
    async def main(made: Site) -> None:
        first, second = made.machines
        async with BusyCallers(first.gateway.url, 4) as one, BusyCallers(second.gateway.url, 4) as two:
            for clients in (one, two):
                await clients.more(8)
            await asyncio.to_thread(rotate, made)
            for clients in (one, two):
                await clients.more(8)
        assert set(one.ended) == set(two.ended) == {"ok"}, (one.ended, two.ended)

    with site(tmp_path) as made:
        for _ in range(2):
            made.machine(policy="timeouts: {drain: 20s}\n")
        known(made)
        asyncio.run(main(made))
        stranger = made.machine(ready=False)
        stranger.says("another cluster named 'prod' is in this store")
        assert not any(token in machine.output for machine in made.machines for token in (SHOWN, NEW))
