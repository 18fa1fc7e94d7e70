"""Table of the fitted constants, and the quality of the fit in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.table import Table

from loadtest.calibrate.fit import Fit, played
from loadtest.calibrate.observations import Observed
from loadtest.engine.latency import Profile
from loadtest.report.number_format import change, share
from loadtest.report.number_format import seconds as shown

ROWS = {
    "base": "every step", "prefill": "each prompt token", "decode": "each sequence that decodes",
    "context": "each KV token these read", "attention": "each prompt token and one before it",
    "delay": "on the way in and out, front and delay",
}  # fmt: skip
EXPLAINED = 0.9  # below, the profile does not fit


def table(fitted: Fit, profile: Profile) -> Table:
    """The constants."""
    found = Table("constant", "value", "of")
    for name, what in ROWS.items():
        found.add_row(name, shown(fitted.constants[name]), what)
    found.add_row("front", shown(profile.front), "of that, one request after the other")
    found.add_row("jitter", share(profile.jitter), "of a step")
    for name in ("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        found.add_row(name, str(getattr(profile, name)), "")
    return found


def quality(fitted: Fit, profile: Profile, observed: Observed) -> Iterator[str]:
    """Judgement of the fit, in words."""
    yield (
        f"{fitted.rows} observations, of which the fit explains {share(fitted.explained)}; half of them are within "
        f"{share(fitted.residual)} of it, nine of ten within {share(fitted.worst)}"
    )
    check = observed.check
    if check is not None:
        first, end = played(profile, check)
        yield (
            f"a burst of {len(check.sizes)} mixed requests, not used for it: {shown(check.seconds)}, simulated "
            f"{shown(end)} ({change(end, check.seconds)}); median TTFT {shown(median(check.first))}, simulated "
            f"{shown(median(first))} ({change(median(first), median(check.first))})"
        )
    yield from observed.notes
    if fitted.explained < EXPLAINED:
        yield "This is no good fit: was the engine, or this machine, busy with something else?"
