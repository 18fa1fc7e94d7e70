"""Log for the operator: one line on standard error for each change, with the time."""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, datetime

from gateway.shared.formatting import shown


def say(line: str) -> None:
    """A line for the operator's log, on standard error, with the time; one that cannot be written is lost."""
    with contextlib.suppress(OSError):
        print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {shown(line)}", file=sys.stderr, flush=True)
