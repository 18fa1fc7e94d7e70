"""Command `gateway calibrate`: fits a latency profile to a live engine, from outside.

`probe.py` chooses what is sent, `live_engine.py` sends it and times the answers, `fit.py` makes a profile of them. The
profile's terms are explained in `engine/latency.py`, its file in `engine/profile_file.py`.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from gateway.shared.command_line import argument
from loadtest.calibrate.fit import Fit, Unfit, fit, with_front
from loadtest.calibrate.fit_table import quality, table
from loadtest.calibrate.live_engine import CalibrateError, Live
from loadtest.calibrate.observations import EngineLimits, Observed, Tell
from loadtest.calibrate.probe import SPREAD, Probe
from loadtest.clients.targets import parse_url, tls_of
from loadtest.engine.latency import Profile
from loadtest.engine.profile_file import ProfileFile, profile_of, text_of
from loadtest.load.scenario import Mistake, key_header
from loadtest.load.scenario_flags import seconds, whole
from loadtest.report.delivery import saying
from loadtest.report.progress import following
from loadtest.signals import handled

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "command"]

MISTAKES = (CalibrateError, Mistake)
LEAST_BUDGET = 5.0  # seconds
BUDGET = 60.0
MOST_SPREAD = 0.3  # of a step; what is more is the network's, or of others on the machine
INTERRUPTED = 130

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    read = argument(parse_url)
    parser.add_argument("--target", required=True, metavar="URL", type=read, help="the engine, without /v1")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the profile is written")
    parser.add_argument("--force", action="store_true", help="write over that file")
    parser.add_argument("--budget", default=BUDGET, metavar="TIME", type=seconds, help="how long, about (60s)")
    parser.add_argument(
        "--longest", default=SPREAD, metavar="N", type=whole(128, 1_000_000),
        help="tokens of the longest prompt that is tried (2048): about as many as your traffic's longest",
    )  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="the model to name; left out: the only one")
    parser.add_argument("--key-env", metavar="VAR", help="the environment variable with the API key")
    parser.add_argument("--ca", metavar="FILE", help="trust these certificates (PEM)")
    parser.add_argument("--insecure", action="store_true", help="check no certificates")
    limits = parser.add_argument_group("limits of the engine")
    for name, text in LIMITS.items():
        limits.add_argument(f"--{name}", metavar="N", type=whole(1, 1_000_000_000), help=text)


def command(given: argparse.Namespace) -> int:
    """Calibrate, print what was found, write it; the exit status. Raises CalibrateError."""
    out = Path(given.out)
    if out.exists() and not given.force:
        raise CalibrateError(f"--out {out} exists: choose another, or --force")
    if not out.parent.is_dir():
        raise CalibrateError(f"--out {out}: there is no folder {out.parent}")
    if given.budget < LEAST_BUDGET:
        raise CalibrateError(
            f"--budget {given.budget:g}s: {LEAST_BUDGET:g}s at least, or little can be told from noise"
        )
    try:
        errors = Console(stderr=True)
        with (
            handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler),
            following(errors, saying(errors)) as follow,
        ):
            bar = follow("calibrating")
            model, observed = uvloop.run(observe(given, lambda done, what: bar(done, lambda: what)))
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        fitted = fit(observed.rows)
    except Unfit as error:
        raise CalibrateError(f"the profile cannot be fitted: {error}; give it more time with --budget") from error
    profile = profile_from(fitted, observed)
    console = Console() if Console().is_terminal else Console(width=120)
    lines = [*quality(fitted, profile, observed)]
    console.print(table(fitted, profile))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    what = f"{model} at {given.target.name}, fitted on {day}"[:200]
    source = shlex.join(["gateway", "calibrate", *(word for word in sys.argv[1:] if word != "calibrate")])
    try:
        out.write_text(text_of(ProfileFile(what=what, profile=profile), [source, *lines]))
    except OSError as error:
        raise CalibrateError(f"--out {out}: {error.strerror}") from error
    profile_of(str(out))  # what is written can be read
    console.print(str(out), markup=False, highlight=False, soft_wrap=True)
    return 0


async def observe(given: argparse.Namespace, tell: Tell) -> tuple[str, Observed]:
    """The model, and all that was seen of it."""
    headers = key_header(given.key_env, os.environ)
    tls = tls_of(given.ca, insecure=given.insecure)
    rng = random.Random()  # noqa: S311 # prompts, no two runs alike: the engine has those of the last in its cache
    live = Live(given.target, tls, headers, rng)
    try:
        tell(0.0, "asking what it is")
        models, limits = await live.told()
        model: str = given.model or (models[0] if len(models) == 1 else "")
        if not model or model not in models:
            raise CalibrateError(f"--model: name one of its models: {', '.join(models) or 'it has none'}")
        asked = {name: getattr(given, name) for name in EngineLimits.__struct_fields__}
        limits = msgspec.structs.replace(limits, **{name: value for name, value in asked.items() if value})
        if not limits.max_model_len:
            raise CalibrateError(f"{live.name} does not tell its max_model_len: give --max-model-len")
        if not limits.num_gpu_blocks:
            raise CalibrateError(f"{live.name}/metrics does not tell the size of its KV cache: give --num-gpu-blocks")
        await live.meet(model)
        return model, await Probe(live, limits, given.budget, rng, tell, longest=given.longest).run()
    finally:
        live.close()


def profile_from(fitted: Fit, observed: Observed) -> Profile:
    """The profile of what was seen."""
    found: dict[str, Any] = fitted.constants | msgspec.structs.asdict(observed.limits)
    profile = Profile(jitter=min(MOST_SPREAD, observed.jitter), **found)
    return with_front(profile, observed.bursts, observed.traffic)
