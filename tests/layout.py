"""Layout of the code: packages, their layers, and what breaks the rules of the house.

`test_architecture.py` holds these rules. Functions read syntax trees; only `loaded` runs a command.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
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
        ("die_with_parent", "signals"),
        ("processes", "engine", "report"),
        ("load",),
        ("clients",),
        ("bench", "simulate", "calibrate"),
        ("lab",),
    ),
}

# Prints the modules that a command has imported when it ends.
LISTING = """\
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from {program}.cli import main
sys.exit(main())
"""

MOST_FILES = 25  # in one folder
# A docstring's first line says what a thing is. It is no question and no riddle.
RIDDLE = re.compile(r"(?:What|How|Which|Who|Whom|Whose|Where|When|Why)\b")


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


# -- imports of a command ---------------------------------------------------------------------------------------------


def loaded(*argv: str, program: str = "gateway") -> set[str]:
    """Return the project's modules that a command has imported at its end. A gateway that serves is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTING.format(program=program), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        if argv[0] == "serve":
            assert process.stdout is not None  # PIPE was asked for
            process.stdout.readline()  # it serves
            process.terminate()
        _, listed = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    if process.returncode:
        raise RuntimeError(f"{program} {' '.join(argv)}: {listed}")
    return {name for name in listed.split() if name.split(".")[0] in ORDER}
