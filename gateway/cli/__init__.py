"""Command line of the gateway: `main`, and one module for each command. A mistake is one line and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gateway.cli.commands import parser_for


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. 2: a mistake in a flag or a file."""
    words = sys.argv[1:] if argv is None else argv
    given = parser_for(words).parse_args(words)
    try:
        return int(given.module.command(given))
    except given.module.MISTAKES as error:
        print("\n".join(f"gateway: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # `gateway status | head`: whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # of a command that has nothing left to end well
        return 130
