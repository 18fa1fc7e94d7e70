"""`sidecar plan`: the size of a model, and the steps that would make it run now."""

from __future__ import annotations

import argparse
import asyncio
from urllib.parse import quote

from sidecar.cli import offline
from sidecar.cli.errors import Impossible
from sidecar.cli.files import File, add_config, add_trial, gpus_folder
from sidecar.control.client import NoSidecar, Rejected
from sidecar.core.formatting import shown

DESCRIPTION = "Show what it takes to have a model run."
EXAMPLES = """\
Prints what the model needs and why, what each GPU has and who holds it, and the steps that would be taken now. Nothing
is done. The sidecar that runs is asked; without one the plan is worked out from the file and the GPUs as they are.

examples:
  sidecar plan llama-3-8b
  sidecar plan llama-3-8b --config /etc/weir/sidecar.yaml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("model", metavar="MODEL", help="the name of its profile")
    add_trial(parser)


def command(given: argparse.Namespace) -> int:
    """What it takes to have a model run. Raises Mistake, Impossible."""
    file = File(given.config)
    profile = file.profile(given.model)
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
