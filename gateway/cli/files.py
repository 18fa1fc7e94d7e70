"""Files named on a command line: a policy, a token. An unusable file raises Mistake, with a line for each reason."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.core.request.tenants import MAX_KEYS_BYTES
from gateway.decider.loading import load
from gateway.shared.command_line import Mistake, token_of
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.modes import refused
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.yaml_file import MAX_BYTES

TOKEN_VARIABLE = "WEIR_ADMIN_TOKEN"  # noqa: S105 # the name of a variable, not what it holds
TOKEN_BYTES = 4096
MOST = max(MAX_BYTES, MAX_KEYS_BYTES) + 1


def checked(path: Path) -> Policy:
    """A good policy, as `gateway serve` starts with. Raises Mistake."""
    try:
        return load(path, lambda file: read_bytes(file, MOST)).policy
    except InvalidFile as error:
        raise Mistake(str(error)) from error
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from error


def read_bytes(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a file. Raises OSError."""
    with open_plain(path, pipes=True) as file:
        return file.read(limit)


def admin_token(file: str | None, flag: str) -> str | None:
    """The control port's token: from the file, else from the environment. Raises Mistake.

    A token is never an argument, because every user of the machine can read those.
    """
    source = f"{flag} {file}" if file else TOKEN_VARIABLE
    text = _token_in(Path(file), source) if file else os.environ.get(TOKEN_VARIABLE)
    return None if text is None else token_of(text, source)


def _token_in(path: Path, source: str) -> str:
    try:
        text = read_bytes(path, TOKEN_BYTES).decode("latin-1")
    except OSError as error:
        raise Mistake(f"{source}: {error.strerror}") from error
    wrong = refused(path)
    if wrong is not None:
        raise Mistake(f"{source}: {wrong}")
    return text
