"""Picture of the README, and its table.

Goodput and every class's share of calls in time, against offered load: on four simulated engines that are asked
directly, in turn, and through the gateway, in virtual time. Below, coding agents at ordinary load beside rivals' rules,
as `make rivals RIVALS=--virtual` has them. The same seeds give the same files, byte for byte.

  python -m loadtest.lab.figures.picture                       all of it, and the table
  python -m loadtest.lab.figures.picture --only weir,agents    what depends on the gateway, the rest as it is
  python -m loadtest.lab.figures.picture --only agents         the coding agents alone; a minute
  python -m loadtest.lab.figures.picture --draw-only           the same from the figures there are, without a run

Engines, clients, policy, capacity, targets and goodput are those of `make figures` (runs.py, load.py), so are warm-up
and measured part. The traffic is that of scenarios/overload.yaml: the interactive class never asks for more than half
of what the engines can do. picture.json has every figure; picture_svg.py draws.

Exit status 0: written; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean

import msgspec

from loadtest.clients.calls import Try
from loadtest.die_with_parent import tie
from loadtest.lab.figures.load import goodput, late
from loadtest.lab.figures.picture_points import (
    AGENTS,
    RULED,
    SIDES,
    AgentPoint,
    ClassShare,
    Picture,
    Point,
    Side,
    table,
)
from loadtest.lab.figures.picture_svg import draw
from loadtest.lab.figures.runs import Saturation, Setting, in_time, measured
from loadtest.lab.rivals.loads import ENGINES, LOADS
from loadtest.lab.rivals.runs import in_virtual_time, row
from loadtest.lab.rows import parser_of
from loadtest.load.scenario import find, load
from loadtest.load.scenario_flags import whole

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
TRAFFIC = load(find("overload")).workload.mix
SEEDS = range(1, 4)  # runs of each point, averaged
AGENTS_SEEDS = range(1, 6)
PARTS = (*SIDES, "agents")
FOLDER = Path(__file__).parent


def capacity_of(seed: int) -> Saturation:
    """Return the most that the engines can do of this traffic."""
    return Setting(engines=ENGINES, seed=seed, mix=TRAFFIC).saturated()


def measure(side: Side, factor: float, seed: int, capacity: Saturation) -> Point:
    """Measure a run at `factor` times the capacity."""
    without = "direct" if side == "direct" else "round_robin"
    setting = Setting(engines=ENGINES, seed=seed, mix=TRAFFIC, without=without, capacity=capacity)
    tries = setting.overload(factor, gateway=side == "weir")
    return Point(
        side=side,
        factor=factor,
        seed=seed,
        goodput=round(goodput(setting, tries), 4),
        first=round(goodput(setting, tries, first=True), 4),
        late=round(late(setting, tries), 5),
        classes={kind.class_name: share_of(setting, tries, kind.class_name) for kind in TRAFFIC},
    )


def share_of(setting: Setting, tries: Sequence[Try], class_name: str) -> ClassShare:
    """Count a class's calls offered in the measured part, its tries in time, and the first tries among these."""
    own = [tried for tried in tries if tried.class_name == class_name]
    offered = sum(tried.number == 1 and setting.warm <= tried.intended < setting.ends for tried in own)
    good = [tried for tried in measured(setting, tries)
            if tried.class_name == class_name and in_time(tried, setting.targets)]  # fmt: skip
    return ClassShare(offered, len(good), sum(tried.number == 1 for tried in good))


def measured_again(
    kept: Picture,
    sides: Collection[str],
    jobs: int,
    *,
    factors: Sequence[float] = FACTORS,
    seeds: Sequence[int] = SEEDS,
) -> Picture:
    """Measure the points of `sides`, the longest runs first, each in a process of its own. The other sides' points
    stay, and the capacity that these were measured at."""
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    found = [point for point in kept.points if point.side not in sides]
    others = len(found)
    with ProcessPoolExecutor(jobs, context, initializer=tie, initargs=(os.getpid(),)) as pool:
        capacity = kept.capacity if found else dict(zip(seeds, pool.map(capacity_of, seeds), strict=True))
        runs = [(side, factor, seed) for factor in reversed(factors) for side in SIDES if side in sides
                for seed in seeds]  # fmt: skip
        running = [pool.submit(measure, *run, capacity[run[2]]) for run in runs]
        for done in as_completed(running):
            found.append(done.result())
            said = f"\r{len(found) - others} of {len(runs)} runs, {time.monotonic() - began:.0f} s"
            print(said, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    found.sort(key=lambda point: (SIDES.index(point.side), point.factor, point.seed))
    return msgspec.structs.replace(kept, capacity=capacity, points=found)


def agents() -> list[AgentPoint]:
    """Coding agents at ordinary load, behind Weir with no policy and behind each rule."""
    found = []
    for name in AGENTS:
        scenarios = [msgspec.structs.replace(LOADS[name].scenario, seed=seed) for seed in AGENTS_SEEDS]
        for rule in RULED:
            rows = [row(*in_virtual_time(LOADS[name], rule, scenario, Path())) for scenario in scenarios]
            means = [round(fmean(one[figure] for one in rows), 4) for figure in ("mean", "p99", "hits")]
            found.append(AgentPoint(name, rule, *means))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print; the exit status."""
    given = arguments(argv)
    figures = FOLDER / "picture.json"
    picture = Picture(engines=ENGINES, capacity={}, points=[])
    if set(given.only) != set(PARTS):
        picture = msgspec.json.decode(figures.read_bytes(), type=Picture)
    if sides := set(given.only) & set(SIDES):
        picture = measured_again(picture, sides, given.jobs)
    if "agents" in given.only:
        picture = msgspec.structs.replace(picture, agents=agents())
    figures.write_text(written(picture))
    (FOLDER / "picture.svg").write_text(draw(picture))
    print("\n".join(table(picture)))
    return 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = parser_of("figures.picture", __doc__)
    parser.add_argument("--only", metavar="PARTS", help=f"measure these again (default: all): {', '.join(PARTS)}")
    parser.add_argument("--draw-only", action="store_true", help="draw picture.json and print its table")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=whole(1, 1000), default=cores, metavar="N", help="processes at a time")
    given = parser.parse_args(argv)
    given.only = [] if given.draw_only else given.only.split(",") if given.only else list(PARTS)
    if unknown := [name for name in given.only if name not in PARTS]:
        parser.error(f"--only: {unknown[0]!r} is not one of {', '.join(PARTS)}")
    return given


def written(picture: Picture) -> str:
    """picture.json: a point a line, those of agents before the others."""
    head = msgspec.json.encode(msgspec.structs.replace(picture, points=[])).decode().removesuffix("]}")
    head = head.replace('{"load"', '\n{"load"')
    return head + "\n" + ",\n".join(msgspec.json.encode(point).decode() for point in picture.points) + "\n]}\n"


if __name__ == "__main__":
    sys.exit(main())
