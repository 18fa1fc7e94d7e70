"""The sidecars of a Ray cluster: real nodes on this machine, each with an address, GPUs and engines of its own.

Everything is a process: Ray's, the `sidecar ray` commands, the sidecars, their simulated engines, a gateway. `make
test-ray` installs Ray and runs this; without Ray it is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Gateway, free_port, get, until
from sidecar.core.config import decode
from sidecar.process import process_family
from sidecar.ray.pool import decode as decode_pool
from sidecar.ray.pool import for_node
from sidecar.serve.assembly import owner
from tests.beside import beside
from tests.e2e.children import post
from tests.sidecar.laid_out import lay_out

GIB = 1 << 30
TOKEN = "of-sixteen-characters"  # noqa: S105 # a test's own
NEW = "of-sixteen-others-too"
POLICY = """
fleet:
  poll: 100ms
  health: 200ms
  sidecars: {token_file: token, allow: [127.0.0.0/8], copies: 100ms}
budget: {max_concurrency: 2}
classes: {default: {ttft: 60s}}  # longer than a wake may take that was never seen
"""
POOL = """
ray: ADDRESS
folder: FOLDER/nodes
engines_per_node: {chat: 2}
sidecar:
  gateways: [GATEWAY]
  token_file: token
  listen: 127.0.0.1:PORT
  engine: {simulated: h100-8b}
  models:
    chat: {model_path: /m/chat, gpu_memory: 40%}
    other: {model_path: /m/other, gpu_memory: 40%, sleep: null}
"""
ABSENT = "Ray is not installed here: `make test-ray` installs it, in an environment of its own, and runs this"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings("default"),  # Ray's own warnings are not ours
    pytest.mark.skipif(find_spec("ray") is None and "WEIR_REQUIRE_RAY" not in os.environ, reason=ABSENT),
]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Machines:
    """A Ray cluster of a head without a GPU and of nodes with one each, and a gateway; `pool` is their file."""

    def __init__(self, folder: Path, temporary: str, cluster: Any, gateway: Gateway) -> None:
        self.folder = folder
        self.temporary = temporary
        self.cluster = cluster
        self.gateway = gateway
        self.pool = folder / "pool.yaml"
        address = cluster.address
        values = {"ADDRESS": address, "FOLDER": folder, "GATEWAY": f'"{gateway.control}"', "PORT": free_port()}
        text = POOL
        for name, value in values.items():
            text = text.replace(name, str(value))
        self.pool.write_text(text)

    def join(self, name: str, number: int) -> Any:
        """A node at 127.0.0.`number`, with one GPU."""
        gpus = self.folder / f"gpus-{name}"
        if not gpus.exists():
            lay_out(gpus, [80 * GIB])
        return self.cluster.add_node(
            num_cpus=1,
            num_gpus=1,
            node_name=name,
            node_ip_address=f"127.0.0.{number}",
            object_store_memory=80 * 1024 * 1024,
            env_vars={"WEIR_SIMULATED_GPUS": str(gpus), "WEIR_SIMULATED_SPEED": "200"},
        )

    def run(self, command: str, *more: str) -> tuple[int, str, str]:
        """Status and outputs of `sidecar ray`."""
        argv = [sys.executable, "-m", "sidecar.cli", "ray", command, "--config", str(self.pool), *more]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stdout, done.stderr

    def nodes(self) -> dict[str, Any]:
        """What each node's sidecar says of itself, by node; None: nothing yet."""
        code, out, err = self.run("status", "--json")
        assert code == 0, err
        rows = json.loads(out)
        assert all(row.keys() == {"name", "address", "gpus", "ray_id", "sidecar"} for row in rows)
        return {row["name"]: row["sidecar"]["status"] for row in rows}

    def models(self, node: str) -> dict[str, tuple[str, int]]:
        """State and sleep level of every profile of a node; none where it does not answer."""
        said = self.nodes().get(node) or {"models": []}
        return {model["profile"]: (model["state"], model["sleep_level"]) for model in said["models"]}

    def controller(self) -> int:
        """The pid of the pool's controller, a child of one of our nodes."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::Controller"):
                    parent = parent_of(int(entry.name))
                    if self.temporary.encode() in Path(f"/proc/{parent}/cmdline").read_bytes():
                        return int(entry.name)
        raise AssertionError("the pool has no controller")

    def engines(self, node: str) -> set[int]:
        """Pids of the engines of a node, whether or not it has a sidecar."""
        file = self.folder / "nodes" / f"{node}.yaml"
        if not file.exists():
            return set()
        return {pid for _, pid, _ in process_family.orphans(owner(decode(file.read_bytes()), file.parent))}

    def call(self) -> tuple[int, bytes]:
        """Status and body of a call for `chat`."""
        body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        status, _, answer = post(f"{self.gateway.url}/v1/chat/completions", body)
        return status, answer

    def served_at(self) -> set[str]:
        """The folders of the sockets that calls go to."""
        return {engine["url"].rpartition("/")[0] for engine in self.gateway.fleet()["engines"]}


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    from ray.cluster_utils import Cluster  # noqa: PLC0415 # absent where these tests are skipped

    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "token").write_text(TOKEN)
    short = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets have long names
    # A head names itself in /tmp/ray/ray_current_cluster, whatever its own folder is, and makes no folder for that.
    monkeypatch.setenv("RAY_TMPDIR", short)
    (Path(short) / "ray").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, short, ignore_errors=True)
        gateway = stack.enter_context(Gateway(tmp_path / "log", "--policy", f"{tmp_path}/policy.yaml", ready=False))
        head = {"num_cpus": 1, "num_gpus": 0, "node_name": "head", "include_dashboard": False, "temp_dir": short}
        cluster = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": 80 * 1024 * 1024})
        found = Machines(tmp_path, short, cluster, gateway)
        stack.callback(_end_engines, found)
        stack.callback(cluster.shutdown)
        yield found


def _end_engines(machines: Machines) -> None:
    """None is left, however the test went; a sidecar ends with its actor, which has ended with the cluster."""
    for node in ("a", "b", "c"):
        for pid in machines.engines(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert until(lambda node=node: not machines.engines(node), 120.0) is not None


def statuses(machines: Machines, token: str) -> list[int]:
    """The statuses of the answers of all nodes' control APIs to whoever shows this token."""
    port = decode_pool(machines.pool.read_bytes()).sidecar.listen.port
    return [get(f"http://127.0.0.{number}:{port}/status", token=token)[0] for number in (2, 3, 4)]


def asleep(machines: Machines, node: str) -> bool:
    """Whether a node has both engines of `chat`, asleep, and none of the model that does not sleep."""
    return machines.models(node) == {"chat-1": ("sleeping", 2), "chat-2": ("sleeping", 2), "other": ("stopped", 0)}


def test_every_node_has_a_sidecar_for_as_long_as_it_is_there(machines: Machines) -> None:
    machines.join("a", 2)
    b = machines.join("b", 3)
    code, out, err = machines.run("up")
    assert code == 0, (out, err)
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["a", "127.0.0.2"], ["b", "127.0.0.3"]]
    for node in ("a", "b"):
        assert until(lambda node=node: asleep(machines, node), 120.0) is not None, machines.run("status")
        assert len(machines.engines(node)) == 2
    models = json.loads(get(f"{machines.gateway.url}/v1/models")[1])["data"]
    assert sorted(model["id"] for model in models) == ["chat", "other"]
    status, answer = machines.call()
    assert status == 200, answer
    pool = decode_pool(machines.pool.read_bytes())
    pools = [for_node(pool, node, "127.0.0.2").pool(str(machines.folder / "nodes")) for node in ("a", "b")]
    assert machines.served_at() <= {f"unix://{each.sockets}" for each in pools}

    # A node joins.
    machines.join("c", 4)
    assert until(lambda: asleep(machines, "c"), 120.0) is not None, machines.run("status")

    # The file changes: each sidecar makes way for one with the new file, which takes the engines over.
    engines = {node: machines.engines(node) for node in "abc"}
    machines.pool.write_text(machines.pool.read_text().replace("    other:", "    another:"))
    code, out, err = machines.run("up")
    assert code == 0, (out, err)
    assert all("another" in machines.models(node) for node in "abc")
    assert {node: machines.engines(node) for node in "abc"} == engines

    # An actor is killed: its engines go on, and the next one has them.
    before, engines = machines.nodes()["a"], machines.engines("a")
    os.kill(parent_of(before["pid"]), signal.SIGKILL)

    def replaced() -> bool:
        now = machines.nodes()["a"]
        return now is not None and now["boot"] != before["boot"]

    assert machines.call()[0] == 200
    assert until(replaced, 120.0) is not None, machines.run("status")
    assert machines.engines("a") == engines
    assert all(state in ("sleeping", "running") for state, _ in list(machines.models("a").values())[:2])

    # The controller is killed: Ray starts it again, and it finds all as it was.
    before = machines.nodes()
    os.kill(machines.controller(), signal.SIGKILL)
    after = machines.nodes()
    assert {name: said["boot"] for name, said in after.items()} == {name: said["boot"] for name, said in before.items()}

    # A token takes the place of another: every sidecar has both, and none is started again.
    (machines.folder / "token").write_text(f"{NEW}\n{TOKEN}\n")
    code, out, err = machines.run("up")
    assert code == 0, (out, err)
    shown = [machines.folder / "nodes" / node / "token" for node in "abc"]
    assert until(lambda: all(file.read_text() == f"{NEW}\n{TOKEN}\n" for file in shown), 60.0) is not None
    for token in (NEW, TOKEN):
        assert until(lambda token=token: set(statuses(machines, token)) == {200}, 60.0) is not None, token
    after = machines.nodes()
    assert {name: said["boot"] for name, said in after.items()} == {name: said["boot"] for name, said in before.items()}
    assert machines.call()[0] == 200

    # A node dies; the others answer. It comes back as another one of the same name, to its engines.
    engines = machines.engines("b")
    machines.cluster.remove_node(b, allow_graceful=False)
    assert until(lambda: set(machines.nodes()) == {"a", "c"}, 120.0) is not None, machines.run("status")
    assert machines.call()[0] == 200
    assert machines.engines("b") == engines
    machines.join("b", 3)
    assert until(lambda: len(machines.models("b")) == 3, 120.0) is not None, machines.run("status")
    assert machines.engines("b") == engines

    # A second node of one name would have the first one's files.
    machines.join("a", 5)
    assert until(lambda: "another node of the cluster has its name" in machines.run("status")[1], 120.0) is not None

    code, out, err = machines.run("down")
    assert (code, out) == (0, "all sidecars of the pool have ended, with their engines\n"), err
    assert {node: machines.engines(node) for node in "abc"} == {"a": set(), "b": set(), "c": set()}
    code, _, err = machines.run("status")
    assert (code, err.count("there is no pool")) == (1, 1)


def test_a_model_that_is_full_on_one_node_wakes_on_another(machines: Machines) -> None:
    few = machines.pool.read_text().replace("gpu_memory: 40%}", "gpu_memory: 40%, flags: {max-num-seqs: 2}}", 1)
    machines.pool.write_text(few)
    for name, number in (("a", 2), ("b", 3)):
        machines.join(name, number)
    code, out, err = machines.run("up")
    assert code == 0, (out, err)
    for node in "ab":
        assert until(lambda node=node: asleep(machines, node), 120.0) is not None, machines.run("status")
    assert machines.call()[0] == 200
    with load(machines.gateway.url, 64):
        assert until(lambda: len(awake(machines)) >= 2, 120.0) is not None, machines.gateway.fleet()
        assert {node for node, _ in awake(machines)} == {"a", "b"}, "apart"
    assert machines.gateway.total("weir_copies_total", result="woken") >= 1
    code, _, err = machines.run("down")
    assert code == 0, err


def awake(machines: Machines) -> set[tuple[str, str]]:
    """Nodes and profiles whose engines may be given calls."""
    return {
        (sidecar["id"], model["profile"])
        for sidecar in machines.gateway.fleet()["sidecars"]
        for model in sidecar["models"]
        if model["state"] == "running" and model["pending"] is None
    }


@contextlib.contextmanager
def load(url: str, callers: int) -> Iterator[None]:
    """So many callers of `chat`, each with one long call after the other."""
    over = threading.Event()
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "chat", "messages": messages, "max_tokens": 16000, "ignore_eos": True}
    refused: list[int] = []

    def calls() -> None:
        while not over.is_set():
            status = post(f"{url}/v1/chat/completions", body)[0]
            if status not in (200, 503):  # 503: the queue is long, come back
                refused.append(status)

    with beside(*[calls] * callers):
        try:
            yield
        finally:
            over.set()
    assert refused == []
