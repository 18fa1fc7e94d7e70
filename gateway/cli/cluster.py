"""`gateway cluster`: who decides for the gateways of several machines."""

from __future__ import annotations

import argparse
import asyncio

import msgspec

from gateway.cli.control_client import NoAnswer, Unfit, ask
from gateway.cli.control_flags import add_control_flags
from gateway.cli.files import Mistake, admin_token
from gateway.control.cluster import ClusterView
from gateway.shared.command_line import Parser, added

MISTAKES = (Mistake,)

DESCRIPTION = "See who decides for the gateways of several machines."
EXAMPLES = """\
Asks the control port of one member. Every member knows the leader, whose decider grants engines to the calls of all.
The policy's `cluster` makes a gateway a member; docs/scale.md says what follows when one dies, or the store does.

examples:
  gateway cluster status                                         as the gateway on this machine knows it
  gateway cluster status --url http://10.0.0.12:8001 --token-file admin.token
  gateway cluster status --json                                  for scripts

Exit status 0: somebody leads, and the store answers; 1: not so; 2: no answer, a wrong token, or no member."""


def add_arguments(parser: Parser) -> None:
    actions = parser.add_subparsers(title="commands", required=True, metavar="status")
    does = "say who leads, since when, and who is there"
    status = added(actions.add_parser, "status", help=does, description=f"{does.capitalize()}.", epilog=EXAMPLES)
    add_control_flags(status, "a member", "control port of a member")
    status.add_argument("--json", action="store_true", help="what it answers, as JSON")


def command(given: argparse.Namespace) -> int:
    """Print who leads. Raises Mistake."""
    try:
        view = asyncio.run(ask(given.url, "/cluster", admin_token(given.token_file, "--token-file"), ClusterView))
    except (Unfit, NoAnswer) as error:
        raise Mistake(f"{given.url}: {error}") from None
    print(msgspec.json.encode(view).decode() if given.json else text(view))
    return 0 if view.leader is not None and view.store_error is None else 1


def text(view: ClusterView) -> str:
    """The view for a person, the leader first."""
    lines = [view.line, *(f"  {_member(view, name)}" for name in view.members)]
    lines += [f"  {name}   silent: forgotten 10 minutes after its last sign" for name in view.gone]
    return "\n".join(lines)


def _member(view: ClusterView, name: str) -> str:
    notes = ["leads" if name == view.leader else "stands by"]
    notes += ["has not told what its calls hold"] * (name in view.awaited)
    notes += ["this gateway"] * (name == view.member)
    return f"{name}   {', '.join(notes)}"
