"""Supervisor of the sidecar of one Ray node: starts it, restarts it, and writes its files.

The sidecar is a process of its own. It ends with the holder of the Node, since its standard input does, and leaves its
engines to the next. That is so even where the Node is killed, and where Ray kills the processes of a worker that has
ended: engines have sessions of their own. Nothing of Ray is imported here.

Every engine is started once and put to sleep, so that the first call waits for a wake and not for a load.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from gateway.shared.protocol import ModelReport
from sidecar.control.client import ControlClient, NoSidecar, Rejected, SidecarTokens
from sidecar.core.config import SidecarConfig, explain
from sidecar.core.status import Status
from sidecar.ray.pool import PoolConfig, file_of, for_node
from sidecar.residency.state_file import replace
from sidecar.serve.operator_log import say

LOOK_EVERY = 0.5  # seconds between two looks at the sidecar
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # seconds between two starts of one that ends
STEADY = 60.0  # seconds after which one that has ended is not taken for one that cannot start
END_WITHIN = 150.0  # seconds for the sidecar and its engines to end
AGAIN = 10.0  # seconds between two orders for what there is no room for yet
QUOTED = 2000  # bytes of its last output that may be told
OF_WORKERS = ("OMP_NUM_THREADS",)  # Ray makes it 1 for its workers, and engines would inherit that


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a node's sidecar. `status`: what it says itself; None: it does not run, or does not answer, and
    `trouble` says why. `creating`: profiles whose engines are still to be made."""

    node: str
    status: Status | None = None
    trouble: str = ""
    creating: tuple[str, ...] = ()


class Node:
    """The sidecar of the node with this id and `address`, in the pool; `tokens` for the files that its own names."""

    def __init__(self, pool: PoolConfig, node: str, address: str, tokens: SidecarTokens) -> None:
        self._node = node
        self._config = for_node(pool, node, address)
        self._file = Path(file_of(pool, node))
        self._client = ControlClient(self._config, tokens.order)
        self._tokens = tokens
        self._last = threading.Event()  # no sidecar is started any more
        self._ended = threading.Event()  # and the one that runs is not wanted
        self._trouble = ""
        self._creation = Creation(self._config, self._client)
        self._thread = threading.Thread(target=self._keep, name="sidecar", daemon=True)
        self._thread.start()

    def status(self) -> NodeStatus:
        """Return the node's current status."""
        try:
            said = self._client.read(Status, "GET", "/status")
        except (Rejected, NoSidecar) as error:
            return NodeStatus(node=self._node, trouble=self._trouble or str(error))
        return NodeStatus(node=self._node, status=said, creating=self._creation.left)

    def renew(self, tokens: SidecarTokens) -> None:
        """Have the sidecar go by these tokens, without another start. Raises OSError."""
        self._tokens = tokens
        self._client.show(tokens.order)
        self._write_tokens()

    def end(self) -> str:
        """End the sidecar and its engines, for good. What became of them, in words; empty: all have ended."""
        self._last.set()
        trouble = self._stop()  # which lets calls end
        self._ended.set()
        self._thread.join(END_WITHIN)
        return trouble and self._stop()  # it cannot be asked, but its engines can be ended

    def _stop(self) -> str:
        argv = [*_program("stop", self._file), "--all"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=END_WITHIN, check=False)  # noqa: S603 # ours
        except subprocess.TimeoutExpired:
            return f"it has not ended after {END_WITHIN:g} s"
        return "" if done.returncode == 0 else done.stderr.strip()[-QUOTED:]

    def _keep(self) -> None:
        """Have a sidecar run, until `end`."""
        pause = FIRST_PAUSE
        while not self._last.is_set():
            began = time.monotonic()
            try:
                self._trouble = self._run()
            except OSError as error:
                self._trouble = f"{error.filename or self._file}: {error.strerror}"
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY else min(2 * pause, LAST_PAUSE)
            if not self._last.is_set():
                say(f"the sidecar of {self._node} has ended ({self._trouble}), and starts again in {pause:g} s")
            self._last.wait(pause)

    def _run(self) -> str:
        """Run a sidecar until it ends. Return the last line of its log."""
        self._write_tokens()
        replace(self._file, explain(self._config).encode())
        log = self._file.parent / self._node / "sidecar.log"
        with log.open("wb") as output:
            child = subprocess.Popen(  # noqa: S603 # our own program, and the file we wrote
                [*_program("serve", self._file), "--end-with-parent"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={name: value for name, value in os.environ.items() if name not in OF_WORKERS},
                start_new_session=True,
            )
        try:
            while child.poll() is None and not self._ended.wait(LOOK_EVERY):
                self._creation.step()
        finally:
            assert child.stdin is not None  # noqa: S101 # it was asked for
            child.stdin.close()
            child.wait()
        return log.read_bytes()[-QUOTED:].decode(errors="replace").strip().rpartition("\n")[2]

    def _write_tokens(self) -> None:
        (self._file.parent / self._node).mkdir(parents=True, exist_ok=True)
        for name, tokens in (
            (self._config.token_file, self._tokens.report),
            (self._config.order_token_file, self._tokens.order),
        ):
            if name is not None:
                replace(self._file.parent / name, "".join(f"{token}\n" for token in tokens).encode())


class Creation:
    """Makes the engines of all models that sleep, each once, and puts them to sleep. A model that is in use by then is
    left awake, and one that was there already is left as it was."""

    def __init__(self, config: SidecarConfig, client: ControlClient) -> None:
        self._client = client
        self._sleeps = tuple(name for name, profile in config.models.items() if profile.sleeps)
        self._to_make = set(self._sleeps)
        self._made: set[str] = set()  # by an order of ours, and not asleep yet
        self._again_at = 0.0

    @property
    def left(self) -> tuple[str, ...]:
        """Profiles whose engines are still to be made, or to be put to sleep."""
        return tuple(name for name in self._sleeps if name in self._to_make | self._made)

    def step(self) -> None:
        """Give the orders that are due. One that is refused is given again."""
        if not self.left:
            return
        try:
            said = self._client.read(Status, "GET", "/status")
            for model in said.models:
                if model.pending is None:
                    self._go_on(model, said.calls.get(model.profile, 0))
        except (Rejected, NoSidecar):
            return  # it starts or ends, or is busy with another model on these GPUs

    def _go_on(self, model: ModelReport, calls: int) -> None:
        name = model.profile
        if name in self._to_make:
            if model.state == "stopped":
                self._client.ask("POST", f"/models/{name}/ensure")
                self._made.add(name)
            self._to_make.discard(name)
        elif name not in self._made:
            return
        elif model.state == "running" and not calls:
            self._client.ask("POST", f"/models/{name}/sleep")
        elif model.state != "stopped":
            self._made.discard(name)  # it sleeps, is in use, or has failed
        elif model.ready_in is None and model.retry_in is None:
            self._made.discard(name)  # it cannot be had; its report says why
        elif time.monotonic() > self._again_at:
            self._again_at = time.monotonic() + AGAIN
            self._client.ask("POST", f"/models/{name}/ensure")  # there was no room for it yet


def _program(command: str, file: Path) -> list[str]:
    return [sys.executable, "-m", "sidecar.cli", command, "--config", str(file)]
