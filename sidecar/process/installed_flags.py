"""Flags of the installed vLLM, by its own --help, compared with those that an engine is about to get.

vLLM would refuse unknown flags itself, one at a time and 20 s later. Its help is asked for once per interpreter. Where
the help cannot be had, nothing is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sidecar.core.addresses import EngineAddress
from sidecar.core.arguments import help_commands, known_flags, unsupported
from sidecar.core.diagnosis import diagnosis
from sidecar.core.profile import EngineSettings
from sidecar.process.process import Process
from sidecar.process.ring import Ring

MISTAKE = 2  # exit status of argparse for an argument that it does not know
LINES, SIZE = 20_000, 4 * 1024 * 1024  # of a help; vLLM's is 3,000 lines, 0.2 MiB


class InstalledFlags:
    """`sidecar`: its id, which the processes that print a help are marked by. `log`: where they write. `within`:
    seconds for one help."""

    def __init__(
        self,
        sidecar: str,
        own: str,
        log: Path,
        folder: Path,
        say: Callable[[str], None],
        *,
        within: float,
    ) -> None:
        self._sidecar = sidecar
        self._own = own
        self._log = log
        self._folder = folder
        self._say = say
        self._within = within
        self._known: dict[str, tuple[tuple[str, ...], frozenset[str] | None]] = {}  # None: its help cannot be had
        self._locks: dict[str, asyncio.Lock] = {}

    async def launcher(self, engine: EngineSettings, environment: Mapping[str, str]) -> tuple[str, ...]:
        """Return the command that starts an engine: see core.arguments. Raises SpawnFailed if the interpreter cannot be
        started, and Unkillable."""
        key = _key(engine)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._known:
                self._known[key] = await self._ask(engine, environment)
        return self._known[key][0]

    def has(self, engine: EngineSettings, flag: str) -> bool:
        """Whether it is known to have the flag; `launcher` has been asked."""
        known = self._known[_key(engine)][1]
        return known is not None and flag in known

    def lacking(self, engine: EngineSettings, argv: Sequence[str]) -> tuple[str, ...]:
        """The flags of `argv` that it does not have; `launcher` has been asked."""
        known = self._known[_key(engine)][1]
        return () if known is None else unsupported(argv, known)

    async def _ask(
        self, engine: EngineSettings, environment: Mapping[str, str]
    ) -> tuple[tuple[str, ...], frozenset[str] | None]:
        why = ""
        commands = help_commands(engine, self._own)
        broken: tuple[str, ...] = ()  # what does not even get as far as its arguments
        for launcher, argv in commands:
            if launcher == broken:
                continue
            ring = Ring(LINES, SIZE)
            process = Process.spawn(
                argv,
                env=environment,
                engine=f"{self._sidecar}/help-{secrets.token_hex(8)}",
                address=EngineAddress(),
                log=self._log,
                cwd=self._folder,
                ring=ring,
                log_most=SIZE,
            )
            try:
                async with asyncio.timeout(self._within):
                    status = await process.gone()
            except TimeoutError:
                why = f"it has not ended within {self._within:g} s"
                break
            finally:
                await process.terminate(0.0)
            lines = ring.lines()
            if status == 0 and (flags := known_flags("\n".join(lines))):
                return launcher, flags
            broken = launcher if status not in (0, MISTAKE) else ()
            why = diagnosis(lines).line or "it says nothing"
        self._say(f"the flags that {argv[0]} knows are not checked, since its help cannot be had: {why}")
        return commands[0][0], None


def _key(engine: EngineSettings) -> str:
    return engine.python or ("" if engine.simulated is None else "simulated")
