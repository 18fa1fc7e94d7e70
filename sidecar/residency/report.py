"""Report of a GPU and of a model, for gateways; explanation of a plan, for a person."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.shared.fields import made_of
from gateway.shared.files.units import GIB
from gateway.shared.protocol import FAILED, NO_MEMORY, OFF, GPUReport, ModelReport
from sidecar.core.gpus import GPU
from sidecar.core.inventory import Resident
from sidecar.core.lifecycle import SLEEPING, State
from sidecar.core.model_state import ModelState
from sidecar.core.placement import as_resident
from sidecar.core.plan import Infeasible, Plan
from sidecar.residency import planner
from sidecar.residency.machine import Machine

WITHDRAWN = "draining"  # why a model cannot be had, beside what gateways tell apart
LONGEST = 2000  # characters of a sentence, as the wire has it
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:,;'\"]+/)+")


def gpu_report(gpu: GPU) -> GPUReport:
    """Report of one GPU."""
    utilization = None if gpu.utilization is None else gpu.utilization / 100
    return made_of(GPUReport, gpu, utilization=utilization, refused=gpu.refused[:LONGEST])


def model_report(machine: Machine, profile: str, there: Sequence[Resident] = ()) -> ModelReport:
    """Report of a model as it is now. `there`: what holds memory, where that is known. Raises KeyError."""
    model, now = machine.models[profile], machine.clock()
    life, engine = model.lifecycle, machine.running.get(profile)
    decision = planner.forecast(machine, model, now, there)
    ready_in = model.ready_in(now, decision)
    why, message, retry_in = "", "", None
    if ready_in is None:
        why, message, retry_in = _why(model, decision, now)
    return made_of(
        ModelReport,
        model.facts,
        profile=model.name,
        model=model.served_name,
        state=State.ERROR.value if model.unusable else life.state.value,
        pending=life.pending.value if life.pending else None,
        url=engine.url if engine else "",
        ready_in=ready_in,
        why=why,
        message=message[:LONGEST],
        retry_in=retry_in,
        transfer=model.profile.transfer,
        role=model.profile.kv_transfer or "both",
        sleep_level=model.level if life.state is SLEEPING else 0,
        last_error=(model.unusable or life.last_error)[:LONGEST],
        copy=model.copy,
        copy_in=planner.copy_in(machine, model, now, there),
        aliases=model.profile.aliases,
        adapters=tuple(model.profile.adapters),
        gpus=model.gpus,
        held=as_resident(model, now, 0, 0).held if model.gpus else 0,
        phase=model.starting.phase if model.starting is not None else "",
    )


def _for_callers(words: str) -> str:
    """An operator's words without the folders of this machine: of a path only its last part."""
    return _FOLDERS.sub("", words)


def _why(model: ModelState, decision: Plan | Infeasible | None, now: float) -> tuple[str, str, float | None]:
    """The reason why it cannot be had: a word, a sentence, and seconds after which that may be otherwise."""
    life = model.lifecycle
    if model.leaving:
        return WITHDRAWN, f"the sidecar's file no longer has {model.name}", None
    if model.off:
        return OFF, f"{model.name} is off until an operator switches it on: sidecar on {model.name}", None
    if model.unusable:
        return FAILED, _for_callers(model.unusable), None
    until = life.rests_until
    if until is not None and model.rests(now):
        why = f"{model.name} has failed too often and is not tried for {until - now:.0f} s, unless somebody asks"
        return FAILED, _for_callers(f"{why}: {life.last_error}"), until - now
    assert isinstance(decision, Infeasible)  # noqa: S101 # nothing else keeps a model from being had
    retry_in = None if decision.retry_at is None else max(0.0, decision.retry_at - now)
    return NO_MEMORY, decision.why, retry_in


def explained(machine: Machine, profile: str) -> str:
    """Explanation of a plan: a model's memory, the GPUs' memory, and the steps to have it run now. Raises KeyError."""
    model = machine.models[profile]
    lines = [f"{model.name}: {model.lifecycle.state.value}"]
    if model.unusable:
        return "\n".join([*lines, f"cannot be run: {model.unusable}"])
    lines.append(f"needs {model.size.arithmetic}" if model.size.arithmetic else "needs no GPU")
    residents = planner.residents(machine)
    for gpu in machine.monitor.gpus:
        here = [r for r in residents if gpu.index in r.gpus]
        held = ", ".join(f"{r.profile} {r.held / GIB:.1f} ({_how(r)})" for r in here) or "no engine of this sidecar"
        quarantine = "; in quarantine" if gpu.refused else ""
        free = f"{gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        lines.append(f"GPU {gpu.index}: {free}{quarantine}; held by {held}")
    decision = planner.decide(machine, model, machine.clock()) if model.sized else None
    return "\n".join([*lines, *_decided(model, decision)])


def _how(resident: Resident) -> str:
    words = [resident.state.value]
    if resident.pending is not None:
        words.append(f"{resident.pending.value} pending")
    if resident.ref_count:
        words.append(f"{resident.ref_count} calls")
    if resident.pinned:
        words.append("pinned")
    return ", ".join(words)


def _decided(model: ModelState, decision: Plan | Infeasible | None) -> list[str]:
    if decision is None:
        return []
    if isinstance(decision, Infeasible):
        return [f"not now: {decision.why}"]
    steps = [f"put {each.profile} to sleep at level {each.level}" for each in decision.sleep]
    steps += [f"stop {name}" for name in decision.stop]
    on = f" on GPU {', '.join(map(str, decision.gpus))}" if decision.gpus else ""
    if decision.wake is not None:
        steps.append(f"wake {model.name}{on}, about {model.wake_seconds[max(0, model.level - 1)]:.1f} s")
    elif decision.start is not None:
        steps.append(f"start {model.name}{on}, about {model.load_seconds:.0f} s")
    return [f"{number}. {step}" for number, step in enumerate(steps, 1)] or ["nothing to do: it runs"]
