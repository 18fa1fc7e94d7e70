"""Command line of the sidecar: `main`, and one module for each command.

Exit status 2: a mistake in a flag or a file. 1: what was asked for cannot be had, as no sidecar runs or it refuses.
3: an order on a model is not done within --timeout.
"""

from __future__ import annotations

from gateway.shared.command_line import Program
from sidecar import __version__

DESCRIPTION = """\
Weir's sidecar: decides which models are resident on one machine's GPUs.

Its file names the models that may run, each with a profile: where its weights are, how much memory it gets, when it
sleeps or stops, what vLLM is told. It starts a model when a gateway has calls for it, puts idle ones to sleep or stops
them to make room, and tells every gateway what there is."""

EXAMPLES = """\
examples:
  sidecar init                                   write sidecar.yaml, commented, to begin with
  sidecar check sidecar.yaml                     find every mistake in the file before it is used
  sidecar serve --config sidecar.yaml            run it; Ctrl-C ends it, and its engines go on
  sidecar status                                 what is resident, and why something is not
  sidecar plan llama-3-8b                        what it takes to have a model run, and what would make room for it
  sidecar diagnose logs/llama-3-8b.log           why an engine failed, and what to do
  sidecar ensure llama-3-8b                      have it ready before the first call
  sidecar off llama-3-8b                         nothing starts it until `sidecar on`
  sidecar stop --all                             end the sidecar and its engines

`sidecar init example --out -` shows and explains every field. The smallest file that will do:
  models:
    llama-3-8b: {model_path: /models/llama-3-8b}"""

# Each command: its module, and its line in `sidecar --help`.
COMMANDS = {
    "init": ("sidecar.cli.init", "write a commented file to begin with"),
    "serve": ("sidecar.cli.serve", "run the sidecar"),
    "status": ("sidecar.cli.status", "show what is resident"),
    "plan": ("sidecar.cli.plan", "show what it takes to have a model run"),
    "logs": ("sidecar.cli.logs", "show what a model's engine has written"),
    "diagnose": ("sidecar.cli.diagnose", "say what an engine's output says went wrong"),
    "ensure": ("sidecar.cli.orders:ENSURE", "have a model ready"),
    "sleep": ("sidecar.cli.orders:SLEEP", "put a model to sleep"),
    "off": ("sidecar.cli.orders:OFF", "switch a model off until it is switched on"),
    "on": ("sidecar.cli.orders:ON", "switch it on"),
    "stop": ("sidecar.cli.stop", "end a model's engine, or the sidecar"),
    "check": ("sidecar.cli.check", "find the mistakes in sidecar files"),
    "ray": ("sidecar.cli.ray", "the sidecars of a Ray cluster"),
}
PROGRAM = Program(name="sidecar", version=__version__, description=DESCRIPTION, examples=EXAMPLES, commands=COMMANDS)
main, parser_for = PROGRAM.main, PROGRAM.parser_for
