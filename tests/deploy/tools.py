"""Programs and packages that check what is deployed: those of the extra `deploy`, which `make test-deploy` installs."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def installed(name: str) -> str:
    """The path of a program beside this Python, else a skip; with WEIR_REQUIRE_DEPLOY set, else a failure."""
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        _absent(name)
    return str(program)


def imported(name: str) -> ModuleType:
    """A package, else a skip; with WEIR_REQUIRE_DEPLOY set, else a failure."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        _absent(name)
        raise


def _absent(name: str) -> None:
    assert not os.environ.get("WEIR_REQUIRE_DEPLOY"), f"{name} is not installed, and WEIR_REQUIRE_DEPLOY is set"
    pytest.skip(f"{name} is not installed (make test-deploy)")
