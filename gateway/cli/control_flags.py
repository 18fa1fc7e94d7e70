"""Flags of a command that asks a control port: its address, and the file of its admin token."""

from __future__ import annotations

import argparse

from gateway.cli.files import TOKEN_VARIABLE
from gateway.shared.command_line import argument
from gateway.upstream.client import parse_origin


def add_control_flags(parser: argparse.ArgumentParser, of: str, help: str) -> None:  # as argparse calls it
    """`--url` and `--token-file`. `of`: whose control port, as a mistake names it; `help`: of `--url`."""

    def control_url(text: str) -> str:
        try:
            origin = parse_origin(text)
        except ValueError:
            origin = None
        if origin is None or origin.unix:
            raise ValueError(f"{text!r}: write http://HOST:PORT or https://HOST:PORT, the control port of {of}")
        return text

    where = f"{help} (default: %(default)s)"
    parser.add_argument("--url", default="http://127.0.0.1:8001", type=argument(control_url), help=where)
    parser.add_argument("--token-file", metavar="FILE", help=f"its admin token, else ${TOKEN_VARIABLE}")
