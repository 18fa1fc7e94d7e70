"""Reads what an operator has written: the sidecar's file or a pool's, and the token it names."""

from __future__ import annotations

from pathlib import Path

from sidecar.core.config import MAX_BYTES, InvalidFile, SidecarConfig, decode
from sidecar.ray import pool

TOKEN_LENGTH = 16
TOKEN_BYTES = 4096


class Mistake(Exception):
    """Something a person can correct; each line says what and where."""


def checked(path: Path) -> SidecarConfig:
    """What the file says. Raises Mistake."""
    try:
        config = decode(_read(path, MAX_BYTES + 1), str(path))
    except InvalidFile as error:
        raise Mistake(str(error)) from error
    return config


def pool_of(path: Path) -> pool.PoolConfig:
    """What the file of a pool says. Raises Mistake."""
    try:
        found = pool.decode(_read(path, MAX_BYTES + 1), str(path))
    except InvalidFile as error:
        raise Mistake(str(error)) from error
    return found


def token_of(config: SidecarConfig, path: Path) -> str | None:
    """The token in the token_file of the config at `path`, without the space around it. Raises Mistake."""
    if config.token_file is None:
        return None
    file = path.parent / config.token_file
    try:
        token = _read(file, TOKEN_BYTES).decode("latin-1").strip()
    except Mistake as mistake:
        raise Mistake(f"token_file {mistake}") from mistake
    if len(token) < TOKEN_LENGTH or not (token.isascii() and token.isprintable() and " " not in token):
        raise Mistake(f"token_file {file}: a token is at least {TOKEN_LENGTH} visible ASCII characters")
    return token


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from error
