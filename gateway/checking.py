"""`gateway check`: every mistake in policy files and in scenarios, and what is unwise, named by file and line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.core.advice import Advice, advise
from gateway.core.checked import InvalidFile, spelled
from gateway.core.explained import explain_call
from gateway.core.policy import Policy
from gateway.core.policy_file import decode_with_lines, explain
from gateway.core.schema import schema_text
from gateway.core.tenants import MAX_KEYS_BYTES, keys_from, with_keys
from gateway.core.yaml_file import MAX_BYTES
from gateway.file_modes import files_of, refused, unwise_of
from gateway.wire.client import parse_origin
from loadtest import scenario
from loadtest.trace import TraceError

EXAMPLES = """\
Prints `FILE: ok`, or one line for every mistake: FILE:LINE: field: what was found, what was expected. Exit status 2
if there is any. What is legal but unwise is a warning; --strict makes it a mistake. Nothing is started and no engine
is asked.

examples:
  gateway check policies/*.yaml
  gateway check --strict policy.yaml                             for a pipeline: warnings fail it too
  gateway check policy.yaml --explain                            the policy in full, every default written out
  gateway check policy.yaml --explain acme batch llama-3-8b      what becomes of such a call; CLASS -: none asked for
  gateway check --schema > schema.json                           for editors: completion and checks while you write
  gateway check --scenario load.yaml                             a scenario of `gateway bench`, and its trace to the end
  gateway check --scenario --schema > scenario-schema.json       and their schema"""

USAGE = """gateway check [-h] [--strict] FILE ... [--explain [TENANT CLASS MODEL]]
       gateway check --scenario FILE|NAME ... [--explain]
       gateway check [--scenario] --schema"""


class Mistake(Exception):
    """Something a person can correct; each line says what and where."""


def command(given: argparse.Namespace) -> int:
    """Check the files and say what was found; the exit status. Raises Mistake for the command line."""
    if given.schema:
        print(scenario.schema_text() if given.scenario else schema_text(), end="")
        return 0
    # `--explain FILE` reads as `FILE --explain`.
    files, call = (given.files, given.explain) if given.files else (given.explain or [], given.explain and [])
    if not files:
        raise Mistake("the following arguments are required: FILE (see gateway check --help)")
    if given.scenario and call:
        raise Mistake("--explain: a scenario has no TENANT CLASS MODEL; alone it shows all of it")
    if call and len(call) != 3:
        raise Mistake("--explain: give TENANT CLASS MODEL, or nothing for the whole policy")
    bad = warned = 0
    for name in files:
        warnings: list[Advice] = []
        try:
            if given.scenario:
                text = _scenario(name, explained=call is not None)
            else:
                policy, warnings, note = checked(Path(name))
                text = f"{name}: ok{note}" if call is None else _explained(name, policy, call)
        except Mistake as mistake:
            bad += 1
            print(mistake, file=sys.stderr)
            continue
        warned += len(warnings)
        for warning in warnings:
            print(warning.told(name), file=sys.stderr)
        print(text)
    return 2 if bad or (warned and given.strict) else 0


def _scenario(name: str, *, explained: bool) -> str:
    try:
        file = scenario.find(name)
        found = scenario.load(file)
        rows = sum(1 for _ in scenario.recorded(found, file.parent) or ())
    except (InvalidFile, scenario.Unusable, TraceError) as error:
        raise Mistake(str(error)) from error
    except OSError as error:
        raise Mistake(f"{name}: {error.filename}: {error.strerror}") from error
    if explained:
        return scenario.explain(found)
    return f"{name}: ok{f' ({rows} rows in {found.trace.file})' if found.trace is not None else ''}"


def _explained(name: str, policy: Policy, call: Sequence[str]) -> str:
    if not call:
        return explain(policy)
    try:
        return explain_call(policy, *call)
    except ValueError as error:
        raise Mistake(f"{name}: --explain: {error}") from error


def _refused(policy: Policy, path: Path) -> None:
    """Raises Mistake for a file that the gateway would not use because of its mode."""
    for field, file, _ in files_of(policy, path.parent):
        with contextlib.suppress(OSError):  # whether it is there is not asked here
            wrong = refused(file)
            if wrong is not None:
                raise Mistake(f"{path}: {spelled(field)}: {file}: {wrong}")


def checked(path: Path) -> tuple[Policy, list[Advice], str]:
    """A good policy, what is unwise in it, and a note on a keys file that is not there yet."""
    note = ""
    try:
        policy, written = decode_with_lines(read(path, "", MAX_BYTES + 1), str(path))
        keys_file = None if policy.keys_file is None else path.parent / policy.keys_file
        if keys_file is not None and os.path.exists(keys_file):
            with_keys(policy, keys_from(read(keys_file, "", MAX_KEYS_BYTES + 1), str(keys_file)), str(keys_file))
        elif keys_file is not None:
            note = f" (its keys_file {keys_file} does not exist yet: `gateway key add` makes it)"
    except InvalidFile as error:
        raise Mistake(str(error)) from error
    _refused(policy, path)
    for index, engine in enumerate(policy.fleet.engines):
        try:
            parse_origin(engine.url)
        except ValueError as error:
            line = written.line_of(("fleet", "engines", index, "url"))
            raise Mistake(f"{path}:{line}: fleet.engines[{index}].url: {error}") from error
    modes = [
        Advice(path=spelled(field), text=text, line=written.line_of(field))
        for field, text in unwise_of(policy, path.parent)
    ]
    return policy, advise(policy, written) + modes, note


def read(path: Path, what: str, limit: int) -> bytes:
    """The first `limit` bytes of a file; `what` stands before its name in messages. Raises Mistake."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise Mistake(f"{what}{path}: {error.strerror}") from error
