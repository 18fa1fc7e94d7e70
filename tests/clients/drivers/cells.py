"""Frame of a Python client's program: it runs each cell, and prints a JSON line with the cell's end.

It runs in the clients' own environment, which has nothing of this project; pydantic is there, as every client needs it.
Where it finds the gateway comes from the environment. `tests/clients/matrix.py` starts it and reads its lines.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

ROOT = os.environ["WEIR_URL"]
URL = ROOT + "/v1"
MODEL = os.environ["WEIR_MODEL"]
KEY = os.environ["WEIR_KEY"]  # of a tenant without limits
SLOW = os.environ["WEIR_SLOW_KEY"]  # of a tenant with one call a second
HELLO = [{"role": "user", "content": "Why is the river level?"}]
LEVEL = {
    "name": "level_of",
    "description": "The level of a river, in centimetres.",
    "parameters": {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
}
ENDLESS = {"ignore_eos": True}  # a field of vLLM's


class Reading(BaseModel):
    """The level of a river."""

    river: str
    level: int


def run(*cells: Callable[[], object]) -> None:
    """Run every cell, one after the other. A cell is called what its function is called."""
    for cell in cells:
        failure = ""
        try:
            cell()
        except Exception:  # whatever a package raises is that cell's end, and is printed whole
            failure = traceback.format_exc()
        print(json.dumps({"cell": cell.__name__, "failure": failure}), flush=True)


def failing(kind: type[Any], act: Callable[[], object], times: int = 1) -> Any:
    """The exception that one of so many calls ends with."""
    try:
        for _ in range(times):
            act()
    except kind as error:
        return error
    raise AssertionError("nothing was refused")


def check(held: object, said: object = "") -> None:
    """Fail the cell unless `held`."""
    if not held:
        raise AssertionError(said)
