"""`gateway check`: every mistake in policy files and scenarios, and every warning, named by file and line."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from importlib import import_module
from pathlib import Path

from gateway.cli import SCENARIOS
from gateway.cli.files import MOST, read_bytes
from gateway.core.policy.advice import advise
from gateway.core.policy.file import explain
from gateway.core.policy.schema import reference_text, schema_text
from gateway.decider.file_modes import unusable_of, unwise_of
from gateway.decider.loading import load
from gateway.shared.files.checked import InvalidFile, Problem
from gateway.shared.files.findings import check_files, placed

DESCRIPTION = "Read policy files and report every mistake, and what is unwise. Or scenarios of a load test."
EXAMPLES = """\
Prints `FILE: ok`, or every mistake: FILE:LINE:COLUMN: field: what was found, what was expected, and the line. Exit
status 2 if there is any. What is legal but unwise is a warning; --strict makes it a mistake. The files that a policy
names are read too, as `gateway serve` would; --no-files leaves them out. Nothing is started, and no engine is asked.

examples:
  gateway check policies/*.yaml
  gateway check --strict policy.yaml                             for a pipeline: warnings fail it too
  gateway check --no-files policies/*.yaml                       for a pull request: without keys and tokens
  gateway check policy.yaml --explain                            the policy in full, every default written out
  gateway check --schema > schema.json                           for editors: completion and checks while you write
  gateway check --reference > policy.md                          every field, explained, as a page
  gateway check --scenario load.yaml                             a scenario of `gateway bench`, and its trace to the end
  gateway check --scenario --schema > scenario-schema.json       and their schema"""

USAGE = """gateway check [-h] [--strict] [--no-files] FILE ...
       gateway check [--scenario] FILE ... --explain
       gateway check --scenario FILE|NAME ...
       gateway check [--scenario] --schema
       gateway check [--scenario] --reference"""


def add_arguments(check: argparse.ArgumentParser) -> None:
    check.usage = USAGE
    check.add_argument("files", nargs="*", metavar="FILE", help="policies; the files that they name are read too")
    check.add_argument("--scenario", action="store_true", help="they are scenarios; their traces are read too")
    check.add_argument("--no-files", action="store_true", help="do not read the files that policies name")
    check.add_argument("--strict", action="store_true", help="exit status 2 for warnings too")
    check.add_argument("--explain", action="store_true", help="print the whole effective policy, defaults included")
    check.add_argument("--schema", action="store_true", help="print the JSON Schema of such files")
    check.add_argument("--reference", action="store_true", help="print every field of such files, as Markdown")


def command(given: argparse.Namespace) -> int:
    """Check the files and say what was found; the exit status. Raises Mistake for the command line."""
    if given.scenario:
        part = import_module(SCENARIOS)
        checked = partial(part.checked, explained=given.explain)
        return check_files(given, "gateway", part.schema_text, part.reference_text, checked)
    checked = partial(_checked, files=not given.no_files, explained=given.explain)
    return check_files(given, "gateway", schema_text, reference_text, checked)


def _checked(name: str, *, files: bool, explained: bool) -> tuple[str, list[Problem]]:
    """Text about a policy, and what was found in it; the text is empty for a policy that cannot be used."""
    path = Path(name)
    try:
        loaded = load(path, lambda file: read_bytes(file, MOST), files=files)
    except InvalidFile as error:
        return "", error.problems
    except OSError as error:
        return "", [Problem(file=name, found=error.strerror or str(error))]
    policy, tree = loaded.policy, loaded.tree
    unusable = unusable_of(policy, path.parent) if files else []
    if unusable:
        return "", placed(name, tree, unusable)
    unwise = [*advise(policy), *(unwise_of(policy, path.parent) if files else ())]
    found = placed(name, tree, unwise, warning=True)
    if explained:
        return explain(policy), found
    notes = []
    keys_file = None if policy.keys_file is None or not files else path.parent / policy.keys_file
    if keys_file is not None and not keys_file.exists():
        notes.append(f"its keys_file {keys_file} does not exist yet: `gateway key add` makes it")
    engines = policy.fleet.engines
    readers = sum([engine.role == "prefill" for engine in engines])
    if readers and len({engine.transfer for engine in engines}) == 1:
        flags = f"--trace CALLS.jsonl --profile PROFILE --engines {len(engines)} --prefill {readers}"
        command = f"gateway simulate --policy {shlex.quote(name)} {flags}"
        notes.append(f"whether a split into prefill and decode pays for logged calls: `{command}`")
    said = "; ".join(notes)
    return f"{name}: ok ({said})" if said else f"{name}: ok", found
