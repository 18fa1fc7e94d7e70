"""Shell completion of `gateway`: `gateway completion SHELL` prints a script that the shell reads at its start."""

from __future__ import annotations

import argparse

from gateway.shared.completion import SHELLS, script

MISTAKES = ()
DESCRIPTION = "Complete commands, flags and file names in a shell."
EXAMPLES = """\
Prints a script for the shell. What it completes is of this version: print it again after an upgrade.

examples:
  gateway completion bash > ~/.local/share/bash-completion/completions/gateway
  gateway completion zsh > ~/.zfunc/_gateway      with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  gateway completion fish > ~/.config/fish/completions/gateway.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=SHELLS)


def command(given: argparse.Namespace) -> int:
    """Print the script."""
    from gateway.cli.commands import parser_for  # noqa: PLC0415 # which knows this module by its name

    print(script(parser_for(None), given.shell))
    return 0
