"""Callgrind: the command line of what counts by it, and the instructions of its dumps."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from loadtest.processes import ChildError

WITHIN = 300.0  # seconds for a dump
TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


def baseline(name: str, description: str) -> Path | None:
    """The other checkout that the command line names. Ends the process where there is no valgrind."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="another checkout, which is the baseline")
    tree: Path | None = parser.parse_args().tree
    if shutil.which("valgrind") is None:
        sys.exit(f"{name}: valgrind is not installed (Debian's package valgrind)")
    return tree


def start_counting(pid: int) -> None:
    """Have a process count from now on that was started with --instr-atstart=no."""
    subprocess.run(["callgrind_control", "--instr=on", str(pid)], check=True, capture_output=True, timeout=WITHIN)


def dumped(pid: int, out: Path, number: int) -> int:
    """Instructions of the process since its last dump. `number`: of this one, from 1 on. Raises ChildError."""
    subprocess.run(["callgrind_control", "--dump", str(pid)], check=True, capture_output=True, timeout=WITHIN)
    found = TOTAL.findall(Path(f"{out}.{number}").read_text())
    if not found:
        raise ChildError("callgrind's dump has no total")
    return int(found[-1])
