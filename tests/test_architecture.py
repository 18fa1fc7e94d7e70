"""The import rules and the shape of the code, enforced by reading it.

`problems(path, source)` judges one file; the tables say what is allowed and why. The last test feeds it small bad
files, one for each rule, so that a rule that can no longer fail is found.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("gateway", "sidecar", "loadtest")

# Arrows point down: a module of gateway imports only from a lower level, or from its own folder.
# wire and dispatch are the two edges others are built on; the edges above them do not know each other.
LEVELS = {
    "cli": 6,
    **dict.fromkeys(("serve", "starter", "top"), 5),
    **dict.fromkeys(("assembly", "checking"), 4),
    **dict.fromkeys(("pipeline", "probing"), 3),
    **dict.fromkeys(
        (
            "announce",
            "batcher",
            "calllog",
            "certificate",
            "control",
            "descriptors",
            "embedded",
            "embedded_sidecar",
            "attempts",
            "keys",
            "kv_events",
            "loading",
            "metrics",
            "outcome_help",
            "relay",
            "reload",
            "sidecar_metrics",
            "sidecars",
            "telemetry",
            "waking",
        ),
        2,
    ),
    "own_token": 3,
    **dict.fromkeys(
        ("dispatch", "engine_sockets", "file_modes", "lines", "sidecar_process", "straight", "tasks", "wire"), 1
    ),
    "core": 0,
    "__version__": 0,
}

# A door is a file (or folder) that alone imports a third-party library. None: any file outside core may.
COMMANDS = ("gateway/checking.py", "gateway/cli.py")  # which know the load test
DOORS: dict[str, tuple[str, ...] | None] = {
    "msgspec": None,
    "anyio": None,
    "yaml": ("gateway/core/yaml_file.py",),
    "httptools": ("gateway/wire/", "loadtest/engine/", "loadtest/client.py", "loadtest/stub.py"),
    "httpx": (
        "gateway/straight.py",
        "gateway/top/asking.py",
        "gateway/waking.py",
        "loadtest/dst_sidecars.py",  # in place of a sidecar's socket
        "loadtest/dst_world.py",
        "sidecar/engine_api.py",
        "sidecar/gateway_link.py",
    ),
    "hypercorn": ("gateway/control/http1.py",),
    "starlette": ("gateway/control/", "sidecar/api.py", "sidecar/guard.py", "sidecar/listener.py"),
    "prometheus_client": ("gateway/metrics.py", "gateway/sidecar_metrics.py", "sidecar/metrics.py"),
    "pynvml": ("sidecar/gpu.py",),
    "ray": ("sidecar/cluster.py",),
    "uvloop": ("gateway/serve.py", "sidecar/serve.py", "loadtest/"),
    "zmq": ("gateway/kv_events.py", "loadtest/engine/publisher.py"),
    "rich": ("gateway/cli.py", "gateway/top/", "loadtest/"),
}
# The gateway in virtual time, what gives its engines cache events there, and what looks at its books after each step;
# the rest of loadtest knows only sockets.
GATEWAY_IN_LOADTEST = (
    "loadtest/inprocess.py",
    "loadtest/affinity.py",
    *(
        f"loadtest/dst_{name}.py"
        for name in ("batches", "books", "caches", "callers", "fairness", "grants", "invariants", "world")
    ),
)
# The sidecar's manager in virtual time: its engines, its gateways, and what is measured there; and its messages alone,
# where sidecars are played for a gateway.
SIDECAR_IN_LOADTEST = ("loadtest/residents.py", "loadtest/residency", "loadtest/dst_")
# Of the gateway the sidecar knows how a file is read, so that one reader bounds both files and answers mistakes in one
# taste, and how a vLLM's metrics and models are read, so that both believe and refuse the same of one engine. Either is
# pure and decides nothing. The sidecar's files that import them, and what of them.
READER = tuple(f"gateway.core.{name}" for name in ("checked", "kinds", "units", "yaml_file"))
READER_IN_SIDECAR = {
    "sidecar/checking.py": ("gateway.core.checked", "gateway.core.findings"),
    "sidecar/core/config.py": (*READER, "gateway.core.findings", "gateway.core.schema"),
    "sidecar/core/pool.py": READER,
    "sidecar/core/profile.py": READER,
    "sidecar/core/vllm.py": ("gateway.core.vllm",),
    "sidecar/listener.py": ("gateway.control.http1",),  # one listener, so that both ports have the same bounds
}
# So does the load test of its scenario files: one reader, and the kinds of values that the files' sections are made of.
# They say what is sent, and nothing of the gateway that it is sent to.
READER_IN_LOADTEST = {
    "loadtest/scenario.py": (*READER, "gateway.core.policy_types", "gateway.core.schema"),
    "loadtest/scenario_rules.py": ("gateway.core.checked",),
    "loadtest/bench_options.py": ("gateway.core.checked",),
    "loadtest/simulate_options.py": ("gateway.core.checked",),
    "loadtest/engine/profile_file.py": READER,
    **dict.fromkeys(("loadtest/bench_flags.py", "loadtest/engine/latency.py"), ("gateway.core.units",)),
    **dict.fromkeys(
        ("loadtest/arrivals.py", "loadtest/lengths.py", "loadtest/slo.py", "loadtest/workload.py"),
        ("gateway.core.kinds", "gateway.core.policy_types", "gateway.core.units"),
    ),
}
# The registry of sidecars takes their messages as they are: structs without I/O, of which nothing else would be left
# to say in a second set of types.
WIRE_IN_CORE = dict.fromkeys(("gateway/core/sidecar.py", "gateway/core/sidecars.py"), "sidecar.wire")
# core decides and does nothing else: what would give it a clock, a socket, a thread or a log line.
NOT_IN_CORE = re.compile(
    "asyncio|concurrent|ctypes|datetime|http|io|logging|multiprocessing|os|pathlib|queue|sched|select|selectors|shutil|"
    "signal|socket|socketserver|ssl|subprocess|tempfile|threading|time"
)
CALLS_NOT_IN_CORE = frozenset({"open", "print", "input", "eval", "exec", "breakpoint"})

BASES = frozenset({"Exception", "Struct", "Enum", "Protocol", "Generic"})
LIBRARY_BASES = {  # what a library demands is named here, with the files that may
    "asyncio.Protocol": ("gateway/wire/", "loadtest/"),
    "asyncio.BufferedProtocol": ("gateway/wire/", "loadtest/"),
    "argparse.ArgumentParser": ("gateway/cli.py", "sidecar/cli.py"),  # error() is there to be replaced
    "TCPServer": ("gateway/control/http1.py",),  # Hypercorn has no setting against HTTP/2 without TLS
    "Collector": ("gateway/metrics.py", "sidecar/metrics.py"),
    "asyncio.SelectorEventLoop": ("loadtest/vtime.py", "loadtest/realtime.py"),
    "asyncio.Handle": ("loadtest/vtime.py",),
    "asyncio.TimerHandle": ("loadtest/vtime.py",),
}
BAD_NAMES = re.compile(r"(?:^|_)(?:utils?|helpers?|common|misc|base|manager_of_\w+)$")
MUTABLE = re.compile(
    "list|dict|set|bytearray|deque|defaultdict|OrderedDict|Counter|count|cycle|ContextVar|Lock|Event|Random|"
    "Weak(?:Key|Value)Dictionary|WeakSet"
)
MUTATORS = re.compile(
    "add|append|appendleft|clear|discard|extend|insert|pop|popitem|popleft|remove|setdefault|sort|update"
)
CACHES = frozenset({"cache", "lru_cache"})
# Where an exception nobody foresaw may be caught without being raised again, and why.
BROAD_EXCEPTS: dict[str, str] = {
    "gateway/core/shadow.py": "what is only asked and never obeyed must not fail a call; it is counted and reported",
    "loadtest/dst.py": "whatever a seed raises is what was looked for; it is reported with the seed and can be shrunk",
}


def files() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def problems(path: str, source: str) -> list[str]:
    """What is wrong with the file at `path` (relative to the root), one line each."""
    tree = ast.parse(source)
    rules = (_names, _docstring, _imports, _core, _bases, _state, _excepts)
    found = [problem for rule in rules for problem in rule(path, tree)]
    return [f"{path}: {problem}" for problem in (*found, *_ignores(source))]


def _names(path: str, _: ast.Module) -> Iterator[str]:
    for part in path.removesuffix(".py").split("/"):
        if BAD_NAMES.search(part):
            yield f"the name {part!r} says nothing of what is in it"


def _docstring(_: str, tree: ast.Module) -> Iterator[str]:
    if tree.body and ast.get_docstring(tree) is None:
        yield "no module docstring: it gives the rules of the file"


# -- imports ----------------------------------------------------------------------------------------------------------


def _imported(path: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names of every module a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                folder = path.split("/")[: -node.level]
                yield ".".join([*folder, node.module or ""]).rstrip(".")
            elif node.module in PACKAGES:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def _under(path: str, allowed: tuple[str, ...]) -> bool:
    return any(path == place or (place.endswith("/") and path.startswith(place)) for place in allowed)


def _imports(path: str, tree: ast.Module) -> Iterator[str]:
    for name in _imported(path, tree):
        top = name.split(".")[0]
        if top in PACKAGES:
            yield from _arrow(path, name)
        elif top in DOORS:
            doors = DOORS[top]
            if doors is not None and not _under(path, doors):
                yield f"imports {top}, whose door is {' or '.join(doors)}"
        elif top not in sys.stdlib_module_names:
            yield f"imports {top}, which has no door"


def _arrow(path: str, name: str) -> Iterator[str]:
    package, target = path.split("/", maxsplit=1)[0], name.split(".", maxsplit=1)[0]
    if package == target == "gateway":
        here, there = _unit(path.removesuffix(".py").split("/")), _unit(name.split("."))
        if here != there and LEVELS.get(here, -1) <= LEVELS.get(there, 9):
            yield f"imports {name}: arrows point down, and {here} is not above {there}"
    elif (package, target) == ("gateway", "sidecar"):
        if not name.startswith("sidecar.wire"):
            yield f"imports {name}: of sidecar the gateway knows only sidecar.wire"
    elif (package, target) == ("gateway", "loadtest"):
        if path not in COMMANDS:
            yield f"imports {name}: only {' and '.join(COMMANDS)} may import loadtest"
    elif (package, target) == ("loadtest", "gateway"):
        if path not in GATEWAY_IN_LOADTEST and not _reader(path, name):
            yield f"imports {name}: only {' and '.join(GATEWAY_IN_LOADTEST)} may import the gateway"
    elif (package, target) == ("loadtest", "sidecar"):
        if not path.startswith(SIDECAR_IN_LOADTEST):
            yield f"imports {name}: only {' and '.join(SIDECAR_IN_LOADTEST)} may import the sidecar"
    elif package != target and not _reader(path, name):
        yield f"imports {name}: {package} knows nothing of {target}"


def _reader(path: str, name: str) -> bool:
    """Whether an import is the sidecar's or the load test's of the reader of files, or of vLLM's answers."""
    return name in READER_IN_SIDECAR.get(path, ()) or name in READER_IN_LOADTEST.get(path, ())


def _unit(parts: list[str]) -> str:
    return parts[1] if len(parts) > 1 else ""


# -- core -------------------------------------------------------------------------------------------------------------


def _core(path: str, tree: ast.Module) -> Iterator[str]:
    package, *rest = path.split("/")
    if rest[:1] != ["core"]:
        return
    for name in _imported(path, tree):
        top = name.split(".")[0]
        own = name.startswith((f"{package}.core", WIRE_IN_CORE.get(path, f"{package}.core")))
        door = _under(path, DOORS.get(top) or ())
        known = own or door or _reader(path, name) or top == "msgspec" or top in sys.stdlib_module_names
        if NOT_IN_CORE.fullmatch(top) or not known:
            yield f"core imports {name}: it has no clock, no I/O, no logging, and knows only core and msgspec"
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"core is synchronous (line {node.lineno})"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS_NOT_IN_CORE:
                yield f"core calls {called}()"
            elif called.startswith("random.") and called != "random.Random":
                yield f"core calls {called}(): the generator is an argument"


# -- classes and state ------------------------------------------------------------------------------------------------


def _bases(path: str, tree: ast.Module) -> Iterator[str]:
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type)]
    exceptions = {kind.__name__ for kind in kinds if issubclass(kind, Exception)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            last = name.rpartition(".")[2]
            allowed = name != "asyncio.Protocol" and (last in BASES or last in exceptions)
            if last in exceptions:
                exceptions.add(node.name)
            if not allowed and not _under(path, LIBRARY_BASES.get(name, ())):
                yield f"class {node.name} has the base {name}"


def _state(_: str, tree: ast.Module) -> Iterator[str]:
    module_names: set[str] = set()
    for statement in tree.body:
        for target, value in _assigned(statement):
            module_names.add(target)
            if _mutable(value) and target != "__all__" and not target.lstrip("_").isupper():
                yield f"module-level mutable state: {target} (a constant table has a name in capitals)"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"module-level mutable state: global {', '.join(node.names)}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _changes(node, module_names - _locals(node))
        elif isinstance(node, ast.Attribute) and node.attr == "state" and ast.unparse(node.value).endswith("app"):
            yield "app.state is a service locator"


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        yield from ((name.id, statement.value) for name in statement.targets if isinstance(name, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and statement.value and isinstance(statement.target, ast.Name):
        yield statement.target.id, statement.value


def _mutable(value: ast.expr) -> bool:
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    called = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return isinstance(value, displays) or MUTABLE.fullmatch(called) is not None


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {argument.arg for argument in every if argument is not None}


def _changes(function: ast.FunctionDef | ast.AsyncFunctionDef, names: set[str]) -> Iterator[str]:
    """Where a function changes what a module-level name holds."""
    for decorator in function.decorator_list:
        if ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator).rpartition(".")[2] in CACHES:
            yield f"module-level mutable state: the cache of {function.name}()"
    for node in ast.walk(function):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and MUTATORS.fullmatch(node.func.attr):
            changed = node.func.value
        if isinstance(changed, ast.Name) and changed.id in names:
            yield f"module-level mutable state: {function.name}() changes {changed.id}"


# -- excepts and ignores ----------------------------------------------------------------------------------------------


def _excepts(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler) or path in BROAD_EXCEPTS:
            continue
        names = ast.unparse(node.type) if node.type else "everything"
        broad = re.search(r"\b(?:everything|Exception|BaseException)\b", names)
        raises = isinstance(node.body[-1], ast.Raise)
        if broad and not raises:
            yield f"catches {names} and does not raise it again (line {node.lineno})"


def _ignores(source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(r"#\s*(?:type: ignore|noqa)(?:\[[\w, -]*\]|: ?[A-Z0-9, ]+)?\s*$", line):
            yield f"an ignore without its reason (line {number})"


# -- the tests --------------------------------------------------------------------------------------------------------


def test_there_is_something_to_judge() -> None:
    assert len(files()) > 20


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_the_rules_hold(file: Path) -> None:
    assert problems(str(file.relative_to(ROOT)), file.read_text()) == []


def test_every_level_is_known() -> None:
    units = {
        file.relative_to(ROOT / "gateway").parts[0].removesuffix(".py") for file in (ROOT / "gateway").rglob("*.py")
    }
    assert units - set(LEVELS) == {"__init__"}


DOC = '"""Doc."""\n'


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("gateway/core/x.py", "import time", "core imports time"),
        ("gateway/core/x.py", "from asyncio import sleep", "core imports asyncio"),
        ("gateway/core/x.py", "def f():\n    import logging", "core imports logging"),
        ("gateway/core/x.py", "import anyio", "core imports anyio"),
        ("sidecar/core/x.py", "import socket", "core imports socket"),
        ("gateway/core/x.py", "from gateway.wire.server import Server", "core imports gateway.wire.server"),
        ("gateway/core/x.py", "async def f(): ...", "core is synchronous"),
        ("gateway/core/x.py", "def f():\n    print(1)", "core calls print()"),
        ("gateway/core/x.py", "import random\nX = random.random()", "core calls random.random()"),
        ("gateway/core/x.py", "import yaml", "imports yaml, whose door is"),
        ("gateway/pipeline.py", "import httpx", "imports httpx, whose door is"),
        ("gateway/metrics.py", "import requests", "imports requests, which has no door"),
        ("sidecar/node.py", "from ray import get", "imports ray, whose door is"),
        ("gateway/metrics.py", "from gateway.pipeline import Pipeline", "metrics is not above pipeline"),
        ("gateway/metrics.py", "from gateway.telemetry import Telemetry", "metrics is not above telemetry"),
        ("gateway/metrics.py", "from gateway import control", "metrics is not above control"),
        ("gateway/control/x.py", "from ..serve import run", "control is not above serve"),
        ("gateway/wire/x.py", "import gateway.dispatch", "wire is not above dispatch"),
        ("gateway/new.py", "import gateway.core.call", "new is not above core"),
        ("gateway/serve.py", "from sidecar.manager import M", "only sidecar.wire"),
        ("gateway/serve.py", "import loadtest.engine", "may import loadtest"),
        ("sidecar/x.py", "from gateway.core.call import Call", "sidecar knows nothing of gateway"),
        ("sidecar/core/x.py", "from gateway.core.units import Bytes", "sidecar knows nothing of gateway"),
        ("sidecar/core/x.py", "from gateway.core.units import Bytes", "core imports gateway.core.units"),
        ("sidecar/core/config.py", "from gateway.core.policy import Policy", "sidecar knows nothing of gateway"),
        ("sidecar/core/config.py", "from gateway.core.policy import Policy", "core imports gateway.core.policy"),
        ("sidecar/core/config.py", "from gateway.core.vllm import ModelCard", "sidecar knows nothing of gateway"),
        ("sidecar/core/vllm.py", "from gateway.core.checked import Fault", "sidecar knows nothing of gateway"),
        ("sidecar/core/config.py", "import yaml", "imports yaml, whose door is"),
        ("loadtest/x.py", "from gateway.core.call import Call", "only loadtest/inprocess.py"),
        ("loadtest/scenario.py", "from gateway.core.policy import Policy", "only loadtest/inprocess.py"),
        ("loadtest/x.py", "from sidecar import wire", "only loadtest/residents.py"),
        ("gateway/utils.py", "", "the name 'utils' says nothing"),
        ("gateway/wire/http_helpers.py", "", "the name 'http_helpers' says nothing"),
        ("gateway/common/x.py", "", "the name 'common' says nothing"),
        ("gateway/x.py", "class A(B): ...", "class A has the base B"),
        ("gateway/x.py", "import abc\nclass A(abc.ABC): ...", "class A has the base abc.ABC"),
        ("gateway/x.py", "import asyncio\nclass A(asyncio.Protocol): ...", "class A has the base asyncio.Protocol"),
        ("gateway/x.py", "cache = {}", "state: cache"),
        ("gateway/x.py", "seen: list[int] = []", "state: seen"),
        ("gateway/x.py", "from itertools import count\nids = count()", "state: ids"),
        ("gateway/x.py", "N = 0\ndef f():\n    global N\n    N = 1", "state: global N"),
        ("gateway/x.py", "TABLE = {}\ndef f(k):\n    TABLE[k] = 1", "f() changes TABLE"),
        ("gateway/x.py", "TABLE = {}\ndef f(k):\n    del TABLE[k]", "f() changes TABLE"),
        ("gateway/x.py", "TABLE = {}\ndef f(k):\n    TABLE[k] += 1", "f() changes TABLE"),
        ("gateway/x.py", "ROWS = []\ndef f(k):\n    ROWS.append(k)", "f() changes ROWS"),
        ("gateway/x.py", "THING = Thing()\ndef f():\n    THING.x = 1", "f() changes THING"),
        ("gateway/x.py", "import functools\n@functools.lru_cache(9)\ndef f(k): ...", "the cache of f()"),
        ("gateway/x.py", "def f(request):\n    return request.app.state.fleet", "app.state"),
        ("gateway/x.py", "try:\n    f()\nexcept Exception:\n    pass", "catches Exception"),
        ("gateway/x.py", "try:\n    f()\nexcept:\n    pass", "catches everything"),
        (
            "gateway/x.py",
            "try:\n    f()\nexcept (OSError, BaseException):\n    pass",
            "catches (OSError, BaseException)",
        ),
        ("gateway/x.py", "x = 1  # type: ignore[misc]", "an ignore without its reason"),
        ("gateway/x.py", "x = 1  # noqa: S101", "an ignore without its reason"),
        ("gateway/x.py", "x = 1  # noqa", "an ignore without its reason"),
    ],
)
def test_every_rule_can_fail(path: str, source: str, expected: str) -> None:
    assert expected in "\n".join(problems(path, DOC + source))


def test_a_file_without_a_docstring_is_found() -> None:
    assert problems("gateway/cli.py", "import sys\n") == [
        "gateway/cli.py: no module docstring: it gives the rules of the file"
    ]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gateway/core/yaml_file.py", "import yaml\nimport msgspec\nfrom gateway.core.units import Unit"),
        ("sidecar/core/config.py", "from gateway.core.yaml_file import written\nimport gateway.core.checked"),
        ("sidecar/core/profile.py", "from gateway.core.kinds import Text\nfrom gateway.core.units import Bytes"),
        ("sidecar/core/vllm.py", "from gateway.core.vllm import series_of"),
        ("loadtest/scenario.py", "from gateway.core.yaml_file import read_file\nimport gateway.core.schema"),
        ("gateway/core/x.py", "import math, random\ndef f(rng: random.Random): ...\nR = random.Random"),
        ("gateway/metrics.py", "from gateway.dispatch import Dispatch\nfrom prometheus_client import REGISTRY"),
        ("gateway/control/app.py", "from gateway.control.listener import x\nimport starlette.routing"),
        ("gateway/serve.py", "from gateway.pipeline import Pipeline\nfrom sidecar.wire import Report\nimport uvloop"),
        ("gateway/cli.py", "from gateway.serve import run\nimport loadtest.engine"),
        ("gateway/wire/x.py", "import asyncio\nclass P(asyncio.Protocol): ..."),
        ("gateway/x.py", "class A(Exception): ...\nclass B(A): ...\nclass C(msgspec.Struct, frozen=True): ..."),
        ("gateway/x.py", "TABLE = {1: 2}\ndef f(TABLE):\n    TABLE[1] = 3\ndef g():\n    TABLE = {}\n    TABLE[1] = 2"),
        ("gateway/x.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
        ("gateway/x.py", "x = 1  # type: ignore[misc]  # the stub is wrong\ny = 2  # noqa: S311 # no secret"),
        ("gateway/__init__.py", ""),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert problems(path, DOC + source if source else "") == []
