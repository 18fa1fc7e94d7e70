"""Configuration of a sidecar, as one frozen tree: its GPUs, its gateways, and the models it may run.

Reading YAML gives all of it, or every problem. The reader is the gateway's, so that both files answer mistakes alike.
An absent field has its default. File names are relative to the file itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from gateway.shared.addresses import is_loopback
from gateway.shared.files.checked import UNREAD, Fault, InvalidFile, Reading, readable
from gateway.shared.files.findings import FORMATS
from gateway.shared.files.kinds import Text
from gateway.shared.files.reference import reference_of
from gateway.shared.files.schema import schema_of, text_of
from gateway.shared.files.units import Bytes
from gateway.shared.files.yaml_file import MAX_BYTES, read_file, written
from sidecar.core.addresses import LONGEST_SOCKET, Address, AddressPool, own_sockets
from sidecar.core.file.names import name_faults
from sidecar.core.profile import Bounds, EngineSettings, FileName, GpuIndex, Profile, engine_faults, faults, on_cpu
from sidecar.core.sleep import note

__all__ = ["FORMATS", "MAX_BYTES", "InvalidFile", "SidecarConfig", "decode", "explain"]

MAX_MODELS = 256
_LEAD = """\
Every field of a sidecar's file, with what it may hold and its default. Written by `sidecar check --reference`.

`sidecar init` writes a commented file to begin with, `sidecar check FILE` finds every mistake, and
`sidecar check FILE --explain` prints a file with all its defaults. File names are relative to the file itself.
[The sidecar](sidecar.md) says what the fields do together."""

SidecarName = Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "a name of letters, digits, _ . and -")]
# Part of paths in the control API, of file names and of metric labels.
ProfileName = Annotated[str, Text(r"[a-z0-9][a-z0-9_.-]{0,63}", "a lower-case name of letters, digits, _ . and -")]
GatewayUrl = Annotated[
    str,
    Text(
        r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?/?",
        "the control port of a gateway: http://HOST:PORT or https://HOST:PORT",
    ),
]


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator tells one machine's sidecar.

    `version`: of this format. `id`: how gateways and metrics call this machine; null: its host name. `gpus`: those it
    may use, numbered as nvidia-smi does. `gateways`: the control ports it reports to. `token_file`: the token that it
    shows gateways, and that its control API asks for, alone in a file. `listen`: of the control API.
    `engine_addresses`: the pool that engines listen on; null: unix sockets in a folder that is this user's alone, or,
    where a gateway is on another machine, ports 8100-8199. Whoever reaches an engine's port can put it to sleep, so
    ports belong on a network of gateways and engines alone. `engine`: what runs the models.
    `host_memory_for_sleep`: how much host memory the weights of sleeping models may fill; auto: half of the machine's.
    `state_file`: what it must know after a restart: which engines are its own, what each model was measured to take.
    `log_dir`: a file per model, of what its engine writes. `models`: what may run, by profile name.
    """

    version: Literal[1] = 1
    id: SidecarName | None = None
    gpus: Literal["all"] | tuple[GpuIndex, ...] = "all"
    gateways: tuple[GatewayUrl, ...] = ()
    token_file: FileName | None = None
    listen: Address = Address("127.0.0.1", 8002)
    engine_addresses: AddressPool | None = None
    engine: EngineSettings = EngineSettings()
    host_memory_for_sleep: Literal["auto"] | Annotated[Bytes, Bounds(ge=0, le=1024**5)] = "auto"
    state_file: FileName = "sidecar.state"
    log_dir: FileName = "sidecar-logs"
    models: Mapping[ProfileName, Profile]

    def pool(self, folder: str) -> AddressPool:
        """Addresses that engines get; `folder`: of the sidecar's file."""
        if self.engine_addresses is not None:
            return self.engine_addresses
        return AddressPool() if _far(self) else own_sockets(folder, self.models)

    def served_name(self, profile: str) -> str:
        """Name by which calls ask for the model of a profile. Raises KeyError where there is none."""
        return self.models[profile].served_name or profile

    def engine_of(self, profile: str) -> EngineSettings:
        """Settings of the engine of a profile. Raises KeyError where there is none."""
        return self.models[profile].engine or self.engine


def decode(data: bytes, name: str = "sidecar") -> SidecarConfig:
    """Read a YAML file. `name` is how messages call the file. Raises InvalidFile."""
    return read_config(data, name).good()


def read_config(data: bytes, name: str = "sidecar") -> Reading[SidecarConfig]:
    """The config as far as it can be read, with every problem of the file. Raises InvalidFile where it is no YAML."""
    reading = read_file(data, name, SidecarConfig)
    reading.judge(faults_of(reading.value))
    return reading


def schema_text() -> str:
    """The JSON Schema of a sidecar's file."""
    return text_of(schema_of(SidecarConfig, "Weir sidecar"))


def reference_text() -> str:
    """The reference as docs/sidecar-file.md holds it; the file at its end has one model."""
    one = decode(b"models: {llama-3-8b: {model_path: /models/llama-3-8b}}")
    return reference_of(SidecarConfig, "Sidecar file reference", _LEAD, explain(one))


def explain(config: SidecarConfig) -> str:
    """The config as YAML, every default written out; it decodes to an equal one."""
    return written(config, SidecarConfig)


def faults_of(config: SidecarConfig) -> Iterator[Fault]:
    """Everything that keeps a well-formed config from being used; of one that could not be read in all its parts, what
    the others tell."""
    yield from readable(
        _number(config), _engine(config), _machine(config), _reach(config), _open(config), _pool(config)
    )
    served: dict[str, str] = {}
    for name, profile in config.models.items():
        parts = faults(profile, ("models", name)), _on_this_machine(config, profile, name), _on_cpu(config, name)
        yield from readable(*parts, _simulated(config, name), _served(config, name, served))
    yield from name_faults(dict(pair for name in config.models for pair in readable(_named(config, name))))


def _named(config: SidecarConfig, name: str) -> Iterator[tuple[str, tuple[str, Profile]]]:
    yield name, (config.served_name(name), config.models[name])


def _number(config: SidecarConfig) -> Iterator[Fault]:
    if not config.models:
        yield Fault(("models",), "no model", "at least one: what the sidecar may run")
    elif len(config.models) > MAX_MODELS:
        found = f"{len(config.models)} models"
        yield Fault(("models",), found, f"at most {MAX_MODELS}: as many as a report to a gateway holds")


def _engine(config: SidecarConfig) -> Iterator[Fault]:
    yield from engine_faults(config.engine, ("engine",))


def _simulated(config: SidecarConfig, name: str) -> Iterator[Fault]:
    if config.models[name].adapters and config.engine_of(name).simulated is not None:
        yield Fault(("models", name, "adapters"), "adapters of a simulated engine", "none: it has no weights")


def _on_cpu(config: SidecarConfig, name: str) -> Iterator[Fault]:
    if config.engine_of(name).device == "cpu":
        yield from on_cpu(config.models[name], ("models", name))


def _served(config: SidecarConfig, name: str, served: dict[str, str]) -> Iterator[Fault]:
    profile = config.models[name]
    first = served.setdefault(config.served_name(name), name)
    if not _same_model(config.models[first], profile):
        field = ("models", name) if profile.served_name is None else ("models", name, "served_name")
        expected = f"another than models.{first} has, or its model_path, tokenizer_path and context_length"
        yield Fault(field, f"the served name {config.served_name(name)}", expected)


def _same_model(first: Profile, second: Profile) -> bool:
    """Whether calls may go to either: profiles of one served name are engines of one model."""
    fields = ("model_path", "tokenizer_path", "context_length")
    return all(getattr(first, field) == getattr(second, field) for field in fields)


def _machine(config: SidecarConfig) -> Iterator[Fault]:
    gpus = config.gpus
    if not gpus:
        yield Fault(("gpus",), "no GPU", "all, or a list of at least one")
    elif len(set(gpus)) < len(gpus) and gpus != "all":
        yield Fault(("gpus",), "a GPU twice", "each GPU once")


def _on_this_machine(config: SidecarConfig, profile: Profile, name: str) -> Iterator[Fault]:
    """Mistakes of models that ask for GPUs that the sidecar does not have."""
    if config.gpus == "all" or not config.gpus:
        return
    own = ", ".join(map(str, config.gpus))
    for index, gpu in enumerate(profile.gpus or ()):
        if gpu not in config.gpus:
            yield Fault(("models", name, "gpus", index), f"the GPU {gpu}", f"one of the sidecar's own: {own}")
    if profile.tensor_parallel > len(config.gpus):
        expected = f"at most the number of the sidecar's GPUs, {len(config.gpus)}"
        yield Fault(("models", name, "tensor_parallel"), str(profile.tensor_parallel), expected)


def _reach(config: SidecarConfig) -> Iterator[Fault]:
    """Mistakes of listeners that other machines can reach without a token."""
    seen: dict[str, int] = {}
    for index, url in enumerate(config.gateways):
        if url is UNREAD:
            continue
        first = seen.setdefault(url.rstrip("/"), index)
        if first != index:
            yield Fault(("gateways", index), f"{url} again (as in gateways[{first}])", "each gateway once")
        elif not _is_port(url):
            yield Fault(("gateways", index), url, "a port from 1 to 65535")


def _is_port(url: str) -> bool:
    """Whether the port of a URL, if it has one, can be."""
    port = re.search(r":([0-9]+)/?$", url)
    return port is None or 0 < int(port[1]) < 65536


def _open(config: SidecarConfig) -> Iterator[Fault]:
    if config.token_file is None and config.gateways:
        yield Fault(("token_file",), "nothing", "the token of its gateways: sidecar.token, which `sidecar init` writes")
    elif config.token_file is None and not is_loopback(config.listen.host):
        yield Fault(("listen",), f"{config.listen}, which other machines can reach", "a token_file beside it")


def _far(config: SidecarConfig) -> list[str]:
    """The gateways that may be on other machines."""
    return [url for url in config.gateways if not is_loopback(urlsplit(url).hostname or "")]


def warnings(config: SidecarConfig) -> Iterator[str]:
    """Warnings of settings that are legal and unwise."""
    notes = ((name, note(profile, None)) for name, profile in config.models.items())
    yield from (f"models.{name}.sleep: {words}" for name, words in notes if words)
    pool = config.pool("/")
    if pool.sockets is not None:
        return
    if config.engine_addresses is None:
        yield f"engine_addresses: {_far(config)[0]} may be another machine's, so engines listen on ports, {pool}"
    here = "every user of this machine, and every web page in a browser on it,"
    who = here if is_loopback(pool.host) else "whoever reaches them"
    yield f"engine_addresses: {who} can use engines at {pool} without a key: let a firewall keep all but gateways away"
    sleepers = ", ".join(name for name, profile in config.models.items() if profile.sleep is not None)
    if sleepers:
        routes = "vLLM's development routes (VLLM_SERVER_DEV_MODE) are open there too"
        yield f"engine_addresses: {sleepers} may sleep, so {routes}: for sleep, and for any method of its workers"


def _pool(config: SidecarConfig) -> Iterator[Fault]:
    """Every model needs an address of its own, for one that sleeps keeps its."""
    pool = config.pool("/")
    if pool.sockets is None:
        if len(pool.ports) < len(config.models):
            found = f"fewer ports ({len(pool.ports)}) than models ({len(config.models)})"
            yield Fault(("engine_addresses",), found, "a port for each model")
        if config.listen.port in pool.ports:
            yield Fault(("engine_addresses",), f"port {config.listen.port}, which is listen's", "ports of their own")
        return
    longest = max(config.models, key=len, default="")
    length = len((pool.on_socket(longest).uds or "").encode())
    if length > LONGEST_SOCKET:
        found = f"a path of {length} bytes for the socket of {longest}"
        yield Fault(("engine_addresses",), found, f"at most {LONGEST_SOCKET} bytes: a shorter folder or name")
