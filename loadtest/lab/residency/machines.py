"""Rows about random machines: which laws of the sidecar were broken, over many seeds."""

from __future__ import annotations

import os
from collections import Counter

from loadtest.lab.residency.laws import MachineLife, lives
from loadtest.lab.rows import OnProgress, Row
from loadtest.lab.seeds import explore

NAMED = 5  # machines that are named where a law was broken
LAWS = {
    "models left stuck": ("pending", "nobody sees to", "no call has"),
    "GPU memory overrun": ("are held on GPU", "were taken", "starts with", " while "),
    "starts repeated with the same claim in the same place": ("was started so again",),
    "engines that hang": ("hangs since",),
    "calls lost without an error": ("hangs", "does not serve", "was cut off", "is ended with"),
    "left over at the end": ("in the end", "are held by engine", "by the ledger", "gateway"),
}


def rows(seeds: range, progress: OnProgress) -> list[Row]:
    """A row for each law, and one for whatever else was wrong."""
    found: list[MachineLife] = []
    for _, more in explore(seeds, os.cpu_count() or 1, lives):
        found += more
        progress("random machines", len(found) / len(seeds))
    calls: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for life in found:
        calls.update(life.calls)
        failures.update(life.failures)
    about = (
        f"{sum(life.starts for life in found)} starts, {failures.total()} failed; {calls.total()} calls: "
        + ", ".join(f"{count} {ending}" for ending, count in calls.most_common())
    )
    return [
        Row(
            name="laws",
            what=f"{len(found)} random machines: {law}",
            value=_value(broken := [life for life in found if law in map(law_of, life.wrong)]),
            baseline=about if number == 0 else "",
            milestone="0",
            met=not broken,
        )
        for number, law in enumerate((*LAWS, "anything else"))
    ]


def law_of(wrong: str) -> str:
    """The law that this breaks, of LAWS; `anything else`: none of them."""
    return next((law for law, words in LAWS.items() if any(each in wrong for each in words)), "anything else")


def _value(broken: list[MachineLife]) -> str:
    if not broken:
        return "0"
    seeds = sorted(life.seed for life in broken)
    return f"{len(seeds)}: --machine {', '.join(map(str, seeds[:NAMED]))}{' ...' if len(seeds) > NAMED else ''}"
