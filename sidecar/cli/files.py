"""Files of an operator: the sidecar's or a pool's, and the tokens that it names."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from gateway.shared.command_line import Impossible, Mistake
from gateway.shared.files.checked import UNREAD, Unread, needed
from gateway.shared.files.plain_file import open_plain
from sidecar.control.client import ControlClient, NoSidecar, Rejected
from sidecar.control.named_files import ca_of, tokens_of
from sidecar.core.config import MAX_BYTES, InvalidFile, SidecarConfig, read_config
from sidecar.ray import pool
from sidecar.residency.state_file import StateError, StateFile
from sidecar.serve.operator_log import say

T = TypeVar("T")


def checked(path: Path, *, to_ask: bool = False) -> SidecarConfig:
    """Read and judge a sidecar's file. `to_ask`: require only `listen` and the files of tokens, because mistakes
    elsewhere must not keep an operator from asking a sidecar that runs with an earlier version of the file. Raises
    Mistake."""
    try:
        reading = read_config(_read(path, MAX_BYTES + 1), str(path))
        config = reading.value
        if to_ask:
            with contextlib.suppress(Unread):
                needed(config.listen, config.token_file, config.order_token_file)
                return config
        return reading.good()
    except InvalidFile as error:
        raise Mistake(str(error)) from error


def pool_of(path: Path) -> pool.PoolConfig:
    """Read the file of a pool. Raises Mistake."""
    try:
        return pool.decode(_read(path, MAX_BYTES + 1), str(path))
    except InvalidFile as error:
        raise Mistake(str(error)) from error


def _read(path: Path, most: int) -> bytes:
    try:
        with open_plain(path) as file:
            return file.read(most)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from error


class File:
    """The sidecar's file at `path`, read; see `checked`. Raises Mistake."""

    def __init__(self, path: str, *, to_ask: bool = False) -> None:
        self.path = Path(path)
        self.folder = self.path.absolute().parent
        self.config = checked(self.path, to_ask=to_ask)
        self.tokens = tokens_of(self.config, self.path)
        self.ca = None if to_ask else ca_of(self.config, self.path)
        self.client = ControlClient(self.config, self.tokens.order)

    def report_to(self, gateway: str) -> None:
        """Report to another gateway's control port, too. Raises Mistake where the file names no token to show it."""
        if not self.tokens.report:
            raise Mistake(f"{self.path}: token_file: the gateway wants one: `sidecar init` shows how, or sidecar.token")
        if gateway not in self.config.gateways:
            self.config = msgspec.structs.replace(self.config, gateways=(*self.config.gateways, gateway))

    def profile(self, name: str) -> str:
        """Raises Mistake for one that the file does not have."""
        if name not in self.config.models:
            named = [each for each in self.config.models if self.config.served_name(each) == name]
            hint = f"did you mean {named[0]}?" if named else f"it has {', '.join(self.config.models)}"
            raise Mistake(f"{self.path}: there is no profile {name!r} ({hint})")
        return name

    def ask(self, path: str, method: Literal["GET", "POST"] = "GET", instead: str = "") -> bytes:
        """The answer of the sidecar that runs. Raises Impossible, from NoSidecar or Rejected. `instead`: what needs
        none, in words."""
        with self._asking(instead):
            return self.client.ask(method, path)

    def read(self, kind: type[T], path: str, method: Literal["GET", "POST"] = "GET") -> T:
        """As `ask`, an answer of this kind."""
        with self._asking():
            return self.client.read(kind, method, path)

    @contextlib.contextmanager
    def _asking(self, instead: str = "") -> Iterator[None]:
        try:
            yield
        except NoSidecar as nobody:
            hint = f"start one: sidecar serve --config {self.path}{instead}"
            with contextlib.suppress(OSError, StateError):
                hint += self.left()
            raise Impossible(f"{nobody}; {hint}") from nobody
        except Rejected as said:
            raise Impossible(str(said)) from said

    def left(self) -> str:
        """A word on engines that may go on without a sidecar. Raises OSError, StateError."""
        names = "" if self.config.state_file is UNREAD else ", ".join(self.state().read().engines)
        return f" (engines it has left may still run: {names})" if names else ""

    def state(self) -> StateFile:
        return StateFile(self.folder / self.config.state_file, say)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="sidecar.yaml", metavar="FILE", help="its file (default: %(default)s)")
