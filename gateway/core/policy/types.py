"""Types of policy fields. Each carries its unit, its bounds, and its description for messages and the JSON Schema."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gateway.core.engines.origin import NO_ROUTE, meant_url
from gateway.shared.files.kinds import Text
from gateway.shared.files.units import ABOVE, TIMES, Bytes, Count, Factor, Seconds, Share
from gateway.shared.tokens import MOST_TOKENS, TOKEN_LENGTH

Bounds = msgspec.Meta
Moment = Annotated[Seconds, Bounds(ge=0.001, le=86_400)]
Positive = Annotated[Count, Bounds(ge=1, le=1_000_000_000)]
Tokens = Annotated[Count, Bounds(ge=1, le=10**15)]
Buffer = Annotated[Bytes, Bounds(ge=1024, le=1024**3)]
Weight = Annotated[Factor, Bounds(ge=0.01, le=1000)]
Part = Annotated[Share, Bounds(ge=0, le=1)]
Times = Annotated[float, TIMES, Bounds(ge=0.01, le=1000)]
Above = Annotated[int, ABOVE, Bounds(ge=0, le=1_000_000_000)]
# Class and tenant names are metric labels and header values; model names appear in both too.
Name = Annotated[str, Text(r"[a-z][a-z0-9_-]{0,31}", "a lower-case name of letters, digits, _ and -")]
TenantName = Annotated[str, Text(r"[a-z0-9][a-z0-9_.-]{0,63}", "a lower-case name of letters, digits, _ . and -")]
ModelName = Annotated[str, Text(r"[!-~]{1,200}", "a model name without spaces")]
FileName = Annotated[str, Text(r"[^\x00-\x1f]{1,4096}", "a file name")]


class NameOf(msgspec.Struct, frozen=True):
    """Mark of names that a field of the policy defines; of `engines`: models that these list, if all of them do."""

    field: Literal["classes", "tenants", "engines"]


class Secret(msgspec.Struct, frozen=True):
    """Mark of names of files with one word alone in them. `kind` says what it is; `least`: characters that it has;
    `most`: words, one a line, where one takes the place of another."""

    kind: str
    least: int = 1
    most: int = 1


ClassName = Annotated[Name, NameOf("classes")]
TenantOfPolicy = Annotated[TenantName, NameOf("tenants")]
EngineModel = Annotated[ModelName, NameOf("engines")]
KeyFile = Annotated[FileName, Secret("key")]
PasswordFile = Annotated[FileName, Secret("password")]
TokenFile = Annotated[FileName, Secret("token", TOKEN_LENGTH, MOST_TOKENS)]
SaltFile = Annotated[FileName, Secret("secret", TOKEN_LENGTH)]
HostName = Annotated[str, Text(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", "a host's name in lower case, no port")]
ObjectName = Annotated[
    str, Text(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", "a name of an object in Kubernetes, in lower case")
]
KeyHash = Annotated[
    str, Text(r"[0-9a-f]{64}", "the SHA-256 of a key: 64 digits, 0-9 and a-f; see gateway key add", secret=True)
]
OF_NOTHING = hashlib.sha256().hexdigest()  # digest of the empty string, as `echo -n $UNSET | sha256sum` prints it
_NETWORK = r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?:/[0-9]{1,2})?|[0-9a-f:]{2,39}(?:/[0-9]{1,3})?"


def _is_network(text: str) -> bool:
    """Whether a text is an address or a block. Bits beyond a block's prefix would trust more hosts than was meant:
    10.1.2.3/8 is sixteen million."""
    try:
        return text == "unix" or bool(ipaddress.ip_network(text))
    except ValueError:
        return False


def _block(text: str) -> str | None:
    """The block of an address or a block, whatever bits are set beyond its prefix; None: it is neither."""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return None


Network = Annotated[
    str,
    Text(
        rf"unix|{_NETWORK}",
        "an IP address, a CIDR block without bits beyond its prefix, or unix",
        valid=_is_network,
        mend=_block,
    ),
]
Block = Annotated[
    str, Text(_NETWORK, "an IP address or a CIDR block without bits beyond its prefix", valid=_is_network, mend=_block)
]
# As browsers write it: lower case, no path, no default port.
WebOrigin = Annotated[
    str,
    Text(
        r"\*|https?://(?:[a-z0-9._-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?",
        "https://HOST, https://HOST:PORT in lower case without a path, or * for all",
    ),
]
WebPage = Annotated[
    str,
    Text(
        r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?(?:/[!-~]*)?", "a web page, https://HOST/PATH"
    ),
]
EngineUrl = Annotated[
    str,
    Text(
        NO_ROUTE + r"(?:https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~%/-]*)?"
        r"|unix:///[^\x00-\x20?#]+)",
        "http://HOST:PORT, https://HOST:PORT or unix:///PATH, without /v1",
        mend=meant_url,
    ),
]
EventsUrl = Annotated[
    str,
    Text(
        r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}|ipc://[^\x00-\x20]+", "tcp://HOST:PORT or ipc://PATH"
    ),
]
StoreUrl = Annotated[
    str,
    Text(
        r"(?:valkey|redis)s?://(?:[a-z][a-z0-9_-]{0,31}@)?(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[0-9]{1,4})?",
        "valkey://HOST:PORT/DATABASE or valkey://USER@HOST:PORT, or valkeys:// for TLS, without a password",
    ),
]
HostPort = Annotated[
    str, Text(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", "HOST:PORT, an IPv6 address in brackets")
]
# Kinds of forwarded routes, as in gateway.core.request.routes.
RouteKind = Literal[
    "chat",
    "completion",
    "response",
    "message",
    "embedding",
    "rerank",
    "score",
    "pooling",
    "classify",
    "tokenize",
    "audio",
]

_PERIODS = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86_400.0}
_PERIOD_WORDS = {"s": ("sec", "second"), "min": ("m", "minute"), "h": ("hr", "hour"), "day": ("d",)}


class Rate(msgspec.Struct, frozen=True):
    """`amount` per `period` seconds, written `600/min`. `parse` and `str` are each other's reverse."""

    pattern: ClassVar[str] = r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kM]?)/(s|min|h|day)"
    what: ClassVar[str] = "a whole number above 0 over time such as 10/s, 600/min, 200k/h, 2M/day"

    amount: int
    period: float

    @classmethod
    def parse(cls, text: str) -> Rate | None:
        """The rate; None where the text is none, or its amount is not a whole number of at least 1."""
        match = re.fullmatch(cls.pattern, text)
        if match is None:
            return None
        amount = Decimal(match[1]) * {"": 1, "k": 1_000, "M": 1_000_000}[match[2]]
        return cls(int(amount), _PERIODS[match[3]]) if amount >= 1 and amount == int(amount) else None

    @classmethod
    def meant(cls, text: str) -> Iterator[str]:
        """Rates that a malformed text may mean: the period under another word, such as `10/minute`."""
        match = re.fullmatch(r"([0-9.]+[kM]?)\s*(?:/|per)\s*([a-z]+?)s?", text.strip())
        for period in _PERIODS if match is not None else ():
            if match is not None and (match[2] == period or match[2] in _PERIOD_WORDS[period]):
                yield f"{match[1]}/{period}"

    def __str__(self) -> str:
        scale, suffix = next(
            (scale, suffix) for scale, suffix in ((1_000_000, "M"), (1_000, "k"), (1, "")) if not self.amount % scale
        )
        period = next(name for name, seconds in _PERIODS.items() if seconds == self.period)
        return f"{self.amount // scale}{suffix}/{period}"


JsonName = Annotated[str, Text(r"[^\x00-\x1f]{1,200}", "the name of a JSON field")]
Json = Any  # a value of a JSON document, as YAML writes it
