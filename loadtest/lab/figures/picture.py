"""Picture of the README, and its table.

Goodput and every class's share of calls in time, against offered load: on four simulated engines that are asked
directly, in turn, and through the gateway, in virtual time. Below, coding agents at ordinary load beside rivals' rules,
as `make rivals RIVALS=--virtual` has them. The same seeds give the same files, byte for byte.

  python -m loadtest.lab.figures.picture                  all of it, and the table
  python -m loadtest.lab.figures.picture --agents-only    the coding agents, the rest as it is; a minute
  python -m loadtest.lab.figures.picture --draw-only      the same from the figures there are, without a run

Engines, clients, policy, capacity, targets and goodput are those of `make figures` (runs.py, load.py), so are warm-up
and measured part. The traffic is that of scenarios/overload.yaml: the interactive class never asks for more than half
of what the engines can do. picture.json has every figure; picture_svg.py draws.

Exit status 0: written; 2: bad arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean

import msgspec

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
from loadtest.simulate.rivals.rules import Direct, RoundRobin
from loadtest.simulate.run_records import RunResult

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
TRAFFIC = load(find("overload")).workload.mix
SEEDS = range(1, 4)  # runs of each point, averaged
AGENTS_SEEDS = range(1, 6)
FOLDER = Path(__file__).parent


def capacity_of(seed: int) -> Saturation:
    """Return the most that the engines can do of this traffic."""
    return Setting(engines=ENGINES, seed=seed, mix=TRAFFIC).saturated()


def measure(side: Side, factor: float, seed: int, capacity: Saturation) -> Point:
    """Measure a run at `factor` times the capacity."""
    rule = Direct if side == "direct" else RoundRobin
    setting = Setting(engines=ENGINES, seed=seed, mix=TRAFFIC, without=rule, capacity=capacity)
    outcome = setting.overload(factor, gateway=side == "weir")
    return Point(
        side=side,
        factor=factor,
        seed=seed,
        goodput=round(goodput(setting, outcome), 4),
        first=round(goodput(setting, outcome, first=True), 4),
        late=round(late(setting, outcome), 5),
        classes={kind.class_name: share_of(setting, outcome, kind.class_name) for kind in TRAFFIC},
    )


def share_of(setting: Setting, outcome: RunResult, class_name: str) -> ClassShare:
    """Count a class's calls offered in the measured part, its tries in time, and the first tries among these."""
    own = [tried for tried in outcome.tries if tried.class_name == class_name]
    offered = sum(tried.number == 1 and setting.warm <= tried.intended < setting.ends for tried in own)
    good = [tried for tried in measured(setting, outcome)
            if tried.class_name == class_name and in_time(tried, setting.targets)]  # fmt: skip
    return ClassShare(offered, len(good), sum(tried.number == 1 for tried in good))


def measured_all(seeds: Sequence[int]) -> Picture:
    """Measure every point, the longest runs first, each in a process of its own."""
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    found: list[Point] = []
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=tie, initargs=(os.getpid(),)) as pool:
        capacity = dict(zip(seeds, pool.map(capacity_of, seeds), strict=True))
        jobs = [(side, factor, seed) for factor in reversed(FACTORS) for side in SIDES for seed in seeds]
        running = [pool.submit(measure, *job, capacity[job[2]]) for job in jobs]
        for done in as_completed(running):
            found.append(done.result())
            said = f"\r{len(found)} of {len(jobs)} runs, {time.monotonic() - began:.0f} s"
            print(said, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    found.sort(key=lambda point: (SIDES.index(point.side), point.factor, point.seed))
    return Picture(engines=ENGINES, capacity=capacity, points=found, agents=agents())


def agents() -> list[AgentPoint]:
    """Coding agents at ordinary load, behind Weir with no policy and behind each rule."""
    found = []
    for name in AGENTS:
        scenarios = [msgspec.structs.replace(LOADS[name].scenario, seed=seed) for seed in AGENTS_SEEDS]
        for rule in RULED:
            rows = [row(*in_virtual_time(LOADS[name], rule, scenario, Path())) for scenario in scenarios]
            means = [round(fmean(getattr(one, figure) for one in rows), 4) for figure in ("mean", "p99", "hits")]
            found.append(AgentPoint(name, rule, *means))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print; the exit status."""
    parser = parser_of("figures.picture", __doc__)
    parser.add_argument("--draw-only", action="store_true", help="draw picture.json and print its table")
    parser.add_argument("--agents-only", action="store_true", help="measure the coding agents alone")
    given = parser.parse_args(argv)
    figures = FOLDER / "picture.json"
    if given.draw_only or given.agents_only:
        picture = msgspec.json.decode(figures.read_bytes(), type=Picture)
    else:
        picture = measured_all(SEEDS)
    if given.agents_only:
        picture = msgspec.structs.replace(picture, agents=agents())
    figures.write_text(written(picture))
    (FOLDER / "picture.svg").write_text(draw(picture))
    print("\n".join(table(picture)))
    return 0


def written(picture: Picture) -> str:
    """picture.json: a point a line, those of agents before the others."""
    head = msgspec.json.encode(msgspec.structs.replace(picture, points=[])).decode().removesuffix("]}")
    head = head.replace('{"load"', '\n{"load"')
    return head + "\n" + ",\n".join(msgspec.json.encode(point).decode() for point in picture.points) + "\n]}\n"


if __name__ == "__main__":
    sys.exit(main())
