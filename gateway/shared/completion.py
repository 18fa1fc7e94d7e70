"""Scripts that complete a program's commands, flags and file names in a shell, made of its parser by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

SHELLS = ("bash", "zsh", "fish")
_FILES = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY}


MISTAKES = ()
DESCRIPTION = "Complete commands, flags and file names in a shell."


def examples(program: str) -> str:
    """The end of the help of a program's `completion` command."""
    return f"""\
Prints a script for the shell. What it completes is of this version: print it again after an upgrade.

examples:
  {program} completion bash > ~/.local/share/bash-completion/completions/{program}
  {program} completion zsh > ~/.zfunc/_{program}      with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  {program} completion fish > ~/.config/fish/completions/{program}.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=SHELLS)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one of SHELLS. An argument that the help calls FILE or FOLDER completes those."""
    for action in _actions(parser):
        for name, kind in _FILES.items():
            if name in str(action.metavar):
                action.complete = kind  # type: ignore[attr-defined] # where shtab looks
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # argparse has no other way to them
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
