"""Architecture test: the import rules and the shape of the code, enforced by reading it.

`problems(path, source)` judges one file; the tables say what is allowed and why. The last test feeds it small bad
files, one for each rule, so that a rule that can no longer fail is found.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest

from tests.layout import (
    GROUND_FLOOR,
    LAYERS,
    MOST_FILES,
    ORDER,
    ROOT,
    arrows_up,
    defined_twice,
    folder_sizes,
    imported,
    riddle,
    sources,
    trees,
    unit,
)

# A door is a file (or folder) that alone imports a third-party library. None: any file outside core may.
DOORS: dict[str, tuple[str, ...] | None] = {
    "msgspec": None,
    "yaml": ("gateway/shared/files/yaml_file.py",),
    "httptools": (
        "gateway/relay/wire/",
        "gateway/upstream/",
        "loadtest/clients/",
        "loadtest/engine/api/http.py",
    ),
    "httpx": (
        "gateway/shared/control/http_client.py",
        "gateway/cli/control_client.py",
        "gateway/decider/kubernetes/api.py",
        "gateway/decider/waking.py",
        "loadtest/lab/dst/",  # in place of sockets
        "sidecar/process/engine_api.py",
        "sidecar/reporting/gateway_link.py",
    ),
    "opentelemetry": ("gateway/serve/otlp.py",),
    "jwt": ("gateway/core/policy/signed_token.py",),
    "hypercorn": ("gateway/shared/control/http1.py",),
    "starlette": ("gateway/control/", "gateway/shared/control/", "sidecar/control/"),
    "prometheus_client": (
        "gateway/shared/metrics.py",
        "gateway/decider/metrics/",
        "sidecar/control/metrics.py",
    ),
    "pynvml": ("sidecar/gpus/nvml.py",),
    "ray": ("sidecar/ray/cluster.py",),
    "redis": ("gateway/serve/cluster/store.py",),
    "uvloop": ("gateway/serve/run.py", "sidecar/serve/run.py", "loadtest/"),
    "zmq": ("gateway/decider/cache_events.py", "loadtest/engine/publisher.py"),
    "rich": ("loadtest/",),
    "google": ("gateway/relay/epp/messages.py",),
    "grpc": ("gateway/relay/epp/server.py",),
    "grpc_health": ("gateway/relay/epp/server.py",),
}
# core decides and does nothing else: what would give it a clock, a socket, a thread or a log line.
NOT_IN_CORE = re.compile(
    "asyncio|concurrent|ctypes|datetime|http|io|logging|multiprocessing|os|pathlib|queue|sched|select|selectors|shutil|"
    "signal|socket|socketserver|ssl|subprocess|tempfile|threading|time"
)
CALLS_NOT_IN_CORE = frozenset({"open", "print", "input", "eval", "exec", "breakpoint"})

EXCEPTIONS = frozenset(
    kind.__name__ for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
BASES = frozenset({"Exception", "Struct", "Enum", "Protocol", "Generic"})
LIBRARY_BASES = {  # what a library demands is named here, with the files that may
    "yaml.BaseLoader": ("gateway/shared/files/yaml_file.py",),
    "asyncio.Protocol": ("gateway/relay/wire/", "gateway/upstream/", "gateway/frames/", "loadtest/"),
    "asyncio.BufferedProtocol": ("gateway/relay/wire/", "gateway/upstream/", "loadtest/"),
    "argparse.ArgumentParser": ("gateway/shared/command_line.py",),  # error() is there to be replaced
    "TCPServer": ("gateway/shared/control/http1.py",),  # Hypercorn has no setting against HTTP/2 without TLS
    "Collector": ("gateway/decider/metrics/collector.py", "sidecar/control/metrics.py"),
    "asyncio.SelectorEventLoop": ("loadtest/simulate/vtime.py",),
    "DefaultSelector": ("loadtest/simulate/vtime.py",),
    "asyncio.TimerHandle": ("loadtest/simulate/vtime.py",),
    "str": ("gateway/shared/notice.py",),  # whatever takes a line for the operator takes one with a level too
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


@functools.cache  # every rule goes through all of them
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def problems(path: str, source: str, tree: ast.Module | None = None) -> list[str]:
    """What is wrong with the file at `path` (relative to the root), one line each."""
    tree = ast.parse(source) if tree is None else tree
    rules = (_names, _docstring, _imports, _core, _bases, _state)
    found = [problem for rule in rules for problem in rule(path, tree)]
    return [f"{path}: {problem}" for problem in (*found, *_excepts(tree, source.splitlines()), *_ignores(source))]


def _names(path: str, _: ast.Module) -> Iterator[str]:
    for part in path.removesuffix(".py").split("/"):
        if BAD_NAMES.search(part):
            yield f"the name {part!r} says nothing of what is in it"


def _docstring(_: str, tree: ast.Module) -> Iterator[str]:
    if tree.body and ast.get_docstring(tree) is None:
        yield "no module docstring: it gives the rules of the file"
    if (line := riddle(tree)) is not None:
        yield f"the first line of the docstring is a question, no name of what the file is: {line}"


# -- imports ----------------------------------------------------------------------------------------------------------


def _under(path: str, allowed: tuple[str, ...]) -> bool:
    return any(path == place or (place.endswith("/") and path.startswith(place)) for place in allowed)


def _imports(path: str, tree: ast.Module) -> Iterator[str]:
    names = tuple(imported(path, nodes(tree)))
    yield from arrows_up(path, names)
    for name in names:
        top = name.split(".")[0]
        if top in DOORS:
            doors = DOORS[top]
            if doors is not None and not _under(path, doors):
                yield f"imports {top}, whose door is {' or '.join(doors)}"
        elif top not in sys.stdlib_module_names and top not in ORDER:
            yield f"imports {top}, which has no door"


# -- core -------------------------------------------------------------------------------------------------------------


def _core(path: str, tree: ast.Module) -> Iterator[str]:
    package, *rest = path.split("/")
    if rest[:1] == ["core"]:
        yield from (f"core {problem}" for problem in _impure(path, tree, f"{package}.core"))


def _impure(path: str, tree: ast.Module, core: str) -> Iterator[str]:
    """What a module of the package `core`, or a shared one that it imports, has to do with time or the world."""
    for name in imported(path, nodes(tree)):
        top = name.split(".")[0]
        known = f"{name}.".startswith(f"{core}.") or top == "msgspec" or top in sys.stdlib_module_names
        if f"{name}.".startswith(f"{GROUND_FLOOR}."):
            if (problem := _of_shared(name, core)) is not None:
                yield f"imports {name}, which {problem}"
        elif NOT_IN_CORE.fullmatch(top) or not (known or _under(path, DOORS.get(top) or ())):
            yield f"imports {name}: it has no clock, no I/O, no logging, and knows only core and msgspec"
    for node in nodes(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"is synchronous (line {node.lineno})"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS_NOT_IN_CORE:
                yield f"calls {called}()"
            elif called.startswith("random.") and called != "random.Random":
                yield f"calls {called}(): the generator is an argument"


@functools.cache  # many modules of core import the same few
def _of_shared(name: str, core: str) -> str | None:
    file = name.replace(".", "/") + ".py"
    if not (ROOT / file).is_file():
        return None  # a folder's name, of which another import names a file
    return next(_impure(file, ast.parse((ROOT / file).read_text()), core), None)


# -- classes and state ------------------------------------------------------------------------------------------------


def _bases(path: str, tree: ast.Module) -> Iterator[str]:
    exceptions = set(EXCEPTIONS)
    for node in nodes(tree):
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
    for node in nodes(tree):
        if isinstance(node, ast.Global):
            yield f"module-level mutable state: global {', '.join(node.names)}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _changes(node, module_names)
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
    own: set[str] | None = None
    for node in ast.walk(function) if names else ():
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and MUTATORS.fullmatch(node.func.attr):
            changed = node.func.value
        if isinstance(changed, ast.Name) and changed.id in names:
            own = _locals(function) if own is None else own
            if changed.id not in own:
                yield f"module-level mutable state: {function.name}() changes {changed.id}"


# -- excepts and ignores ----------------------------------------------------------------------------------------------


def _excepts(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """An exception that nobody foresaw goes on, unless a comment beside `except` says why it ends there."""
    for node in nodes(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        names = ast.unparse(node.type) if node.type else "everything"
        broad = re.search(r"\b(?:everything|Exception|BaseException)\b", names)
        raises = isinstance(node.body[-1], ast.Raise)
        if broad and not raises and "  # " not in lines[node.lineno - 1]:
            yield f"catches {names}, does not raise it again and does not say why (line {node.lineno})"


def _ignores(source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(r"#\s*(?:type: ignore|noqa)(?:\[[\w, -]*\]|: ?[A-Z0-9, ]+)?\s*$", line):
            yield f"an ignore without its reason (line {number})"


# -- the tests --------------------------------------------------------------------------------------------------------


FILES = sources(*ORDER)


def test_there_is_something_to_judge() -> None:
    assert len(FILES) > 300


@functools.cache
def parsed() -> dict[str, ast.Module]:
    return trees(FILES)


def test_the_rules_hold() -> None:
    modules = parsed().items()
    assert [problem for file, tree in modules for problem in problems(file, (ROOT / file).read_text(), tree)] == []


def test_every_level_is_known() -> None:
    for package, layers in LAYERS.items():
        found = {unit(file.split("/")) for file in FILES if file.startswith(f"{package}/")} - {"__init__"}
        assert found == {name for layer in layers for name in layer} - {"__version__"}


def test_a_library_has_one_door_in_a_folder() -> None:
    for library, doors in DOORS.items():
        folders = folder_sizes(door.rstrip("/") for door in doors or ())
        assert set(folders.values()) <= {1}, f"{library} has more doors than one in {folders.most_common(1)}"


def test_every_door_is_used_and_every_class_is_defined_once_in_its_package() -> None:
    modules = parsed()
    assert defined_twice(modules) == []
    used = {(name.split(".")[0], file) for file, tree in modules.items() for name in imported(file, nodes(tree))}
    doors = {(library, door) for library, places in DOORS.items() for door in places or ("",)}
    there = {pair for pair in doors if any(pair[0] == top and file.startswith(pair[1]) for top, file in used)}
    assert doors - there == set()


def test_a_class_that_is_defined_twice_is_found() -> None:
    tree = ast.parse("class A: ...\nclass _B: ...")
    assert defined_twice({"gateway/x.py": tree, "sidecar/x.py": tree}) == []
    twice = defined_twice({"gateway/x.py": tree, "gateway/core/y.py": tree})
    assert twice == ["class A is defined in gateway/x.py and in gateway/core/y.py"]


def test_a_folder_can_be_read_at_a_glance() -> None:
    full = {folder: files for folder, files in folder_sizes([*FILES, *sources("tests")]).items() if files > MOST_FILES}
    assert full == {}


def test_files_are_counted_by_their_folder() -> None:
    assert folder_sizes(["a/x.py", "a/y.py", "a/b/z.py"]) == {"a": 2, "a/b": 1}


def test_a_file_of_tests_says_what_it_is() -> None:
    asked = {file: riddle(tree) for file, tree in trees(sources("tests")).items()}
    assert {file: line for file, line in asked.items() if line is not None} == {}


@pytest.mark.parametrize("word", ["What", "How", "Which", "Who", "Where", "When", "Why"])
def test_a_riddle_is_found(word: str) -> None:
    assert riddle(ast.parse(f'"""{word} it is.\n\nMore."""')) == f"{word} it is."
    assert riddle(ast.parse(f'"""The {word} of it."""')) is None
    assert riddle(ast.parse(f'"""{word}ever."""')) is None


DOC = '"""Doc."""\n'


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("gateway/core/x.py", "import time", "core imports time"),
        ("gateway/core/x.py", "from asyncio import sleep", "core imports asyncio"),
        ("gateway/core/x.py", "def f():\n    import logging", "core imports logging"),
        ("gateway/core/x.py", "import anyio", "core imports anyio"),
        ("sidecar/core/x.py", "import socket", "core imports socket"),
        ("gateway/core/x.py", "from gateway.relay.wire.server import Server", "core imports gateway.relay.wire.server"),
        ("gateway/core/x.py", "async def f(): ...", "core is synchronous"),
        ("gateway/core/x.py", "def f():\n    print(1)", "core calls print()"),
        ("gateway/core/x.py", "import random\nX = random.random()", "core calls random.random()"),
        ("gateway/core/x.py", "import yaml", "imports yaml, whose door is"),
        ("gateway/relay/pipeline.py", "import httpx", "imports httpx, whose door is"),
        ("gateway/decider/metrics/x.py", "import requests", "imports requests, which has no door"),
        ("sidecar/ray/node.py", "from ray import get", "imports ray, whose door is"),
        ("gateway/decider/x.py", "from gateway.relay.pipeline import Pipeline", "decider is not above relay"),
        ("gateway/relay/x.py", "from gateway.decider.metrics.collector import Metrics", "relay is not above decider"),
        ("gateway/decider/x.py", "from gateway import control", "decider is not above control"),
        ("gateway/control/x.py", "from ..serve import run", "control is not above serve"),
        ("gateway/upstream/x.py", "import gateway.decider.dispatch", "upstream is not above decider"),
        ("gateway/shared/x.py", "import gateway.core.request.call", "shared is not above core"),
        ("loadtest/report/x.py", "from loadtest.simulate.step_times import Pace", "report is not above simulate"),
        ("loadtest/simulate/x.py", "from loadtest.bench.options import Bench", "simulate is not above bench"),
        ("gateway/serve/run.py", "from sidecar.residency.manager import M", "gateway knows nothing of sidecar"),
        ("gateway/cli/check.py", "import loadtest.engine", "gateway knows nothing of loadtest"),
        ("sidecar/x.py", "import loadtest.engine", "sidecar knows nothing of loadtest"),
        ("sidecar/x.py", "from gateway.core.request.call import Call", "the sidecar knows only gateway.shared"),
        ("sidecar/control/x.py", "from gateway.upstream.client import Client", "the sidecar knows only gateway.shared"),
        ("sidecar/relay/x.py", "from gateway.relay.pipeline import Pipeline", "knows only gateway.shared and gateway."),
        ("sidecar/core/x.py", "from gateway.shared.lines import LineWriter", "core imports gateway.shared.lines"),
        ("gateway/core/x.py", "from gateway.shared import lines", "core imports gateway.shared.lines"),
        (
            "gateway/core/x.py",
            "import gateway.shared.tasks",
            "gateway.shared.tasks, which imports asyncio",
        ),
        (
            "sidecar/core/x.py",
            "from sidecar.residency.manager import M",
            "core imports sidecar.residency.manager",
        ),
        ("sidecar/process/x.py", "import sidecar.residency.manager", "process is not above residency"),
        ("sidecar/core/config.py", "import yaml", "imports yaml, whose door is"),
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
    assert problems("gateway/x.py", '"""How it goes."""\n') == [
        "gateway/x.py: the first line of the docstring is a question, no name of what the file is: How it goes."
    ]
    assert problems("gateway/cli.py", "import sys\n") == [
        "gateway/cli.py: no module docstring: it gives the rules of the file"
    ]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "gateway/shared/files/yaml_file.py",
            "import yaml\nimport msgspec\nfrom gateway.shared.files.units import Unit",
        ),
        (
            "sidecar/core/config.py",
            "from gateway.shared.files.yaml_file import written\nimport gateway.shared.files.checked",
        ),
        (
            "sidecar/core/profile.py",
            "from gateway.shared.files.kinds import Text\nfrom gateway.shared.files.units import Bytes",
        ),
        ("sidecar/core/vllm.py", "from gateway.shared.vllm.answers import series_of"),
        (
            "loadtest/load/scenario.py",
            "from gateway.shared.files.yaml_file import read_file\nimport gateway.shared.files.schema",
        ),
        ("gateway/core/x.py", "import math, random\ndef f(rng: random.Random): ...\nR = random.Random"),
        (
            "gateway/decider/metrics/x.py",
            "from gateway.decider.dispatch import Dispatch\nfrom prometheus_client import REGISTRY",
        ),
        ("gateway/control/app.py", "from gateway.shared.control.http1 import x\nimport starlette.routing"),
        (
            "gateway/serve/run.py",
            "from gateway.relay.pipeline import Pipeline\nfrom gateway.shared.protocol import Report\nimport uvloop",
        ),
        ("gateway/cli/serve.py", "from gateway.serve.run import run"),
        ("loadtest/lab/x.py", "from sidecar.residency.manager import M\nfrom gateway.serve.assembly import Gateway"),
        ("gateway/relay/wire/x.py", "import asyncio\nclass P(asyncio.Protocol): ..."),
        ("gateway/x.py", "class A(Exception): ...\nclass B(A): ...\nclass C(msgspec.Struct, frozen=True): ..."),
        ("gateway/x.py", "TABLE = {1: 2}\ndef f(TABLE):\n    TABLE[1] = 3\ndef g():\n    TABLE = {}\n    TABLE[1] = 2"),
        ("gateway/x.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
        ("gateway/x.py", "try:\n    f()\nexcept Exception:  # told to whoever asks\n    g()"),
        ("gateway/x.py", "x = 1  # type: ignore[misc]  # the stub is wrong\ny = 2  # noqa: S311 # no secret"),
        ("gateway/__init__.py", ""),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert problems(path, DOC + source if source else "") == []


def test_the_wheel_has_every_package_but_the_lab() -> None:
    """If not: name it under `packages` in pyproject.toml."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    files = [file.parent.relative_to(ROOT) for package in ORDER for file in (ROOT / package).rglob("__init__.py")]
    there = {".".join(folder.parts) for folder in files if folder.parts[:2] != ("loadtest", "lab")}
    assert set(named) - {"gateway.docs", "gateway.policies"} == there


def test_make_finds_every_slow_test() -> None:
    """`make slow` looks for them in `test_*.py` alone."""
    files = (ROOT / "tests").rglob("*.py")
    assert {file.name for file in files if not file.match("test_*.py") and "mark.slow" in file.read_text()} == set()


def test_the_suite_for_endpoint_pickers_names_none() -> None:
    """Whoever has another picker can run its cases. `conftest.py` starts this project's."""
    for name in ("test_picker", "proxy", "ext_proc"):
        path = f"tests/epp/{name}.py"
        tree = ast.parse((ROOT / path).read_text())
        assert {each.partition(".")[0] for each in imported(path, nodes(tree))}.isdisjoint(ORDER), name
