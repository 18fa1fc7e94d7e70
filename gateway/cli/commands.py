"""Table of the gateway's commands. A command's module is imported when the command is chosen, and no other.

`gateway --help` imports none of them. The load test's modules are named here as text, because the gateway does not
depend on the load test: `gateway serve` and `gateway check POLICY` import nothing of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from gateway import __version__
from gateway.cli.parser import Parser, added

DESCRIPTION = """\
Weir: a traffic gateway for self-hosted LLM engines.

It stands between OpenAI-compatible clients and a fleet of vLLM engines, holds every engine's KV cache at a set level,
and decides for each request whether, when, where and how large it runs."""

EXAMPLES = """\
examples:
  gateway serve --engine sim:2                                   try it: two simulated engines, no GPU needed
  gateway serve --engine demo                                    the same, with four models that take turns on two GPUs
  gateway serve --engine http://10.0.0.11:8000 --engine unix:///run/vllm/b.sock
  gateway init                                                   write policy.yaml, commented, to begin with
  gateway check policy.yaml                                      find every mistake in a policy before it is used
  gateway serve --policy policy.yaml
  gateway top                                                    watch it: classes, queues, engines, calls a second
  gateway bench --engines sim:4 --compare direct,round_robin     what it is worth, on simulated engines
  gateway simulate --policy next.yaml --trace last-week.csv --engines 4       what it would have done to last week
  gateway calibrate --target http://10.0.0.11:8000 --out mine.yaml            an engine of yours, to simulate with"""

# Each command: its module, and its line in `gateway --help`.
COMMANDS = {
    "serve": ("gateway.cli.serve", "run the gateway"),
    "init": ("gateway.cli.init", "write a commented policy to begin with"),
    "check": ("gateway.cli.check", "find the mistakes in policy files, and in scenarios"),
    "key": ("gateway.cli.key", "make, list and revoke API keys"),
    "top": ("gateway.cli.top", "watch a running gateway"),
    "bench": ("loadtest.bench.command", "measure servers under a load"),
    "simulate": ("loadtest.simulate.command", "what a policy would have done to a load, in virtual time"),
    "calibrate": ("loadtest.calibrate.command", "fit a simulated engine to a live one"),
}
# Parts of the load test that commands of the gateway use.
PROFILES = "loadtest.engine.profile_file"
SCENARIOS = "loadtest.load.scenario_check"


class Command(Protocol):
    """Module of a command. `MISTAKES`: exceptions whose message is for the person who typed the command."""

    DESCRIPTION: str
    EXAMPLES: str
    MISTAKES: tuple[type[Exception], ...]

    def add_arguments(self, parser: Any) -> None: ...
    def command(self, given: argparse.Namespace) -> int: ...


def parser_for(words: Sequence[str]) -> Parser:
    """The parser of a command line: of every command its name, of the one that `words` choose its flags too."""
    top = added(Parser, prog="gateway", description=DESCRIPTION, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"weir {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, (module, does) in COMMANDS.items():
        if name != chosen:
            added(commands.add_parser, name, help=does)
            continue
        found = cast("Command", import_module(module))
        parser = added(commands.add_parser, name, help=does, description=found.DESCRIPTION, epilog=found.EXAMPLES)
        found.add_arguments(parser)
        parser.set_defaults(command=found.command, mistakes=found.MISTAKES)
    return top
