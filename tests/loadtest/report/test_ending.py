"""Delivery of reports: each part arrives, whatever happens to the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from loadtest.report.delivery import deliver, saying, unhurried
from tests.loadtest.made_runs import a_run


@contextmanager
def full_disk() -> Iterator[TextIO]:
    """Where no space is left, and what is printed goes there."""
    with open("/dev/full", "w", encoding="utf-8") as file, redirect_stdout(file), open(os.devnull, "w") as nowhere:
        yield file
        os.dup2(nowhere.fileno(), file.fileno())  # closing it would try once more


def test_the_first_signal_is_answered_and_the_next_ends_it() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with unhurried(lambda line, style="": said.append(line)):
        signal.raise_signal(signal.SIGTERM)
        assert said == ["gateway: the report is being made; once more ends it without one"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_report_is_written_though_it_cannot_be_printed(tmp_path: Path) -> None:
    said: list[str] = []
    with full_disk():
        problems = deliver(
            [a_run("a", 5.0)], tmp_path, partial=True, problems=["", "of a run"], show=lambda to: to.print("a table"),
            say=lambda line, style="": said.append(line),
        )  # fmt: skip
    assert problems == ["of a run", "standard output: No space left on device"]
    assert said == [f"gateway: {problem}" for problem in problems]
    assert b'"partial":true' in (tmp_path / "report.json").read_bytes()


def test_nobody_who_hears_it_ends_no_run() -> None:
    with full_disk() as file:
        saying(Console(file=file))("a line of progress")
