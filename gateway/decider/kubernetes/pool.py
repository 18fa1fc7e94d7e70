"""Pods of an InferencePool, read from the Kubernetes API's objects: which are engines, and at which addresses. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

MOST = 4096  # pods of a pool
_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class BadObject(ValueError):
    """An object of the API server that cannot be read; the message says why."""


class _TargetPort(msgspec.Struct):
    number: _Port


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: list[_TargetPort]


class _Pool(msgspec.Struct):
    spec: _PoolSpec


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    pod_ip: str = msgspec.field(name="podIP", default="")
    phase: str = ""
    conditions: tuple[_Condition, ...] = ()


class Pod(msgspec.Struct):
    """Pod, as far as an engine's address needs to be known."""

    metadata: _Metadata
    status: _PodStatus = _PodStatus()

    @property
    def address(self) -> str | None:
        """Address of a pod that is ready and stays; None: it gets no calls."""
        status = self.status
        ready = any(each.type == "Ready" and each.status == "True" for each in status.conditions)
        if not ready or status.phase != "Running" or self.metadata.deletion_timestamp is not None:
            return None
        try:
            address = ipaddress.ip_address(status.pod_ip)
        except ValueError:
            return None
        return f"[{address}]" if address.version == 6 else str(address)


class PodList(msgspec.Struct):
    """Answer to a list of pods."""

    metadata: _Metadata
    items: list[Pod]


class WatchEvent(msgspec.Struct):
    """Line of a watch."""

    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


class Gone(Exception):
    """The API server has forgotten the version that a watch goes on from: list anew."""


class Pool(msgspec.Struct, frozen=True):
    """Selector of the pool's pods, and the ports on which their engines listen."""

    labels: tuple[tuple[str, str], ...]
    ports: tuple[int, ...]

    @classmethod
    def read(cls, body: bytes) -> Pool:
        """Read an InferencePool. Raises BadObject."""
        spec = decoded(body, _Pool).spec
        labels = tuple(sorted(spec.selector.match_labels.items()))
        if not labels or not spec.target_ports:
            raise BadObject("the InferencePool has no selector.matchLabels or no targetPorts")
        return cls(labels, tuple(each.number for each in spec.target_ports))

    @property
    def selector(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.labels)


class Pods:
    """Pods of a pool as they are now. `version` is where a watch goes on."""

    def __init__(self, body: bytes) -> None:
        """Take a list. Raises BadObject."""
        listed = decoded(body, PodList)
        self.version = listed.metadata.resource_version
        self._pods = {pod.metadata.name: pod for pod in listed.items[:MOST]}

    def take(self, line: bytes) -> None:
        """Take one line of a watch. Raises Gone, BadObject."""
        event = decoded(line, WatchEvent)
        if event.type == "ERROR":
            raise Gone(bytes(event.object)[:200].decode("utf-8", "replace"))
        pod = decoded(bytes(event.object), Pod)
        self.version = pod.metadata.resource_version or self.version
        if event.type == "DELETED":
            self._pods.pop(pod.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED") and (pod.metadata.name in self._pods or len(self._pods) < MOST):
            self._pods[pod.metadata.name] = pod

    def urls(self, ports: tuple[int, ...]) -> Mapping[str, str]:
        """Names of ready engines by their URLs."""
        several = len(ports) > 1
        return {
            f"http://{pod.address}:{port}": f"{name}-{port}" if several else name
            for name, pod in sorted(self._pods.items())
            if pod.address is not None
            for port in ports
        }


def decoded(body: bytes, kind: type[Any]) -> Any:
    """Read an object. Raises BadObject."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadObject(f"the API server's answer cannot be read: {error}") from error
