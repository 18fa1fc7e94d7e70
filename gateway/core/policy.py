"""The policy: everything an operator may change, as one frozen tree; and its door, YAML in, problems out.

`Policy()` is the defaults. One snapshot serves a call from start to end. A field is here only if something obeys it.
Reading is bounded (bytes, depth, nodes after aliases), refuses duplicate keys, and ends with every problem found.
Times are seconds, sizes bytes or tokens, shares 0..1, whatever units the file used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, cast

import msgspec
import yaml

from gateway.core.checked import Problem, Reader, Text, Value, dotted, nearest, plain, shortened
from gateway.core.units import SAMPLE, Bytes, Count, Factor, Seconds, Share

MAX_BYTES = 256 * 1024  # about 3,000 engines
MAX_NODES = 20_000  # after aliases: a file that grows by reference is refused before it is built
MAX_DEPTH = 16

Bounds = msgspec.Meta
Moment = Annotated[Seconds, Bounds(ge=0.001, le=86_400)]
Positive = Annotated[Count, Bounds(ge=1, le=1_000_000_000)]
Buffer = Annotated[Bytes, Bounds(ge=1024, le=1024**3)]
# Class names are metric labels and header values; model names appear in both too.
Name = Annotated[str, Text(r"[a-z][a-z0-9_-]{0,31}", "a lower-case name of letters, digits, _ and -")]
ModelName = Annotated[str, Text(r"[!-~]{1,200}", "a model name without spaces")]
FileName = Annotated[str, Text(r"[^\x00-\x1f]{1,4096}", "a file name")]
# As browsers write it: lower case, no path, no default port.
WebOrigin = Annotated[
    str,
    Text(
        r"\*|https?://(?:[a-z0-9._-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?",
        "https://HOST, https://HOST:PORT in lower case without a path, or * for all",
    ),
]
EngineUrl = Annotated[
    str,
    Text(
        r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~%/-]*)?|unix:///[^\x00-\x20?#]+",
        "http://HOST:PORT, https://HOST:PORT or unix:///PATH",
    ),
]


class TrafficClass(msgspec.Struct, frozen=True, kw_only=True):
    """`weight`: share of tokens under contention. `deadline`: seconds to the last token.

    `max_queue`: calls that may wait, per model. `max_concurrency`: calls that may run, in the whole fleet.
    """

    weight: Annotated[Factor, Bounds(ge=0.01, le=1000)] = 1.0
    deadline: Moment = 300.0
    max_queue: Annotated[Count, Bounds(ge=0, le=1_000_000)] = 512
    max_concurrency: Positive | None = None


def default_classes() -> Mapping[str, TrafficClass]:
    """Most important first."""
    return {
        "interactive": TrafficClass(weight=8, deadline=60.0, max_queue=256),
        "default": TrafficClass(weight=4, deadline=300.0, max_queue=512),
        "long_context": TrafficClass(weight=2, deadline=600.0, max_queue=64, max_concurrency=8),
        "batch": TrafficClass(weight=1, deadline=3600.0, max_queue=4096),
    }


def default_service_tiers() -> Mapping[str, str]:
    return {"priority": "interactive", "default": "default", "flex": "batch"}


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How much may be promised on an engine. `capacity`: KV tokens of an engine that does not tell its own."""

    kv_target: Annotated[Share, Bounds(ge=0.05, le=1)] = 0.80
    alpha: Literal["auto"] | Annotated[Share, Bounds(ge=0, le=1)] = "auto"
    engine_backlog: Annotated[Count, Bounds(ge=0, le=10_000)] = 2
    capacity: Positive = 100_000
    max_concurrency: Positive = 256


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """`block`: bytes of prompt per prefix block. `imbalance`: how far above the mean one engine may be held."""

    affinity: Literal["prefix", "none"] = "prefix"
    block: Annotated[Bytes, Bounds(ge=64, le=65_536)] = 512
    affinity_ttl: Moment = 600.0
    imbalance: Annotated[Factor, Bounds(ge=1, le=1000)] = 1.5
    slow_start: Annotated[Seconds, Bounds(ge=0, le=3600)] = 30.0


RetryCause = Literal["connect", "reset", "timeout", "429", "502", "503", "504"]


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Second attempts before the first byte. `budget`: share of the calls of the last 10 s, never below `at_least`."""

    budget: Annotated[Share, Bounds(ge=0, le=1)] = 0.20
    at_least: Annotated[Count, Bounds(ge=0, le=10_000)] = 3
    per_call: Annotated[Count, Bounds(ge=0, le=10)] = 2
    on: tuple[RetryCause, ...] = ("connect", "reset", "timeout", "429", "502", "503", "504")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. `connect`, `first_byte`, `stall` bound an engine; `drain_grace` and `drain` are our own end's;
    the others bound a client."""

    connect: Moment = 2.0
    first_byte: Moment = 60.0
    stall: Moment = 60.0
    headers: Moment = 10.0
    body: Moment = 30.0
    keep_alive: Moment = 75.0
    write_stall: Moment = 15.0
    half_open: Annotated[Seconds, Bounds(ge=3, le=3600)] = 15.0
    drain_grace: Annotated[Seconds, Bounds(ge=0, le=3600)] = 0.0
    drain: Moment = 60.0


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request's body. `media`: which images, audio and files a prompt may carry."""

    max: Buffer = 16 * 1024**2
    max_messages: Positive = 2000
    max_n: Annotated[Count, Bounds(ge=1, le=1024)] = 8
    media: Literal["data_urls_only", "any", "none"] = "data_urls_only"


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server. `models` empty: all it has. `capacity` (KV tokens) and `max_concurrency` None: learned."""

    url: EngineUrl
    models: tuple[ModelName, ...] = ()
    api_key_file: FileName | None = None
    capacity: Positive | None = None
    max_concurrency: Positive | None = None


class FleetPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`poll`: seconds between readings of /metrics. `health`: seconds between readings of /health."""

    poll: Annotated[Seconds, Bounds(ge=0.02, le=60)] = 0.5
    health: Annotated[Seconds, Bounds(ge=0.02, le=60)] = 2.0
    engines: tuple[EngineEntry, ...] = ()


class ServerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on the data port's connections, bytes and counts."""

    max_connections: Positive = 10_000
    max_request_line: Buffer = 8 * 1024
    max_headers: Buffer = 16 * 1024
    max_header_fields: Positive = 100
    max_pipelined: Positive = 16
    write_high_water: Buffer = 256 * 1024


class Cors(msgspec.Struct, frozen=True, kw_only=True):
    """Which web pages may call the data port, by their origin; empty: none. Browsers obey it, nothing else does."""

    origins: tuple[WebOrigin, ...] = ()


class Logging(msgspec.Struct, frozen=True, kw_only=True):
    """`calls`: the share of calls that get a log line."""

    calls: Annotated[float, SAMPLE, Bounds(ge=0, le=1)] = 1.0


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The whole policy. `classes` is in order of importance, the most important first."""

    version: Literal[1] = 1
    classes: Mapping[Name, TrafficClass] = msgspec.field(default_factory=default_classes)
    service_tiers: Mapping[Name, Name] = msgspec.field(default_factory=default_service_tiers)
    budget: Budget = Budget()
    routing: Routing = Routing()
    retries: Retries = Retries()
    timeouts: Timeouts = Timeouts()
    body: Body = Body()
    fleet: FleetPolicy = FleetPolicy()
    server: ServerPolicy = ServerPolicy()
    cors: Cors = Cors()
    logging: Logging = Logging()


class PolicyError(Exception):
    """A policy file that cannot be used: every problem found in it, in the order of its lines."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line)
        super().__init__("\n".join(map(str, self.problems)))


def decode(data: bytes, name: str = "policy") -> Policy:
    """The policy in a YAML file. `name` is how messages call the file. Raises PolicyError."""
    reader = Reader(name)
    root = _tree(data, reader)
    policy = reader.read(root, Policy, "")
    if not reader.problems:
        policy = _whole(policy, root, reader)
    if reader.problems:
        raise PolicyError(reader.problems)
    return policy  # type: ignore[no-any-return]  # read() builds what the annotations say; its type is a value here


def explain(policy: Policy) -> str:
    """The policy as YAML, every default written out, one field a line; it decodes to an equal policy."""
    lines: list[str] = []
    for name, section in plain(policy, Policy).items():
        if isinstance(section, dict):
            lines += [f"{name}:", *(f"  {field}: {_flow(value)}" for field, value in section.items())]
        else:
            lines.append(f"{name}: {_flow(section)}")
    return "\n".join(lines) + "\n"


def _flow(tree: Any) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {_flow(value)}" for name, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_flow, tree)) + "]"
    if tree is None:
        return "null"
    bare = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.%-]*", tree) and tree != "null"
    return tree if bare else msgspec.json.encode(tree).decode()


def _whole(policy: Policy, root: Value, reader: Reader) -> Policy:
    """What no single field can tell: names that must exist, and values that must agree."""
    written = dict(root.fields or {})
    if "service_tiers" not in written:
        tiers = {tier: name for tier, name in policy.service_tiers.items() if name in policy.classes}
        policy = msgspec.structs.replace(policy, service_tiers=tiers)
    if "default" not in policy.classes:
        line = written["classes"][0]
        reader.problem(line, "classes", f"the classes {', '.join(policy.classes)}", "a class named default among them")
    for tier, name in policy.service_tiers.items():
        if name not in policy.classes:
            known = ", ".join(policy.classes)
            line = _line(root, "service_tiers", tier)
            reader.problem(line, f"service_tiers.{tier}", name, f"one of {known}", nearest(name, policy.classes))
    first: dict[str, int] = {}
    for index, engine in enumerate(policy.fleet.engines):
        if first.setdefault(engine.url, index) != index:
            found = f"{engine.url} again (as in fleet.engines[{first[engine.url]}])"
            reader.problem(
                _line(root, "fleet", "engines", index), f"fleet.engines[{index}].url", found, "each engine once"
            )
    return policy


def _line(root: Value, *path: str | int) -> int:
    """The line where a path that is known to be written begins."""
    value, line = root, root.line
    for step in path:
        if isinstance(step, int):
            value = (value.items or ())[step]
            line = value.line
        else:
            line, value = (value.fields or {})[step]
    return line


# -- YAML to a plain tree ---------------------------------------------------------------------------------------------


def _tree(data: bytes, reader: Reader) -> Value:
    """The file as a plain tree. Duplicate keys are gathered in `reader`; what ends the reading is raised at once."""
    if len(data) > MAX_BYTES:
        reader.problem(1, "", f"{len(data)} bytes", f"at most {MAX_BYTES} bytes")
        raise PolicyError(reader.problems)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reader.problem(line, "", f"the byte 0x{data[error.start]:02x}", "UTF-8 text")
        raise PolicyError(reader.problems) from None
    try:
        return _Tree(yaml.parse(text, yaml.SafeLoader), reader).document()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reader.problem(line, "", f"the character {chr(error.character)!r}", "printable text")
    except yaml.MarkedYAMLError as error:
        # Every error of the parser carries a mark; what it was in the middle of may have begun lines before.
        mark, began = cast(yaml.Mark, error.problem_mark), error.context_mark
        context = f", {error.context} from line {began.line + 1}" if began else ""
        reader.problem(mark.line + 1, "", f"a YAML error ({error.problem}{context})", "valid YAML")
    raise PolicyError(reader.problems)


def _at(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Tree:
    """Builds Values from YAML events, in one pass. Any: the stubs do not say which events have marks and anchors."""

    def __init__(self, events: Iterator[Any], reader: Reader) -> None:
        self._events = events
        self._reader = reader
        self._anchors: dict[str | None, Value] = {}
        self._nodes = 0

    def document(self) -> Value:
        next(self._events)  # the stream begins
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return Value(line=1)
        root = self._node(next(self._events), "", 1)
        next(self._events)  # the document ends
        event = next(self._events)
        if isinstance(event, yaml.DocumentStartEvent):
            self._stop(event, "", "a second document", "one document in a file")
        return root

    def _stop(self, event: Any, path: str, found: str, expected: str) -> NoReturn:
        self._reader.problem(_at(event), path, found, expected)
        raise PolicyError(self._reader.problems)

    def _node(self, event: Any, path: str, depth: int) -> Value:
        line = _at(event)
        if isinstance(event, yaml.AliasEvent):
            value = self._anchors.get(event.anchor)
            if value is None:
                self._stop(event, path, f"the alias *{event.anchor}", f"an anchor &{event.anchor} complete before it")
        elif event.tag is not None:
            self._stop(event, path, f"the tag {shortened(event.tag)}", "no tags: a field's name says what it is")
        elif depth > MAX_DEPTH:
            self._stop(event, path, f"more than {MAX_DEPTH} levels", "a flatter file")
        elif isinstance(event, yaml.ScalarEvent):
            null = event.implicit[0] and event.value in {"", "~", "null"}
            value = Value(line=line, text=None if null else event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = tuple(self._items(path, depth))
            value = Value(line=line, items=items, size=1 + sum(item.size for item in items))
        else:
            fields = self._fields(path, depth)
            value = Value(line=line, fields=fields, size=1 + sum(field.size for _, field in fields.values()))
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        self._nodes += value.size if isinstance(event, yaml.AliasEvent) else 1
        if self._nodes > MAX_NODES:
            self._stop(event, path, f"more than {MAX_NODES} values, aliases counted in full", "a smaller file")
        return value

    def _items(self, path: str, depth: int) -> Iterator[Value]:
        index = 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, f"{path}[{index}]", depth + 1)
            index += 1

    def _fields(self, path: str, depth: int) -> dict[str, tuple[int, Value]]:
        fields: dict[str, tuple[int, Value]] = {}
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent):
                self._stop(key, path, "a key that is not a word", "a field's name")
            here, line = dotted(path, key.value), _at(key)
            value = self._node(next(self._events), here, depth + 1)
            if key.value in fields:
                found = f"{shortened(key.value)} a second time (first on line {fields[key.value][0]})"
                self._reader.problem(line, here, found, "each field once")
            else:
                fields[key.value] = (line, value)
        return fields
