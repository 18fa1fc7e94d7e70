"""Command line of a program with commands: one module a command, imported when the command is chosen.

`PROGRAM --help` imports no command. A mistake is one line, and help texts stay as they are written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast


class Command(Protocol):
    """Module of a command."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: Any) -> None:
        """Declare the command's arguments."""

    def command(self, given: argparse.Namespace) -> int:
        """Carry it out; the exit status."""


class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, where it has a paragraph."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake in one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def added(add: Callable[..., Parser], *name: str, **more: Any) -> Parser:
    """A parser made by `add`, which is Parser or the `add_parser` of another; `more`: what argparse takes."""
    return add(*name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **more)


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argument's type. argparse hides the message of a ValueError and shows that of an ArgumentTypeError."""

    def converted(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def with_commands(
    top: Parser, words: Sequence[str] | None, modules: Mapping[str, tuple[str, str]], metavar: str
) -> Parser:
    """`top` with its commands: of each its name, of the one that `words` choose its flags too; None: of all. `modules`:
    of each command its module, and its line in the program's help. `module` of what is parsed is the chosen one."""
    commands = top.add_subparsers(title="commands", required=True, metavar=metavar)
    chosen = set(modules) if words is None else {*[word for word in words if not word.startswith("-")][:1]}
    for name, (module, does) in modules.items():
        if name not in chosen:
            added(commands.add_parser, name, help=does)
            continue
        found = cast("Command", import_module(module))
        text = {"description": found.DESCRIPTION, "epilog": found.EXAMPLES}
        parser = added(commands.add_parser, name, help=does, **text)
        found.add_arguments(parser)
        parser.set_defaults(module=found)
    return top
