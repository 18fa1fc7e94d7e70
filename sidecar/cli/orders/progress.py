"""Progress of an order on a model, by the model's reports after it: done, failed, or under way."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.shared.formatting import seconds
from gateway.shared.protocol import NO_MEMORY, ModelReport

Order = Literal["ensure", "sleep", "stop", "off", "on"]
GRACE = 1.5  # seconds for a model to be sized again, before the reason why it cannot be had counts


class Progress(msgspec.Struct, frozen=True):
    """`words`: how it is. `ended`: whether there is nothing to wait for; `failed`: not as it was ordered."""

    words: str
    ended: bool = False
    failed: bool = False


def progress(order: Order, model: ModelReport, *, calls: int, after: float) -> Progress:
    """Return the progress of an order, by the model's report `after` seconds after it. `calls`: in flight."""
    how, still = _how(model), model.pending is None
    has_engine = model.state in ("starting", "running", "sleeping")
    match order:
        case "ensure":
            if model.state == "running" and still:
                return Progress("running", ended=True)
            if model.ready_in is None and model.why != NO_MEMORY and after >= GRACE:
                return Progress(model.message or model.last_error or how, ended=True, failed=True)
            return Progress(how)
        case "sleep":
            if model.state == "sleeping" and still:
                return Progress(how, ended=True)
            if not still:
                return Progress(_with_calls(how, calls))
            why = f": {model.last_error}" if model.last_error else ": its calls went on for too long, or it was wanted"
            return Progress(f"it is {how}{'' if model.state == 'stopped' else why}", ended=True, failed=True)
        case "on":
            return Progress(how, ended=True)
    if still and not has_engine:
        return Progress(how, ended=True)
    if model.pending in (None, "start", "wake"):
        return Progress(f"it is {how}: it was wanted again", ended=True, failed=True)
    return Progress(_with_calls(how, calls))


def _how(model: ModelReport) -> str:
    level = f" at level {model.sleep_level}" if model.state == "sleeping" and model.sleep_level else ""
    words = [f"{model.state}{level}"]
    if model.pending is not None:
        words.append(f"{model.pending} under way")
    if model.ready_in:
        words.append(f"ready in {seconds(model.ready_in)}")
    told = model.message or model.last_error
    return ", ".join(words) + (f": {told}" if told else "")


def _with_calls(how: str, calls: int) -> str:
    return f"{how}, {calls} call{'s' * (calls != 1)} under way" if calls else how
