"""File of API keys: a line for each key, with the SHA-256 of the key and the tenant it belongs to.

A new line is appended as a comment. Then one byte, the first digit in place of its `#`, makes it a key; a `#` in place
of that digit revokes it. A reader therefore sees the file before or after the change: a longer write may be seen in
part, as a page of memory is filled at a time. Two changes at once do not undo each other.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gateway.core.request.tenants import MAX_KEYS, MAX_KEYS_BYTES, key_lines, keys_from
from gateway.shared.printable import printable

RANDOM_BYTES = 24  # of a key: 192 bits, 32 characters
SHOWN = 12  # digits of a hash that people are shown


class KeysError(Exception):
    """A change of keys that cannot be made; the message says which file it is about, and why."""


class Entry(msgspec.Struct, frozen=True):
    """Line of a keys file: the key's SHA-256 in hexadecimal, whose it is, the rest of the line, where it begins."""

    digest: str
    tenant: str
    comment: str
    offset: int


def digest_of(key: str) -> str:
    """Return a key's SHA-256 in hexadecimal, by which the key is known. Space around a key does not count."""
    return hashlib.sha256(key.strip().encode()).hexdigest()


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
