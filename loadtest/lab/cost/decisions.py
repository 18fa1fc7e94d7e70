"""Instructions of one decision: in one process, at a relay and at its decider, counted by callgrind.

    python -m loadtest.lab.cost.decisions [--tree FOLDER]

Calls take the way from their arrival to their end in one process that opens no socket: by a `LocalDecider`, then by a
`RemoteDecider` whose frames a hub takes. What the relay has sent is then taken once more by a fresh session of the hub:
that is the decider's part, and the rest of the second is the relay's. Calls that come in one turn of the loop share
frames, so there is a figure for one at a time and for several. Parsing, bytes of answers and the kernel are not in it;
what the same tasks cost that ask nobody is taken off. Each figure is the slope between few calls and many. With
`--tree` another checkout is counted too, as the baseline.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from loadtest.lab.cost.callgrind import baseline, dumped
from loadtest.lab.cost.decision_parts import AT_ONCE, PARTS, ROUNDS
from loadtest.processes import ChildError


def measure(tree: Path) -> list[dict[str, float]]:
    """Instructions of a call's parts, for each of AT_ONCE."""
    with tempfile.TemporaryDirectory(prefix="decisions-") as folder:
        out = Path(folder) / "callgrind"
        command = [
            *("env", f"PYTHONPATH={tree}", "PYTHONHASHSEED=0"),
            *("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--"),
            *(sys.executable, "-P", str(Path(__file__).with_name("decision_parts.py"))),
        ]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as child:
            try:
                marks = range(1, 2 * len(AT_ONCE) * len(ROUNDS) * len(PARTS) + 1)
                spent = iter([count(child, out, mark) for mark in marks][1::2])
            finally:
                child.kill()
    found = []
    for _ in AT_ONCE:
        _, few, many = ([next(spent) for _ in PARTS] for _ in ROUNDS)
        calls = ROUNDS[2] - ROUNDS[1]
        found.append({name: (b - a) / calls for name, a, b in zip(PARTS, few, many, strict=True)})
    return found


def count(child: subprocess.Popen[bytes], out: Path, number: int) -> int:
    """Instructions up to the child's next mark, the dump of this number."""
    assert child.stdin is not None  # noqa: S101 # both are pipes
    assert child.stdout is not None  # noqa: S101 # see above
    if child.stdout.readline() != b"mark\n":
        raise ChildError("the counted process has ended")
    instructions = dumped(child.pid, out, number)
    child.stdin.write(b"\n")
    child.stdin.flush()
    return instructions


def main() -> None:
    other = baseline("decisions", __doc__)
    print(f"{'instructions of a call':24}{'one process':>14}{'relay':>10}{'decider':>10}")
    for name, tree in {"baseline": other, "this tree": Path.cwd()}.items():
        try:
            for at_once, parts in zip(AT_ONCE, measure(tree) if tree else (), strict=False):
                one, relay = parts["local"] - parts["loop"], parts["frames"] - parts["decider"] - parts["loop"]
                print(f"{f'{name}, {at_once} at once':24}{one:14,.0f}{relay:10,.0f}{parts['decider']:10,.0f}")
        except (ChildError, subprocess.SubprocessError) as error:
            sys.exit(f"decisions: {error}")


if __name__ == "__main__":
    main()
