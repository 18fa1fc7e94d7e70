"""`sidecar plan`: the size of a model and the steps that make it run now, or its size on GPUs that are not here."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from gateway.shared.command_line import argument
from gateway.shared.formatting import shown
from gateway.shared.new_file import not_written, write_new
from sidecar.cli import offline
from sidecar.cli.errors import Impossible, Mistake
from sidecar.cli.files import File, add_config, add_trial, gpus_folder
from sidecar.cli.plan_on import gpu, planned, size, table
from sidecar.cli.plan_proposal import Proposal
from sidecar.cli.plan_turns import Machine, turn_table, turns
from sidecar.control.client import NoSidecar, Rejected
from sidecar.core.engine_records import Unusable

DESCRIPTION = "Show what it takes to have a model run."
EXAMPLES = """\
Prints what the model needs and why, what each GPU has and who holds it, and the steps that would be taken now. Nothing
is done. The sidecar that runs is asked; without one the plan is worked out from the file and the GPUs as they are.

With --gpu it is worked out for GPUs that need not be here, from the sizes of the model's files alone, and no sidecar is
asked: SIZE is what nvidia-smi shows, CUDA what vLLM shows of it (a little less); SIZE:unified is a GPU whose memory is
the host's, as every one of 115 to 125 GiB is (GB10, DGX Spark). With --all, each --gpu is one GPU of a machine: can the
file's models take turns on it, and how long does a call wait for each? Where some would be stopped, or do not fit, a
file is proposed with which they sleep.

examples:
  sidecar plan llama-3-8b
  sidecar plan llama-3-8b --config /etc/weir/sidecar.yaml
  sidecar plan llama-3-8b --gpu 24GiB --gpu 80GiB:79.25GiB --json      an object for each size
  sidecar plan --all --gpu 80GiB --gpu 80GiB                           two GPUs
  sidecar plan --all --gpu 24GiB --host-memory 64GiB --propose sidecar-24.yaml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="the name of its profile")
    parser.add_argument(
        "--gpu",
        action="append",
        type=argument(gpu),
        metavar="SIZE[:CUDA|:unified]",
        help="for such a GPU; may be repeated",
    )
    parser.add_argument("--all", action="store_true", help="for all models of the file in turn, on the GPUs named")
    parser.add_argument("--host-memory", type=argument(size), metavar="SIZE", help="of the machine, with --all")
    parser.add_argument(
        "--propose", type=Path, metavar="FILE", help="with --all: write a file with which all take turns there"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with --gpu")
    add_trial(parser)


def command(given: argparse.Namespace) -> int:
    """Print what it takes to run a model. Raises Mistake, Impossible."""
    if given.all and (given.model or not given.gpu):
        raise Mistake("--all is for all models of the file: it takes --gpu for each GPU, and no MODEL")
    if not given.all and not given.model:
        raise Mistake("the following arguments are required: MODEL (see sidecar plan --help)")
    if given.json and not given.gpu:
        raise Mistake("--json needs --gpu SIZE: what a running sidecar would do is told in words")
    file = File(given.config)
    if given.all:
        return _turns(file, given)
    profile = file.profile(given.model)
    if given.gpu:
        return _on(file, profile, given)
    try:
        text = file.client.ask("GET", f"/models/{quote(profile)}/plan").decode(errors="replace").rstrip("\n")
    except Rejected as said:
        raise Impossible(str(said)) from said
    except NoSidecar:
        text, usable = asyncio.run(offline.explained(file.config, file.folder, profile, gpus_folder(given)))
        if not usable:
            raise Impossible("\n".join(map(shown, text.split("\n")))) from None
    print("\n".join(map(shown, text.split("\n"))))
    return 0


def _turns(file: File, given: argparse.Namespace) -> int:
    """Whether all models can take turns, and a file with which they would; 1 where they cannot."""
    found = turns(Machine(file.config, file.folder, given.gpu, given.host_memory))
    proposal = "" if found.asleep else Proposal(Machine(file.config, file.folder, given.gpu, given.host_memory)).text()
    found = msgspec.structs.replace(found, proposal=proposal)
    _print(found, turn_table(found), given.json)
    if proposal and given.propose is not None:
        try:
            write_new(given.propose, proposal, 0o666)
        except OSError as error:
            raise Mistake(not_written(given.propose, error)) from error
        print(f"written: {given.propose}", file=sys.stderr)
    elif proposal and not given.json:
        print(f"\n# With this file all take turns, asleep meanwhile (--propose FILE writes it):\n{proposal}", end="")
    return int(not found.take_turns)


def _on(file: File, profile: str, given: argparse.Namespace) -> int:
    """The plans for the GPUs named; 1 where it fits on none."""
    if file.config.engine_of(profile).device == "cpu" or file.config.engine_of(profile).simulated is not None:
        raise Impossible(f"{profile} takes no GPU of a size that its files tell: its engine is simulated, or on CPU")
    try:
        plans = planned(file.config, file.folder, profile, given.gpu)
    except Unusable as error:
        raise Impossible(f"{profile}: {error}") from error
    _print(plans, table(plans), given.json)
    return int(not any(each.fits for each in plans))


def _print(found: object, words: Iterable[str], as_json: bool) -> None:
    print(msgspec.json.encode(found).decode() if as_json else "\n".join(map(shown, words)))
