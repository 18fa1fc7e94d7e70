"""Argument parser of the command line: one line for a mistake, help texts as they are written."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, where it has a paragraph."""

    def error(self, message: str) -> NoReturn:
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
