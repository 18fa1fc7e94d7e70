"""Programs of others, coding agents most of all, each with one question through a real gateway."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.processes import Gateway, until
from tests.clients import install
from tests.clients.matrix import PAGE
from tests.clients.programs import BEGIN, END, PROGRAMS, Program, files, told

ABSENT = "`make clients` installs what it can, and runs this"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_CLIENTS") == "1":
            pytest.fail(reason)
        pytest.skip(f"{reason}: {ABSENT}")
    with Gateway(tmp_path_factory.mktemp("programs") / "log", "--engine", "sim:1") as running:
        yield running


@pytest.mark.clients
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_is_answered(gateway: Gateway, program: Program, tmp_path: Path) -> None:
    (model,) = {model for engine in gateway.fleet()["engines"] for model in engine["models"]}

    def answered() -> float:
        return gateway.total("weir_requests_total", outcome="ok", route=program.route)

    def others() -> float:
        return gateway.total("weir_requests_total", route=program.route) - answered()

    before, failed = answered(), others()
    done = program.run(tmp_path, {"<URL>": gateway.url, "<MODEL>": model, "<KEY>": "any-key-will-do"})
    said = f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    assert done.stdout.strip(), said
    assert until(lambda: answered() > before, 10.0) is not None, said  # counted once its last byte has gone out
    assert others() == failed, said


def test_the_page_shows_the_files_that_were_tried_and_which_programs_were() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == files()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for program in PROGRAMS:
        (row,) = [row for row in rows if row.startswith(f"| {told(program)} |")]
        assert row.split("|")[2].strip() == "yes"
