"""Advice on engines that exchange KV caches and never or seldom read a prompt for each other."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.policy.advice_tenants import Found
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.rules import share_models
from gateway.shared.files.checked import listed


def transfers(policy: Policy) -> Found:
    """Transfer groups in which nobody reads for others, and engines that are kept for reading without much to read."""
    engines = policy.fleet.engines
    idle: set[str] = set()  # groups that were told
    for index, engine in enumerate(engines):
        path = ("fleet", "engines", index)
        group = engine.transfer
        if group is None:
            continue
        if group not in idle and not _any_reads(group, engines):
            idle.add(group)
            text = (
                f"no two engines of group {group} serve a model so that one reads (role prefill or both) and another "
            )
            yield (*path, "transfer"), f"{text}answers: prompts are always read where they are answered"
        if engine.role != "prefill":
            continue
        outside = [e.url for e in engines if e.role != "prefill" and e.transfer != group and share_models(e, engine)]
        if outside:
            text = f"{listed(outside)} may answer the same models and is not of group {group}: its prompts are never"
            yield (*path, "role"), f"{text} read here"
        if all(each.tpot is None for each in policy.classes.values()):
            text = "no class has a tpot, so prompts are read here only if that brings the first token sooner; meanwhile"
            yield (*path, "role"), f"{text} this engine answers no call"


def _any_reads(group: str, engines: Sequence[EngineEntry]) -> bool:
    """Whether an engine of the group could read a prompt that another one answers."""
    members = [engine for engine in engines if engine.transfer == group]
    return any(
        reader is not writer and reader.role != "decode" and writer.role != "prefill" and share_models(reader, writer)
        for reader in members
        for writer in members
    )
