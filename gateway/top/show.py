"""Choice of a display for `gateway top`: live on a terminal, one frame, or lines of JSON; and its exit status."""

from __future__ import annotations

import asyncio
import io
import os
import sys

from rich.console import Console

from gateway.top.control_client import NoAnswer, Unfit
from gateway.top.live import once, watch


class TopError(Exception):
    """A mistake that trying again will not mend; says what and where."""


def show(url: str, token: str | None, interval: float, *, just_once: bool, as_json: bool) -> int:
    """Until somebody has seen enough. The exit status. Raises TopError."""
    plain = just_once or as_json
    if not plain and (not sys.stdout.isatty() or Console().is_dumb_terminal):
        raise TopError("standard output is no terminal that can be drawn on: --once prints one frame, --json lines")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that it cannot carry is no reason to end
        sys.stdout.reconfigure(errors="replace")
    try:
        if plain:
            asyncio.run(once(url, token, interval, as_json=as_json, lasting=not just_once))
        else:
            asyncio.run(watch(url, token, interval))
    except Unfit as error:
        raise TopError(f"{url}: {error}") from None
    except NoAnswer as error:
        print(f"gateway: {url}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `gateway top --once | head`: whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0
