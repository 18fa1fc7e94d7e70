"""`gateway key`: API keys made, listed and revoked. A key is shown once, when it is made."""

from __future__ import annotations

import argparse
import getpass
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.decider.key_file import SHOWN, KeysError, add, digest_of, entries, revoke
from gateway.shared.command_line import Parser, added
from gateway.shared.files.checked import InvalidFile, nearest
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.yaml_file import MAX_BYTES

MISTAKES = (KeysError, InvalidFile)
LONGEST_KEY = 4096  # characters that are read from standard input

DESCRIPTION = "Make, list and revoke API keys."
EXAMPLES = """\
A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. The policy names the file of their hashes
(`keys_file: keys.txt`, relative to the policy) and who there is (`tenants`). A key is shown once, when it is made.

examples:
  gateway key add acme --policy policy.yaml                      a new key of the tenant acme, on standard output
  gateway key list --policy policy.yaml                          what keys there are, by the beginning of their hashes
  gateway key revoke 3f2a91c07be4 --policy policy.yaml           the key whose hash begins with this
  gateway key revoke --policy policy.yaml                        the key that is typed or piped in: never an argument"""


def add_arguments(parser: Parser) -> None:
    actions = parser.add_subparsers(title="commands", required=True, metavar="add | list | revoke")

    def action(name: str, does: str, run: Callable[[argparse.Namespace, Policy, Path], None]) -> Parser:
        made = added(actions.add_parser, name, help=does, description=f"{does.capitalize()}.", epilog=EXAMPLES)
        where = "the policy that says whose keys, and where"
        made.add_argument("--policy", type=Path, required=True, metavar="FILE", help=where)
        made.set_defaults(action=run)
        return made

    add = action("add", "make a key and print it, once", _add)
    add.add_argument("tenant", metavar="TENANT", help="whose key it is")
    action("list", "list the keys", _list)
    revoke = action("revoke", "revoke a key", _revoke)
    revoke.add_argument("hash", nargs="?", metavar="HASH", help="how its hash begins; left out: read the key itself")


def command(given: argparse.Namespace) -> int:
    """Do what was chosen. Raises KeysError, and InvalidFile for a file with mistakes."""
    given.action(given, *_named_in(given.policy))
    return 0


def _add(given: argparse.Namespace, policy: Policy, file: Path) -> None:
    """Make a key: the key alone on standard output, what was done on standard error."""
    tenant = given.tenant
    if tenant not in policy.tenants:
        close = nearest(tenant, policy.tenants)
        hint = f"did you mean {close}?" if close else f"its tenants are {', '.join(policy.tenants)}"
        raise KeysError(f"{given.policy}: there is no tenant {tenant!r} ({hint})")
    key = add(file, tenant, datetime.now(UTC).date().isoformat())
    print(key, flush=True)
    print(
        f"gateway: this is a key of {tenant}; it is not shown again. Its hash {digest_of(key)[:SHOWN]} is in {file}",
        file=sys.stderr,
    )


def _list(_: argparse.Namespace, policy: Policy, file: Path) -> None:
    """Print one line for each key: the beginning of its hash, its tenant, and what else is known."""
    for entry in entries(file):
        lost = "" if entry.tenant in policy.tenants else "  (no such tenant: the policy is refused until it is revoked)"
        print(f"{entry.digest[:SHOWN]}  {entry.tenant}  {entry.comment}{lost}".rstrip())
    for name, tenant in policy.tenants.items():
        for digest in tenant.keys:
            print(f"{digest[:SHOWN]}  {name}  (in the policy itself)")


def _revoke(given: argparse.Namespace, _: Policy, file: Path) -> None:
    """Revoke a key by the beginning of its hash, or (without one) the key that comes on standard input."""
    digest = given.hash
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


def _named_in(policy_file: Path) -> tuple[Policy, Path]:
    """A policy, and the keys file it names (relative to the policy's own folder)."""
    try:
        with open_plain(policy_file) as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise KeysError(f"{policy_file}: {error.strerror}") from error
    policy = decode(data, str(policy_file))
    if policy.keys_file is None:
        raise KeysError(f"{policy_file}: it names no file for keys: add a line such as `keys_file: keys.txt`")
    return policy, policy_file.parent / policy.keys_file
