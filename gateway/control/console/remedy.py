"""Remedies of the console: for calls that were refused or failed, what to change, in words."""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.outcome import Outcome

ROOM = (Outcome.QUEUE_FULL, Outcome.SHED, Outcome.DEADLINE_UNREACHABLE, Outcome.EXPIRED)  # more room would have helped
ALWAYS = {  # whoever calls, and whatever for
    Outcome.DRAINING: "End the drain below, or let the balancer send calls elsewhere.",
    Outcome.STORAGE_FULL: (
        "Free space on the disk of the policy's storage, or let files be deleted sooner: batches.keep."
    ),
    Outcome.BUG: "This is a bug in the gateway: report it with the request id that Calls shows.",
    Outcome.UNAUTHORIZED: "The callers need a key that this gateway knows: gateway key add TENANT --policy FILE.",
}
LITTLE = 0.1  # share of the room that other classes hold: there is no more to gain by a weight

Key = tuple[str, str, str]  # class, tenant, model


class ModelState(msgspec.Struct, frozen=True):
    """The mode of a model, and why it is in it. `engines` that may be given its calls, and `wanted` by the scaling
    signal; `full`: what these engines hold, in words; `queued` calls wait for it. `room`: tokens of KV cache that its
    calls hold, by class."""

    mode: str
    why: str
    engines: int = 0
    wanted: int = 0
    full: str = ""
    queued: int = 0
    room: Mapping[str, int] = msgspec.field(default_factory=dict)


def remedy(
    key: Key,
    outcome: Outcome,
    state: ModelState | None,
    capped: Container[str],
    classes: Mapping[str, TrafficClass],
    *,
    short: bool,
    engines: str = "",
) -> str:
    """Change that would help calls of `key` that ended so. `capped`: classes that run as many calls as their
    max_concurrency; `short`: the engines that the model lacks are told already; `engines`: the names of those that had
    the calls."""
    class_name, tenant, model = key
    if outcome in ROOM and class_name in capped:
        return f"Raise classes.{class_name}.max_concurrency: the class runs as many calls as that allows."
    more = "add the engines named above" if short else f"add an engine of {model or 'its model'}"
    match outcome:
        case Outcome.RATE_LIMITED:
            return (
                f"The engines are not the cause. Raise the limit that is named (limits, or tenants.{tenant}.limits), "
                f"or have {tenant} send less."
            )
        case Outcome.QUEUE_FULL:
            return f"To serve them, {more}. To let more wait, as after a burst, raise classes.{class_name}.max_queue."
        case Outcome.SHED if state is not None and state.mode != "normal":
            return f"To serve them, {more}. To shed later, change modes.{state.mode} in the policy."
        case Outcome.SHED:
            return f"To serve them, {more}. {_larger_share(class_name, state, classes)}"
        case Outcome.DEADLINE_UNREACHABLE:
            return (
                f"To serve them, {more}. Else give the class more time (classes.{class_name}.ttft or deadline). "
                f"{_larger_share(class_name, state, classes)}"
            )
        case Outcome.EXPIRED:
            return f"To be in time, {more}. Else give them more time: classes.{class_name}.deadline, or the caller's."
        case Outcome.NO_ENGINE:
            return f"Bring an engine of {model or 'the model'} back: the engines below say what each of them met."
        case Outcome.MODEL_UNAVAILABLE:
            return f"Load {model} below, or make room for it: its sidecar says what is in the way."
        case Outcome.UPSTREAM | Outcome.TRUNCATED:
            return f"Read the log of {engines or 'its engines'}. Restart an engine that goes on so, or drain it."
        case Outcome.FORBIDDEN:
            return f"Allow it in the policy (tenants.{tenant}.models or best_class), or have {tenant} ask for another."
        case _:
            return ALWAYS.get(outcome, "The callers must change what they send: the reason says what.")


def _larger_share(class_name: str, state: ModelState | None, classes: Mapping[str, TrafficClass]) -> str:
    """Whether a weight would give the class more room: it takes from other classes alone."""
    room = {} if state is None else {name: held for name, held in state.room.items() if name in classes}
    most = max((name for name in room if name != class_name), key=room.__getitem__, default="")
    share = room[most] / sum(room.values()) if most else 0.0
    if share < LITTLE or class_name not in classes:
        return f"classes.{class_name}.weight is no cure: no other class holds much room now."
    return (
        f"To take room from class {most}, which holds {share:.0%} of it now, raise classes.{class_name}.weight "
        f"({classes[class_name].weight:g}; that of {most} is {classes[most].weight:g})."
    )
