"""What `gateway calibrate` says: its help, the constants it found, and what they are worth."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.table import Table

from loadtest.calibrate.fit import Fit, played
from loadtest.calibrate.observations import Observed
from loadtest.engine.latency import Profile
from loadtest.report.number_format import change, share
from loadtest.report.number_format import seconds as shown

DESCRIPTION = """\
Fit a latency profile to a live engine, and write it to a file.

It sends requests for about a minute, looks at when tokens come, and finds the constants of

    step = base + prefill x prompt tokens + decode x sequences + context x KV tokens they read
           + attention x pairs of prompt tokens

with which the simulated engine behaves as this one. Calibrate one engine, itself, idle, alone on its machine; who
calibrates should not take the processor from it."""

EXAMPLES = """\
examples:
  gateway calibrate --target http://10.0.0.5:8000 --out mine.yaml
  gateway simulate --profile mine.yaml --engines 2,4,8 --trace last-week.csv       and then: how many of them are needed
  gateway bench --engines sim:4:mine.yaml                                          four of them, simulated, in real time
  gateway serve --engine sim:2:mine.yaml
  gateway calibrate --target http://10.0.0.5:8000 --out mine.yaml --force --max-num-seqs 256 --budget 3m

Read from the engine are the size of its KV cache (/metrics) and max_model_len (/v1/models). max_num_seqs and
max_num_batched_tokens are found by sending more than that; flags say better what cannot be seen. The engine must know
vLLM's ignore_eos and stream_options.include_usage.

Exit status: 0; 2: a mistake, or an engine that cannot be calibrated; 130: Ctrl-C."""

LIMITS = {  # flags, and what they say
    "max-num-seqs": "sequences in a batch (left out: found)",
    "max-num-batched-tokens": "tokens in a step (left out: found)",
    "max-model-len": "tokens of prompt and answer (left out: read)",
    "num-gpu-blocks": "KV blocks of 16 tokens (left out: read)",
}
ROWS = {
    "base": "every step", "prefill": "each prompt token", "decode": "each sequence that decodes",
    "context": "each KV token these read", "attention": "each prompt token and one before it",
    "delay": "on the way in and out, front and delay",
}  # fmt: skip
EXPLAINED = 0.9  # below, the profile does not fit


def table(fitted: Fit, profile: Profile) -> Table:
    """The constants and their errors."""
    found = Table("constant", "value", "+-", "of")
    for name, what in ROWS.items():
        constant = fitted.constants[name]
        found.add_row(name, shown(constant.value), shown(constant.error), what)
    found.add_row("front", shown(profile.front), "", "of that, one request after the other")
    found.add_row("jitter", share(profile.jitter), "", "of a step")
    for name in ("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        found.add_row(name, str(getattr(profile, name)), "", "")
    return found


def quality(fitted: Fit, profile: Profile, observed: Observed) -> Iterator[str]:
    """What the fit is worth, in words."""
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
