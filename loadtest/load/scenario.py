"""Scenario file: a workload, its arrivals, its duration and its SLOs.

Read by the gateway's reader, so that every mistake names its line and what was probably meant. What is absent has its
default; names of files are relative to the scenario. `load` and `planned` are all that a command needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.core.policy.types import FileName, Times
from gateway.shared.files.kinds import Text
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.reference import reference_of
from gateway.shared.files.schema import schema_of, text_of
from gateway.shared.files.units import Count, Seconds
from gateway.shared.files.yaml_file import MAX_BYTES, read_file, written
from loadtest.load import trace
from loadtest.load.arrivals import Arrivals, Rate, Span
from loadtest.load.plan import plan
from loadtest.load.scenario_rules import faults
from loadtest.load.slo import Objective, slos_of
from loadtest.load.workload import Kind, Planned, Tenant, Workload
from loadtest.report.records import Slo, Window

SHIPPED = Path(__file__).parents[1] / "scenarios"
LONGEST_KEY = 4096  # bytes
DURATION = 60.0  # seconds, where none is given
_LEAD = """\
Every field of a scenario of `gateway bench` and `gateway simulate` ([bench.md](bench.md)), its values and its default.
`gateway check --scenario --reference` writes this page; `gateway check --scenario FILE` finds every mistake."""


class Mistake(Exception):
    """A mistake of a person, or something that is not there; says what and where."""


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded traffic. A bare name of a file is a trace too.

    `file`: Azure LLM or BurstGPT trace (CSV), Mooncake trace or the gateway's call log (JSONL).
    `format`: Format of the file; auto: by its first line.
    `speed`: Speed of sending, as a multiple of the recorded one.
    """

    shorthand: ClassVar[str] = "file"

    file: FileName
    format: Literal["auto", "azure", "burstgpt", "mooncake", "weir"] = "auto"
    speed: Times = 1.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and what is expected under it.

    `version`: Version of this format.
    `what`: Title for reports.
    `arrivals`: Arrival process of requests; trace: as recorded.
    `trace`: Recorded traffic, for its times, its lengths, or both.
    `workload`: Requests to send.
    `duration`: Time of sending, warm-up and cool-down included; null: 1m, or to the trace's end.
    `warmup`: Time at the beginning that does not count.
    `cooldown`: Time at the end that does not count.
    `seed`: Seed of all that is random: the same seed is the same load.
    `retries`: Most retries of a request, as OpenAI's client makes them; 0: none.
    `timeout`: Time after which a client gives up a try.
    `slo`: Bounds that make a request of a class good, from its intended time, and the share that must be good.
    """

    version: Literal[1] = 1
    what: Annotated[str, Text(r"[^\x00-\x1f]{0,200}", "one line of at most 200 characters")] = ""
    arrivals: Literal["trace"] | Arrivals = Arrivals(poisson=Rate(1.0))
    trace: TraceFile | None = None
    workload: Workload = Workload()
    duration: Span | None = None
    warmup: Annotated[Seconds, msgspec.Meta(ge=0, le=86_400)] = 0.0
    cooldown: Annotated[Seconds, msgspec.Meta(ge=0, le=86_400)] = 0.0
    seed: Annotated[Count, msgspec.Meta(ge=0, le=1_000_000_000)] = 1
    retries: Annotated[Count, msgspec.Meta(ge=0, le=10)] = 2
    timeout: Span = 600.0
    slo: tuple[Objective, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds for which requests are sent at most; infinite: as long as the trace is."""
        if self.duration is not None:
            return self.duration
        return math.inf if isinstance(self.arrivals, str) else DURATION

    @property
    def window(self) -> Window:
        """Window of the requests that count."""
        return Window(duration=self.seconds, warmup=self.warmup, cooldown=self.cooldown)

    @property
    def slos(self) -> tuple[Slo, ...]:
        """Objectives that make a request good."""
        return slos_of(self.slo)

    @property
    def clients(self) -> int:
        """Number of clients of a closed loop, each of which sends its next request once it has its answer; 0: an open
        loop."""
        return 0 if isinstance(self.arrivals, str) or self.arrivals.closed is None else self.arrivals.closed.clients

    @property
    def rate(self) -> float:
        """Requests per second as planned, follow-ups of conversations not among them; 0.0: unknown."""
        return 0.0 if isinstance(self.arrivals, str) else self.arrivals.mean_rate(self.seconds)

    def scaled(self, factor: float) -> Scenario:
        """The same load at `factor` times the rate; a trace is sent as many times faster."""
        if not isinstance(self.arrivals, str):
            return msgspec.structs.replace(self, arrivals=self.arrivals.scaled(factor))
        assert self.trace is not None  # noqa: S101 # the rules say so
        faster = msgspec.structs.replace(self.trace, speed=self.trace.speed * factor)
        return msgspec.structs.replace(self, trace=faster)


# -- files ------------------------------------------------------------------------------------------------------------


def shipped() -> tuple[str, ...]:
    """The names of the scenarios that come with the load test, each a file of SHIPPED."""
    return tuple(sorted(file.stem for file in SHIPPED.glob("*.yaml")))


def find(name: str) -> Path:
    """The file of a scenario: one that is shipped, by its name, or any by its path. Raises Mistake."""
    if name in shipped():
        return SHIPPED / f"{name}.yaml"
    if not Path(name).is_file():
        raise Mistake(f"{name}: neither a file nor one of the scenarios {', '.join(shipped())}")
    return Path(name)


def load(path: Path) -> Scenario:
    """The scenario in a file. Raises InvalidFile, and OSError where it cannot be read."""
    with open_plain(path) as file:
        return decode(file.read(MAX_BYTES + 1), str(path))


def decode(data: bytes, name: str = "scenario") -> Scenario:
    """The scenario in YAML. `name` is how messages call the file. Raises InvalidFile."""
    reading = read_file(data, name, Scenario)
    reading.judge(faults(reading.value))
    return reading.good()


def of_trace(file: str, *, speed: float = 1.0, model: str = "sim") -> Scenario:
    """Recorded traffic as it was, to its end: a command line's `--trace FILE`. Answers are as long as recorded, where a
    server knows vLLM's `ignore_eos`."""
    kind = Kind(prompt="trace", output="trace", ignore_eos=True)
    workload = Workload(model=model, mix=(kind,))
    return Scenario(what=f"{Path(file).name}, as recorded"[:200], arrivals="trace",
                    trace=TraceFile(file=file, speed=speed), workload=workload)  # fmt: skip


def explain(scenario: Scenario) -> str:
    """The scenario as YAML, every default written out; it decodes to an equal one."""
    return written(scenario, Scenario)


def schema_text() -> str:
    """The JSON Schema of scenarios, as scenarios/schema.json holds it."""
    return text_of(schema_of(Scenario, "Weir load test scenario"))


def reference_text() -> str:
    """The reference as docs/scenario.md holds it."""
    return reference_of(Scenario, "Scenario file reference", _LEAD, "shown by `--explain`")


# -- requests ---------------------------------------------------------------------------------------------------------


def planned(
    scenario: Scenario, *, seed: int | None = None, folder: Path = Path(), keys: Mapping[str, str] | None = None
) -> Iterator[Planned]:
    """The requests, in order, those of a closed loop without end. `seed`: another than the scenario's; `folder`: where
    the scenario is; `keys`: API keys by tenant, of `keys_of`.

    Raises TraceError and OSError for the trace, when the row at fault is reached.
    """
    chosen = scenario.seed if seed is None else seed
    rows = recorded(scenario, folder)
    seconds = scenario.seconds
    arrivals: Iterator[float] | Iterator[trace.Arrival]
    if isinstance(scenario.arrivals, str):
        assert rows is not None  # noqa: S101 # the rules say so
        arrivals = takewhile(lambda row: row.at < seconds, rows)
    else:
        arrivals = times = takewhile(lambda at: at < seconds, scenario.arrivals.times(chosen))
        if rows is not None:  # its lengths, at other times
            arrivals = (msgspec.structs.replace(row, at=at) for at, row in zip(times, rows, strict=False))
    return plan(scenario.workload, arrivals, chosen, keys=keys)


def recorded(scenario: Scenario, folder: Path = Path()) -> Iterator[trace.Arrival] | None:
    """The rows of its trace, if it has one; where a kind sends its conversations, the first row of each, with its
    turns. Raises as `planned` does."""
    if scenario.trace is None:
        return None
    given = scenario.trace
    form = None if given.format == "auto" else given.format
    file = folder / given.file
    rows = trace.read(file, form, speed=given.speed)
    turns = any(kind.session is not None and kind.prompt == "trace" for kind in scenario.workload.mix)
    return trace.conversations(rows, file) if turns else rows


def keys_of(scenario: Scenario, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The tenants' API keys, of those that have one. Raises Mistake, which never says a key."""
    tenants = scenario.workload.tenants.items()
    found = {name: key_of(tenant, f"workload.tenants.{name}", folder, environment) for name, tenant in tenants}
    return {name: key for name, key in found.items() if key}


def key_header(variable: str | None, environment: Mapping[str, str]) -> dict[bytes, bytes]:
    """The header with the API key that `--key-env` names; none where it is not given. Raises Mistake."""
    if variable is None:
        return {}
    key = key_of(Tenant(key_env=variable), "--key-env", Path(), environment)
    return {b"authorization": b"Bearer " + key.encode()}


def key_of(whose: Tenant, path: str, folder: Path, environment: Mapping[str, str]) -> str:
    """API key of a tenant; "": the tenant has none. `path`: how messages call it. Raises Mistake."""
    if whose.key_env is not None:
        where, key = f"the environment variable {whose.key_env}", environment.get(whose.key_env, "")
    elif whose.key_file is not None:
        where = str(folder / whose.key_file)
        try:
            with open_plain(folder / whose.key_file) as file:
                key = file.read(LONGEST_KEY + 1).decode("ascii", "replace")
        except OSError as error:
            raise Mistake(f"{path}.key_file: {where}: {error.strerror}") from error
    else:
        return ""
    key = key.strip()
    if not (key.isascii() and key.isprintable() and 0 < len(key) <= LONGEST_KEY) or " " in key:
        raise Mistake(f"{path}: {where} holds no API key, expected one alone, without spaces")
    return key
