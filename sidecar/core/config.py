"""Configuration of a sidecar, as one frozen tree: its GPUs, its gateways, and the models it may run.

Reading YAML gives all of it, or every problem. The reader is the gateway's, so that both files answer mistakes alike.
An absent field has its default. File names are relative to the file itself.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from gateway.shared.addresses import is_loopback
from gateway.shared.files.checked import UNREAD, Fault, InvalidFile, Path, Reading, needed, readable, shortened
from gateway.shared.files.kinds import Text
from gateway.shared.files.reference import reference_of
from gateway.shared.files.schema import schema_of, text_of
from gateway.shared.files.units import Bytes
from gateway.shared.files.yaml_file import MAX_BYTES, read_file, written
from sidecar.core.addresses import LONGEST_SOCKET, Address, AddressPool, own_sockets
from sidecar.core.profile import Bounds, EngineSettings, FileName, GpuIndex, Profile, engine_faults, faults, on_cpu
from sidecar.core.sleep import note

__all__ = ["MAX_BYTES", "InvalidFile", "SidecarConfig", "decode", "explain"]

MAX_MODELS = 256
MOST_NAMES = 64  # aliases, and adapters, of one profile: as many as a report to a gateway holds
_LEAD = """\
Every field of a sidecar's file, its values and its default. `sidecar check --reference` writes this page.

`sidecar init` writes a commented file, `sidecar check FILE` finds every mistake, and `sidecar check FILE --explain`
prints all values. File names are relative to the file. [The sidecar](sidecar.md) says what the fields do together."""

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


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The port by which gateways on other machines reach the engines and may have a model made ready.

    `listen`: Address of the port; with 0.0.0.0 each gateway gets the address that its reports come from.
    `certificate_file`: Certificate with its chain, in PEM; null: plain HTTP, which the network can read.
    `key_file`: Key of the certificate; null: in certificate_file.
    """

    shorthand: ClassVar[str] = "listen"

    listen: Address
    certificate_file: FileName | None = None
    key_file: FileName | None = None


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one machine's sidecar.

    `version`: Version of this format.
    `id`: Name of this machine for gateways and metrics; null: its host name.
    `gpus`: GPUs that the sidecar may use, numbered as by nvidia-smi.
    `gateways`: Control ports that get reports.
    `token_file`: File with the report token, which the sidecar shows gateways.
    `order_token_file`: File with the order token, which control API and relay ask for; null: the report token.
    `ca_file`: Authorities of the certificates of gateways at https://, in PEM; null: the system's.
    `listen`: Address of the control API.
    `relay`: Port for gateways on other machines; null: all gateways are here.
    `engine_addresses`: Folder for engines' unix sockets, or ports of 127.0.0.1; null: a folder of this user alone.
    `engine`: Program that runs the models.
    `host_memory_for_sleep`: Host memory for the weights of sleeping models; auto: half of the machine's.
    `state_file`: File with the sidecar's engines and measured sizes, for its next start.
    `log_dir`: Folder with a file of output for each model.
    `models`: Models that may run, by profile name.
    """

    version: Literal[1] = 1
    id: SidecarName | None = None
    gpus: Literal["all"] | tuple[GpuIndex, ...] = "all"
    gateways: tuple[GatewayUrl, ...] = ()
    token_file: FileName | None = None
    order_token_file: FileName | None = None
    ca_file: FileName | None = None
    listen: Address = Address("127.0.0.1", 8002)
    relay: RelaySettings | None = None
    engine_addresses: AddressPool | None = None
    engine: EngineSettings = EngineSettings()
    host_memory_for_sleep: Literal["auto"] | Annotated[Bytes, Bounds(ge=0, le=1024**5)] = "auto"
    state_file: FileName = "sidecar.state"
    log_dir: FileName = "sidecar-logs"
    models: Mapping[ProfileName, Profile]

    def pool(self, folder: str) -> AddressPool:
        """Addresses that engines get; `folder`: of the sidecar's file. No two sidecars share a state file, so beside it
        no other has sockets."""
        if self.engine_addresses is not None:
            return self.engine_addresses
        needed(self.state_file)
        return own_sockets(posixpath.dirname(posixpath.join(folder, self.state_file)), self.models)

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
    """The reference as docs/sidecar-file.md holds it."""
    return reference_of(SidecarConfig, "Sidecar file reference", _LEAD, "shown by `--explain`")


def explain(config: SidecarConfig) -> str:
    """The config as YAML, every default written out; it decodes to an equal one."""
    return written(config, SidecarConfig)


def faults_of(config: SidecarConfig) -> Iterator[Fault]:
    """Everything that keeps a well-formed config from being used; of one that could not be read in all its parts, what
    the others tell."""
    engine = engine_faults(config.engine, ("engine",))
    parts = _number(config), engine, _machine(config), _reach(config), _open(config), _relay(config), _pool(config)
    yield from readable(*parts)
    served: dict[str, str] = {}
    for name, profile in config.models.items():
        own = faults(profile, ("models", name)), _on_this_machine(config, profile, name), _on_cpu(config, name)
        yield from readable(*own, _simulated(config, name), _served(config, name, served))
    yield from _name_faults(dict(pair for name in config.models for pair in readable(_named(config, name))))


def _named(config: SidecarConfig, name: str) -> Iterator[tuple[str, tuple[str, Profile]]]:
    yield name, (config.served_name(name), config.models[name])


def _number(config: SidecarConfig) -> Iterator[Fault]:
    if not config.models:
        yield Fault(("models",), "no model", "at least one: what the sidecar may run")
    elif len(config.models) > MAX_MODELS:
        found = f"{len(config.models)} models"
        yield Fault(("models",), found, f"at most {MAX_MODELS}: as many as a report to a gateway holds")


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


def _relay(config: SidecarConfig) -> Iterator[Fault]:
    """Mistakes of the way by which other machines reach engines."""
    relay, far = config.relay, far_gateways(config)
    if relay is None:
        if far:
            expected = f"the address at which {far[0]} reaches this machine, such as 0.0.0.0:8003"
            yield Fault(("relay",), "nothing", expected)
        return
    if config.token_file is None and config.order_token_file is None:
        yield Fault(("relay",), str(relay.listen), "a token_file beside it")
    if relay.listen.port == config.listen.port:
        yield Fault(("relay",), f"port {config.listen.port}, which is listen's", "a port of its own")
    if relay.key_file is not None and relay.certificate_file is None:
        yield Fault(("relay", "key_file"), "a key alone", "its certificate_file beside it")


def is_local(gateway: str) -> bool:
    """Whether a gateway, by its URL, is certainly on this machine."""
    return is_loopback(urlsplit(gateway).hostname or "")


def far_gateways(config: SidecarConfig) -> list[str]:
    """The gateways that may be on other machines."""
    return [url for url in config.gateways if url is not UNREAD and not is_local(url)]


def warnings(config: SidecarConfig) -> Iterator[str]:
    """Warnings of settings that are legal and unwise."""
    yield from _in_the_clear(config)
    notes = ((name, note(profile, None)) for name, profile in config.models.items())
    yield from (f"models.{name}.sleep: {words}" for name, words in notes if words)
    pool = config.pool("/")
    if pool.sockets is None:
        here = "every user of this machine, and every web page in a browser on it,"
        sleepers = ", ".join(name for name, profile in config.models.items() if profile.sleeps is not None)
        routes = f", and of {sleepers} vLLM's development routes (VLLM_SERVER_DEV_MODE)" if sleepers else ""
        yield f"engine_addresses: {here} can use engines at {pool} without a key{routes}: unix sockets keep them away"


def _in_the_clear(config: SidecarConfig) -> Iterator[str]:
    """Yield a warning for each token or prompt that crosses a network unencrypted, and for a token that more sidecars
    know than need it."""
    listen, relay = config.listen, config.relay
    for url in far_gateways(config):
        if url.startswith("http:"):
            yield f"gateways: the report token crosses the network to {url} in the clear: https:// or a tunnel hides it"
    if not is_loopback(listen.host):
        why = "the order token crosses the network in the clear: 127.0.0.1 will do, as gateways elsewhere use `relay`"
        yield f"listen: {listen} has no TLS, so {why}"
    if relay is not None and relay.certificate_file is None and not is_loopback(relay.listen.host):
        yield "relay: prompts and the order token cross the network in the clear: certificate_file hides them"
    if relay is not None and config.order_token_file is None:
        yield "order_token_file: without it each sidecar's token gives orders to all others that gateways call"


def _pool(config: SidecarConfig) -> Iterator[Fault]:
    """Every model needs an address of its own, for one that sleeps keeps its."""
    pool = config.pool("/")
    if pool.sockets is None:
        if len(pool.ports) < len(config.models):
            found = f"fewer ports ({len(pool.ports)}) than models ({len(config.models)})"
            yield Fault(("engine_addresses",), found, "a port for each model")
        taken = {"listen": config.listen} | ({} if config.relay is None else {"relay": config.relay.listen})
        for field, address in taken.items():
            if address.port in pool.ports:
                yield Fault(("engine_addresses",), f"port {address.port}, which is {field}'s", "ports of their own")
        return
    longest = max(config.models, key=len, default="")
    length = len((pool.on_socket(longest).uds or "").encode())
    if length > LONGEST_SOCKET:
        found = f"a path of {length} bytes for the socket of {longest}"
        yield Fault(("engine_addresses",), found, f"at most {LONGEST_SOCKET} bytes: a shorter folder or name")


# -- names that calls may use -----------------------------------------------------------------------------------------

# A served name may be that of several profiles, which are engines of one model then, and so may their aliases and the
# adapters that are alike.
Meanings = dict[str, tuple[Hashable, str]]  # by name: the meaning, and the profile that has it first


def _name_faults(served: dict[str, tuple[str, Profile]]) -> Iterator[Fault]:
    """Names with two meanings, and too many of them. `served`: by profile, its served name and its settings."""
    meanings: Meanings = {model: (("model", model), profile) for profile, (model, _) in reversed(served.items())}
    for name, (model, profile) in served.items():
        at = ("models", name)
        yield from readable(*(_others(at, field, model, profile, meanings) for field in ("aliases", "adapters")))


def _others(at: Path, field: str, model: str, profile: Profile, meanings: Meanings) -> Iterator[Fault]:
    """Mistakes of the other names in a field of the profile at `at`."""
    names = profile.aliases if field == "aliases" else profile.adapters
    if len(names) > MOST_NAMES:
        expected = f"at most {MOST_NAMES}: as many as a report to a gateway holds"
        yield Fault((*at, field), f"{len(names)} names", expected)
    for index, name in enumerate(names):
        meaning = ("alias", model) if field == "aliases" else ("adapter", model, profile.adapters[name])
        known, first = meanings.setdefault(name, (meaning, str(at[-1])))
        if known != meaning:
            expected = f"a name that is not one of models.{first} already"
            yield Fault((*at, field, index if field == "aliases" else name), f"the name {shortened(name)}", expected)
