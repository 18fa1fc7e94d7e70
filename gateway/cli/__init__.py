"""Command line of the gateway: `main`, and one module for each command. A mistake is one line and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from gateway.cli.commands import parser_for
from gateway.shared.command_line import carry_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. 2: a mistake in a flag or a file."""
    return carry_out(partial(_run, sys.argv[1:] if argv is None else argv))


def _run(words: Sequence[str]) -> int:
    given = parser_for(words).parse_args(words)
    try:
        return int(given.module.command(given))
    except given.module.MISTAKES as error:
        print("\n".join(f"gateway: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
