"""Layout of the code: packages, their layers, and counts of what breaks the rules of the house.

`tests/test_architecture.py` holds these rules; `make house` prints the counts. Every function reads syntax trees;
nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]
Trees: TypeAlias = Mapping[str, ast.Module]  # by the file's path from the root

# Imports point down. Between packages: loadtest > sidecar > gateway.
ORDER = ("gateway", "sidecar", "loadtest")
GROUND_FLOOR = "gateway.shared"  # all of the gateway that the sidecar imports, but for its relay
# The sidecar's relay is made of what carries a gateway's bytes.
RELAY = "sidecar/relay/"
OF_RELAY = ("gateway.relay.wire", "gateway.upstream", "gateway.core.request")
# Within a package a folder imports only from rows above its own in this table, or from itself.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gateway": (
        ("__version__",),
        ("shared",),
        ("core",),
        ("native",),
        ("upstream", "frames"),
        ("relay", "decider"),
        ("batches",),
        ("control",),
        ("serve",),
        ("cli",),
    ),
    "sidecar": (
        ("__version__",),
        ("core",),
        ("sizing", "gpus"),
        ("process",),
        ("residency",),
        ("reporting", "control", "relay"),
        ("serve",),
        ("ray",),
        ("cli",),
    ),
    "loadtest": (
        ("die_with_parent",),
        ("processes", "engine", "report"),
        ("load",),
        ("clients",),
        ("bench", "simulate", "calibrate"),
        ("lab",),
    ),
}

MOST_FILES = 25  # in one folder
# A docstring's first line says what a thing is. It is no question and no riddle.
RIDDLE = re.compile(r"(?:What|How|Which|Who|Whom|Whose|Where|When|Why)\b")
# Pronouns and question words that begin no docstring: the first word is a verb or the noun that is returned.
NO_SUBJECT = re.compile(
    r"\W*(?:its?|ones?|th(?:is|ese|at|ose|ey|em|eir)|what|how|which|who[ms]?|whose|where|when|why)\b", re.IGNORECASE
)
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
MOST_ARGUMENTS = 8  # of one call, by position
LONGEST_CLASS, LONGEST_FUNCTION = 300, 50  # lines


def sources(*folders: str) -> list[str]:
    """The Python files under some folders of the tree."""
    return sorted(str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).rglob("*.py"))


def trees(files: Iterable[str]) -> dict[str, ast.Module]:
    return {file: ast.parse((ROOT / file).read_text(), file) for file in files}


# -- arrows -----------------------------------------------------------------------------------------------------------


def imported(path: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names of every module that a file imports; `nodes`: all of its tree's."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                folder = path.split("/")[: -node.level]
                yield ".".join([*folder, node.module or ""]).rstrip(".")
            else:
                yield from _from(node.module or "", node.names)


def _from(module: str, names: Iterable[ast.alias]) -> Iterator[str]:
    """`from module import names`: the module, or those of its own modules that are named."""
    if module.split(".", maxsplit=1)[0] not in ORDER:
        yield module
        return
    folder = ROOT / module.replace(".", "/")
    for alias in names:
        inner = module in ORDER or (folder / alias.name).is_dir() or (folder / f"{alias.name}.py").is_file()
        yield f"{module}.{alias.name}" if inner else module


def arrows_up(path: str, names: Iterable[str]) -> Iterator[str]:
    """Imports of our own modules that do not point down; `names`: those that the file imports."""
    for name in names:
        if name.split(".")[0] in ORDER:
            yield from _arrow_up(path, name)


def _arrow_up(path: str, name: str) -> Iterator[str]:
    package, target = path.split("/", maxsplit=1)[0], name.split(".", maxsplit=1)[0]
    if package == target:
        here, there = unit(path.split("/")), unit(name.split("."))
        if here != there and _layer(package, here) <= _layer(package, there):
            yield f"imports {name}: arrows point down, and {here} is not above {there}"
    elif ORDER.index(package) < ORDER.index(target):
        yield f"imports {name}: {package} knows nothing of {target}"
    elif (package, target) == ("sidecar", "gateway"):
        known = (GROUND_FLOOR, *(OF_RELAY if path.startswith(RELAY) else ()))
        if not any(f"{name}.".startswith(f"{each}.") for each in known):
            yield f"imports {name}: of the gateway the sidecar knows only {' and '.join(known)}"


def unit(parts: list[str]) -> str:
    """The folder or file of a package that a file or module belongs to."""
    return parts[1].removesuffix(".py") if len(parts) > 1 else ""


def _layer(package: str, name: str) -> int:
    return next((height for height, units in enumerate(LAYERS[package]) if name in units), -1)


# -- names and folders ------------------------------------------------------------------------------------------------


def defined_twice(modules: Trees) -> list[str]:
    """Public classes that have their name from another class of their package too."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[path.split("/", maxsplit=1)[0], node.name].append(path)
    return [f"class {name} is defined in {' and in '.join(files)}" for (_, name), files in found.items() if files[1:]]


def folder_sizes(files: Iterable[str]) -> Counter[str]:
    """Count the files of each folder, those of its own folders left out."""
    return Counter(str(Path(file).parent) for file in files)


def riddle(tree: ast.Module) -> str | None:
    """The first line of a module's docstring where it begins with a question's word."""
    line = (ast.get_docstring(tree) or "").partition("\n")[0]
    return line if RIDDLE.match(line) else None


# -- sentences and sizes ----------------------------------------------------------------------------------------------


def docstrings(modules: Trees) -> Iterator[tuple[str, str]]:
    """Place of each docstring, and its first line."""
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path}:{node.body[0].lineno}", text.partition("\n")[0]


def crowded_calls(modules: Trees) -> list[str]:
    """Calls with more positional arguments than anyone can tell apart."""
    return [
        f"{path}:{node.lineno}: {ast.unparse(node.func)} with {len(node.args)}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) > MOST_ARGUMENTS
    ]


def long_definitions(modules: Trees, kinds: tuple[type[ast.AST], ...], most: int) -> list[str]:
    """Classes or functions of more than `most` lines, the longest first."""
    found = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.lineno}: {node.name}")
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and isinstance(node, (ast.ClassDef, *FUNCTIONS))
    ]
    return [f"{where} has {lines} lines" for lines, where in sorted(found, reverse=True) if lines > most]


def flags(modules: Trees) -> list[str]:
    """Flags that command lines declare: each call of `add_argument` whose first name begins with a dash."""
    return [
        f"{path}:{node.lineno}: {first.value}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for first in node.args[:1]
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("-")
    ]
