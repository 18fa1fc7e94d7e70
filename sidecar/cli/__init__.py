"""`sidecar init | serve | status | plan | logs | stop | check | ray`: flags and a file in, a clear line for a mistake.

Exit status 2: a mistake in a flag or a file. 1: what was asked for cannot be had, as no sidecar runs or it refuses.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sidecar import __version__
from sidecar.cli import pool_commands, starter
from sidecar.cli.checking import check
from sidecar.cli.commands import Impossible, logs, plan, serve, status, stop
from sidecar.cli.files import Mistake
from sidecar.control.api import MOST_LINES
from sidecar.core.config import FORMATS, reference_text, schema_text
from sidecar.core.flags import SIMULATED_GPUS

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
  sidecar stop --all                             end the sidecar and its engines

`sidecar init example --out -` shows and explains every field. The smallest file that will do:
  models:
    llama-3-8b: {model_path: /models/llama-3-8b}"""

SERVE_EXAMPLES = """\
It listens on `listen` for gateways and for the commands beside this one, and starts no model before one is wanted (or
pinned). SIGTERM or Ctrl-C ends the sidecar and leaves its engines running: calls go on, and the next start takes them
over. Started again after it was killed, it does the same.

examples:
  sidecar serve                                  with ./sidecar.yaml
  sidecar serve --config /etc/weir/sidecar.yaml
  sidecar serve --end-engines                    SIGTERM and Ctrl-C end the engines too"""

STATUS_EXAMPLES = """\
examples:
  sidecar status                                 a table: GPUs, models, gateways, and what is wrong
  sidecar status --watch                         again every second, until Ctrl-C
  sidecar status --json                          for programs; GET /status of the control API says the same"""

PLAN_EXAMPLES = """\
Prints what the model needs and why, what each GPU has and who holds it, and the steps that would be taken now. Nothing
is done. The sidecar that runs is asked; without one the plan is worked out from the file and the GPUs as they are.

examples:
  sidecar plan llama-3-8b
  sidecar plan llama-3-8b --config /etc/weir/sidecar.yaml"""

LOGS_EXAMPLES = """\
The last lines that the model's engine has written. Its file in `log_dir` has more.

examples:
  sidecar logs llama-3-8b
  sidecar logs llama-3-8b -n 1000"""

STOP_EXAMPLES = """\
Ends the sidecar and waits for that. Its engines go on, and the next `sidecar serve` takes them over; with --all they
are ended too, also where the sidecar has ended already.

examples:
  sidecar stop
  sidecar stop --all"""

CHECK_EXAMPLES = """\
Prints `FILE: ok`, or every mistake: FILE:LINE:COLUMN: field: what was found, what was expected, and the line. Exit
status 2 if there is any. The token_file is read too; --no-files leaves it out. Nothing is started, no GPU is looked at,
and whether the installed vLLM knows a flag is not asked.

examples:
  sidecar check sidecar.yaml
  sidecar check machines/*.yaml
  sidecar check --format github --no-files machines/*.yaml       for a pull request: mistakes at their lines; or json
  sidecar check --here sidecar.yaml              on its own machine: whether its models are there
  sidecar check --schema > sidecar-schema.json   for editors: completion and checks while you write
  sidecar check --reference > sidecar-file.md    every field, explained, as a page
  sidecar check sidecar.yaml --explain           the file in full, every default written out"""

RAY_EXAMPLES = """\
A pool's file says what the sidecars of all nodes have in common; `sidecar init pool` writes one. The nodes are
those of the Ray cluster that have GPUs, and are followed as they join and die. Each needs weir-gateway[ray], in the
environment that Ray's workers have. Engines go on where a sidecar, its actor or Ray ends; `down` ends them.

examples:
  sidecar ray check pool.yaml                    find every mistake in the file; needs no cluster
  sidecar ray up --config pool.yaml              a sidecar on every node; again, with another file, to change it
  sidecar ray status --config pool.yaml          how each node is
  sidecar ray down --config pool.yaml            end all of them, with their engines"""

COMMANDS = "init | serve | status | plan | logs | stop | check | ray"


class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, where it has a paragraph."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 2 for a mistake in a flag or a file, 1 for what cannot be had."""
    given = _parser().parse_args(argv)
    try:
        return int(given.command(given))
    except (Mistake, Impossible) as error:
        print("\n".join(f"sidecar: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 1
    except BrokenPipeError:  # `sidecar logs | head`: whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    def parser(add: Callable[..., Parser], *name: str, epilog: str, description: str, **more: Any) -> Parser:
        return add(
            *name,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )

    top = parser(Parser, prog="sidecar", description=DESCRIPTION, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"weir {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar=COMMANDS)

    def command(
        name: str, does: str, run: Callable[[argparse.Namespace], int], more: str, *, config: bool = True
    ) -> Parser:
        added = parser(commands.add_parser, name, help=does, description=f"{does[0].upper()}{does[1:]}.", epilog=more)
        added.set_defaults(command=run)
        if config:
            added.add_argument(
                "--config", default="sidecar.yaml", metavar="FILE", help="its file (default: %(default)s)"
            )
        return added

    def with_trial(added: Parser) -> None:
        added.add_argument(
            "--gpus-from",
            metavar="FOLDER",
            default=os.environ.get(SIMULATED_GPUS) or None,
            help=f"for a trial: GPUs that FOLDER simulates (see sidecar/gpus/simulated.py); default: ${SIMULATED_GPUS}",
        )

    added = command("serve", "run the sidecar", _serve, SERVE_EXAMPLES)
    added.add_argument("--end-engines", action="store_true", help="end the engines whenever the sidecar ends")
    added.add_argument("--die-with-parent", action="store_true", help="end, engines too, when standard input ends")
    added.add_argument("--end-with-parent", action="store_true", help="end, without them, when standard input ends")
    added.add_argument("--gateway", metavar="URL", help="the control port of a gateway to report to, beside the file's")
    with_trial(added)

    added = command("status", "show what is resident", _status, STATUS_EXAMPLES)
    added.add_argument("--json", action="store_true", help="as JSON")
    added.add_argument("--watch", action="store_true", help="again every second")

    added = command("plan", "show what it takes to have a model run", _plan, PLAN_EXAMPLES)
    added.add_argument("model", metavar="MODEL", help="the name of its profile")
    with_trial(added)

    added = command("logs", "show what a model's engine has written", _logs, LOGS_EXAMPLES)
    added.add_argument("model", metavar="MODEL", help="the name of its profile")
    added.add_argument("-n", dest="lines", type=_lines, default=200, metavar="N", help="lines (default: %(default)s)")

    added = command("stop", "end the sidecar", _stop, STOP_EXAMPLES)
    added.add_argument("--all", action="store_true", help="and its engines")

    added = command("init", "write a commented file to begin with", _init, starter.EXAMPLES, config=False)
    added.add_argument(
        "name", nargs="?", choices=starter.FILES, default=starter.STARTER, metavar="NAME", help="which one"
    )
    added.add_argument("--out", metavar="FILE|-", help="where; -: standard output (default: sidecar.yaml, pool.yaml)")

    added = command("check", "find the mistakes in sidecar files", _check, CHECK_EXAMPLES, config=False)
    added.add_argument("files", nargs="*", metavar="FILE", help="what a sidecar would be started with")
    added.add_argument("--format", choices=FORMATS, default="text", help="of what is found (default: %(default)s)")
    added.add_argument("--no-files", action="store_true", help="do not read the token_file that it names")
    added.add_argument("--here", action="store_true", help="it is for this machine: look for its models too")
    added.add_argument("--schema", action="store_true", help="print the JSON Schema of such files")
    added.add_argument("--reference", action="store_true", help="print every field of such files, as Markdown")
    added.add_argument("--explain", action="store_true", help="print the whole effective file, defaults included")

    of_pool = parser(
        commands.add_parser,
        "ray",
        help="the sidecars of a Ray cluster",
        description="The sidecars of a Ray cluster: one a node.",
        epilog=RAY_EXAMPLES,
    ).add_subparsers(title="commands", required=True, metavar="up | status | down | check")

    def with_pool(name: str, does: str, run: Callable[[argparse.Namespace], int]) -> Parser:
        more = "`sidecar ray --help` has examples."
        added = parser(of_pool.add_parser, name, help=does, description=f"{does[0].upper()}{does[1:]}.", epilog=more)
        added.set_defaults(command=run)
        return added

    for added in (
        with_pool("up", "have a sidecar on every node", lambda given: pool_commands.up(given.config)),
        with_pool("status", "show how every node is", _pool_status),
        with_pool("down", "end all sidecars and their engines", lambda given: pool_commands.down(given.config)),
    ):
        added.add_argument("--config", default="pool.yaml", metavar="FILE", help="its file (default: %(default)s)")
        if added.prog.endswith("status"):
            added.add_argument("--json", action="store_true", help="as JSON")
    added = with_pool("check", "find the mistakes in pools' files", _pool_check)
    added.add_argument("files", nargs="+", metavar="FILE", help="what a pool would be made of")
    added.add_argument("--explain", action="store_true", help="print the whole effective file, defaults included")
    return top


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_LINES):
        raise argparse.ArgumentTypeError(f"a number from 1 to {MOST_LINES}, not {text!r}")
    return int(text)


def _serve(given: argparse.Namespace) -> int:
    return serve(
        given.config,
        gpus_from=given.gpus_from,
        end_engines=given.end_engines,
        die_with_parent=given.die_with_parent,
        end_with_parent=given.end_with_parent,
        gateway=given.gateway,
    )


def _status(given: argparse.Namespace) -> int:
    return status(given.config, as_json=given.json, watch=given.watch)


def _plan(given: argparse.Namespace) -> int:
    return plan(given.config, given.model, gpus_from=given.gpus_from)


def _logs(given: argparse.Namespace) -> int:
    return logs(given.config, given.model, lines=given.lines)


def _stop(given: argparse.Namespace) -> int:
    return stop(given.config, engines=given.all)


def _pool_status(given: argparse.Namespace) -> int:
    return pool_commands.status(given.config, as_json=given.json)


def _pool_check(given: argparse.Namespace) -> int:
    return pool_commands.check(given.files, full=given.explain)


def _init(given: argparse.Namespace) -> int:
    return starter.init(given.name, given.out)


def _check(given: argparse.Namespace) -> int:
    if given.schema:
        print(schema_text(), end="")
        return 0
    if given.reference:
        print(reference_text(), end="")
        return 0
    if not given.files:
        raise Mistake("the following arguments are required: FILE (see sidecar check --help)")
    return check(given.files, full=given.explain, form=given.format, files=not given.no_files, here=given.here)
