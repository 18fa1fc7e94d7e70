"""Files of the report, its table and its verdicts, on runs drawn from a seed."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.report.records import Run, Slo, Window
from loadtest.report.report import COLUMNS, SCHEMA, check, refusal, table, write
from loadtest.report.summary import summarise
from loadtest.report.tally import tallies_of
from tests.loadtest.made_runs import SLOS, a_result, a_run

FILES = ["report.html", "report.json", "requests.csv"]


def small(**fields: object) -> Run:
    """One run of one request."""
    return Run(name="one", rate=1.0, window=Window(duration=20.0), slos=SLOS, results=[a_result(**fields)])


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "requests.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def printed(*runs: Run, partial: bool = False) -> str:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table(runs, partial=partial))
    return console.export_text()


def test_every_request_is_in_the_json_and_in_the_csv(tmp_path: Path) -> None:
    runs = [a_run("a", 5.0), a_run("b", 5.0, repeats=2)]
    written = write(runs, tmp_path / "new" / "folder")
    assert written.problem == ""
    assert sorted(path.name for path in written.files) == FILES
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == FILES

    report = json.loads((tmp_path / "new" / "folder" / "report.json").read_text())
    assert (report["schema"], report["partial"], len(report["runs"])) == (SCHEMA, False, 2)
    for run, told in zip(runs, report["runs"], strict=True):
        results = list(run.results)
        assert told["kept"] == len(told["requests"]) == len(results)
        assert [one["index"] for one in told["requests"]] == [result.index for result in results]
        assert told["requests"][3]["gaps"] == pytest.approx(results[3].gaps, abs=1e-6)
        assert told["total"]["goodput"] == summarise(run).total.goodput
        assert told["window"]["duration"] == 120.0
        assert len(told["series"]) == len(run.series)

    rows = rows_of(tmp_path / "new" / "folder")
    assert tuple(rows[0]) == COLUMNS
    assert [row["run"] for row in rows] == [run.name for run in runs for _ in run.results]
    counted = [row for row in rows if row["run"] == "a" and row["measured"] == "1"]
    total = summarise(runs[0]).total
    assert (len(counted), sum(row["met"] == "1" for row in counted)) == (total.offered, total.met)


def test_a_row_has_what_happened_and_nothing_for_what_did_not(tmp_path: Path) -> None:
    write([small()], tmp_path / "ok")
    write(
        [small(outcome="upstream", status=502, first_token=0.0, gaps=(), reason="=cmd|' /C calc'!A0\nx")],
        tmp_path / "no",
    )
    ok, no = (rows_of(tmp_path / name)[0] for name in ("ok", "no"))
    assert [ok[name] for name in ("ttft", "tpot", "e2e", "itl_max", "met")] == ["0.200000", "0.100000", "0.500000",
                                                                               "0.100000", "0"]  # fmt: skip
    assert [no[name] for name in ("ttft", "tpot", "e2e", "itl_max", "met", "first_token")] == ["", "", "", "", "0", ""]
    assert no["reason"] == "'=cmd|' /C calc'!A0\nx"  # no formula for a spreadsheet


def test_a_folder_with_something_in_it_is_refused_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "there is something in it already" in refusal(tmp_path, force=False)
    written = write([small()], tmp_path)
    assert written.files == ()
    assert "--force" in written.problem
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert write([small()], tmp_path, force=True).problem == ""
    assert write([small(status=201)], tmp_path, force=True).problem == ""  # over its own files
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", *FILES]
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["requests"][0]["status"] == 201


def test_a_folder_that_cannot_be_one_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "folder", tmp_path / ("x" * 300)):
        problem = refusal(folder, force=True)
        assert problem.startswith(str(folder))
        assert "\n" not in problem
    assert refusal(tmp_path / "empty", force=False) == ""


def test_a_full_disk_costs_only_the_files_that_did_not_fit(tmp_path: Path) -> None:
    (tmp_path / "requests.csv").write_text("of an earlier run")
    for name in ("report.json", "requests.csv"):
        (tmp_path / f"{name}.part").symlink_to("/dev/full")  # where every write is told that no space is left
    written = write([a_run("a", 5.0)], tmp_path, force=True)
    assert [path.name for path in written.files] == ["report.html"]
    assert written.problem == (
        f"{tmp_path}: requests.csv was not written: No space left on device, "
        "report.json was not written: No space left on device"
    )
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_partial_run_is_marked_everywhere(tmp_path: Path) -> None:
    run = small()
    write([run], tmp_path, partial=True)
    assert json.loads((tmp_path / "report.json").read_text())["partial"] is True
    assert rows_of(tmp_path)[0]["partial"] == "1"
    assert "Partial." in (tmp_path / "report.html").read_text()
    assert "partial" in printed(run, partial=True)
    assert "partial" not in printed(run)


def test_runs_that_were_only_tallied_are_reported_without_their_requests(tmp_path: Path) -> None:
    run = a_run("a", 5.0)
    bare = Run(name="a", rate=5.0, window=run.window, slos=SLOS, tallies=tallies_of(run))
    assert summarise(bare) == summarise(Run(**{**{name: getattr(run, name) for name in run.__struct_fields__},
                                              "series": (), "meta": {}}))  # fmt: skip
    write([bare], tmp_path)
    told = json.loads((tmp_path / "report.json").read_text())["runs"][0]
    assert (told["kept"], told["requests"]) == (0, [])
    assert told["total"]["offered"] == summarise(run).total.offered


def test_the_table_says_each_runs_figures_its_classes_and_what_is_wrong() -> None:
    text = printed(a_run("weir", 5.0, repeats=2), a_run("weir", 9.0, lag=0.01))
    lines = text.splitlines()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # nothing was cut
    for name in ("weir at 5/s", "weir at 9/s", "  interactive", "  default", "  batch"):
        assert sum(line.startswith(name) for line in lines) >= 3
    assert "\nas vLLM's" in text
    assert re.search(r"weir at 5/s: over 2 repeats, at 95 % confidence: goodput .* %,\s+ttft_p99", text)
    assert re.search(r"weir at 9/s: invalid: the sender was late by [\d.]+ ms at p99, more than\s+5 ms", text)
    assert "weir at 5/s: invalid" not in text


def test_what_others_named_is_neither_markup_nor_obeyed_by_the_terminal() -> None:
    text = printed(*(Run(name=name, rate=1.0, window=Window(duration=20.0), results=[
        a_result(outcome="upstream", reason="[bold]x[/nothing]\x1b[2J", class_name=cls) for cls in ("a\x1b]0;", "[red]")
    ]) for name in ("[/b]\x07", "[blue]other")))  # fmt: skip
    assert "[/b]?" in text
    assert "against [/b]?" in text
    assert "[blue]other" in text
    assert "  a?]0;" in text
    assert "[bold]x[/nothing]?[2J" in text


def test_the_table_says_how_runs_differ() -> None:
    text = printed(a_run("direct", 5.0, refused=0.0), a_run("weir", 5.0, slow=2.0))
    found = re.search(r"against direct +.*\nweir +-?([\d.]+) pt +\+([\d.]+) %", text)
    assert found is not None
    assert float(found[2]) > 50.0
    assert "against" not in printed(a_run("direct", 5.0))


def test_check_says_what_was_missed() -> None:
    lost = check(SLOS, small())  # TPOT is 0.1 s, above 0.05; and no batch
    assert [one.partition(":")[0] for one in lost] == ["batch", "interactive"]


def test_other_slos_than_the_runs_own_are_counted_anew_or_not_at_all() -> None:
    run = small()
    assert check(SLOS, run) != []
    assert check([Slo(ttft=1.0)], run) == []
    run.results = ()
    assert len(check(SLOS, run)) == 2
    with pytest.raises(ValueError, match="not kept"):
        check([Slo(ttft=1.0)], run)


BIG = """
import sys
from pathlib import Path
from loadtest.report.report import write
from tests.loadtest.made_runs import a_run
run = a_run("big", 840.0, tokens=16)
written = write([run], Path(sys.argv[1]))
assert not written.problem, written.problem
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss is the parent's too
print(len(run.results), int(most.split()[1]) / 1024)
"""


@pytest.mark.slow
def test_a_hundred_thousand_requests_take_megabytes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BIG, str(tmp_path)], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    requests, mebibytes = map(float, done.stdout.split())
    assert requests > 100_000
    assert mebibytes < 1000.0
