"""Address of an engine: `http://HOST:PORT[/BASE]`, `https://…` or `unix:///PATH`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

# What people copy from a client's base_url, or from an example call: these are the gateway's to add.
_ROUTES = r"/v1(?:/(?:models|completions|chat/completions|embeddings|messages|responses))?/?"
NO_ROUTE = rf"(?!.*{_ROUTES}$)"
_COPIED = re.compile(rf"(.*?){_ROUTES}")
_NO_SCHEME = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(?:/.*)?|localhost(?:/.*)?")
_SOCKET = re.compile(r"(?:unix:)?/+([^/].*)")
HOST = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?|[0-9a-f:.]*:[0-9a-f:.]*")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed engine URL. `unix` is the socket's path, None for TCP; `base_path` has no trailing slash."""

    url: str
    host: str
    port: int
    unix: str | None = None
    tls: bool = False
    base_path: str = ""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host if self.port == default else f"{host}:{self.port}"


def meant_url(text: str) -> str | None:
    """URL that was probably meant by text that is no engine's URL: without /v1, with a scheme; None without a guess."""
    meant = text.strip()
    if _NO_SCHEME.fullmatch(meant):
        meant = f"http://{meant}"
    elif _SOCKET.fullmatch(meant):
        meant = _SOCKET.sub(r"unix:///\1", meant)
    copied = _COPIED.fullmatch(meant)
    if copied is not None and "://" in copied[1]:
        meant = copied[1].rstrip("/")
    return None if meant == text else meant


def engine_id(url: str) -> str:
    """Id of an engine in metrics, logs and headers: its URL without the scheme."""
    return url.partition("://")[2].rstrip("/")


def url_fault(url: str) -> str | None:
    """Fault of an engine's URL, or the form expected instead; None if the URL is valid."""
    try:
        parse_origin(url)
    except ValueError as error:
        return str(error).removeprefix(f"{url!r}: ")
    return None


def parse_origin(url: str) -> Origin:
    """Raises ValueError saying what is wrong with `url`."""
    if any(char.isspace() or not char.isprintable() or not char.isascii() for char in url):
        raise ValueError(f"{url!r}: an engine's URL is printable ASCII without spaces")
    if url.startswith("unix:"):
        path = url.removeprefix("unix://")
        if path == url or not path.startswith("/") or len(path) > 107:
            raise ValueError(f"{url!r}: write unix:///PATH, an absolute path of at most 107 bytes")
        return Origin(url=url, host="localhost", port=80, unix=path)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = _hint(meant_url(url))
        raise ValueError(f"{url!r}: write http://HOST:PORT, https://HOST:PORT or unix:///PATH{hint}")
    if re.fullmatch(NO_ROUTE + ".*", url) is None:
        raise ValueError(f"{url!r}: write it without /v1, which is added to it{_hint(meant_url(url))}")
    if parts.username is not None or "?" in url or "#" in url:
        raise ValueError(f"{url!r}: no user, query or fragment in an engine's URL; its key goes into api_key_file")
    if HOST.fullmatch(parts.hostname) is None:
        raise ValueError(f"{url!r}: {parts.hostname!r} is neither a host name nor an address")
    tls = parts.scheme == "https"
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{url!r}: the port is a number from 1 to 65535")
    return Origin(
        url=url, host=parts.hostname, port=port or (443 if tls else 80), tls=tls, base_path=parts.path.rstrip("/")
    )


PROVIDER = "provider:"  # begins the ids of providers; no URL has such an id, as a port is a number


def provider_of(id: str) -> str:
    """Return the policy's name for the provider of this id; empty: the id is an engine's."""
    return id.removeprefix(PROVIDER) if id.startswith(PROVIDER) else ""


def origin_of(id: str, url: str) -> Origin:
    """Return the origin of an engine's URL, or of a provider's: its path takes the place of the routes' /v1. Raises
    ValueError."""
    if not provider_of(id):
        return parse_origin(url)
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    return Origin(url=url, host=parts.hostname or "", port=port, tls=tls, base_path=parts.path.rstrip("/"))


def _hint(meant: str | None) -> str:
    return "" if meant is None else f" (did you mean {meant}?)"
