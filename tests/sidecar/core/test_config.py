"""Sidecar's file: defaults, units, and the message for every mistake."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gateway.shared.addresses import is_loopback
from sidecar.core.addresses import ELSEWHERE, Address, AddressPool, EngineAddress
from sidecar.core.config import MAX_BYTES, InvalidFile, RelaySettings, SidecarConfig, decode, explain, warnings
from sidecar.core.flags import FLAGS, OWNED, OWNED_VARIABLES, VARIABLES
from sidecar.core.profile import LOAD_TIMEOUT, EngineSettings, KvMemory, Profile, Sleep, Warmup
from tests.config_files import problems_of, structs_of

EXAMPLE = Path(__file__).parents[3] / "sidecar" / "cli" / "example.yaml"
A = "models: {a: {model_path: /m}}\n"
ANOTHER = "expected another than models.a has, or its model_path, tokenizer_path and context_length"


def of(profile: str, more: str = "") -> str:
    """A file with one model `a`, whose profile says `profile` too; on line 1."""
    return f"models: {{a: {{model_path: /m, {profile}}}}}\n{more}"


def problems(text: str | bytes) -> list[str]:
    return problems_of(decode, text, "s.yaml")


# -- what is right ----------------------------------------------------------------------------------------------------


def test_a_long_stall_needs_no_longer_timeout_unless_one_is_told() -> None:
    assert decode(b"models:\n  a: {model_path: /m, load_stall: 2h}\n").models["a"].load_timeout == LOAD_TIMEOUT


def test_models_alone_are_a_file() -> None:
    config = decode(A.encode())
    assert config == SidecarConfig(models={"a": Profile(model_path="/m")})
    assert (str(config.listen), config.engine_addresses, config.gpus) == ("127.0.0.1:8002", None, "all")
    assert config.models["a"].sleep == Sleep(level=1, after=None)
    assert (config.models["a"].load_stall, config.models["a"].load_timeout) == (300.0, 3600.0)


def test_a_merge_key_brings_what_the_mapping_does_not_say_itself() -> None:
    found = decode(b"""
models:
  a: &a {model_path: /m/a, pin: true, max_starvation: 10s}
  b: {<<: *a, model_path: /m/b}
  c: {<<: [{pin: false}, *a], model_path: /m/c}
""").models
    assert [(each.model_path, each.pin, each.max_starvation) for each in found.values()] == [
        ("/m/a", True, 10.0),
        ("/m/b", True, 10.0),
        ("/m/c", False, 10.0),
    ]
    with pytest.raises(InvalidFile, match=r"2: models.a.<<: found a merge of what is no mapping"):
        decode(b"models:\n  a: {<<: [b], model_path: /m}")


def test_engines_of_one_model_may_share_its_name() -> None:
    config = decode(
        b"models: {a-1: {model_path: /m, served_name: a}, a-2: {model_path: /m, served_name: a, pin: true}}"
    )
    assert [config.served_name(name) for name in config.models] == ["a", "a"]


def test_a_file_says_everything_in_units() -> None:
    config = decode(
        b"""
id: Box-1
gpus: [0, 1, 3]
gateways: ["http://127.0.0.1:8001", "https://[fd00::1]:8001/"]
listen: 10.0.0.5:8002
token_file: t
order_token_file: o
relay: {listen: 10.0.0.5:8003, certificate_file: c.pem}
engine_addresses: 9000-9001
engine: /opt/vllm/bin/python
host_memory_for_sleep: 1.5GiB
models:
  a: {model_path: org/a, served_name: org/A, context_length: 8k, gpu_memory: 45%, sleep: {level: 2, after: 90s},
      stop_after: 2h, tensor_parallel: 2, gpus: [3, 0], warmup: {requests: 0}, load_timeout: 10m, max_starvation: 2m}
  b.2:
    {model_path: /b.gguf, tokenizer_path: /b, trust_remote_code: true, gpu_memory: {kv: 8GiB}, sleep: null, pin: true,
     engine: {device: cpu}, environment: {OMP_NUM_THREADS: 4},
     flags: {enforce-eager: true, max-num-seqs: 8, dtype: bfloat16, revision: 1.0, lora-modules: [x=/x],
             hf-overrides: {a: [1]}}}
"""
    )
    a, b = config.models.values()
    assert (config.id, config.gpus, config.host_memory_for_sleep) == ("Box-1", (0, 1, 3), 3 * 2**29)
    assert config.gateways == ("http://127.0.0.1:8001", "https://[fd00::1]:8001/")
    assert (config.listen, config.engine_addresses) == (Address("10.0.0.5", 8002), AddressPool(9000, 9001))
    assert config.relay == RelaySettings(listen=Address("10.0.0.5", 8003), certificate_file="c.pem")
    assert (a.context_length, a.gpu_memory, a.sleep) == (8000, 0.45, Sleep(level=2, after=90.0))
    assert (a.stop_after, a.gpus, a.warmup, a.load_timeout) == (7200.0, (3, 0), Warmup(requests=0), 600.0)
    assert (b.gpu_memory, b.sleep, b.pin, b.trust_remote_code) == (KvMemory(kv=8 * 2**30), None, True, True)
    assert b.flags == {
        "enforce-eager": True,
        "max-num-seqs": 8,
        "dtype": "bfloat16",
        "revision": 1.0,
        "lora-modules": ["x=/x"],
        "hf-overrides": {"a": [1]},
    }
    assert [config.served_name(name) for name in config.models] == ["org/A", "b.2"]
    assert [config.engine_of(name) for name in config.models] == [
        EngineSettings(python="/opt/vllm/bin/python"),
        EngineSettings(device="cpu"),
    ]
    assert decode(explain(config).encode()) == config


def test_engines_on_sockets_and_simulated_ones() -> None:
    config = decode(f"{A}engine_addresses: unix:/run/weir\nengine: {{simulated: h100-8b}}".encode())
    assert (config.engine_addresses, config.engine) == (
        AddressPool(sockets="/run/weir"),
        EngineSettings(simulated="h100-8b"),
    )
    assert decode(explain(config).encode()) == config


def test_engines_listen_on_sockets_of_this_user_wherever_gateways_are() -> None:
    local = 'token_file: t\ngateways: ["http://127.0.0.1:8001", "https://localhost", "http://[::1]:8001/"]\n'
    for text in (A, A + local):
        config = decode(text.encode())
        assert config.pool("/etc/weir") == AddressPool(sockets="/etc/weir/sidecar-engines")
        assert list(warnings(config)) == []
    far = decode(f'{A}token_file: t\ngateways: ["http://10.0.0.9:8001"]\nrelay: 0.0.0.0:8003\n'.encode())
    assert far.pool("/etc/weir") == AddressPool(sockets="/etc/weir/sidecar-engines")
    beside = decode(f"{A}state_file: /var/lib/weir/n/state".encode())
    assert beside.pool("/etc/weir") == AddressPool(sockets="/var/lib/weir/n/sidecar-engines")
    long = config.pool("/" + "d" * 90)
    assert (long.sockets or "").startswith(ELSEWHERE)
    assert long == config.pool("/" + "d" * 90) != config.pool("/" + "d" * 91)


def test_a_state_file_that_is_no_name_is_told_where_the_engines_sockets_would_be_beside_it() -> None:
    (said,) = problems(f"{A}state_file: [1]")
    assert "state_file: found a list" in said


def test_ports_are_warned_of_and_most_where_models_may_sleep() -> None:
    (who,) = warnings(decode(f"{A}engine_addresses: 8100-8199".encode()))
    assert "every user of this machine" in who
    assert "and of a vLLM's development routes (VLLM_SERVER_DEV_MODE)" in who
    for never in ("sleep: null", "pin: true"):
        awake = f"models: {{a: {{model_path: /a, {never}}}}}\nengine_addresses: 8100-8199"
        (who,) = warnings(decode(awake.encode()))
        assert "DEV_MODE" not in who
    assert list(warnings(decode(f"{A}engine_addresses: unix:/run/weir".encode()))) == []


RELAYED = f'{A}token_file: t\norder_token_file: o\ngateways: ["https://10.0.0.9:8001", "http://127.0.0.1:1"]\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RELAYED + "relay: {listen: 0.0.0.0:8003, certificate_file: c}", []),
        (RELAYED + "relay: 127.0.0.1:8003", []),
        (RELAYED + "relay: 0.0.0.0:8003", ["relay: prompts and the order token cross the network in the clear"]),
        (
            RELAYED.replace("https:", "http:") + "relay: {listen: 0.0.0.0:8003, certificate_file: c}",
            ["gateways: the report token crosses the network to http://10.0.0.9:8001 in the clear"],
        ),
        (
            RELAYED + "relay: {listen: 0.0.0.0:8003, certificate_file: c}\nlisten: 10.0.0.5:8002",
            ["listen: 10.0.0.5:8002 has no TLS, so the order token crosses the network in the clear"],
        ),
        (
            RELAYED.replace("order_token_file: o\n", "") + "relay: {listen: 0.0.0.0:8003, certificate_file: c}",
            ["order_token_file: without it each sidecar's token gives orders to all others"],
        ),
    ],
)
def test_tokens_that_cross_a_network_in_the_clear_are_warned_of(text: str, expected: list[str]) -> None:
    found = list(warnings(decode(text.encode())))
    assert len(found) == len(expected), found
    for line, begins in zip(found, expected, strict=True):
        assert line.startswith(begins)


def test_reports_need_a_token() -> None:
    (found,) = problems(A + 'gateways: ["http://127.0.0.1:1"]')
    assert found.endswith(
        "token_file: found nothing, expected the token of its gateways: sidecar.token, which `sidecar init` writes"
    )


def test_the_commented_example_is_good_and_shows_every_field() -> None:
    data = EXAMPLE.read_bytes()
    config = decode(data, EXAMPLE.name)
    assert decode(explain(config).encode()) == config
    kinds = structs_of(SidecarConfig)
    assert {SidecarConfig, RelaySettings, Profile, Sleep, Warmup, EngineSettings, KvMemory} == kinds
    fields = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    assert {name for name in fields if f"{name}:" not in data.decode()} == set()


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        ("8100-8100", AddressPool(first=8100, last=8100)),
        ("1-65535", AddressPool(1, 65_535)),
        ("unix:/run/weir", AddressPool(sockets="/run/weir")),
        ("unix:/", AddressPool(sockets="/")),
    ],
)
def test_a_pool_of_addresses_is_written_as_it_is_read(text: str, pool: AddressPool) -> None:
    assert (AddressPool.parse(text), str(pool)) == (pool, text)


def test_ports_may_be_written_with_the_address_that_they_are_of() -> None:
    assert AddressPool.parse("127.0.0.1:8100-8199") == AddressPool(8100, 8199)


@pytest.mark.parametrize(
    "text",
    [
        "8199-8100",
        "0-9",
        "8100",
        "1-65536",
        "0.0.0.0:1-2",
        "unix:run",
        "unix:",
        "a b:1-2",
        "8100-8199 ",
    ],
)
def test_what_is_no_pool_of_addresses(text: str) -> None:
    assert AddressPool.parse(text) is None


def test_where_an_engine_listens() -> None:
    ports, sockets = AddressPool(9000, 9001), AddressPool(sockets="/run/weir")
    assert (ports.ports, sockets.ports) == ((9000, 9001), ())
    assert EngineAddress(port=9000).url == "http://127.0.0.1:9000"
    assert sockets.on_socket("a").url == "unix:///run/weir/a.sock"
    assert AddressPool(sockets="/").on_socket("a") == EngineAddress(uds="/a.sock")


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("Localhost", True), ("10.0.0.1", False), ("h", False)],
)
def test_loopback_hosts(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_no_name_is_both_allowed_and_the_sidecars() -> None:
    assert set(FLAGS) & set(OWNED) == set()
    assert VARIABLES & set(OWNED_VARIABLES) == set()


def test_a_level_that_a_model_cannot_sleep_at_is_warned_of() -> None:
    lora = "models: {a: {model_path: /a, sleep: {level: 2}, flags: {enable-lora: true}}, b: {model_path: /b}}"
    (found,) = warnings(decode(lora.encode()))
    assert found.startswith("models.a.sleep: no sleep at level 2, since vLLM does not load LoRA adapters again")


# -- what is wrong ----------------------------------------------------------------------------------------------------

ADDRESS = "the sidecar gives every engine its address, from engine_addresses"
NO = "expected no such flag:"
KEY = "an engine's routes for sleeping ask for no key, so its address is its guard (engine_addresses)"
GPUS = (
    "tensor parallelism on one machine alone is supported (tensor_parallel counts its GPUs, gpus names them); more "
    "engines of a model are more profiles with one served_name"
)
FIELDS = (
    "model_path, tokenizer_path, served_name, aliases, adapters, context_length, trust_remote_code, tensor_parallel, "
    "gpus, gpu_memory, sleep, stop_after, pin, max_starvation, warmup, load_stall, load_timeout, "
    "engine, kv_transfer, flags, environment"
)
TOP = (
    "version, id, gpus, gateways, token_file, order_token_file, ca_file, listen, relay, engine_addresses, engine, "
    "host_memory_for_sleep, state_file, log_dir, models"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the reader, as policies have it
        ("", ["1: found no models, expected models: a mapping"]),
        ("a: [", ["1: found a YAML error (expected the node content, but found '<stream end>', while parsing a flow "]),
        (A + A, ["2: models: found 'models' a second time (first on line 1), expected each field once"]),
        (A + "version: 2", ["2: version: found '2', expected 1"]),
        (A + "gpu: all", [f"2: found unknown field 'gpu', expected one of {TOP} (did you mean gpus?)"]),
        ("models: {}", ["1: models: found no model, expected at least one: what the sidecar may run"]),
        (
            "engine_addresses: 9000-9999\nmodels:\n" + "".join(f"  m{n}: {{model_path: /m}}\n" for n in range(257)),
            ["2: models: found 257 models, expected at most 256: as many as a report to a gateway holds"],
        ),
        (
            "models:\n  A/b: {model_path: /m}",
            ["2: models: found the name 'A/b', expected a lower-case name of letters, digits, _ . and -"],
        ),
        (
            "models:\n  a: {modelpath: /m}",
            [
                f"2: models.a: found unknown field 'modelpath', expected one of {FIELDS} (did you mean model_path?)",
            ],
        ),
        # one field
        (
            "models: {a: {model_path: --port}}",
            ["1: models.a.model_path: found '--port', expected a folder, a file or the model's id on a hub"],
        ),
        (
            of("gpu_memory: 8GiB"),
            [
                "1: models.a.gpu_memory: found '8GiB', expected auto or a share such as 80%, at least 2%, at most 100% "
                "or a mapping with kv"
            ],
        ),
        (of("sleep: {level: 3}"), ["1: models.a.sleep.level: found '3', expected 1 or 2"]),
        (
            of("sleep: {after: 5}"),
            [
                "1: models.a.sleep.after: found '5', expected a time such as 250ms, 10s, 5m, at least 1s, at most 30d "
                "(did you mean 5s?)"
            ],
        ),
        (
            of("tensor_parallel: 0"),
            ["1: models.a.tensor_parallel: found '0', expected a number such as 256, 200k, 1M, at least 1, at most 64"],
        ),
        (of("flags: [a]"), ["1: models.a.flags: found a list, expected a mapping"]),
        (
            A + "listen: 8002",
            ["2: listen: found '8002', expected HOST:PORT such as 127.0.0.1:8002"],
        ),
        (
            A + "listen: h:65536",
            ["2: listen: found 'h:65536', expected HOST:PORT such as 127.0.0.1:8002"],
        ),
        (
            A + "engine_addresses: 0.0.0.0:8100-8199",
            [
                "2: engine_addresses: found '0.0.0.0:8100-8199', expected ports of 127.0.0.1 such as "
                "8100-8199, or a folder for sockets such as unix:/run/weir"
            ],
        ),
        (
            A + 'token_file: t\ngateways: ["http://h:8001/fleet"]',
            [
                "3: gateways[0]: found 'http://h:8001/fleet', expected the control port of a gateway: http://HOST:PORT "
                "or https://HOST:PORT"
            ],
        ),
        # GPUs
        (A + "gpus: []", ["2: gpus: found no GPU, expected all, or a list of at least one"]),
        (A + "gpus: [0, 0]", ["2: gpus: found a GPU twice, expected each GPU once"]),
        (of("gpus: [0, 0]"), ["1: models.a.gpus: found a GPU twice in [0, 0], expected each GPU once"]),
        (
            of("gpus: [0], tensor_parallel: 2"),
            ["1: models.a.gpus: found 1 in [0], expected as many as tensor_parallel says, 2"],
        ),
        (
            of("gpus: [1, 7], tensor_parallel: 2", "gpus: [0, 1]"),
            ["1: models.a.gpus[1]: found the GPU 7, expected one of the sidecar's own: 0, 1"],
        ),
        (
            of("tensor_parallel: 4", "gpus: [0, 1]"),
            ["1: models.a.tensor_parallel: found 4, expected at most the number of the sidecar's GPUs, 2"],
        ),
        # idle
        (
            of("pin: true, stop_after: 1h, sleep: {after: 5m}"),
            [
                "1: models.a.stop_after: found 1h, expected null: a pinned model is always ready",
                "1: models.a.sleep.after: found 5m, expected null: a pinned model is always ready",
            ],
        ),
        (
            of("stop_after: 5m, sleep: {after: 10m}"),
            ["1: models.a.stop_after: found 5m, expected more than sleep.after, 10m, or it would never sleep"],
        ),
        (
            of("load_timeout: 2m"),
            ["1: models.a.load_timeout: found 2m, expected at least load_stall, 5m"],
        ),
        # names
        (
            "models:\n  a: {model_path: /m}\n  b: {model_path: /n, served_name: a}",
            [f"3: models.b.served_name: found the served name a, {ANOTHER}"],
        ),
        (
            "models:\n  a: {model_path: /m, served_name: b}\n  b: {model_path: /m, context_length: 8k}",
            [f"3: models.b: found the served name b, {ANOTHER}"],
        ),
        (
            "models:\n  a: {model_path: /m}\n  b: {model_path: /n, aliases: [c, a], adapters: {c: /l}}",
            [
                "3: models.b.aliases[1]: found the name 'a', expected a name that is not one of models.a already",
                "3: models.b.adapters.c: found the name 'c', expected a name that is not one of models.b already",
            ],
        ),
        (
            f"models: {{a: {{model_path: /m, aliases: [{', '.join(map(str, range(65)))}]}}}}",
            ["1: models.a.aliases: found 65 names, expected at most 64: as many as a report to a gateway holds"],
        ),
        (
            of("adapters: {x: /l}, flags: {enable-lora: true, max-loras: 3, lora-modules: [y]}"),
            [
                "1: models.a.flags.enable-lora: found adapters as well, expected one of them",
                "1: models.a.flags.lora-modules: found adapters as well, expected one of them",
            ],
        ),
        (
            "engine: {simulated: h100-8b}\nmodels: {a: {model_path: /m, adapters: {x: /l}}}",
            ["2: models.a.adapters: found adapters of a simulated engine, expected none: it has no weights"],
        ),
        # engines
        (
            of("engine: {python: p, simulated: s}", "engine: {python: p, simulated: s}"),
            [
                "1: models.a.engine.simulated: found python as well, expected one of them: a simulated engine is "
                "no vLLM",
                "2: engine.simulated: found python as well, expected one of them: a simulated engine is no vLLM",
            ],
        ),
        # addresses
        (
            A + "listen: 0.0.0.0:8002",
            ["2: listen: found 0.0.0.0:8002, which other machines can reach, expected a token_file beside it"],
        ),
        (
            A + 'token_file: t\ngateways: ["https://h:1", "https://h:1/"]\nrelay: 0.0.0.0:1',
            ["3: gateways[1]: found https://h:1/ again (as in gateways[0]), expected each gateway once"],
        ),
        (
            A + 'token_file: t\ngateways: ["http://127.0.0.1:1", "http://h:1"]',
            [
                "1: relay: found nothing, expected the address at which http://h:1 reaches this machine, such as "
                "0.0.0.0:8003"
            ],
        ),
        (A + "relay: 0.0.0.0:8003", ["2: relay: found 0.0.0.0:8003, expected a token_file beside it"]),
        (
            A + "token_file: t\nrelay: {listen: 0.0.0.0:8002, key_file: k}\nengine_addresses: 8002-8003",
            [
                "3: relay: found port 8002, which is listen's, expected a port of its own",
                "3: relay.key_file: found a key alone, expected its certificate_file beside it",
                "4: engine_addresses: found port 8002, which is listen's, expected ports of their own",
                "4: engine_addresses: found port 8002, which is relay's, expected ports of their own",
            ],
        ),
        (
            A + "engine_addresses: 8000-8099\nlisten: 127.0.0.1:8002",
            ["2: engine_addresses: found port 8002, which is listen's, expected ports of their own"],
        ),
        (
            "models: {a: {model_path: /a}, b: {model_path: /b}}\nengine_addresses: 1-1",
            ["2: engine_addresses: found fewer ports (1) than models (2), expected a port for each model"],
        ),
        (
            f"{A}engine_addresses: unix:/{'d' * 99}\n".replace("{a:", "{abc:"),
            [
                "2: engine_addresses: found a path of 109 bytes for the socket of abc, expected at most 107 bytes: a "
                "shorter folder or name"
            ],
        ),
        # flags and variables
        (of("flags: {api-key: k}"), [f"1: models.a.flags.api-key: found the flag 'api-key', {NO} {KEY}"]),
        (of("flags: {port: 1}"), [f"1: models.a.flags.port: found the flag 'port', {NO} {ADDRESS}"]),
        (of("flags: {--uds: x}"), [f"1: models.a.flags.--uds: found the flag '--uds', {NO} {ADDRESS}"]),
        (of("flags: {host: x}"), [f"1: models.a.flags.host: found the flag 'host', {NO} {ADDRESS}"]),
        (
            of("flags: {pipeline_parallel_size: 2}"),
            [f"1: models.a.flags.pipeline_parallel_size: found the flag 'pipeline_parallel_size', {NO} {GPUS}"],
        ),
        (
            of("environment: {HIP_VISIBLE_DEVICES: 0}"),
            [
                "1: models.a.environment.HIP_VISIBLE_DEVICES: found the variable HIP_VISIBLE_DEVICES, expected no such "
                "variable: GPUs of NVIDIA alone are supported, not of AMD and Intel"
            ],
        ),
        (
            of("flags: {kv-transfer-config: {kv_connector: NixlConnector, kv_role: kv_producer}}"),
            [
                "1: models.a.flags.kv-transfer-config.kv_role: found kv_producer, expected kv_both: kv_transfer says "
                "that an engine only reads prompts for others, or only answers"
            ],
        ),
        (
            of("kv_transfer: prefill, sleep: null"),
            [
                "1: models.a.kv_transfer: found prefill, expected pin: true too: no call would start an engine that "
                "answers none"
            ],
        ),
        (
            of("kv_transfer: decode"),
            [
                "1: models.a.kv_transfer: found decode, expected sleep: null, or pin: true: NIXL has registered the KV "
                "cache, which an engine asleep gives back"
            ],
        ),
        (
            of("kv_transfer: both, sleep: null, flags: {runner: pooling, kv-transfer-config: {kv_connector: X}}"),
            [
                "1: models.a.kv_transfer: found both, expected null: a pooling model keeps no KV cache",
                "1: models.a.flags.kv-transfer-config: found kv_transfer as well, expected one of them",
            ],
        ),
        (
            of("environment: {VLLM_NIXL_SIDE_CHANNEL_PORT: '1'}"),
            [
                "1: models.a.environment.VLLM_NIXL_SIDE_CHANNEL_PORT: found the variable VLLM_NIXL_SIDE_CHANNEL_PORT, "
                "expected no such variable: the sidecar sets it for models that exchange KV caches (kv_transfer)"
            ],
        ),
        (
            of("flags: {max-model-len: 8}"),
            [
                "1: models.a.flags.max-model-len: found the flag 'max-model-len', expected no such flag: "
                "context_length says it"
            ],
        ),
        (
            of("flags: {no-enable-sleep-mode: true}"),
            [
                "1: models.a.flags.no-enable-sleep-mode: found the flag 'no-enable-sleep-mode', "
                "expected no such flag: sleep says it"
            ],
        ),
        (
            of("flags: {max-num-seqs: x, enforce-eager: 1, dtype: -x, hf-overrides: [1], lora-modules: a, seed: }"),
            [
                "1: models.a.flags.max-num-seqs: found 'x', expected a number",
                "1: models.a.flags.enforce-eager: found '1', expected true or false",
                "1: models.a.flags.dtype: found '-x', expected text that does not begin with -",
                "1: models.a.flags.hf-overrides: found '[1]', expected a mapping",
                "1: models.a.flags.lora-modules: found 'a', expected a list of text and numbers that do not "
                "begin with -",
                "1: models.a.flags.seed: found nothing, expected a number",
            ],
        ),
        (
            of("gpu_memory: 45%", "engine: {device: cpu}"),
            [
                "1: models.a.gpu_memory: found 45%, expected auto, or {kv: 4GiB}: on CPU there is no GPU to have a "
                "share of"
            ],
        ),
        (
            of("gpu_memory: {kv: 1536MiB}, engine: {device: cpu}"),
            [
                "1: models.a.gpu_memory.kv: found 1.50 GiB, expected whole GiB such as 1GiB: vLLM on CPU cannot be "
                "told anything else"
            ],
        ),
        (
            of("gpu_memory: {kv: 1GiB}, environment: {VLLM_CPU_KVCACHE_SPACE: 2}, engine: {device: cpu}"),
            ["1: models.a.environment.VLLM_CPU_KVCACHE_SPACE: found gpu_memory as well, expected one of them"],
        ),
        (
            of("environment: {VLLM_SERVER_DEV_MODE: 1, CUDA_VISIBLE_DEVICES: 0, VLLM_API_KEY: k}"),
            [
                "1: models.a.environment.VLLM_SERVER_DEV_MODE: found the variable VLLM_SERVER_DEV_MODE, expected "
                "no such "
                "variable: the sidecar sets it for models that may sleep (sleep)",
                "1: models.a.environment.CUDA_VISIBLE_DEVICES: found the variable CUDA_VISIBLE_DEVICES, expected "
                "no such "
                "variable: the sidecar sets it from the model's GPUs (gpus)",
                "1: models.a.environment.VLLM_API_KEY: found the variable VLLM_API_KEY, "
                f"expected no such variable: {KEY}",
            ],
        ),
    ],
)
def test_every_mistake_gets_exactly_its_line(text: str, expected: list[str]) -> None:
    found = problems(text)
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        whole = f"s.yaml:{start}"
        assert line == whole if not start.endswith(" ") else line.startswith(whole)


def test_what_is_no_flag_is_answered_with_those_there_are_and_the_nearest() -> None:
    (found,) = problems(of("flags: {max_num_seq: 8}"))
    assert found.startswith(
        "s.yaml:1: models.a.flags.max_num_seq: found the flag 'max_num_seq', expected one of async-"
    )
    assert found.endswith(" more (did you mean max-num-seqs?)")
    (found,) = problems(of("environment: {PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True}"))
    assert "does not go with vLLM's sleep mode" in found
    (found,) = problems(of("environment: {VLLM_ATTENTION_BACKENDS: x}"))
    assert found.endswith(" more (did you mean VLLM_ATTENTION_BACKEND?)")


@pytest.mark.parametrize("fields", ["kv_transfer: both, sleep: null", "kv_transfer: prefill, pin: true"])
def test_engines_that_exchange_kv_caches_do_not_sleep(fields: str) -> None:
    profile = decode(of(fields).encode()).models["a"]
    assert (profile.sleeps, profile.transfer) == (None, "nixl-tp1")


def test_a_file_that_is_too_long_is_not_read() -> None:
    assert problems(b"#" * (MAX_BYTES + 1)) == ["s.yaml:1: found 262145 bytes, expected at most 262144 bytes"]
