"""Displays of `gateway top`: a live screen on a terminal, or frames as text or JSON.

The terminal is restored on every exit, and while the process is stopped (Ctrl-Z). A gateway that goes away is asked
until it is back. Only an error of the first answer (`Unfit`) ends the display.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live

from gateway.top.control_client import ControlClient, NoAnswer, Unfit
from gateway.top.draw import frame, heading
from gateway.top.grid import ASCII, BLOCKS, Glyphs
from gateway.top.sample import Point
from gateway.top.view import KEPT, View, view_of

QUIT = b"qQ\x03\x04"  # the keys that end it; Ctrl-C comes as a signal too


class Watched:
    """A gateway as far as it is known: the last view, and why there is nothing newer."""

    def __init__(self, client: ControlClient) -> None:
        self.view: View | None = None
        self._client = client
        self._points: deque[Point] = deque(maxlen=KEPT)
        self._trouble = ""
        self._since = 0.0

    async def look(self) -> None:
        """Take one more sample. Raises Unfit as long as there has been none."""
        try:
            sample = await self._client.sample()
        except (NoAnswer, Unfit) as error:
            if isinstance(error, Unfit) and self.view is None:
                raise
            self._since = self._since if self._trouble else time.monotonic()
            self._trouble = str(error)
            return
        self._points.append(sample.point)
        self.view, self._trouble = view_of(sample, self._points), ""

    @property
    def trouble(self) -> str:
        """Why the view is old, in a line; empty where it is not."""
        since = f"for {time.monotonic() - self._since:.0f} s"
        return f"NO ANSWER {since}, still trying: {self._trouble}" if self._trouble else ""

    def drawn(self, width: int, height: int | None, glyphs: Glyphs) -> RenderableType:
        if self.view is None:
            return Group(*heading(None, self._client.url, self.trouble))
        return frame(self.view, self._client.url, self.trouble, width, height, glyphs)


async def watch(url: str, token: str | None, interval: float) -> None:
    """Show it live until q, Ctrl-C or SIGTERM. Raises Unfit before anything is shown."""
    loop = asyncio.get_running_loop()
    work = loop.create_task(_watch(url, token, interval))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _watch(url: str, token: str | None, interval: float) -> None:
    loop, work = asyncio.get_running_loop(), asyncio.current_task()
    assert work is not None  # noqa: S101 # a coroutine that runs is a task's
    client = ControlClient(url, token, time.monotonic)
    try:
        watched = Watched(client)
        await watched.look()
        with Screen(watched, work.cancel) as screen:
            due = loop.time()
            while True:
                due = max(due + interval, loop.time())
                await asyncio.sleep(due - loop.time())
                await watched.look()
                screen.draw()
    finally:
        await client.aclose()


async def once(url: str, token: str | None, interval: float, *, as_json: bool, lasting: bool) -> None:
    """Print one frame as plain text, or one JSON object a line; `lasting`: again and again. Two samples an interval
    apart come first, for rates. Raises NoAnswer, Unfit."""
    client = ControlClient(url, token, time.monotonic)
    points: deque[Point] = deque(maxlen=KEPT)
    try:
        points.append((await client.sample()).point)
        while True:
            await asyncio.sleep(interval)
            sample = await client.sample()
            points.append(sample.point)
            view = view_of(sample, points)
            print(msgspec.json.encode(view).decode() if as_json else text(view, client.url, sys.stdout), flush=True)
            if not lasting:
                return
    finally:
        await client.aclose()


def text(view: View, where: str, output: TextIO) -> str:
    """A whole frame without colours, as wide as $COLUMNS or the terminal, else 80."""
    width = Console(file=output).width
    plain = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with plain.capture() as captured:
        plain.print(frame(view, where, "", width, None, glyphs_for(output)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def glyphs_for(output: TextIO) -> Glyphs:
    """ASCII where the output can carry nothing else."""
    try:
        BLOCKS.spark.encode(output.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


class Screen:
    """The terminal while a view is on it; `with` gives it back. Keys that end it call `stop`."""

    def __init__(self, watched: Watched, stop: Callable[[], object]) -> None:
        self._watched = watched
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._glyphs = glyphs_for(sys.stdout)
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False)
        self._before: list[Any] | None = None

    def __enter__(self) -> Screen:
        try:
            self._take()
        except BaseException:
            self._give_back()
            raise
        self._loop.add_signal_handler(signal.SIGWINCH, self.draw)
        self._loop.add_signal_handler(signal.SIGTSTP, self._pause)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_signal_handler(signal.SIGWINCH)
        self._loop.remove_signal_handler(signal.SIGTSTP)
        self._give_back()

    def draw(self) -> None:
        """What is known now, as large as the terminal is now."""
        with contextlib.suppress(OSError):  # not a terminal any more: its last size will do
            width, height = os.get_terminal_size(sys.stdout.fileno())
            self._console.size = (width or 80, height or 24)
        width, height = self._console.size
        self._live.update(self._watched.drawn(width, height, self._glyphs), refresh=True)

    def _take(self) -> None:
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin, termios.TCSADRAIN)
            self._loop.add_reader(sys.stdin.fileno(), self._typed)
        self._live.start()
        self.draw()

    def _give_back(self) -> None:
        self._live.stop()
        if self._before is not None:
            self._loop.remove_reader(sys.stdin.fileno())
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def _typed(self) -> None:
        try:
            typed = os.read(sys.stdin.fileno(), 64)
        except OSError:
            typed = b""
        if not typed or any(key in QUIT for key in typed):  # nothing: the terminal is gone
            self._stop()

    def _pause(self) -> None:
        """Ctrl-Z: the terminal is the shell's until it lets us go on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
