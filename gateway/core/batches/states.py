"""States of a batch, and the steps from one to the next. A step is taken in one transaction, and never twice.

validating -> in_progress -> finalizing -> completed, or expired where its window ended before all was done
validating -> failed: its file cannot be worked off
in_progress -> finalizing -> failed: its results are more than its tenant may keep
validating, in_progress -> cancelling -> cancelled
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# The states that a step may leave, by the state that it enters.
BEFORE: Final = MappingProxyType(
    {
        "in_progress": ("validating",),
        "failed": ("validating", "finalizing"),
        "cancelling": ("validating", "in_progress"),
        "finalizing": ("in_progress",),
        "completed": ("finalizing",),
        "expired": ("finalizing",),
        "cancelled": ("cancelling",),
    }
)
UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
ALL: Final = ("validating", *BEFORE)


def end_of(status: str, pending: int, faults: bool) -> str:
    """The last state of a batch whose files are written, of which so many lines have no result. `faults`: it was
    stopped."""
    if status == "cancelling":
        return "cancelled"
    if faults:
        return "failed"
    return "expired" if pending else "completed"
