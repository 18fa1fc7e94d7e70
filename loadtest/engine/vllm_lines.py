"""Lines that vLLM writes when a start, a wake or a group of GPUs fails, with numbers to be filled in.

They are in `vllm_lines.json`. Each kind of `sidecar diagnose` has the wordings of several versions, as in published
logs; a test compares them. Sizes are GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec


class VllmLines(msgspec.Struct, frozen=True):
    """Content of the file. `failures`: wordings by kind; `other_causes`: kinds that are nobody's want of memory, so
    that nothing is to be learnt of such a start; `host_memory`: a want of the machine's memory, in torch's words and of
    no kind; `follows`: after any failure; `slow_or_hung`: written once a minute while the GPUs of a start wait for each
    other, for ever or until something is compiled."""

    failures: Mapping[str, tuple[str, ...]]
    other_causes: tuple[str, ...]
    host_memory: str
    follows: str
    slow_or_hung: str


VLLM_LINES = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=VllmLines)


def line(kind: str, wording: int = 0, **numbers: float) -> str:
    """The line of a failure of this kind, in one of its wordings. Raises KeyError for a kind or number not known."""
    wordings = VLLM_LINES.failures[kind]
    return wordings[wording % len(wordings)].format(**numbers)
