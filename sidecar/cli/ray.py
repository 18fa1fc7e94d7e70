"""`sidecar ray`: the sidecars of a Ray cluster, one a node. Each command prints, and returns the exit status.

Ray is imported once a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from gateway.shared.command_line import Impossible, Parser, added
from gateway.shared.formatting import columns, shown
from sidecar.cli.files import pool_of
from sidecar.control.client import SidecarTokens
from sidecar.control.named_files import tokens_of
from sidecar.core.config import warnings
from sidecar.ray.node import NodeStatus
from sidecar.ray.pool import PoolConfig

if TYPE_CHECKING:
    from sidecar.ray.cluster import Pool, PoolNode

DESCRIPTION = "The sidecars of a Ray cluster: one a node."
EXAMPLES = """\
A pool's file says what the sidecars of all nodes have in common; `sidecar init pool` writes one. The nodes are
those of the Ray cluster that have GPUs, and are followed as they join and die. Each needs the extra `ray`, in the
environment that Ray's workers have. Engines go on where a sidecar, its actor or Ray ends; `down` ends them.

examples:
  sidecar check pool.yaml                        find every mistake in the file; needs no cluster
  sidecar ray up --config pool.yaml              a sidecar on every node; again, with another file, to change it
  sidecar ray status --config pool.yaml          how each node is
  sidecar ray down --config pool.yaml            end all of them, with their engines"""
MORE = "`sidecar ray --help` has examples."

T = TypeVar("T")
Nodes: TypeAlias = "list[tuple[PoolNode, NodeStatus]]"

COLUMNS = ("NODE", "ADDRESS", "GPUS", "RUNNING", "ASLEEP", "OTHERS", "TO MAKE", "")
JSON = ("name", "address", "gpus", "ray_id")  # of a node, beside its sidecar
UP_WITHIN = 60.0  # seconds for every node's sidecar to answer
POLL = 0.5  # seconds between two looks whether they do
NO_RAY = "Ray is not installed here: pip install 'WEIR.whl[ray]', with the version of Ray that the cluster has"


def add_arguments(parser: Parser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="up | status | down")

    def action(name: str, does: str, run: Callable[[argparse.Namespace], int]) -> Parser:
        made = added(commands.add_parser, name, help=does, description=f"{does[0].upper()}{does[1:]}.", epilog=MORE)
        made.set_defaults(action=run)
        made.add_argument("--config", default="pool.yaml", metavar="FILE", help="its file (default: %(default)s)")
        return made

    action("up", "have a sidecar on every node", lambda given: up(given.config))
    shows = action("status", "show how every node is", lambda given: status(given.config, as_json=given.json))
    shows.add_argument("--json", action="store_true", help="as JSON")
    action("down", "end all sidecars and their engines", lambda given: down(given.config))


def command(given: argparse.Namespace) -> int:
    """Do what was chosen; the exit status. Raises Mistake, Impossible."""
    return int(given.action(given))


def up(config: str) -> int:
    """Have a sidecar on every node. Raises Mistake, Impossible."""
    pool = pool_of(Path(config))
    tokens = tokens_of(pool.sidecar, Path(config))
    for line in warnings(pool.sidecar):
        print(f"sidecar: warning: {config}: sidecar.{line}", file=sys.stderr)
    found = _on(pool, lambda cluster: _up(cluster, pool, tokens))
    print(_table(found))
    return 0 if _good(found) else 1


def _up(cluster: Pool, pool: PoolConfig, tokens: SidecarTokens) -> Nodes:
    cluster.up(pool, tokens)
    until = time.monotonic() + UP_WITHIN
    while not _good(found := cluster.status()) and time.monotonic() < until:
        time.sleep(POLL)
    return found


def _good(found: Nodes) -> bool:
    return all(said.status is not None for _, said in found)


def status(config: str, *, as_json: bool) -> int:
    """Print the status of every node's sidecar. Raises Mistake, Impossible."""
    found = _on(pool_of(Path(config)), lambda cluster: cluster.status())
    rows = [{**{field: getattr(node, field) for field in JSON}, "sidecar": said} for node, said in found]
    print(msgspec.json.encode(rows).decode() if as_json else _table(found))
    return 0


def down(config: str) -> int:
    """End all sidecars and their engines. Raises Mistake, Impossible."""
    left = _on(pool_of(Path(config)), lambda cluster: cluster.down())
    for node, trouble in left.items():
        print(f"sidecar: {shown(node)}: {shown(trouble)}", file=sys.stderr)
    if not left:
        print("all sidecars of the pool have ended, with their engines")
    return 1 if left else 0


def _on(pool: PoolConfig, act: Callable[[Pool], T]) -> T:
    try:
        from sidecar.ray.cluster import Pool, Unreachable  # noqa: PLC0415 # Ray is an extra, and slow to import
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise Impossible(NO_RAY) from None
    try:
        # Ray prints what it sees of the cluster, in the midst of ours.
        with contextlib.redirect_stdout(sys.stderr), Pool(pool.ray) as cluster:
            return act(cluster)
    except Unreachable as error:
        raise Impossible(str(error)) from error


def _table(found: Nodes) -> str:
    """For a person, without a last newline."""
    if not found:
        return "no node has a GPU that Ray knows of: nothing runs yet, and a node that joins is followed"
    return "\n".join(columns([COLUMNS, *(_row(node, said) for node, said in found)]))


def _row(node: PoolNode, said: NodeStatus) -> tuple[str, ...]:
    models = () if said.status is None else said.status.models
    running, asleep = (sum(model.state == state for model in models) for state in ("running", "sleeping"))
    troubles = [said.trouble, *(said.status.troubles if said.status else ())]
    troubles += [f"{model.profile}: {model.last_error}" for model in models if model.state == "error"]
    counts = (node.gpus, running, asleep, len(models) - running - asleep, len(said.creating))
    return (shown(node.name), node.address, *map(str, counts), shown("; ".join(filter(None, troubles))))
