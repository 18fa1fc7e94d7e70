"""Pool of sidecars on a Ray cluster, one on every node for as long as the node is there. Only this file imports Ray.

A controller, a detached actor that Ray starts again wherever it ends, compares the live nodes with the actors by name.
A node without an actor gets one, on that node and no other, with all GPUs that Ray counts there. An actor whose file is
no longer the pool's makes way for another. So nothing has to be remembered: a killed controller goes on, and a killed
actor is replaced. The next sidecar of a node takes over the engines that the one before has left.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sidecar.control.client import SidecarTokens
from sidecar.ray.node import END_WITHIN, Node, NodeStatus
from sidecar.ray.pool import Cluster, PoolConfig, explain, node_id
from sidecar.serve.operator_log import say

CONTROLLER = "pool"
LOOK_EVERY = 1.0  # seconds between two looks at the nodes
AGAIN = 0.2  # seconds between two tries of a command
ANSWER_WITHIN = 15.0  # seconds for an actor's answer
END_ALL_WITHIN = 3 * END_WITHIN  # seconds for all nodes at once, those whose actor has to be made first included
AT_ONCE = 8  # calls that an actor answers side by side: a slow one must not keep others from asking
NOT_PLACED = "Ray has not started its actor yet: are GPUs of the node held by others?"
TWICE = "another node of the cluster has its name: give each its own (ray start --node-name)"


class Unreachable(Exception):
    """No such cluster answers, or it has no pool; the message says which."""


class PoolNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster that should have a sidecar. `name`: as Ray calls it; `node`: its sidecar's id."""

    name: str
    node: str
    address: str
    gpus: int
    ray_id: str
    trouble: str = ""

    def actor(self, digest: str) -> str:
        """The name of its actor, for a pool of this digest. Started again, a node has another ray_id."""
        return f"node/{self.node}/{self.ray_id}/{digest}"


class Controller:
    """Follows the nodes of the cluster it runs in. `tokens`: of every node's sidecar."""

    def __init__(self, pool: PoolConfig, tokens: SidecarTokens) -> None:
        self._pool = pool
        self._tokens = tokens
        self._digest = hashlib.sha256(explain(pool).encode()).hexdigest()[:12]
        self._told: set[str] = set()  # actors that have these tokens
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nodes", daemon=True)
        self._thread.start()

    def status(self) -> list[tuple[PoolNode, NodeStatus]]:
        """Status of every node."""
        nodes = self._nodes()
        answers = self._answers([node for node in nodes if not node.trouble], "status", ANSWER_WITHIN)
        return [(node, _said(node, answers.get(node.ray_id, node.trouble))) for node in nodes]

    def down(self) -> dict[str, str]:
        """End all sidecars and their engines. What was in the way of that, by node; empty: nothing."""
        self._ended.set()
        self._thread.join()
        self._look()  # engines of a node whose actor has just ended need one that ends them
        nodes = {node.ray_id: node for node in self._nodes() if not node.trouble}
        # An actor that Ray has not started would not answer for as long as that takes.
        found = self._answers(list(nodes.values()), "status", ANSWER_WITHIN)
        there = [node for ray_id, node in nodes.items() if isinstance(found[ray_id], NodeStatus)]
        found |= self._answers(there, "end", END_ALL_WITHIN)
        for name in _names():
            if name.startswith("node/"):
                _kill(name)
        return {nodes[ray_id].name: str(trouble) for ray_id, trouble in found.items() if trouble}

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except RayError as error:
                say(f"the nodes cannot be followed: {error}")
            self._ended.wait(LOOK_EVERY)

    def _look(self) -> None:
        there = {name for name in _names() if name.startswith("node/")}
        wanted = {node.actor(self._digest): node for node in self._nodes() if not node.trouble}
        for name in there - set(wanted):
            say(f"{name} makes way")
            _kill(name)
        late = [node for name, node in wanted.items() if name in there - self._told]
        answers = self._answers(late, "renew", LOOK_EVERY, self._tokens)
        self._told |= {node.actor(self._digest) for node in late if answers[node.ray_id] is None}
        # Another one of the same node goes first: it has the GPUs.
        for name in set(wanted) - there:
            self._start_actor(name, wanted[name])

    def _nodes(self) -> list[PoolNode]:
        """Nodes that should have a sidecar; of two with one name, the one that has it already."""
        there = _names()
        alive = [node for node in ray.nodes() if node["Alive"]]
        found = [
            PoolNode(
                name=node["NodeName"],
                node=node_id(node["NodeName"]),
                address=node["NodeManagerAddress"],
                gpus=int(node["Resources"].get("GPU", 0)),
                ray_id=node["NodeID"],
            )
            for node in alive
        ]
        usable = [node for node in found if node.gpus or not self._pool.on_gpus]
        usable.sort(key=lambda node: (node.actor(self._digest) not in there, node.ray_id))
        seen: set[str] = set()
        nodes = []
        for node in usable:
            nodes.append(msgspec.structs.replace(node, trouble=TWICE if node.node in seen else ""))
            seen.add(node.node)
        return sorted(nodes, key=lambda node: (node.node, node.trouble))

    def _start_actor(self, name: str, node: PoolNode) -> None:
        say(f"{name} is started at {node.address}")
        actor = ray.remote(Node).options(
            name=name,
            lifetime="detached",
            num_cpus=0,
            num_gpus=node.gpus,
            max_concurrency=AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.ray_id, soft=False),
        )
        try:
            actor.remote(self._pool, node.node, node.address, self._tokens)
            self._told.add(name)
        except ValueError as error:  # the one that was killed still has the name
            say(f"{name} is not started: {error}")

    def _answers(self, nodes: list[PoolNode], what: str, within: float, *given: object) -> dict[str, Any]:
        """Answers of the actors of some nodes, all asked at once, or in words why one gives none; by ray_id."""
        asked = {}
        for node in nodes:
            try:
                asked[node.ray_id] = getattr(ray.get_actor(node.actor(self._digest)), what).remote(*given)
            except ValueError:
                asked[node.ray_id] = None
        until = time.monotonic() + within
        return {ray_id: _answer(ref, until) for ray_id, ref in asked.items()}


class Pool:
    """The pool of a cluster, as a command sees it; `with` connects. Raises Unreachable."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> Pool:
        try:
            ray.init(
                address=self._cluster.address,
                namespace=self._cluster.namespace,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Unreachable(f"no Ray cluster at {self._cluster.address}: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def up(self, pool: PoolConfig, tokens: SidecarTokens) -> None:
        """Have this pool, and no other. Returns once it has a controller. Raises Unreachable."""
        _kill(CONTROLLER)
        until = time.monotonic() + ANSWER_WITHIN
        while CONTROLLER in _names():
            if time.monotonic() > until:
                raise Unreachable("the controller of the pool before this one does not end")
            time.sleep(AGAIN)
        options = {"lifetime": "detached", "num_cpus": 0, "max_restarts": -1, "max_concurrency": AT_ONCE}
        ray.remote(Controller).options(name=CONTROLLER, **options).remote(pool, tokens)
        self.status()

    def status(self) -> list[tuple[PoolNode, NodeStatus]]:
        """Status of every node. Raises Unreachable."""
        found: list[tuple[PoolNode, NodeStatus]] = self._asked("status", 3 * ANSWER_WITHIN)
        return found

    def down(self) -> dict[str, str]:
        """End all of it. What was in the way, by node. Raises Unreachable."""
        left: dict[str, str] = self._asked("down", END_ALL_WITHIN + ANSWER_WITHIN)
        _kill(CONTROLLER)
        return left

    def _controller(self) -> Any:
        try:
            return ray.get_actor(CONTROLLER)
        except ValueError:
            where = f"in the namespace {self._cluster.namespace} of this cluster"
            raise Unreachable(f"there is no pool {where}: `sidecar ray up` makes one") from None

    def _asked(self, what: str, within: float) -> Any:
        """The controller's answer; one whose node has died is asked again where Ray has started it next."""
        until = time.monotonic() + within
        while True:
            left = until - time.monotonic()
            try:
                return ray.get(getattr(self._controller(), what).remote(), timeout=max(0.0, left))
            except RayError as error:
                if left <= 0 or not isinstance(error, RayActorError):
                    raise Unreachable(f"the pool's controller does not answer: {error}") from error
                time.sleep(AGAIN)


def _names() -> set[str]:
    """Actors of our namespace that have not ended."""
    return set(ray.util.list_named_actors())


def _kill(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name), no_restart=True)
    except ValueError:
        return  # it has ended


def _said(node: PoolNode, answer: Any) -> NodeStatus:
    return answer if isinstance(answer, NodeStatus) else NodeStatus(node=node.node, trouble=answer)


def _answer(ref: Any, until: float) -> Any:
    """Answer of an actor, or why it gives none."""
    if ref is None:
        return "its actor has ended, and the next one is on its way"
    try:
        return ray.get(ref, timeout=max(0.0, until - time.monotonic()))
    except GetTimeoutError:
        return NOT_PLACED
    except RayError as error:
        return f"its actor has ended: {str(error).splitlines()[0]}"
