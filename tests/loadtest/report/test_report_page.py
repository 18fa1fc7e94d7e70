"""HTML page of the report: its content, no external resources, and its rendering in a browser."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from loadtest.report.comparison import base_of, verdict
from loadtest.report.html import page
from loadtest.report.number_format import change, count, seconds, share
from loadtest.report.plots import Axis, Line, axis_over, chart
from loadtest.report.records import EngineSample, Run
from loadtest.report.summary import summarise
from tests.loadtest.made_runs import a_run

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser",
                                               "google-chrome"))), None)  # fmt: skip
VOID = {"meta", "link", "br", "img", "input", "hr"}


def page_of(*runs: Run, partial: bool = False) -> str:
    return page(runs, [summarise(run) for run in runs], partial=partial)


def several() -> list[Run]:
    """Three targets at three rates, the first overloaded early."""
    return [
        a_run(name, rate, slow=1.0 + rate / capacity, repeats=2, tokens=8)
        for rate in (2.0, 4.0, 8.0)
        for name, capacity in (("direct", 2.0), ("round_robin", 4.0), ("weir", 30.0))
    ]


@pytest.fixture(scope="module")
def full() -> str:
    """The page of all of them."""
    return page_of(*several())


class Reader(HTMLParser):
    """Checks that tags are closed in order, and collects what there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.captions: list[str] = []
        self.svgs: list[dict[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.extend(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "svg":
            self.svgs.append(dict(attrs))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.extend(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in {"rect", "path", "circle"}:
            return
        while self.open[-1] in {"th", "td", "li", "dt", "dd", "p"} and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)
        if self.open and self.open[-1] == "desc":
            self.words.append(data)


def test_everything_is_on_the_page_and_said_in_words(full: str) -> None:
    read = Reader(full)
    assert read.captions[:5] == [
        "Goodput against offered load", *(f"{name}: requests that met their SLO" for name in
                                          ("batch", "default", "interactive")), "TTFT, cumulative",
    ]  # fmt: skip
    for wanted in ("ITL, cumulative", "E2E, cumulative", "weir at 8/s: interactive", "weir at 8/s: KV cache",
                   "weir at 8/s: queue depth"):  # fmt: skip
        assert wanted in read.captions
    drawn = [svg for svg in read.svgs if svg.get("role") == "img"]
    assert len(drawn) == len(read.words) == len(read.captions)
    assert all(len(words) > 10 for words in read.words)
    assert all("aria-hidden" in svg for svg in read.svgs if svg.get("role") != "img")
    for heading in ("Figures", "Latencies", "How requests ended", "Over time", "How this was counted"):
        assert f"<h2>{heading}</h2>" in full
    assert "Differences from direct at the same rate." in full


def test_runs_are_compared_at_the_same_rate() -> None:
    runs = [a_run(name, rate, series=False) for rate in (2.0, 4.0) for name in ("a", "b")]
    slow, other, quick, last = [summarise(run) for run in [*runs[:3], a_run("b", 9.0, series=False)]]
    assert base_of(quick, [slow, other, quick, last]) is None  # it is the first name's
    assert base_of(other, [slow, other, quick, last]) is slow
    assert base_of(last, [slow, other, quick, last]) is None
    assert base_of(summarise(runs[3]), [slow, other, quick, last]) is quick


def test_policies_are_compared_with_as_many_engines_and_drawn_over_their_number() -> None:
    runs = [a_run(f"{name}, {number} engines", 4.0, series=False) for name in ("now", "next") for number in (2, 4)]
    summaries = [summarise(run) for run in runs]
    assert [base_of(summary, summaries) for summary in summaries] == [None, None, *summaries[:2]]
    text = page(runs, summaries)
    assert "<h1>Load test: now, next; 2, 4 engines</h1>" in text
    assert "Differences from now at the same rate, with as many engines." in text
    chart_of_batch = text.partition("<figcaption>batch: requests that met their SLO")[2].partition("</figure>")[0]
    assert re.findall(r"</svg>([^<]+)</li>", chart_of_batch) == ["now", "next"]
    assert ">engines</text>" in chart_of_batch


def test_only_repeats_that_lie_apart_are_called_better_or_worse() -> None:
    base, slower = (summarise(a_run("x", 2.0, slow=slow, repeats=3, series=False)) for slow in (1.0, 2.0))
    assert verdict("tpot_p50", slower, base, higher=False) == "bad"
    assert verdict("tpot_p50", base, slower, higher=False) == "good"
    assert verdict("tpot_p50", base, slower, higher=None) == ""
    assert verdict("tpot_p50", base, base, higher=False) == ""
    assert verdict("tpot_p50", summarise(a_run("x", 2.0, series=False)), base, higher=False) == ""


def test_one_run_at_one_rate_is_compared_with_nothing() -> None:
    read = Reader(page_of(a_run("weir", 5.0, series=False)))
    assert read.captions == ["TTFT, cumulative", "ITL, cumulative", "E2E, cumulative", "weir: batch", "weir: default",
                             "weir: interactive"]  # fmt: skip


def test_many_engines_are_three_lines() -> None:
    run = a_run("weir", 2.0, series=False)
    run.series = [EngineSample(float(at), f"e{one}", one / 10, one, 0) for at in range(30) for one in range(10)]
    text = page_of(run)
    legend = [
        part.partition("</li>")[0].rpartition(">")[2] for part in text.partition("weir: KV cache")[2].split("<li>")
    ]
    assert legend[1:4] == ["fullest", "mean of 10", "emptiest"]
    assert "running: at most 45" in text  # the sum of all


def test_a_run_of_nothing_has_a_page() -> None:
    run = a_run("none", 5.0, series=False)
    run.results = []
    assert Reader(page_of(run, partial=True)).captions == []


def test_it_needs_nothing_from_anywhere(full: str) -> None:
    read = Reader(full)
    fetched = [value for name, value in read.attributes if name in {"src", "href", "action", "srcset", "data"}]
    assert fetched == ["data:,"]
    assert not re.search(r"<script|@import|url\(|<iframe|<object|\bon\w+=", full)
    assert "default-src 'none'" in full


def test_what_servers_and_files_say_is_text() -> None:
    run = a_run('<img src=x onerror="a()">', 5.0)
    run.meta = {"<b>x</b>": "</dl><script>a()</script>"}
    for result in run.results:
        result.reason, result.class_name = "<i>&reason", "<u>class"
        result.outcome = "</div>" if result.index % 3 == 0 else result.outcome
    run.tallies = []
    text = page_of(run, a_run("</title>", 5.0))
    Reader(text)
    assert "onerror=&quot;" in text
    for bad in ("<img", "<b>x", "<script", "<i>&r", "<u>", "</title></title>"):
        assert bad not in text


def test_an_invalid_run_and_missing_usages_are_said_on_top() -> None:
    run = a_run("slow sender", 5.0, lag=0.02)
    for result in run.results:
        result.completion_tokens = 0
    text = page_of(run).partition("<main>")[0]
    assert "Invalid." in text
    assert "told no usage" in text


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (axis_over("x", [8.0]), [0, 2, 4, 6, 8]),
        (axis_over("x", []), [0, 0.25, 0.5, 0.75, 1.0]),
        (Axis(label="x", high=2.08, whole=True), [0, 1, 2]),
        (axis_over("x", [0.0]), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (axis_over("x", [0.0, 0.009, 0.11], log=True), [0.01, 0.02, 0.05, 0.1]),
        (axis_over("x", [1e-6, 10.0], log=True), [1e-6, 1e-4, 1e-2, 1.0]),
        (axis_over("x", [0.02], log=True), [0.02, 0.03, 0.04]),
    ],
)
def test_ticks_are_few_and_round(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


def test_a_line_is_where_its_points_are() -> None:
    lines = [Line(name="a&b", points=[(0.0, 0.0), (5.0, 10.0), (99.0, 5.0)], whiskers=[None, 1.0, None])]
    drawn = chart("T", "words", Axis(label="x", high=10.0), Axis(label="y", high=10.0), lines, [(0.0, 5.0)])
    assert 'd="M62.0 198.0L210.0 10.0L358.0 104.0"' in drawn  # what is beyond the axis lies on its edge
    assert 'd="M210.0 28.8V10.0"' in drawn  # 9 to 11, cut at 10
    assert '<rect class="cut" x="62.0" y="10" width="148.0" height="188"/>' in drawn
    assert "a&amp;b" in drawn


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (seconds(0.0), "0"), (seconds(0.00001234), "12.3 us"), (seconds(0.0999), "99.9 ms"), (seconds(0.99996), "1 s"),
        (seconds(1234.0), "1234 s"), (count(0.0), "0"), (count(9999.0), "9999"), (count(12_340.0), "12.3k"),
        (count(2.5e6), "2.5M"), (share(0.0), "0 %"), (share(1.0), "100 %"), (share(0.5), "50.0 %"),
        (share(0.999999), "> 99.999 %"), (share(0.9996), "99.96 %"), (share(0.000001), "< 0.001 %"),
        (change(2.0, 0.0), ""), (change(1.1, 1.0), "+10.0 %"), (change(0.5, 1.0), "-50.0 %"),
        (change(20.0, 1.0), "20x"),
    ],
)  # fmt: skip
def test_figures_are_worded(said: str, expected: str) -> None:
    assert said == expected


# -- in a browser -----------------------------------------------------------------------------------------------------

PROBE = """<!doctype html>
<iframe id="page" src="%s" style="width:%dpx;height:800px;border:0"></iframe><pre id="found"></pre>
<script>onload = () => {
  const inner = document.getElementById("page").contentDocument, root = inner.documentElement;
  const all = (what) => [...inner.querySelectorAll(what)], box = (element) => element.getBoundingClientRect();
  const reaches = (element, edge) => box(element).left < edge.left - 1 || box(element).right > edge.right + 1;
  const loose = all("body *").filter((element) => !element.closest(".wide") && !element.closest("svg"));
  const texts = all("figure svg text");
  document.getElementById("found").textContent = JSON.stringify({
    dark: inner.defaultView.matchMedia("(prefers-color-scheme: dark)").matches,
    over: root.scrollWidth - root.clientWidth,
    wide: loose.filter((element) => reaches(element, box(root))).map((element) => element.outerHTML.slice(0, 80)),
    outside: texts.filter((text) => reaches(text, box(text.closest("svg")))).map((text) => text.textContent),
    height: Math.min(...texts.filter((text) => !text.hasAttribute("transform")).map((text) => box(text).height)),
    charts: all("figure").length });
};</script>"""


def browse(*arguments: str) -> str:
    """What a headless Chromium writes to its output. Its whole process group is ended, whatever happens."""
    assert BROWSER is not None
    argv = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    browser = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return browser.communicate(timeout=60)[0].decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


def picture(path: Path) -> tuple[int, int, tuple[int, ...]]:
    """Width, height and the first pixel of a PNG, which no filter changes."""
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    pixels, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            pixels += data[at + 8 : at + 8 + length]
        at += 12 + length
    return width, height, tuple(zlib.decompress(pixels)[1:4])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page is not looked at")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_a_browser_shows_it_light_and_dark_wide_and_on_a_phone(tmp_path: Path, width: int, *, dark: bool) -> None:
    """Nothing reaches over the edge, letters are not tiny, and the colours are the reader's choice. What it looks like
    is left in the test's folder (`pytest --basetemp=FOLDER`)."""
    report, shot = tmp_path / "report.html", tmp_path / f"{width}-{'dark' if dark else 'light'}.png"
    report.write_text(
        page_of(*several(), a_run("a-target-with-quite-a-long-name-and-more", 16.0, lag=0.02), partial=True)
    )
    (tmp_path / "probe.html").write_text(PROBE % (report.name, width))
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--allow-file-access-from-files"]
    said = browse(*scheme, "--window-size=1400,900", "--dump-dom", f"file://{tmp_path}/probe.html")
    found = json.loads(said.partition('<pre id="found">')[2].partition("</pre>")[0])
    assert (found["over"], found["wide"], found["outside"], found["dark"]) == (0, [], [], dark)
    assert found["height"] >= 11.0  # CSS pixels, of a line of text
    assert found["charts"] > 15
    browse(*scheme, f"--window-size={width},1400", f"--screenshot={shot}", f"file://{report}")
    assert picture(shot) == (width, 1400, (0x12, 0x16, 0x1C) if dark else (0xF6, 0xF7, 0xF9))
