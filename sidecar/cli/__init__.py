"""Command line of the sidecar: `main`, and one module for each command.

Exit status 2: a mistake in a flag or a file. 1: what was asked for cannot be had, as no sidecar runs or it refuses.
3: an order on a model is not done within --timeout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from gateway.shared.command_line import carry_out
from sidecar.cli.commands import parser_for
from sidecar.cli.errors import Impossible, Mistake


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 2 for a mistake in a flag or a file, 1 for what cannot be had."""
    return carry_out(partial(_run, sys.argv[1:] if argv is None else argv))


def _run(words: Sequence[str]) -> int:
    given = parser_for(words).parse_args(words)
    try:
        return int(given.module.command(given))
    except (Mistake, Impossible) as error:
        print("\n".join(f"sidecar: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 1
