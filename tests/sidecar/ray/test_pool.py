"""Pool file: the resulting file of each node, the message for every mistake, and a node's sidecar."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from loadtest.processes import until
from sidecar.cli import main
from sidecar.control.client import ControlClient, SidecarTokens
from sidecar.core import config
from sidecar.core.profile import Sleep
from sidecar.core.status import Status
from sidecar.process import process_family
from sidecar.ray.node import Node
from sidecar.ray.pool import PoolConfig, decode, explain, file_of, for_node, node_id
from sidecar.residency.state_file import StateFile
from sidecar.serve.assembly import owner
from sidecar.serve.operator_log import say
from tests.config_files import problems_of, structs_of
from tests.sidecar.laid_out import lay_out

EXAMPLE = Path(__file__).parents[3] / "sidecar" / "cli" / "pool.yaml"
TOKEN = "of-sixteen-characters"  # noqa: S105 # a test's own
S = "sidecar: {token_file: t, models: {a: {model_path: /m}}}\n"


def of(more: str = "", profile: str = "") -> str:
    """A file with one model `a`; `sidecar` says `more` too, on line 1."""
    return f"sidecar: {{token_file: t, models: {{a: {{model_path: /m, {profile}}}}}, {more}}}\n"


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_example_is_good_and_says_every_field() -> None:
    pool = decode(EXAMPLE.read_bytes())
    assert decode(explain(pool).encode()) == pool
    written = EXAMPLE.read_text()
    own = structs_of(PoolConfig) - structs_of(config.SidecarConfig)
    fields = {field.name for struct in own for field in msgspec.structs.fields(struct)}
    assert [field for field in fields if f"{field}:" not in written] == []


def test_each_node_has_a_file_of_its_own() -> None:
    pool = decode(
        b"folder: /w\nengines_per_node: {a: 2}\n"
        b"sidecar: {token_file: ../t, order_token_file: o, relay: 0.0.0.0:9000, state_file: s, models: {\n"
        b"  a: {model_path: ./m, served_name: org/A, sleep: {after: 5m}}, b: {model_path: n, sleep: null}}}\n"
    )
    ours = for_node(pool, node_id("10.0.0.7"), "10.0.0.7")
    assert config.decode(config.explain(ours).encode()) == ours
    assert ours.relay is not None
    assert (ours.id, str(ours.listen), str(ours.relay.listen)) == ("10.0.0.7", "127.0.0.1:8002", "10.0.0.7:9000")
    assert ours.pool("/w").sockets == "/w/10.0.0.7/sidecar-engines"
    assert (ours.token_file, ours.order_token_file) == ("10.0.0.7/token", "10.0.0.7/order-token")
    assert (ours.state_file, ours.log_dir) == ("10.0.0.7/s", "10.0.0.7/sidecar-logs")
    assert [(name, ours.served_name(name)) for name in ours.models] == [("a-1", "org/A"), ("a-2", "org/A"), ("b", "b")]
    assert [profile.sleep for profile in ours.models.values()] == [Sleep(level=2, after=300.0)] * 2 + [None]
    assert ours.models["a-2"].model_path == "./m"
    assert file_of(pool, "10.0.0.7") == "/w/10.0.0.7.yaml"
    sixth = for_node(pool, "n", "fd00::7")
    assert str(sixth.relay and sixth.relay.listen) == "[fd00::7]:9000"
    exposed = for_node(decode(of("listen: 0.0.0.0:9000").encode()), "n", "10.0.0.7")
    assert (str(exposed.listen), exposed.relay, exposed.order_token_file) == ("10.0.0.7:9000", None, None)


def test_names_of_nodes_become_ids() -> None:
    assert [node_id(name) for name in ("gpu box/1", "fd00::7", "::")] == ["gpu-box-1", "fd00--7", "node"]


def test_a_node_without_a_gpu_has_a_sidecar_only_where_no_model_needs_one() -> None:
    assert decode(S.encode()).on_gpus
    assert not decode(of("engine: {device: cpu}").encode()).on_gpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1", ["1: found no sidecar, expected sidecar: a mapping with "]),
        (f"{S}folder: here", ["2: folder: found 'here', expected a folder's full name, on every node"]),
        (f"{S}ray: {{adress: auto}}", ["2: ray: found unknown field 'adress', expected one of address, namespace "]),
        (f"{S}engines_per_node: 0", ["2: engines_per_node: found '0', expected "]),
        (
            f"{S}engines_per_node: {{b: 2}}",
            ["2: engines_per_node.b: found the profile b, expected a profile of sidecar.models"],
        ),
        ("sidecar: {token_file: t, models: {}}", ["1: sidecar.models: found no model, expected at least one: "]),
        ("sidecar: {models: {a: {model_path: /m}}}", ["1: sidecar.token_file: found nothing, expected a token, "]),
        (of("id: x"), ["1: sidecar.id: found x, expected null: each is called as Ray calls its node"]),
        (of("gpus: [0]"), ["1: sidecar.gpus: found a list, expected all: "]),
        (of("listen: 10.0.0.1:9000"), ["1: sidecar.listen: found 10.0.0.1:9000, expected 127.0.0.1:9000, or "]),
        (of("relay: 10.0.0.1:9000"), ["1: sidecar.relay: found 10.0.0.1:9000, expected 0.0.0.0:9000: each listens "]),
        (of("engine_addresses: unix:/e"), ["1: sidecar.engine_addresses: found unix:/e, expected null for sockets "]),
        (
            of("engine_addresses: 10.0.0.1:1-9"),
            ["1: sidecar.engine_addresses: found '10.0.0.1:1-9', "],
        ),
        (of("log_dir: /l"), ["1: sidecar.log_dir: found /l, expected a name without a / before it: "]),
        (of("", "sleep: {level: 1}"), ["1: sidecar.models.a.sleep.level: found 1, expected 2, at which the engines "]),
        # what is wrong with any sidecar's file, of copies once and by the name that is written
        (
            of("engine_addresses: 9000-9000") + "engines_per_node: 2",
            ["1: sidecar.engine_addresses: found fewer ports (1) than models (2), expected a port for each model"],
        ),
        (
            of("", "pin: true, stop_after: 1h") + "engines_per_node: 3",
            ["1: sidecar.models.a.stop_after: found 1h, expected null: a pinned model is always ready"],
        ),
        (
            "engines_per_node: {a: 2}\nsidecar:\n  token_file: t\n  models:\n    a: {model_path: /m}\n"
            "    a-1: {model_path: /m, served_name: a}",
            ["5: sidecar.models.a: found a-1 for one of its engines: there is one already, expected another name"],
        ),
        (
            of("listen: nowhere, gpus: [0]"),
            ["1: sidecar.listen: found 'nowhere'", "1: sidecar.gpus: found a list, expected all"],
        ),
        (
            S.replace("{a:", "{" + "a" * 63 + ":") + "engines_per_node: 2",
            [f"1: sidecar.models.{'a' * 63}: found {'a' * 63}-{n} for one of its engines: more than " for n in (1, 2)],
        ),
    ],
)
def test_every_mistake_is_a_line(text: str, expected: list[str]) -> None:
    found = problems_of(decode, text, "p.yaml")
    assert len(found) == len(expected), found
    for line, begins in zip(found, expected, strict=True):
        assert line.startswith(f"p.yaml:{begins}")


def test_the_command_looks_at_a_pools_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(of("ca_file: of-the-nodes.pem"))
    assert main(("check", str(file))) == 2
    err = capsys.readouterr().err
    assert f"sidecar.token_file: found {tmp_path}/t: No such file or directory" in err
    assert "sidecar.ca_file" not in err
    assert main(("check", "--no-files", str(file))) == 0


def test_the_command_checks_a_file_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(of('id: x, relay: 0.0.0.0:1, gateways: ["http://h:99999"]'))
    port = tmp_path / "port.yaml"
    port.write_text(of('relay: 0.0.0.0:1, gateways: ["http://h:99999"]'))
    assert main(("check", "--no-files", str(EXAMPLE), str(bad), str(port))) == 2
    out, err = capsys.readouterr()
    assert out == f"{EXAMPLE}: ok\n"
    told = [line.split(": ") for line in err.splitlines() if ".yaml:" in line]
    unwise = [(parts[0], parts[2], parts[-2].endswith("in the clear")) for parts in told if parts[1] == "warning"]
    at = "the example is for a network of its own"
    assert unwise == [(f"{EXAMPLE}:26:3", "sidecar.gateways", True), (f"{EXAMPLE}:29:3", "sidecar.relay", True)], at
    wrong = [(parts[0].rpartition(":")[0], parts[1]) for parts in told if parts[1] != "warning"]
    assert wrong == [
        (f"{bad}:1", "sidecar.id"), (f"{bad}:1", "sidecar.gateways[0]"), (f"{port}:1", "sidecar.gateways[0]"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ['"sidecar": {id: x}', "{sidecar: {id: x}}", "folder: /w\nengines_per_node: 2"])
def test_the_command_knows_a_pool_however_it_is_written(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    assert main(("check", str(file))) == 2
    err = capsys.readouterr().err
    assert "sidecar" in err
    assert "unknown field" not in err


# -- a node, without a cluster ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_has_a_sidecar_and_engines_asleep_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path / "gpus", [80 << 30])
    monkeypatch.setenv("WEIR_SIMULATED_GPUS", str(tmp_path / "gpus"))
    monkeypatch.setenv("WEIR_SIMULATED_SPEED", "200")
    pool = decode(
        f"folder: {tmp_path}/w\nengines_per_node: {{a: 2}}\n"
        "sidecar: {token_file: t, order_token_file: o, listen: 127.0.0.1:18002, relay: 0.0.0.0:18003,\n"
        "  engine: {simulated: h100-8b},\n"
        "  models: {a: {model_path: /m, gpu_memory: 60%}, b: {model_path: /n, gpu_memory: 60%, sleep: null},\n"
        "           c: {model_path: /o, gpu_memory: {kv: 900GiB}}}}\n".encode()
    )
    ours = for_node(pool, "n", "127.0.0.9")
    file = Path(file_of(pool, "n"))
    node = Node(pool, "n", "127.0.0.9", SidecarTokens(report=("a" * 16,), order=(TOKEN,)))

    def engines() -> set[int]:
        return {pid for _, pid, _ in process_family.orphans(owner(ours, file.parent))}

    def asked() -> Status:
        return msgspec.json.decode(ControlClient(ours, (TOKEN,)).ask("GET", "/status"), type=Status)

    try:
        assert until(lambda: node.status().status is not None, 60.0) is not None, node.status()
        assert until(lambda: not node.status().creating, 60.0) is not None, node.status()
        assert [model.state for model in asked().models] == ["sleeping", "sleeping", "stopped", "error"], asked().models
        assert [m.sleep_level for m in asked().models] == [2, 2, 0, 0]
        assert (file.parent / "n" / "token").stat().st_mode & 0o777 == 0o600
        assert (file.parent / "n" / "order-token").stat().st_mode & 0o777 == 0o600
        first, made = asked().pid, engines()
        assert len(made) == 2
        node.renew(SidecarTokens(report=("a" * 16,), order=("b" * 16, TOKEN)))
        assert until(lambda: node.status().status is not None, 60.0) is not None, node.status()
        assert asked().pid == first, "the one before is accepted, and no sidecar was started again"
        ControlClient(ours, (TOKEN,)).ask("POST", "/models/a-1/ensure")
        assert until(lambda: asked().models[0].state == "running", 60.0) is not None
        # One that is killed before it has written down that a model is awake leaves one whose weights may not be there.
        state = StateFile(file.parent / ours.state_file, say)
        assert until(lambda: state.load().engines["a-1"].level == 0, 60.0) is not None
        os.kill(first, signal.SIGKILL)
        assert until(lambda: (now := node.status().status) is not None and now.pid != first, 60.0) is not None
        assert engines() == made
        assert [model.state for model in asked().models[:2]] == ["running", "sleeping"], "who runs is left running"
        assert node.end() == ""
        assert engines() == set()
        assert node.status().status is None
    finally:
        node.end()
        for pid in engines():
            os.kill(pid, signal.SIGKILL)
