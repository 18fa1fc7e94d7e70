"""Shell completion of `sidecar`: `sidecar completion SHELL` prints a script that the shell reads at its start."""

from __future__ import annotations

import argparse

from gateway.shared.completion import DESCRIPTION, MISTAKES, add_arguments, examples, script

__all__ = ["DESCRIPTION", "EXAMPLES", "MISTAKES", "add_arguments", "command"]

EXAMPLES = examples("sidecar")


def command(given: argparse.Namespace) -> int:
    """Print the script."""
    from sidecar.cli.commands import parser_for  # noqa: PLC0415 # which knows this module by its name

    print(script(parser_for(None), given.shell))
    return 0
