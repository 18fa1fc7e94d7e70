"""Starter files of `sidecar init`: a sidecar's or a pool's file, and its secret tokens, never over another file."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from pathlib import Path

from gateway.shared.new_file import write_out

STARTER = "starter"
FILES = {STARTER: "sidecar.yaml", "example": "sidecar.yaml", "pool": "pool.yaml"}  # and what each is called by default
# Names of the files of tokens, and where gateways name them in their policy.
TOKENS = {"sidecar.token": "token_file", "order.token": "order_token_file"}
DESCRIPTION = "Write a commented file to begin with."
EXAMPLES = """\
Writes a commented file to begin with and, for each token that it names, a new secret beside it that only you can read.
What is there already is never touched.

  starter     a sidecar's file with what most change first
  example     every field of a sidecar's file, explained
  pool        the sidecars of a Ray cluster

examples:
  sidecar init                                   sidecar.yaml and sidecar.token
  sidecar init pool --out cluster.yaml
  sidecar init example --out -                   read every field, on standard output"""
_OWN = re.compile(r"(?:sidecar/cli/)?(?:example|pool|sidecar)\.yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", choices=list(FILES), default=STARTER, metavar="NAME", help="which one")
    parser.add_argument("--out", metavar="FILE|-", help="where; -: standard output (default: sidecar.yaml, pool.yaml)")


def command(given: argparse.Namespace) -> int:
    """Write the file. Raises Mistake."""
    name, out = given.name, given.out
    text = (Path(__file__).parent / f"{name}.yaml").read_text()
    if out == "-":
        sys.stdout.write(text)
        return 0
    path = Path(out or FILES[name])
    write_out(path, _OWN.sub(lambda at: at[0] if at[0] not in _own(name) else str(path), text))
    written = [str(path)]
    for secret, field in TOKENS.items():
        token = path.with_name(secret)
        if re.search(rf"^ *{field}: {secret}$", text, re.MULTILINE) and not token.exists():
            write_out(token, secrets.token_urlsafe(32) + "\n", 0o600)
            written.append(f"{token} (for the gateways' policies too: fleet.sidecars.{field})")
    print("written: " + ", ".join(written))
    print(f"Name your models in it, then: sidecar check {path}")
    return 0


def _own(name: str) -> tuple[str, ...]:
    """The words by which a shipped file speaks of itself."""
    return (FILES[name], f"sidecar/{name}.yaml")
