"""`sidecar`: the program that will decide which models are resident on a GPU. This version has none to run yet.

It exists so that the command's name and `--version` are settled, and so that nobody finds out by a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 for --help and --version (by SystemExit), else 2, since there is nothing to run."""
    parser = argparse.ArgumentParser(
        prog="sidecar", description="Starts, sleeps, wakes and evicts vLLM engines on one machine's GPUs: not yet."
    )
    parser.add_argument("--version", action="version", version=f"weir {version('weir')}")
    parser.parse_args(argv)
    print("sidecar: this version of weir has no sidecar yet; run your engines yourself", file=sys.stderr)
    return 2
