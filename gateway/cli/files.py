"""Files named on a command line: a policy, a token. An unusable file raises Mistake, with a line for each reason."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.core.request.tenants import MAX_KEYS_BYTES
from gateway.decider.loading import load
from gateway.shared.command_line import Mistake
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.token_file import tokens_of
from gateway.shared.files.yaml_file import MAX_BYTES
from gateway.shared.tokens import MAX_SECRET, Tokens, tokens_in

TOKEN_VARIABLE = "WEIR_ADMIN_TOKEN"  # noqa: S105 # the name of a variable, not what it holds
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


def admin_tokens(file: str | None, flag: str) -> Tokens:
    """The control port's tokens: from the file, else from the environment; empty: there is none. Raises Mistake.

    A token is never an argument, because every user of the machine can read those.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    try:
        if file:
            return tokens_of(Path(file), lambda path: read_bytes(path, MAX_SECRET + 1))
        return () if given is None else tokens_in(os.fsencode(given))
    except OSError as error:
        raise Mistake(f"{flag} {file}: {error.strerror}") from error
    except ValueError as error:
        raise Mistake(f"{flag} {error}" if file else f"{TOKEN_VARIABLE}: {error}") from error
