"""Scenario files checked, traces included: for `gateway check --scenario`, which imports this module by its name."""

from __future__ import annotations

from gateway.shared.files.checked import InvalidFile, Problem
from loadtest.load import scenario
from loadtest.load.scenario import reference_text, schema_text
from loadtest.load.trace import TraceError

__all__ = ["checked", "reference_text", "schema_text"]


def checked(name: str, *, explained: bool) -> tuple[str, list[Problem]]:
    """Text to print of a good scenario, or its mistakes. `explained`: all of it, defaults included."""
    try:
        file = scenario.find(name)
        found = scenario.load(file)
        rows = sum(1 + len(row.turns) for row in scenario.recorded(found, file.parent) or ())
    except InvalidFile as error:
        return "", error.problems
    except (TraceError, scenario.Mistake) as error:
        return "", [Problem(file="", found=str(error))]
    except OSError as error:
        return "", [Problem(file=name, found=f"{error.filename}: {error.strerror}")]
    if explained:
        return scenario.explain(found), []
    return f"{name}: ok{f' ({rows} rows in {found.trace.file})' if found.trace is not None else ''}", []
