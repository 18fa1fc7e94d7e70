"""Long run of the fuzz targets, each in turn or those that are named.

    python -m tests.fuzz [--seconds N] [--seed N] [TARGET ...]

What breaks a rule is printed and written to a file of the folder `tests/fuzz/found`; once it is mended, the input goes
into `tests/fuzz/corpus/TARGET`, and every run of the tests tries it first.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time

from tests.fuzz.engine import CORPUS, Found, Fuzzer
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (all)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together (600)")
    parser.add_argument("--seed", type=int, help="of the mutations (another each time)")
    given = parser.parse_args()
    if unknown := [name for name in given.targets if name not in TARGETS]:
        parser.error(f"there is no target {', '.join(unknown)}; one of {', '.join(TARGETS)}")
    names = given.targets or list(TARGETS)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    return max([_run(name, seed, given.seconds / len(names)) for name in names])


def _run(name: str, seed: int, seconds: float) -> int:
    fuzzer = Fuzzer(name, seed)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            fuzzer.step()
            if fuzzer.tried % 50 == 0:
                fuzzer.grow()
    except Found as found:
        print(f"{name}: {found}")
        folder = CORPUS.parent / "found"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}-{hashlib.sha256(str(found).encode()).hexdigest()[:12]}").write_text(str(found))
        return 1
    print(f"{name}: {fuzzer.tried} inputs, {fuzzer.lines} lines reached, {len(fuzzer.pool)} inputs kept, seed {seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
