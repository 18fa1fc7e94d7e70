"""`gateway key`: making, listing and revoking API keys. A key is shown once, when it is made; the file has its hash.

A new line is added as a comment; one byte, the first digit in place of its `#`, makes it a key, and a `#` in place of
that digit revokes it. So whoever reads meanwhile sees the file before or after (a longer write may be seen in part: a
page of memory is filled at a time), and what two people do at once does not undo each other.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import hashlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.request.tenants import MAX_KEYS, MAX_KEYS_BYTES, key_lines, keys_from
from gateway.shared.files.checked import nearest
from gateway.shared.files.yaml_file import MAX_BYTES
from gateway.shared.printable import printable

RANDOM_BYTES = 24  # of a key: 192 bits, 32 characters
LONGEST_KEY = 4096  # characters that are read from standard input
SHOWN = 12  # digits of a hash that people are shown


class KeysError(Exception):
    """What was asked for cannot be done; the message says which file it is about, and why."""


class Entry(msgspec.Struct, frozen=True):
    """One line of a keys file: the key's SHA-256 in hexadecimal, whose it is, the rest of the line, where it begins."""

    digest: str
    tenant: str
    comment: str
    offset: int


def digest_of(key: str) -> str:
    """What a key is known by: SHA-256 in hexadecimal. Space around it does not count."""
    return hashlib.sha256(key.strip().encode()).hexdigest()


# -- the commands: each prints, and raises KeysError, or InvalidFile for a file with mistakes -------------------------


def run_add(tenant: str, policy_file: Path) -> int:
    """Make a key: the key alone on standard output, what was done on standard error."""
    policy, file = _named_in(policy_file)
    if tenant not in policy.tenants:
        close = nearest(tenant, policy.tenants)
        hint = f"did you mean {close}?" if close else f"its tenants are {', '.join(policy.tenants)}"
        raise KeysError(f"{policy_file}: there is no tenant {tenant!r} ({hint})")
    key = add(file, tenant, datetime.now(UTC).date().isoformat())
    print(key, flush=True)
    print(
        f"gateway: this is a key of {tenant}; it is not shown again. Its hash {digest_of(key)[:SHOWN]} is in {file}",
        file=sys.stderr,
    )
    return 0


def run_list(policy_file: Path) -> int:
    """Print one line for each key: the beginning of its hash, its tenant, and what else is known."""
    policy, file = _named_in(policy_file)
    for entry in entries(file):
        lost = "" if entry.tenant in policy.tenants else "  (no such tenant in the policy: nobody may use it)"
        print(f"{entry.digest[:SHOWN]}  {entry.tenant}  {entry.comment}{lost}".rstrip())
    for name, tenant in policy.tenants.items():
        for digest in tenant.keys:
            print(f"{digest[:SHOWN]}  {name}  (in the policy itself)")
    return 0


def run_revoke(digest: str | None, policy_file: Path) -> int:
    """Revoke a key by the beginning of its hash, or (None) the one that comes on standard input."""
    _, file = _named_in(policy_file)
    if digest is None:
        key = getpass.getpass("the key: ") if sys.stdin.isatty() else sys.stdin.readline(LONGEST_KEY)
        if not key.strip():
            raise KeysError("no key came on standard input")
        digest = digest_of(key)
    elif not re.fullmatch(r"[0-9a-f]{8,64}", digest):
        raise KeysError(
            "HASH is 8 digits or more of a hash, as `gateway key list` shows it. Never give a key as an argument, as "
            "others can see those: leave HASH out and give the key on standard input"
        )
    entry = revoke(file, digest)
    print(f"gateway: the key {entry.digest[:SHOWN]} of {entry.tenant} is revoked in {file}", file=sys.stderr)
    return 0


def _named_in(policy_file: Path) -> tuple[Policy, Path]:
    """A policy, and the keys file it names (relative to the policy's own folder)."""
    try:
        with policy_file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise KeysError(f"{policy_file}: {error.strerror}") from error
    policy = decode(data, str(policy_file))
    if policy.keys_file is None:
        raise KeysError(f"{policy_file}: it names no file for keys: add a line such as `keys_file: keys.txt`")
    return policy, policy_file.parent / policy.keys_file


# -- the file ---------------------------------------------------------------------------------------------------------


def add(file: Path, tenant: str, today: str) -> str:
    """A new key of `tenant`, whose hash is on disk. Makes the file if need be, readable by its owner alone.

    `today` becomes the line's comment. Raises KeysError, InvalidFile.
    """
    key = "weir-" + secrets.token_urlsafe(RANDOM_BYTES)
    with _opened(file, os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
        data = _content(descriptor)
        if len(keys_from(data, str(file))) >= MAX_KEYS:
            raise KeysError(f"{file}: it has {MAX_KEYS} keys, and no more are read")
        begin = "\n" if data and not data.endswith(b"\n") else ""
        digest = digest_of(key)
        line = f"#{digest[1:]} {tenant}  # {today}\n".encode()
        if os.write(descriptor, begin.encode() + line) != len(begin) + len(line):
            raise KeysError(f"{file}: the new line could not be written in full, and is left as a comment")
        # Where it was added, which others may have moved; a descriptor that appends writes nowhere else.
        offset = os.lseek(descriptor, 0, os.SEEK_CUR) - len(line)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_APPEND)
        os.pwrite(descriptor, digest[:1].encode(), offset)
        os.fsync(descriptor)
    return key


def entries(file: Path) -> list[Entry]:
    """Every key of the file, in its order; none where there is no file yet. Raises KeysError, InvalidFile."""
    if not file.exists():
        return []
    with _opened(file, os.O_RDONLY) as descriptor:
        return _entries(descriptor, file)


def revoke(file: Path, digest: str) -> Entry:
    """Take the one key whose hash begins with `digest` out of the file. Raises KeysError, InvalidFile."""
    with _opened(file, os.O_RDWR) as descriptor:
        found = [entry for entry in _entries(descriptor, file) if entry.digest.startswith(digest)]
        if len(found) != 1:
            count = f"{len(found)} keys have" if found else "no key has"
            raise KeysError(f"{file}: {count} the hash {digest[:SHOWN]}; see `gateway key list`")
        os.pwrite(descriptor, b"#", found[0].offset)
        os.fsync(descriptor)
    return found[0]


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    """The file's descriptor. To write, it must be a plain file under its own name (no symbolic link: it may point at
    anything) that nobody but its owner could have added a key to."""
    writes = flags & os.O_RDWR
    try:
        # Without waiting for the other end of what may be a pipe.
        descriptor = os.open(file, flags | (os.O_NOFOLLOW if writes else 0) | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise KeysError(f"{file}: not a regular file")
            if writes and mode & 0o022:
                raise KeysError(f"{file}: others may write to it, and so make keys for themselves: chmod go-w {file}")
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        why = "a symbolic link; name the file itself" if error.errno == errno.ELOOP else error.strerror
        raise KeysError(f"{file}: {why}") from error


def _content(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as opened:
        return opened.read(MAX_KEYS_BYTES + 1)


def _entries(descriptor: int, file: Path) -> list[Entry]:
    data = _content(descriptor)
    tenants = keys_from(data, str(file))
    found = []
    for _, offset, (digest, _, *rest) in key_lines(data):
        comment = b"".join(rest).decode("utf-8", "replace").strip()
        found.append(Entry(digest.decode(), tenants[digest.decode()], printable(comment), offset))
    return found
