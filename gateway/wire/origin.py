"""Where an engine listens: `http://HOST:PORT[/BASE]`, `https://…` or `unix:///PATH`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

_HOST = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?|[0-9a-f:.]*:[0-9a-f:.]*")


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
        raise ValueError(f"{url!r}: write http://HOST:PORT, https://HOST:PORT or unix:///PATH")
    if parts.username is not None or "?" in url or "#" in url:
        raise ValueError(f"{url!r}: no user, query or fragment in an engine's URL; its key goes into api_key_file")
    if _HOST.fullmatch(parts.hostname) is None:
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
