"""Row about prefill elsewhere: decided per call, beside engines that never exchange a prompt or always do.

Engines are `a100-8b` with vLLM's defaults, and fetch KV cache at 10 GB/s (`loadtest/engine/kv_transfer.py`). A call is
in time if it keeps the bounds of SLO. The capacity is what the mixed engines do for closed-loop clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import msgspec

from gateway.core.admission import admission
from gateway.core.engines.choice import Choice, cached_tokens, predicted_ttft, usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.transfer import SOONER, Prefill, where
from gateway.core.request.call import Call
from gateway.shared.protocol import Role
from loadtest.lab.figures.runs import Setting
from loadtest.lab.rivals.loads import AGENTS, CHATS, PROMPTS, SHORT, RivalLoad
from loadtest.lab.rows import Row, percent
from loadtest.load.lengths import Length, LogNormal
from loadtest.load.scenario import Scenario
from loadtest.load.slo import parse_slo
from loadtest.load.workload import Kind, Workload
from loadtest.report.summary import Part, summarise
from loadtest.simulate.run import Cell, Progress, simulate

PROFILE = "a100-8b"
POLICY = b"""
classes:
  interactive: {weight: 8, ttft: 2s, tpot: 100ms, deadline: 60s}
  default: {weight: 4, ttft: 10s, deadline: 5m}
"""
SLO = parse_slo(
    "interactive.ttft.p99<2s,interactive.tpot.p99<100ms,interactive.e2e.p99<60s,"
    "default.ttft.p99<10s,default.e2e.p99<300s"
)
NO_WORSE = 0.98  # of the calls in time with the better of the two FIXED ways
SPLIT: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")


class Way(msgspec.Struct, frozen=True):
    """Way to use four engines. `always`: each prompt is read on an engine that reads, whatever is predicted, and that
    answers nothing."""

    roles: tuple[Role, ...] = ()
    always: bool = False


WAYS = {
    "mixed": Way(),
    "2+2, every prompt": Way(SPLIT, always=True),
    "2+2, per call": Way(SPLIT),
}
FIXED = ("mixed", "2+2, every prompt")
CODE = Kind(
    class_name="interactive", prompt=Length(log_normal=LogNormal(1_500, 0.8), least=16, most=7_500),
    output=Length(log_normal=LogNormal(14, 0.9), least=1, most=1_000), ignore_eos=True,
)  # fmt: skip
LONG = Kind(prompt=Length(constant=18_000), output=Length(constant=200), ignore_eos=True, share=1.0)


def _load(*mix: Kind, trace: str = "", longest: int | None = None) -> RivalLoad:
    scenario = Scenario(workload=Workload(mix=mix), slo=SLO, retries=0, timeout=300.0)
    return RivalLoad(scenario=scenario, trace=trace, profile=PROFILE, longest=longest, share=1.0)


LOADS = {
    "conversations": _load(CHATS, trace="chats"),
    "code": _load(CODE),
    "long prompts": _load(PROMPTS, trace="prompts", longest=131_072),
    "agents": _load(AGENTS.workload.mix[0]),
    "chats and 18,000-token prompts": _load(msgspec.structs.replace(SHORT, share=12.0), LONG),
}
SHARES = (0.8, 0.95)  # of the capacity


def always(
    call: Call, choice: Choice, readers: Sequence[Engine], targets: Mapping[str, float], now: float
) -> Prefill | None:
    """Have the prompt read on the engine with the least to read, as a fleet that is split by its configuration."""
    able = [e for e in usable_of(readers, now) if e.ledger.fits(call.prompt_tokens, call.class_name)]
    if not able or not call.splits:
        return None
    unread = {engine: max(1, call.prompt_tokens - cached_tokens(engine, call)) for engine in able}
    reader = min(able, key=lambda engine: predicted_ttft(engine, unread[engine], now))
    there = predicted_ttft(reader, unread[reader], now)
    return Prefill(reader, SOONER, choice.ttft, there, unread[reader], choice.prefill, within=300.0)


def answering(fleet: Fleet, model: str) -> tuple[Engine, ...]:
    """Engines of the model less those that read for others, as in a fleet that is split by its configuration."""
    return tuple([engine for engine in fleet if engine.transfers.answers and model in engine.models])


def row_prefill(setting: Setting) -> list[Row]:
    """Run each load at each share of its capacity, each way."""
    rows = []
    for name, load in LOADS.items():
        file = setting.traces.get(load.trace)
        given = load if file is None else load.replayed(file)
        capacity = given.capacity()
        for share in SHARES:
            what = f"{name} at {share:g}x"
            found = {way: measured(setting, f"{what}, {way}", given, way, share * capacity) for way in WAYS}
            rows += [_row(f"{what}, {way}", each, found, fixed=way in FIXED) for way, each in found.items()]
    return rows


def _row(what: str, part: Part, found: Mapping[str, Part], *, fixed: bool) -> Row:
    """Share of the calls in time, seconds to the first token (mean, p99), milliseconds between two tokens and per token
    of a call (p99)."""
    least = NO_WORSE * max(found[way].goodput for way in FIXED)
    value = (
        f"{percent(part.goodput)}; {part.ttft.mean:.2f}, {part.ttft.p99:.2f} s; {1e3 * part.itl.p99:.0f} ms; "
        f"{1e3 * part.tpot.p99:.0f} ms"
    )
    if fixed:
        return Row(name="prefill", what=what, value=value)
    return Row(name="prefill", what=what, value=value, milestone=f">= {percent(least)}", met=part.goodput >= least)


def measured(setting: Setting, what: str, load: RivalLoad, way: str, rate: float) -> Part:
    """Run a load one way, at so many calls or conversations a second."""
    offered = msgspec.structs.replace(load, share=1.0).at(rate, setting.ends)
    scenario = msgspec.structs.replace(offered, warmup=setting.warm, duration=setting.ends, seed=setting.seed)

    def tell(progress: Progress) -> bool:
        setting.progress(what, min(1.0, progress.at / setting.ends))
        return False

    decides, serving = (always, answering) if WAYS[way].always else (where, Fleet.serving)
    with (
        TemporaryDirectory() as folder,
        patch.object(admission, "where", decides),
        patch.object(Fleet, "serving", serving),
    ):
        cell = Cell(name=what, before="gateway", policy=POLICY, engines=4, config=load.config, scenario=scenario,
                    folder=Path(folder), roles=WAYS[way].roles)  # fmt: skip
        made = simulate(cell, tell)
    setting.left += [f"{what}: {left}" for left in made.left]
    return summarise(made.run).total
