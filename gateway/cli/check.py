"""`gateway check`: every mistake in policy files and scenarios, and every warning, named by file and line."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from gateway.cli.commands import SCENARIOS
from gateway.cli.files import MOST, Mistake, read_bytes
from gateway.core.engines.origin import engine_id
from gateway.core.policy.advice import advise
from gateway.core.policy.file import explain
from gateway.core.policy.policy import Budget, EngineEntry
from gateway.core.policy.schema import reference_text, schema_text
from gateway.decider.file_modes import unusable_of, unwise_of
from gateway.decider.loading import Configuration, load
from gateway.decider.telemetry import MODELS_WITHIN, Questions, Unanswered, unmeasured
from gateway.shared.files.checked import InvalidFile, listed, spelled
from gateway.shared.files.findings import Finding, Report, mistake, mistakes, warning
from gateway.shared.vllm.answers import AnswerError, sample_from
from gateway.upstream.names import Names

MISTAKES = (Mistake,)
PROBED_WITHIN = 2.0  # seconds for /health: more than a running gateway gives, since a new connection is made
PROBED_AT_ONCE = 32  # engines

DESCRIPTION = "Read policy files and report every mistake, and what is unwise. Or scenarios of a load test."
EXAMPLES = """\
Prints `FILE: ok`, or every mistake: FILE:LINE:COLUMN: field: what was found, what was expected, and the line. Exit
status 2 if there is any. What is legal but unwise is a warning; --strict makes it a mistake. The files that a policy
names are read too, as `gateway serve` would; --no-files leaves them out. Nothing is started, and no engine is asked
without --probe.

examples:
  gateway check policies/*.yaml
  gateway check --strict policy.yaml                             for a pipeline: warnings fail it too
  gateway check --no-files policies/*.yaml                       for a pull request: without keys and tokens
  gateway check --probe policy.yaml                              ask every engine once; exit status 1 if one is not well
  gateway check policy.yaml --explain                            the policy in full, every default written out
  gateway check --schema > schema.json                           for editors: completion and checks while you write
  gateway check --reference > policy.md                          every field, explained, as a page
  gateway check --scenario load.yaml                             a scenario of `gateway bench`, and its trace to the end
  gateway check --scenario --schema > scenario-schema.json       and their schema"""

USAGE = """gateway check [-h] [--strict] [--no-files] [--probe] FILE ...
       gateway check [--scenario] FILE ... --explain
       gateway check --scenario FILE|NAME ...
       gateway check [--scenario] --schema
       gateway check [--scenario] --reference"""


class CheckFailed(Exception):
    """A file that cannot be used, with what was found."""

    def __init__(self, found: list[Finding]) -> None:
        super().__init__("a file that cannot be used")
        self.found = found


def add_arguments(check: argparse.ArgumentParser) -> None:
    check.usage = USAGE
    check.add_argument("files", nargs="*", metavar="FILE", help="policies; the files that they name are read too")
    check.add_argument("--scenario", action="store_true", help="they are scenarios; their traces are read too")
    check.add_argument("--no-files", action="store_true", help="do not read the files that policies name")
    check.add_argument("--probe", action="store_true", help="ask every engine of the policies once")
    check.add_argument("--strict", action="store_true", help="exit status 2 for warnings too")
    check.add_argument("--explain", action="store_true", help="print the whole effective policy, defaults included")
    check.add_argument("--schema", action="store_true", help="print the JSON Schema of such files")
    check.add_argument("--reference", action="store_true", help="print every field of such files, as Markdown")


def command(given: argparse.Namespace) -> int:
    """Check the files and say what was found; the exit status. Raises Mistake for the command line."""
    if given.schema:
        print(import_module(SCENARIOS).schema_text() if given.scenario else schema_text(), end="")
        return 0
    if given.reference:
        print(import_module(SCENARIOS).reference_text() if given.scenario else reference_text(), end="")
        return 0
    if not given.files:
        raise Mistake("the following arguments are required: FILE (see gateway check --help)")
    if given.probe and given.scenario:
        raise Mistake("--probe: a scenario has no engines of its own")
    report = Report()
    down = 0
    for name in given.files:
        found = Configuration()
        try:
            if given.scenario:
                text, mistaken = import_module(SCENARIOS).checked(name, explained=given.explain)
                if mistaken:
                    raise CheckFailed(mistaken)
            else:
                found, note = _policy(name, files=not given.no_files)
                report.add(*_unwise(name, found, files=not given.no_files))
                text = explain(found.policy) if given.explain else f"{name}: ok{note}"
        except CheckFailed as refused:
            report.add(*refused.found)
            continue
        print(text)
        if given.probe:
            down += _probed(name, found, report)
    return 2 if report.mistakes or (report.warnings and given.strict) else 1 if down else 0


def _probed(name: str, found: Configuration, report: Report) -> int:
    """Ask the engines of a policy, and say how each is; how many are not well."""
    engines, down = found.policy.fleet.engines, 0
    for index, (well, words) in enumerate(asyncio.run(_probe(engines, found.api_keys))):
        line = f"engine {engine_id(engines[index].url)} {words}"
        if well:
            print(line)
        else:
            down += 1
            at = None if found.tree is None else found.tree.mark_of(("fleet", "engines", index, "url"))
            report.add(warning(name, f"fleet.engines[{index}]", line, at))
    return down


def _unwise(name: str, found: Configuration, *, files: bool) -> list[Finding]:
    """List advice on a policy and, with `files`, on the modes of its files."""
    modes = unwise_of(found.policy, Path(name).parent) if files else []
    advice = [warning(name, each.path, each.text, each.mark) for each in advise(found.policy, found.tree)]
    tree = found.tree
    marks = [None if tree is None else tree.mark_of(field) for field, _ in modes]
    return advice + [
        warning(name, spelled(field), text, mark) for (field, text), mark in zip(modes, marks, strict=True)
    ]


def _check_storage(name: str, found: Configuration) -> None:
    """Raises CheckFailed for a storage that a gateway could not start with."""
    wrong = unusable_of(found.policy, Path(name).parent)
    if wrong:
        tree = found.tree
        marks = [None if tree is None else tree.mark_of(field) for field, _ in wrong]
        pairs = zip(wrong, marks, strict=True)
        raise CheckFailed([mistake(name, text, spelled(field), mark) for (field, text), mark in pairs])


def _policy(name: str, *, files: bool) -> tuple[Configuration, str]:
    """A good policy with the files that it names, and a note on a keys file that is not there yet."""
    path = Path(name)
    try:
        found = load(path, lambda file: read_bytes(file, MOST), files=files)
    except InvalidFile as error:
        raise CheckFailed(mistakes(error)) from error
    except OSError as error:
        raise CheckFailed([mistake(name, error.strerror or str(error))]) from error
    keys_file = None if found.policy.keys_file is None else path.parent / found.policy.keys_file
    if files:
        _check_storage(name, found)
    if files and keys_file is not None and not keys_file.exists():
        return found, f" (its keys_file {keys_file} does not exist yet: `gateway key add` makes it)"
    return found, ""


# -- engines -----------------------------------------------------------------------------------------------------------


async def _probe(engines: Sequence[EngineEntry], api_keys: Mapping[str, str]) -> list[tuple[bool, str]]:
    """Check each engine once, as a gateway would: whether it is well, and its models or the reason of its trouble."""
    names, room = Names(), asyncio.Semaphore(PROBED_AT_ONCE)

    async def one(entry: EngineEntry) -> tuple[bool, str]:
        async with room:
            return await _one(entry, Questions(entry.url, api_keys.get(entry.url), names))

    return await asyncio.gather(*(one(entry) for entry in engines))


async def _one(entry: EngineEntry, questions: Questions) -> tuple[bool, str]:
    try:
        await questions.health(PROBED_WITHIN)
        has = sorted(card.id for card in await questions.models(MODELS_WITHIN))
        assumed = await _assumed(entry, questions)
    except Unanswered as error:
        return False, f"is down: {error}"
    finally:
        questions.close()
    missing = sorted(set(entry.models) - set(has))
    if missing:
        return False, f"is up, and does not have {listed(missing)}; it has {listed(has) or 'no model'}"
    return True, f"is up; serves {listed(sorted(entry.models) or has) or 'no model'}{assumed}"


async def _assumed(entry: EngineEntry, questions: Questions) -> str:
    """Text on the budget that a gateway would assume of an engine without vLLM's metrics; empty if the engine has
    them."""
    try:
        sample_from(await questions.metrics(PROBED_WITHIN))
    except (Unanswered, AnswerError) as error:
        budget = Budget()
        capacity, slots = budget.capacity, entry.max_concurrency or budget.max_concurrency
        why = unmeasured(error) or str(error)
        return f"; tells no metrics, as a vLLM would ({why}): {capacity} tokens of KV cache, {slots} calls are assumed"
    return ""
