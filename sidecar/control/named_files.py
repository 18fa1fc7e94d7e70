"""Files that a sidecar's file names: its tokens, and the authorities of gateways' certificates."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from gateway.shared.certificate import authorities_in
from gateway.shared.command_line import Mistake
from gateway.shared.files.modes import unwise
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.token_file import tokens_of as tokens_in
from gateway.shared.tokens import Tokens
from sidecar.control.client import SidecarTokens
from sidecar.core.config import SidecarConfig

Read = Callable[[Path], bytes]
MOST = 16 * 1024**2  # bytes; the system's own bundle of certificates has 220 KB


def read_plain(path: Path) -> bytes:
    """The content of a file, whole. Raises OSError."""
    with open_plain(path) as file:
        return file.read(MOST)


def tokens_of(config: SidecarConfig, path: Path, read: Read = read_plain) -> SidecarTokens:
    """The tokens in the files that the config at `path` names. Raises Mistake, which begins with the field."""
    report = _tokens(config.token_file, "token_file", path, read)
    order = _tokens(config.order_token_file, "order_token_file", path, read)
    return SidecarTokens(report=report, order=order or report)


def ca_of(config: SidecarConfig, path: Path, read: Read = read_plain) -> str | None:
    """The certificates in the ca_file of the config at `path`, in PEM. Raises Mistake, which begins with the field."""
    if config.ca_file is None:
        return None
    file = path.parent / config.ca_file
    try:
        found = authorities_in(read(file))
        ssl.create_default_context(cadata=found)
    except ssl.SSLError as error:
        raise Mistake(f"ca_file {file}: no certificates in PEM: {error.reason or error}") from error
    except OSError as error:
        raise Mistake(f"ca_file {file}: {error.strerror}") from error
    return found


def unwise_files(config: SidecarConfig, path: Path) -> list[str]:
    """Warnings of files with tokens that others may read, each beginning with its field."""
    files = (("token_file", config.token_file), ("order_token_file", config.order_token_file))
    found = [(field, unwise(path.parent / name)) for field, name in files if name is not None]
    return [f"{field}: {text}" for field, text in found if text is not None]


def _tokens(name: str | None, field: str, path: Path, read: Read) -> Tokens:
    if name is None:
        return ()
    try:
        return tokens_in(path.parent / name, read)
    except OSError as error:
        raise Mistake(f"{field} {path.parent / name}: {error.strerror}") from error
    except ValueError as error:
        raise Mistake(f"{field} {error}") from None
