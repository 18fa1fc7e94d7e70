"""Views of the console under an overload: accessible in both themes, readable at every width, silent."""

from __future__ import annotations

import csv
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Gateway, until
from tests.console.conftest import Console
from tests.console.traffic import Traffic, call, chat

pytestmark = [pytest.mark.slow, pytest.mark.console]

KEYS = {"acme": "sk-acme", "globex": "sk-globex"}
POLICY = """
classes:
  interactive: {ttft: 1s, deadline: 30s, weight: 8}
  default: {ttft: 5s, deadline: 60s, weight: 4}
  batch: {deadline: 10m, weight: 1, max_queue: 20}
tenants:
  acme: {limits: {classes: {batch: {requests: 60/min}}}, keys: [%s]}
  globex: {keys: [%s]}
budget: {max_concurrency: 4}
"""
DOCS = Path(__file__).parents[2] / "docs"
VIEWS = ["now", "calls", "policy", "tenants"]


def policy() -> str:
    return POLICY % tuple(hashlib.sha256(key.encode()).hexdigest() for key in KEYS.values())


@pytest.fixture(scope="module")
def overloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with overload(tmp_path_factory.mktemp("console")) as gateway:
        yield gateway


@pytest.fixture
def just_overloaded(tmp_path: Path) -> Iterator[Gateway]:
    """One in its first minutes, whose only engine has too little room for what comes."""
    with overload(tmp_path, engines=1, rate=60) as gateway:
        yield gateway


@contextmanager
def overload(folder: Path, engines: int = 3, rate: int = 25) -> Iterator[Gateway]:
    """A gateway with so many engines and more calls than its policy lets through: at most `rate` a second, and fewer
    while twice as many are under way."""
    (folder / "policy.yaml").write_text(policy())
    kinds = itertools.cycle([("acme", "batch"), ("acme", "interactive"), ("globex", "default"), ("acme", "batch")])
    with Gateway(
        folder / "log", "--policy", str(folder / "policy.yaml"), "--engine", f"sim:{engines}:l4-8b-fp8"
    ) as gateway:

        def send() -> int:
            tenant, name = next(kinds)
            headers = {"authorization": f"Bearer {KEYS[tenant]}", "x_weir_class": name}
            return call(gateway.url, chat("sim", 100, words=200), **headers)

        with Traffic(send, rate=rate, threads=2 * rate):
            yield gateway


def test_the_pictures_of_the_documentation(
    just_overloaded: Gateway, console: Callable[..., Console], pictures: Path
) -> None:
    """`make console-pictures` writes them into docs/; else they are left in the cache."""
    folder = DOCS if os.environ.get("WEIR_WRITE_PICTURES") else pictures
    page = console(just_overloaded.control, "light", 1280, 960).open()
    page.locator(".lines li.bad", has_text="Overload").wait_for(timeout=60000)
    page.wait_for_timeout(8000)  # a line of the last minute that is to be seen
    page.screenshot(path=str(folder / "console-now.png"))
    page = console(just_overloaded.control, "dark", 1280, 960).open("calls")
    page.locator(".row .call", has_text="200 (ok)").nth(2).click()
    page.screenshot(path=str(folder / "console-calls.png"))
    assert all((folder / name).stat().st_size < 250_000 for name in ("console-now.png", "console-calls.png"))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible(overloaded: Gateway, console: Callable[..., Console], view: str, theme: str) -> None:
    opened = console(overloaded.control, theme)
    page = opened.open(view)
    page.wait_for_timeout(3000)
    assert opened.violations() == []


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [320, 1280, 3840])
def test_a_view_fits_its_window(
    overloaded: Gateway, console: Callable[..., Console], pictures: Path, view: str, width: int
) -> None:
    page = console(overloaded.control, "light", width, 2160 if width == 3840 else 900).open(view)
    page.wait_for_timeout(3000)
    page.screenshot(path=str(pictures / f"{view}-{width}.png"), full_page=width < 3840)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_it_says_within_a_minute_who_is_refused_and_why_and_what_to_change(
    overloaded: Gateway, console: Callable[..., Console]
) -> None:
    page = console(overloaded.control).open()
    line = page.locator(".lines li", has_text="batch of tenant acme")
    line.first.wait_for(timeout=60000)
    text = line.first.inner_text()
    assert "429 (rate_limited)" in text
    assert "60/min requests" in text
    assert "tenants.acme.limits" in text


WHO = r"^Class (\w+) of tenant (\w+), model sim: (\d+) of (\d+) calls of the last (?:minute|\d+ s) were refused"


IN_SIGHT = """[...document.querySelectorAll(".lines li")]
  .filter((line) => line.querySelector(".why").innerText && line.getBoundingClientRect().bottom <= innerHeight)
  .map((line) => [".what", ".why", ".do"].map((part) => line.querySelector(part).innerText))"""


def test_a_stranger_reads_from_now_who_is_refused_why_and_what_to_change(
    just_overloaded: Gateway, console: Callable[..., Console]
) -> None:
    """Nothing but the first view is read, without scrolling: its first lines, and the row of the class they name."""
    page = console(just_overloaded.control, height=800).open()
    found: dict[Any, Any] = {}

    def read() -> bool:
        lines = page.evaluate(IN_SIGHT)  # in one go: the lines are replaced each second
        whos = [(re.match(WHO, what), "429" in what, why, change) for what, why, change in lines]
        found.clear()
        found.update({(who[1], who[2], limit): (who, why, change) for who, limit, why, change in whos if who})
        found.update({line[0].partition(":")[0]: line for line in lines if line[0].startswith("Overload")})
        return {"Overload", ("batch", "acme", True), ("interactive", "acme", False)} <= found.keys()

    assert until(read, 120.0, every=0.5) is not None, found
    what, why, change = found.pop("Overload")
    assert re.match(r"Overload: \d+ of \d+ calls of the last \w+( s)? for model sim found no room[.,]", what)
    assert why.startswith("Why: More was offered than its engines can do. Now they run ")
    assert re.match(r"Do: Add \d+ engines? of sim: what was offered of late wants \d+, and 1 serves it\.$", change)
    assert all(0 < int(who[3]) <= int(who[4]) for who, _, _ in found.values())
    limit, room = found["batch", "acme", True], found["interactive", "acme", False]
    assert limit[1].startswith("Why: The last was told: The limit of tenant acme in class batch is 60/min requests")
    assert limit[2].startswith("Do: The engines are not the cause.")
    assert "class 'interactive' allows 1.0 s" in room[1]
    assert room[2].startswith("Do: To serve them, add the engines named above.")
    assert re.search(
        r"which holds \d+% of it now, raise classes\.interactive\.weight \(8; that of \w+ is [14]\)", room[2]
    )
    names = page.locator("table").first.locator("thead th").all_inner_texts()
    model = page.locator("table").nth(1).locator("tbody tr").inner_text()
    assert re.search(r"\b1 of \d+ wanted\b", model)
    row = page.locator("table").first.locator("tbody tr", has_text="batch").locator("th, td").all_inner_texts()
    figures = dict(zip(names, row, strict=True))
    assert float(figures["refused/s"]) > 0
    assert float(figures["offered/s"]) > float(figures["admitted/s"])


def test_it_can_be_used_by_keyboard_alone(overloaded: Gateway, console: Callable[..., Console]) -> None:
    page = console(overloaded.control).open()
    page.locator(".engine").first.wait_for()
    reached: list[Any] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("[document.activeElement.tagName, document.activeElement.textContent.slice(0, 20)]")
        )
    assert ["A", "Now"] in reached
    assert any(tag == "BUTTON" and text.startswith("Theme") for tag, text in reached)
    assert any(tag == "BUTTON" and text == "Drain" for tag, text in reached)
    page.locator(".engine button").first.focus()
    page.keyboard.press("Enter")
    page.locator("dialog[open]").wait_for()
    assert "none is cut off" in page.locator("dialog[open]").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    assert not any(engine["draining"] for engine in overloaded.fleet()["engines"])


def test_a_call_opens_to_its_life_and_filters_find_it(overloaded: Gateway, console: Callable[..., Console]) -> None:
    page = console(overloaded.control).open("calls")
    page.locator(".row .call").first.wait_for()
    outcome = page.get_by_label("outcome")
    outcome.locator("option[value=rate_limited]").wait_for(state="attached", timeout=60000)
    outcome.select_option("rate_limited")
    page.get_by_label("class").select_option("batch")
    page.wait_for_timeout(500)
    shown = page.locator(".row .call")
    assert shown.count() > 0
    assert all("429 (rate_limited)" in text and "acme" in text for text in shown.all_inner_texts())
    shown.first.click()
    life = page.locator("section[aria-label='Life of the call']")
    life.get_by_text("60/min requests").wait_for()
    outcome.select_option("ok")
    page.wait_for_timeout(500)
    page.locator(".row .call").first.click()
    life.get_by_text("200 (ok)").wait_for()
    words = life.inner_text()
    for word in ("came", "judged", "waited", "engine", "first byte", "tokens", "ended"):
        assert word in words
    page.get_by_label("class").select_option("interactive")
    outcome.locator("option[value=shed]").wait_for(state="attached", timeout=60000)
    outcome.select_option("shed")
    page.wait_for_timeout(500)
    page.locator(".row .call").first.click()
    life.get_by_text("the room was used").wait_for()


def test_calls_are_saved_as_a_table_without_formulas(overloaded: Gateway, console: Callable[..., Console]) -> None:
    headers = {"authorization": f"Bearer {KEYS['acme']}", "x_request_id": "=1+1"}
    assert call(overloaded.url, chat('-nobody,has"it'), **headers) == 404
    page = console(overloaded.control).open("calls")
    page.get_by_label("outcome").locator("option[value=not_found]").wait_for(state="attached", timeout=30000)
    page.get_by_label("outcome").select_option("not_found")
    page.wait_for_timeout(500)
    with page.expect_download() as saved:
        page.get_by_text("Save as CSV").click()
    with open(saved.value.path(), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["request_id"] == "'=1+1"
    assert rows[0]["model"] == "'-nobody,has\"it"


def test_the_policy_is_shown_and_its_last_change_told(overloaded: Gateway, console: Callable[..., Console]) -> None:
    page = console(overloaded.control).open("policy")
    in_force = page.get_by_role("region", name="Policy in force")
    in_force.get_by_text("60/min").first.wait_for()
    assert "max_queue: 20" in in_force.inner_text()
    assert "No change since the start." in page.get_by_role("region", name="Last change").inner_text()


def test_tenants_are_shown_with_what_is_left(overloaded: Gateway, console: Callable[..., Console]) -> None:
    page = console(overloaded.control).open("tenants")
    row = page.locator("tbody tr", has_text="acme")
    row.get_by_text("60/min requests (class batch)").wait_for(timeout=20000)
    assert hashlib.sha256(KEYS["acme"].encode()).hexdigest()[:8] in row.inner_text()
    assert hashlib.sha256(KEYS["acme"].encode()).hexdigest()[:12] not in row.inner_text()
