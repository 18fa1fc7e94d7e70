"""Command line of a program with commands: one module a command, imported when the command is chosen.

A module has DESCRIPTION, EXAMPLES, `add_arguments(parser)`, and `command(given)`, which gives the exit status. Its
MISTAKES, if it has any, are further errors that are told as a Mistake.

`PROGRAM --help` imports no command. A mistake is one line, and help texts stay as they are written.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, cast

import msgspec

SIMILAR = 0.6  # of 1, from which a name is taken for another's


class Mistake(Exception):
    """Error that a person can correct; each line says what and where."""


class Impossible(Exception):
    """Order or question that cannot be carried out; the message says why and what to do."""


class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, where it has a paragraph, and with what was probably meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and exit where an argument is left over: so the command that was chosen names its own help."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            flag = left[0].partition("=")[0]
            close = get_close_matches(flag, self._option_string_actions, 1, SIMILAR)
            self.error(f"unrecognized arguments: {' '.join(left)}{_meant(close)}")
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            close = get_close_matches(str(value), action.choices, 1, SIMILAR)
            self.error(f"there is no command {value!r}{_meant(close)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Print the mistake in one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _meant(close: Sequence[str]) -> str:
    return f": did you mean {close[0]}?" if close else ""


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


def _imported(path: str) -> ModuleType:
    """A command's module. Imports make no garbage, and httpx's own command line (rich, click, pygments) is not needed:
    they would be an eighth of a start."""
    sys.modules.setdefault("httpx._main", cast("ModuleType", None))
    gc.disable()
    try:
        return import_module(path)
    finally:
        gc.enable()


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Program by its `name`. `commands`: of each its module, or `module:object`, and its line in the program's help."""

    name: str
    version: str
    description: str
    examples: str
    commands: Mapping[str, tuple[str, str]]

    def parser_for(self, words: Sequence[str]) -> Parser:
        """The parser of a command line: the names of all commands, and the flags of the one that `words` choose, whose
        module is the `module` of what is parsed."""
        top = added(Parser, prog=self.name, description=self.description, epilog=self.examples)
        top.add_argument("--version", action="version", version=f"weir {self.version}")
        commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
        chosen = next((word for word in words if not word.startswith("-")), "")
        for name, (module, does) in self.commands.items():
            if name != chosen:
                added(commands.add_parser, name, help=does)
                continue
            path, _, object_in = module.partition(":")
            holder = _imported(path)
            found: Any = getattr(holder, object_in) if object_in else holder
            text = {"description": found.DESCRIPTION, "epilog": found.EXAMPLES}
            parser = added(commands.add_parser, name, help=does, **text)
            found.add_arguments(parser)
            parser.set_defaults(module=found)
        return top

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one command, its help included, and write its output out; the exit status. 2: a mistake in a flag or a
        file, also a name that no file can have; 1: what was asked for cannot be had. A reader that has closed the pipe,
        such as `| head`, has read enough."""
        try:
            try:
                return self._run(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            print(f"{error.filename}: {error.strerror}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:  # of a command that has nothing left to end well
            return 130

    def _run(self, words: Sequence[str]) -> int:
        given = self.parser_for(words).parse_args(words)
        try:
            return int(given.module.command(given))
        except (Mistake, Impossible, *getattr(given.module, "MISTAKES", ())) as error:
            print("\n".join(f"{self.name}: {line}" for line in str(error).splitlines()), file=sys.stderr)
            return 1 if isinstance(error, Impossible) else 2
