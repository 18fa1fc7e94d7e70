"""`sidecar plan`: the size of a model and the steps that make it run now, or its size on GPUs that are not here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from gateway.shared.command_line import Impossible, Mistake, argument
from gateway.shared.files.yaml_file import written
from gateway.shared.formatting import shown
from gateway.shared.new_file import write_out
from sidecar.cli.files import File, add_config
from sidecar.cli.plan_on import gpu, planned, size, table
from sidecar.cli.plan_turns import Layout, turn_table
from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import Unusable
from sidecar.core.profile import KvMemory, Profile
from sidecar.sizing.memory import LITTLE

DESCRIPTION = "Show what it takes to have a model run."
EXAMPLES = """\
Prints what the model needs and why, what each GPU has and who holds it, and the steps that would be taken now. Nothing
is done. The sidecar that runs is asked; without one, --gpu tells what a model needs.

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
QUANTIZED = "fp8"  # what vLLM makes of 16 bits while it loads, on every GPU since Ampere


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
    instead = f", or sidecar plan {profile} --gpu 80GiB, which asks none"
    text = file.ask(f"/models/{quote(profile)}/plan", instead=instead).decode(errors="replace").rstrip("\n")
    print("\n".join(map(shown, text.split("\n"))))
    return 0


def _turns(file: File, given: argparse.Namespace) -> int:
    """Whether all models can take turns, and a file with which they would; 1 where they cannot."""

    def layout(models: Mapping[str, Profile]) -> Layout:
        config = msgspec.structs.replace(file.config, models=models)
        return Layout(config, file.folder, given.gpu, given.host_memory)

    found = layout(file.config.models).turns()
    if not found.asleep:
        found = msgspec.structs.replace(found, proposal=_proposed(file.config, layout, len(given.gpu)))
    _print(found, turn_table(found), given.json)
    if found.proposal and given.propose is not None:
        write_out(given.propose, found.proposal)
        print(f"written: {given.propose}", file=sys.stderr)
    elif found.proposal and not given.json:
        print("\n# With this file all take turns, asleep meanwhile (--propose FILE writes it):")
        print(found.proposal, end="")
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


# -- a file whose models take turns ---------------------------------------------------------------------------------


def _proposed(config: SidecarConfig, layout: Callable[[Mapping[str, Profile]], Layout], gpus: int) -> str:
    """A sidecar's file as YAML whose models take turns on so many GPUs, each asleep while others run; empty: there is
    none. `layout`: the models with other profiles on these GPUs.

    A model gets less of its GPU, so that what others keep asleep has room; more GPUs, or weights in 8 bits, where it
    does not fit otherwise. The smallest models are stopped instead of put to sleep where nothing else helps. What fits
    in no way is left out. The proposal is planned before it is made.
    """
    profiles: dict[str, Profile] = {}
    notes: dict[str, str] = {}  # what was changed, or why a model was left out
    for name, profile in config.models.items():
        for changed, note in _forms(profile, gpus):
            refused = layout({name: changed}).refused.get(name)
            notes[name] = note if refused is None else f"left out: {refused}"
            if refused is None:
                profiles[name] = changed
                break
    found = layout(profiles)
    while (crowded := _crowded(found)) is not None:
        _make_room(crowded, found, profiles, notes, layout)
        found = layout(profiles)
    if not profiles or not found.turns().asleep:
        return ""
    plain = {name: Profile(model_path="") for name in profiles}
    lines = "".join(f"# {name}: {note}\n" for name, note in notes.items() if note)
    proposed = msgspec.structs.replace(config, models=profiles)
    return lines + written(proposed, SidecarConfig, beside=SidecarConfig(models=plain))


def _crowded(found: Layout) -> str | None:
    """The first model for which those that sleep leave too little; None: there is none."""
    return next((name for name in found.sizes if not found.homes[name] or found.lacks[name]), None)


def _make_room(
    name: str,
    found: Layout,
    profiles: dict[str, Profile],
    notes: dict[str, str],
    layout: Callable[[Mapping[str, Profile]], Layout],
) -> None:
    """Give a model less of its GPUs; else have the smallest that sleeps beside it stopped; else leave it out."""
    profile, claim = profiles[name], found.sizes[name].claim
    share = (claim.bytes - max(found.lacks[name].values(), default=0)) * 100 // claim.total / 100
    if found.homes[name] and share >= 0.02 and not isinstance(profile.gpu_memory, KvMemory):
        less = msgspec.structs.replace(profile, gpu_memory=share)
        size = layout({name: less}).sizes.get(name)
        if size is not None and size.least.total + LITTLE <= size.claim.bytes:
            profiles[name] = less
            return
    sleepers = [other for other in found.beside(name) if found.asleep(other)]
    if sleepers:
        smallest = min(sleepers, key=lambda other: found.sizes[other].least.weights)
        profiles[smallest] = msgspec.structs.replace(profiles[smallest], sleep=None)
        notes[smallest] = "stopped instead of put to sleep, as nothing is left for it beside the others"
        return
    del profiles[name]
    notes[name] = "left out: its GPUs have no room for it beside the others"


def _forms(profile: Profile, gpus: int) -> Iterator[tuple[Profile, str]]:
    """A profile as it is and in other forms, the dearest last, each with a note."""
    yield profile, ""
    several = []
    if profile.gpus is None:
        counts = (1 << power for power in range(1, 8))
        several = [count for count in counts if profile.tensor_parallel < count <= gpus]
    for count in several:
        yield msgspec.structs.replace(profile, tensor_parallel=count), f"on {count} GPUs, as it does not fit otherwise"
    if "quantization" in profile.flags:
        return
    smaller = msgspec.structs.replace(profile, flags={**profile.flags, "quantization": QUANTIZED})
    for count in (profile.tensor_parallel, *several):
        where = f", on {count} GPUs" if count > profile.tensor_parallel else ""
        note = f"its weights in 8 bits{where}, as it does not fit otherwise"
        yield msgspec.structs.replace(smaller, tensor_parallel=count), note
