"""Alerts against a real Prometheus, each fired by its fault: `python -m loadtest.lab.operate.alerts --help`.

The rules pass their unit tests first (promtool). Then a gateway, engines and a sidecar run as processes under light
traffic. Nothing may fire for a minute, which is an hour of the rules' time. Then each fault happens: its alert must
fire, and cease once the fault is mended.

Exit status 0: every alert fired by its fault and was silent before and after; 1: not so; 2: bad arguments, or no
Prometheus.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from loadtest.lab.operate.debian import PROMETHEUS, NoProgram
from loadtest.lab.operate.drills import DRILLS, UNDRILLED, Drill
from loadtest.lab.operate.prometheus import SPEED, compressed
from loadtest.lab.operate.site import OperatedSite
from loadtest.lab.rows import terminal
from loadtest.processes import until

RULES = Path(__file__).parents[3] / "deploy/prometheus/alerts.yaml"
QUIET = 60.0  # seconds: an hour of the rules' time
FIRES = 60.0  # seconds within which an alert must fire, and cease
LIGHT = 2.0  # calls a second


def _quiet(site: OperatedSite, seconds: float) -> set[str]:
    """The alerts that fired in a time in which nothing happens."""
    fired: set[str] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fired |= site.prometheus.firing().keys()
        time.sleep(0.25)
    return fired


def _drilled(site: OperatedSite, drill: Drill) -> tuple[float | None, float | None, set[str]]:
    """Seconds until the alert fired and, after the mending, until it ceased; None: it did not. And what fired too."""
    others: set[str] = set()

    def fires() -> bool:
        drill.again(site)
        firing = site.prometheus.firing()
        others.update(firing)
        return drill.alert in firing

    drill.strike(site)
    fired = until(fires, FIRES, every=0.25)
    drill.mend(site)
    ceased = until(lambda: drill.alert not in site.prometheus.firing(), FIRES, every=0.25)
    site.settled()
    return fired, ceased, others - {drill.alert}


def names() -> list[str]:
    """Every alert of the rules."""
    return re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.lab.operate.alerts", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="LIST", help="these alerts alone, and no quiet hour before them")
    only = [name for name in parser.parse_args(argv).only.split(",") if name]
    known = [drill.alert for drill in DRILLS]
    if not set(only) <= set(known):
        parser.error(f"--only: of {', '.join(known)}")
    console = terminal()
    try:
        PROMETHEUS.install()
        rules = RULES.with_name("alerts.test.yaml")
        subprocess.run([*PROMETHEUS.command("promtool"), "test", "rules", rules], check=True)
    except NoProgram as error:
        console.print(str(error))
        return 2
    except subprocess.CalledProcessError:
        return 1
    wrong = False
    table = Table("alert", "fault", "fires after", "ceases after", "fired with it")
    with (
        tempfile.TemporaryDirectory(prefix="weir-alerts-") as folder,
        OperatedSite(Path(folder), compressed(RULES.read_text())) as site,
    ):
        site.callers("light", LIGHT)
        until(lambda: bool(site.prometheus.query('up{job="weir"} == 1')), 30.0)
        if not only:
            fired = _quiet(site, QUIET)
            wrong = bool(fired)
            console.print(f"{QUIET:g} s of light traffic, an hour of the rules: {', '.join(fired) or 'silent'}")
        for drill in DRILLS:
            if only and drill.alert not in only:
                continue
            after, ceased, others = _drilled(site, drill)
            wrong = wrong or after is None or ceased is None
            table.add_row(drill.alert, drill.fault, *map(_minutes, (after, ceased)), ", ".join(sorted(others)))
            console.print(f"{drill.alert}: fires after {_minutes(after)}")
    for name, why in UNDRILLED.items():
        table.add_row(name, f"none: {why}", "", "", "")
    console.print(table)
    return int(wrong)


def _minutes(seconds: float | None) -> str:
    """Seconds of the run as minutes of the rules' time."""
    return "[red]never[/]" if seconds is None else f"{seconds * SPEED / 60:.1f} min"


if __name__ == "__main__":
    sys.exit(main())
