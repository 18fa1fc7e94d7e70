"""Command line of the gateway: `main`, and one module for each command. A mistake is one line and exit status 2."""

from __future__ import annotations

from gateway import __version__
from gateway.shared.command_line import Program

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
  gateway status --watch                                         what it does now: classes, queues, engines
  gateway bench --engines sim:4 --compare direct,round_robin     what it is worth, on simulated engines
  gateway simulate --policy next.yaml --trace last-week.csv --engines 4       what it would have done to last week
  gateway calibrate --target http://10.0.0.11:8000 --out mine.yaml            an engine of yours, to simulate with"""

# Each command: its module, and its line in `gateway --help`.
COMMANDS = {
    "serve": ("gateway.cli.serve", "run the gateway"),
    "init": ("gateway.cli.init", "write a commented policy to begin with"),
    "check": ("gateway.cli.check", "find the mistakes in policy files, and in scenarios"),
    "key": ("gateway.cli.key", "make, list and revoke API keys"),
    "status": ("gateway.cli.status", "what a running gateway does now"),
    "bench": ("loadtest.bench.command", "measure servers under a load"),
    "simulate": ("loadtest.simulate.command", "what a policy would have done to a load, in virtual time"),
    "calibrate": ("loadtest.calibrate.command", "fit a simulated engine to a live one"),
}
# Parts of the load test that commands of the gateway use.
PROFILES = "loadtest.engine.profile_file"
SCENARIOS = "loadtest.load.scenario_check"
PROGRAM = Program(name="gateway", version=__version__, description=DESCRIPTION, examples=EXAMPLES, commands=COMMANDS)
main, parser_for = PROGRAM.main, PROGRAM.parser_for
