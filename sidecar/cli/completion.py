"""Shell completion of `sidecar`: `sidecar completion SHELL` prints a script that the shell reads at its start."""

from __future__ import annotations

import argparse

from gateway.shared.completion import SHELLS, script

MISTAKES = ()
DESCRIPTION = "Complete commands, flags and file names in a shell."
EXAMPLES = """\
Prints a script for the shell. What it completes is of this version: print it again after an upgrade.

examples:
  sidecar completion bash > ~/.local/share/bash-completion/completions/sidecar
  sidecar completion zsh > ~/.zfunc/_sidecar      with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  sidecar completion fish > ~/.config/fish/completions/sidecar.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=SHELLS)


def command(given: argparse.Namespace) -> int:
    """Print the script."""
    from sidecar.cli.commands import parser_for  # noqa: PLC0415 # which knows this module by its name

    print(script(parser_for(None), given.shell))
    return 0
