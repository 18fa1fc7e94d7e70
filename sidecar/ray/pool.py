"""Configuration of a pool: one sidecar's file for every node of a Ray cluster.

The part that the nodes share is written under `sidecar`, as in a sidecar's file. File names there are relative to
`folder` on each node. A node's id, its address and the places of its files are Ray's to say, and refused where they are
written. `for_node` makes the file of one node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.shared.addresses import is_loopback
from gateway.shared.files.checked import Fault, Reading, Value, nearest, needed, readable
from gateway.shared.files.kinds import Text
from gateway.shared.files.units import Count
from gateway.shared.files.yaml_file import read_file, written
from sidecar.core.addresses import LOOPBACK
from sidecar.core.config import ProfileName, SidecarConfig, faults_of
from sidecar.core.profile import Bounds, FileName, Profile
from sidecar.core.reload import on_gpu

EVERYWHERE = "0.0.0.0"  # noqa: S104 # it names no machine; where it is written a node's own address is meant
LONGEST_NAME = 64  # characters of a profile's name, and of a sidecar's

Engines = Annotated[Count, Bounds(ge=1, le=64)]
RayAddress = Annotated[str, Text(r"[!-~]{1,255}", "auto, or HOST:PORT of the cluster's head")]
Namespace = Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "a name of letters, digits, _ . and -")]
FolderName = Annotated[str, Text(r"/[^\x00-\x1f]{0,200}", "a folder's full name, on every node")]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster. `address`: as `ray.init` takes it; auto: the one this machine is in. `namespace`: where the
    pool's actors have their names; a cluster has one pool in each.
    """

    shorthand: ClassVar[str] = "address"

    address: RayAddress = "auto"
    namespace: Namespace = "weir"


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator tells the sidecars of a cluster.

    `version`: of this format. `ray`: the cluster. `folder`: on each node, for the sidecar's files, its state and its
    logs. `engines_per_node`: how many engines of every model each node has, or of which model how many; of one that is
    not named, one. `sidecar`: what every node's sidecar is told.
    """

    version: Literal[1] = 1
    ray: Cluster = Cluster()
    folder: FolderName = "/var/lib/weir"
    engines_per_node: Engines | Mapping[ProfileName, Engines] = 1
    sidecar: SidecarConfig

    def engines(self, profile: str) -> int:
        """Number of engines that a node has of the model of a profile."""
        number = self.engines_per_node
        return number if isinstance(number, int) else number.get(profile, 1)

    def copies(self, profile: str) -> tuple[str, ...]:
        """The profiles that a node has in place of one of the file: itself, or NAME-1, NAME-2 and so on."""
        number = self.engines(profile)
        return (profile,) if number == 1 else tuple(f"{profile}-{n}" for n in range(1, number + 1))

    @property
    def on_gpus(self) -> bool:
        """Whether any model runs on a GPU; then a node without one has no sidecar."""
        return on_gpu(self.sidecar)


def read_pool(data: bytes, name: str = "pool") -> Reading[PoolConfig]:
    """The pool as far as it can be read, with every problem of the file. Raises InvalidFile where it is no YAML."""
    reading = read_file(data, name, PoolConfig)
    found = readable(_levels(reading.value, reading.root), _faults(reading.value))
    reading.judge(dict.fromkeys(found))  # copies have a model's mistakes, once
    return reading


def decode(data: bytes, name: str = "pool") -> PoolConfig:
    """Read a YAML file. `name` is how messages call the file. Raises InvalidFile."""
    return with_deep_sleep(read_pool(data, name).good())


def with_deep_sleep(pool: PoolConfig) -> PoolConfig:
    """Return the pool with every model's sleep at level 2, unless a model never sleeps."""
    # Level 1 would fill a host's memory with the weights of every copy.
    models = {name: _deeply(profile) for name, profile in pool.sidecar.models.items()}
    return msgspec.structs.replace(pool, sidecar=msgspec.structs.replace(pool.sidecar, models=models))


def explain(pool: PoolConfig) -> str:
    """The pool as YAML, every default written out; it decodes to an equal one."""
    return written(pool, PoolConfig)


def node_id(name: str) -> str:
    """Id of a node's sidecar: the node's name in Ray, in the letters that an id may have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("-._")[:LONGEST_NAME] or "node"


def file_of(pool: PoolConfig, node: str) -> FileName:
    """Path of the file of a node's sidecar, on that node; `node` is its id. In `folder` itself, so that what is
    relative there is relative to it."""
    return f"{pool.folder.rstrip('/')}/{node}.yaml"


def for_node(pool: PoolConfig, node: str, address: str) -> SidecarConfig:
    """The file of one node's sidecar. `node`: its id; `address`: by which gateways reach it. The relay alone listens
    there; the control API stays on loopback, where nothing else was written."""
    config, relay = pool.sidecar, pool.sidecar.relay
    host = f"[{address}]" if ":" in address else address
    inner = host if config.listen.host == EVERYWHERE or is_loopback(host) else LOOPBACK
    if relay is not None:
        relay = msgspec.structs.replace(relay, listen=msgspec.structs.replace(relay.listen, host=host))
    models: dict[str, Profile] = {}
    for name, profile in config.models.items():
        served = config.served_name(name)
        for copy in pool.copies(name):
            models[copy] = msgspec.structs.replace(profile, served_name=served)
    return msgspec.structs.replace(
        config,
        id=node,
        token_file=f"{node}/token",
        order_token_file=None if config.order_token_file is None else f"{node}/order-token",
        listen=msgspec.structs.replace(config.listen, host=inner),
        relay=relay,
        state_file=f"{node}/{config.state_file}",
        log_dir=f"{node}/{config.log_dir}",
        models=models,
    )


def _faults(pool: PoolConfig) -> Iterator[Fault]:
    """Everything that keeps a well-formed pool from being used."""
    yield from readable(_of_nodes(pool.sidecar), _engines(pool), _of_each(pool))


def _of_each(pool: PoolConfig) -> Iterator[Fault]:
    """Mistakes in the file of a node."""
    needed(pool.sidecar.listen, pool.sidecar.relay, pool.sidecar.engine_addresses, *pool.sidecar.models.values())
    origin = {copy: name for name in pool.sidecar.models for copy in pool.copies(name)}
    for fault in faults_of(for_node(pool, "node", LOOPBACK)):
        path = fault.path
        if path[0] == "models" and len(path) > 1:
            path = ("models", origin[str(path[1])], *path[2:])
        yield msgspec.structs.replace(fault, path=("sidecar", *path))


def _deeply(profile: Profile) -> Profile:
    if profile.sleep is None:
        return profile
    return msgspec.structs.replace(profile, sleep=msgspec.structs.replace(profile.sleep, level=2))


def _levels(pool: PoolConfig, root: Value) -> Iterator[Fault]:
    """Mistakes of level 1: a level that is not written is 2 here."""
    for name, profile in pool.sidecar.models.items():
        path = ("sidecar", "models", name, "sleep", "level")
        if profile.sleep is not None and profile.sleep.level == 1 and _says(root, path):
            yield Fault(path, "1", "2, at which the engines of a pool sleep")


def _says(value: Value, path: tuple[str, ...]) -> bool:
    for step in path:
        if step not in (value.fields or {}):
            return False
        _, value = (value.fields or {})[step]
    return True


def _of_nodes(config: SidecarConfig) -> Iterator[Fault]:
    """Mistakes of fields that are each node's own, or have to be the same on all."""
    if config.id is not None:
        yield Fault(("sidecar", "id"), config.id, "null: each is called as Ray calls its node")
    if config.gpus != "all":
        yield Fault(("sidecar", "gpus"), "a list", "all: a sidecar holds every GPU that Ray counts on its node")
    if config.token_file is None:
        yield Fault(("sidecar", "token_file"), "nothing", "a token, for gateways reach every node over the network")
    if config.listen.host not in (LOOPBACK, EVERYWHERE):
        expected = f"127.0.0.1:{config.listen.port}, or 0.0.0.0:{config.listen.port} for each node's own address"
        yield Fault(("sidecar", "listen"), str(config.listen), expected)
    if config.relay is not None and config.relay.listen.host != EVERYWHERE:
        expected = f"0.0.0.0:{config.relay.listen.port}: each listens at its node's own address"
        yield Fault(("sidecar", "relay"), str(config.relay.listen), expected)
    addresses = config.engine_addresses
    if addresses is not None and addresses.sockets is not None:
        expected = "null for sockets beside each node's files, or ports of 127.0.0.1"
        yield Fault(("sidecar", "engine_addresses"), str(addresses), expected)
    for field, name in (("state_file", config.state_file), ("log_dir", config.log_dir)):
        if name.startswith("/"):
            yield Fault(("sidecar", field), name, "a name without a / before it: each node has a folder of its own")


def _engines(pool: PoolConfig) -> Iterator[Fault]:
    """Mistakes of the numbers of engines: a profile that is not there, a name that cannot be."""
    models = pool.sidecar.models
    if not isinstance(pool.engines_per_node, int):
        for name in pool.engines_per_node:
            if name not in models:
                expected = "a profile of sidecar.models"
                yield Fault(("engines_per_node", name), f"the profile {name}", expected, nearest(name, models))
    for name in models:
        for copy in pool.copies(name):
            if copy != name and (copy in models or len(copy) > LONGEST_NAME):
                why = "there is one already" if copy in models else f"more than {LONGEST_NAME} characters"
                yield Fault(("sidecar", "models", name), f"{copy} for one of its engines: {why}", "another name")
