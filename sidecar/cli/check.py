"""`sidecar check`: every mistake and warning in sidecars' files, and in the files that those name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from msgspec import structs

from gateway.shared.command_line import Mistake
from gateway.shared.files.checked import Fault, InvalidFile, Problem, Value
from gateway.shared.files.findings import check_files, placed
from gateway.shared.files.plain_file import open_plain
from sidecar.control.named_files import ca_of, tokens_of, unwise_files
from sidecar.core.config import (
    MAX_BYTES,
    SidecarConfig,
    explain,
    read_config,
    reference_text,
    schema_text,
    warnings,
)
from sidecar.ray.pool import explain as explain_pool
from sidecar.ray.pool import read_pool, with_deep_sleep
from sidecar.relay.relay import certificate_of
from sidecar.residency.state_file import not_plain

DESCRIPTION = "Find the mistakes in sidecar and pool files."
EXAMPLES = """\
Prints `FILE: ok`, or every mistake: FILE:LINE:COLUMN: field: what was found, what was expected, and the line. Exit
status 2 if there is any. What is unwise is a warning, a token that would cross a network in the clear among it. Tokens,
certificates and the place of the state file are looked at too, of a pool its tokens alone; --no-files leaves them out.
Nothing is started, no GPU and no model is looked at, and whether the installed vLLM knows a flag is not asked.

examples:
  sidecar check sidecar.yaml
  sidecar check machines/*.yaml
  sidecar check pool.yaml                        the sidecars of a Ray cluster
  sidecar check --no-files machines/*.yaml       for a pull request: without tokens and certificates
  sidecar check --schema > sidecar-schema.json   for editors: completion and checks while you write
  sidecar check --reference > sidecar-file.md    every field, explained, as a page
  sidecar check sidecar.yaml --explain           the file in full, every default written out"""
_OF_POOLS = {"sidecar", "ray", "folder", "engines_per_node"}  # fields of pools' files alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="what a sidecar would be started with")
    parser.add_argument("--no-files", action="store_true", help="do not read the files that it names")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of such files")
    parser.add_argument("--reference", action="store_true", help="print every field of such files, as Markdown")
    parser.add_argument("--explain", action="store_true", help="print the whole effective file, defaults included")


def command(given: argparse.Namespace) -> int:
    """Check the files; the exit status. Raises Mistake for the command line."""
    checked = partial(_checked, files=not given.no_files, explained=given.explain)
    return check_files(given, "sidecar", schema_text, reference_text, checked)


def _checked(name: str, *, files: bool, explained: bool) -> tuple[str, list[Problem]]:
    """Text about a file, and what was found in it; the text is empty for a file that cannot be used."""
    path, good = Path(name), f"{name}: ok"
    try:
        with open_plain(path) as file:
            data = file.read(MAX_BYTES + 1)
        reading = read_config(data, name)
        if not _OF_POOLS.isdisjoint(reading.root.fields or {}):
            pool = read_pool(data, name)
            if files:  # the other files that it names are the nodes'
                tokens = _unread(pool.value.sidecar, path, tokens_of, "the file of a token")
                pool.judge(structs.replace(fault, path=("sidecar", *fault.path)) for fault in tokens)
            value = pool.good()
            whole = explain_pool(with_deep_sleep(value)).removesuffix("\n")
            return whole if explained else good, _unwise(name, warnings(value.sidecar), pool.root, "sidecar")
        if files:
            reading.judge(_named(reading.value, path))
        config = reading.good()
    except InvalidFile as error:
        return "", error.problems
    except OSError as error:
        return "", [Problem(file=name, found=error.strerror or str(error))]
    whole = explain(config).removesuffix("\n")
    lines = [*warnings(config), *(unwise_files(config, path) if files else ())]
    return whole if explained else good, _unwise(name, lines, reading.root)


def _unwise(name: str, lines: Iterable[str], root: Value, *within: str) -> list[Problem]:
    parts = [line.partition(": ") for line in lines]
    return placed(name, root, [((*within, field), text) for field, _, text in parts], warning=True)


def _unread(
    config: SidecarConfig, path: Path, read: Callable[[SidecarConfig, Path], object], expected: str
) -> Iterator[Fault]:
    try:
        read(config, path)
    except Mistake as error:
        field, _, found = str(error).partition(" ")
        yield Fault((field,), found, expected)


def _named(config: SidecarConfig, path: Path) -> Iterator[Fault]:
    """Judge the files that the config at `path` names, as `sidecar serve` would find them."""
    yield from _unread(config, path, tokens_of, "the file of a token")
    yield from _unread(config, path, ca_of, "a file of certificates")
    if config.relay is not None and (certificate := certificate_of(config.relay, path.parent)) is not None:
        try:
            certificate.context(Path.read_bytes)
        except (OSError, ValueError) as error:
            field = "key_file" if config.relay.key_file and str(certificate.key) in str(error) else "certificate_file"
            found = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            yield Fault(("relay", field), found, "a certificate and its private key, in PEM")
    state = path.parent / config.state_file
    if not_plain(state):
        yield Fault(("state_file",), f"{state}, which is no plain file", "a file of this sidecar's own")
