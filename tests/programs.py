"""Servers of others that a test needs."""

from __future__ import annotations

import os

import pytest

from loadtest.lab.debian import DebianProgram, NoProgram


def required(program: DebianProgram, *names: str) -> list[str]:
    """The command that starts it, or another program of its packages. Skips the test where there is none, unless
    WEIR_REQUIRE_PROMETHEUS or WEIR_REQUIRE_VALKEY is 1."""
    try:
        return program.command(*names)
    except NoProgram as error:
        if os.environ.get(f"WEIR_REQUIRE_{program.target.upper()}") == "1":
            raise
        pytest.skip(str(error))
