"""Starter files of `gateway init`: the shipped policies, written where they are wanted and never over another file."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from gateway.core.policy.schema import schema_text
from gateway.shared.command_line import Mistake
from gateway.shared.new_file import write_out

STARTER = "starter"

# What comes after `gateway check`, by policy.
NEXT = {
    STARTER: (
        "gateway serve --policy {out} --engine sim:2      (without a GPU; leave --engine out for engines it names)",
    ),
    "demo": ("gateway serve --policy {out} --engine demo       (four models on two simulated GPUs)",),
    "one-machine": (
        "sidecar init                                     (sidecar.yaml: name your models in it)",
        "gateway serve --policy {out} --sidecar sidecar.yaml",
        "gateway serve --policy {out} --engine demo       (without a GPU: four models on two simulated ones)",
    ),
}

DESCRIPTION = "Write a commented policy to begin with."
EXAMPLES = """\
Writes a commented policy to begin with, and beside it the schema by which editors complete and check it. A file that
is there already is never touched.

  starter             a short file with what most change first: engines, keys, limits
  one-machine         models that take turns on the GPUs of one machine; calls wait for a model that loads
  one-engine          one vLLM with few places, people and batch jobs on it
  interactive-first   people first, batch fills the gaps
  multi-tenant        keys, quotas, fair shares
  batch-night         throughput: long queues, long deadlines
  embeddings          small embedding, rerank and score calls merged into few
  demo                what `gateway serve --engine demo` goes by
  default             every field with its default, explained

examples:
  gateway init                                   policy.yaml, the short one
  gateway init multi-tenant --out tenants.yaml
  gateway init default --out -                   read every field, on standard output"""
_NAMED = re.compile(r"policies/([a-z-]+)\.yaml")


def folder() -> Path:
    """The folder of the shipped policies: in an installed package, or at the top of the source tree."""
    here = Path(__file__).parents[1]
    installed = here / "policies"
    return installed if installed.is_dir() else here.parent / "policies"


def shipped(name: str) -> Path:
    """The file of a shipped policy."""
    return folder() / f"{name}.yaml"


def names() -> list[str]:
    """The shipped policies."""
    return sorted(file.stem for file in folder().glob("*.yaml"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=STARTER, metavar="NAME", help="which one (default: %(default)s)")
    parser.add_argument(
        "--out", default="policy.yaml", metavar="FILE|-", help="where; -: standard output (default: %(default)s)"
    )


def command(given: argparse.Namespace) -> int:
    """Write the policy, and its schema beside it. Raises Mistake."""
    if given.name not in names():
        raise Mistake(f"there is no policy {given.name!r}; there are {', '.join(names())}")
    if given.out == "-":
        sys.stdout.write(_text(given.name, "policy.yaml", "schema.json"))
        return 0
    out = Path(given.out)
    schema = out.with_name(f"{out.stem}.schema.json")
    write_out(out, _text(given.name, given.out, schema.name))
    if not schema.exists():
        write_out(schema, schema_text())
    print(f"{out}: written, and {schema.name} for editors. Next:")
    print(f"  gateway check {out}")
    for step in NEXT.get(given.name, NEXT[STARTER]):
        print("  " + step.format(out=out))
    return 0


def _text(name: str, out: str, schema: str) -> str:
    """A shipped policy, whose comments name the new file and the commands that print the others."""
    text = shipped(name).read_text()
    text = text.replace("$schema=schema.json", f"$schema={schema}", 1)
    return _NAMED.sub(lambda at: out if at[1] == name else f"`gateway init {at[1]} --out -`", text)
