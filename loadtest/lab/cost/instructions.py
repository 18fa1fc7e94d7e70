"""Instructions per request and per SSE event of the gateway's process, counted by callgrind.

    python -m loadtest.lab.cost.instructions

A clock differs from run to run with whatever else a machine does; user-space instructions differ by 1 % or less. One
gateway process runs under valgrind. Each figure is the slope between a short and a long load, so that start-up and
warm-up do not count; what polling engines costs meanwhile does, and is little, since they are polled once a minute.
The kernel's part is not seen: `make bench-overhead` measures CPU time. An event's count is that of ten streams at once:
the fewer events come in one turn of the loop, the more each costs. Another checkout's own command gives the baseline.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from loadtest.clients.stub import StubLoad, serve_stub
from loadtest.lab.cost.overhead import ENGINE_PORT, answers_calls
from loadtest.processes import Child, ChildError

PORT = 19390
DUMPED = 300.0  # seconds for a dump
TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)
WARM, FEW, MANY = 300, 200, 1200  # requests
STREAMS = (5, 205)  # events of a stream
AT_ONCE = 10  # streams
WITHIN = 150.0  # seconds of a load: valgrind is about fifty times slower
POLICY = "version: 1\nfleet: {poll: 60s, health: 60s}\n"


class CallgrindGateway:
    """A gateway under callgrind. `count` runs a load; its value is the instructions spent meanwhile."""

    def __init__(self, folder: Path) -> None:
        policy = folder / "policy.yaml"
        policy.write_text(POLICY)
        self._out = folder / "callgrind"
        self._dumps = 0
        # One seed of hashes: dictionaries that collide differently are a per cent of difference between runs.
        command = [
            *("env", "PYTHONHASHSEED=0"),
            # Counting begins once it answers: its start would take four times as long.
            *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={self._out}", "--"),
            *(sys.executable, "-m", "gateway.cli", "serve", "--policy", str(policy)),
            *("--engine", f"http://127.0.0.1:{ENGINE_PORT}", "--listen", f"127.0.0.1:{PORT}"),
            *("--control", "127.0.0.1:0", "--log", "/dev/null"),
        ]
        self._child = Child("gateway", command, folder / "output")

    def __enter__(self) -> CallgrindGateway:
        with self._child.starting():
            self._child.wait(lambda: answers_calls(PORT), 180.0, "an answer under valgrind", every=1.0)
            self._control("--instr=on")
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def count(self, load: StubLoad) -> int:
        self._dump()
        result = uvloop.run(load.run(PORT, WITHIN))
        if result.errors:
            raise ChildError(f"{result.errors} of {result.finished} calls failed")
        # The load's clients are gone; once another is answered, the gateway has closed their connections too. Else this
        # load pays for that or the next, by chance.
        if not answers_calls(PORT):
            raise ChildError("the gateway does not answer after a load")
        return self._dump()

    def _dump(self) -> int:
        """Instructions since the last dump."""
        self._dumps += 1
        self._control("--dump")
        found = TOTAL.findall(Path(f"{self._out}.{self._dumps}").read_text())
        if not found:
            raise ChildError("callgrind's dump has no total")
        return int(found[-1])

    def _control(self, order: str) -> None:
        argv = ["callgrind_control", order, str(self._child.pid)]
        subprocess.run(argv, check=True, capture_output=True, timeout=DUMPED)


def measure() -> tuple[float, float]:
    """Instructions per JSON request, and per event of a stream."""
    with tempfile.TemporaryDirectory(prefix="instructions-") as folder, CallgrindGateway(Path(folder)) as gateway:
        gateway.count(StubLoad(requests=WARM, connections=8))
        few, many = (gateway.count(StubLoad(requests=n, connections=8)) for n in (FEW, MANY))
        # The first streams open connections to the engine that the later ones use too.
        _, short, long = (
            gateway.count(StubLoad(requests=AT_ONCE, connections=AT_ONCE, tokens=n)) for n in (STREAMS[0], *STREAMS)
        )
    return (many - few) / (MANY - FEW), (long - short) / (AT_ONCE * (STREAMS[1] - STREAMS[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("instructions: valgrind is not installed (Debian's package valgrind)")
    print("two minutes under valgrind", file=sys.stderr)
    try:
        with serve_stub(ENGINE_PORT):
            request, event = measure()
    except (ChildError, subprocess.SubprocessError) as error:
        sys.exit(f"instructions: {error}")
    pump = "on" if any(Path("gateway/native").glob("pump.*.so")) else "not built"
    print(f"{request:,.0f} per JSON request, {event:,.0f} per SSE event, pump {pump}")


if __name__ == "__main__":
    main()
