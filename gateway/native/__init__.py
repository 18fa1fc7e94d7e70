"""Pump for streams, in C: optional, and defined by the Python path that it takes the place of.

`Pump` is None where `STATE` is not `on`. It is `off` where `WEIR_NATIVE=off` turns the pump off, and `not built` where
no C compiler was there at installation.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gateway.native.pump import Pump as StreamPump


def _found() -> tuple[type[StreamPump] | None, Literal["on", "off", "not built"]]:
    if os.environ.get("WEIR_NATIVE") == "off":
        return None, "off"
    try:
        from gateway.native.pump import Pump  # noqa: PLC0415 # only where wanted
    except ImportError:
        return None, "not built"
    return Pump, "on"


Pump, STATE = _found()
