"""Row about batches: what endless lines of a batch cost the people beside whom they run, on one engine.

People ask for 0.6 times the capacity. All lines wait from the first second on, in the class `batch` of docs/batches.md.
First tokens are seconds from a call's sending.
"""

from __future__ import annotations

import msgspec

from gateway.core.quantile import nearest_rank
from loadtest.lab.figures.runs import MIX, Setting, measured, tokens
from loadtest.lab.rows import Row, percent
from loadtest.load.plan import poisson

POLICY = b"""
classes:
  interactive: {weight: 8, strict: true, ttft: 2s, deadline: 60s}
  default: {}
  batch: {deadline: 24h, headroom: 15%, max_queue: 1000000}
"""
LOAD, LINES = 0.6, 2.0  # of the capacity: people's calls, and lines for as long as a run
MEASURED = 900.0  # seconds
LONGER = 1.05  # times the 99th percentile of the first token without lines


def row_batches(setting: Setting) -> list[Row]:
    """The same people without lines and with them."""
    kind = msgspec.structs.replace(MIX[0], share=1.0)
    own = msgspec.structs.replace(
        setting, engines=1, mix=(kind,), policy=POLICY, capacity=None, measured=MEASURED * setting.measured / 120.0
    )
    capacity = own.saturated()
    people = list(poisson(own.mix, LOAD * capacity.calls, own.ends, own.seed))
    lines = poisson(
        (msgspec.structs.replace(kind, class_name="batch"),), LINES * capacity.calls, own.ends, own.seed + 1
    )
    waiting = [msgspec.structs.replace(line, at=0.0) for line in lines]
    rows: list[Row] = []
    alone = 0.0
    for what, calls in (("people alone", people), ("and endless lines", waiting + people)):
        tries = [tried for tried in measured(own, own.run(what, calls)) if tried.outcome == "ok"]
        firsts = sorted(tried.first_byte - tried.sent for tried in tries if tried.class_name == "interactive")
        p50, p99 = (nearest_rank(firsts, share) for share in (0.5, 0.99))
        used = percent(sum(map(tokens, tries)) / own.measured / capacity.tokens)
        row = Row(
            name="batches",
            what=f"{what}: of the capacity; first token p50, p99",
            value=f"{used}; {p50:.2f}, {p99:.2f} s",
            milestone=f"p99 <= {LONGER * alone:.2f} s" if alone else "",
            met=p99 <= LONGER * alone if alone else None,
        )
        rows.append(row)
        alone = alone or p99
    return rows
