"""An engine dies at night: the page, opened afterwards, says what is wrong, since when, where and what to do."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Child, Gateway, get, until
from tests.console.conftest import Console
from tests.console.traffic import Traffic, call, chat

pytestmark = [pytest.mark.slow, pytest.mark.console]

POLICY = 'fleet: {engines: [{url: "%s", name: left}, {url: "%s", name: right}]}'
EARLY, LATE = 1.0, 3.0  # seconds: calls that break off tell at once, health checks within two


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Child]:
    with engine(tmp_path, "left") as child:
        yield child


@pytest.fixture
def killed(tmp_path: Path, left: Child) -> Iterator[tuple[Gateway, float]]:
    """A gateway, one of whose two engines was killed under traffic, and when."""
    with engine(tmp_path, "right") as right:
        urls = [child.line(r"^ready (\S+)", 30) for child in (left, right)]
        (tmp_path / "policy.yaml").write_text(POLICY % tuple(urls))
        with Gateway(tmp_path / "log", "--policy", str(tmp_path / "policy.yaml")) as gateway:
            with Traffic(lambda: call(gateway.url, chat("sim", 200)), rate=4, threads=8):
                assert until(lambda: "left" in streaming(gateway), 30.0) is not None  # else its calls move unseen
                at = time.time()
                left.signal(signal.SIGKILL)
                assert until(lambda: not gateway.fleet()["engines"][0]["up"], 30.0) is not None
            yield gateway, at


def streaming(gateway: Gateway) -> set[str]:
    """Engines in the middle of an answer."""
    calls = json.loads(get(f"{gateway.control}/calls")[1])["calls"]
    return {each["engine"] for each in calls if each["state"] == "streaming"}


def engine(folder: Path, name: str) -> Child:
    return Child(name, [sys.executable, "-m", "loadtest.engine", "--profile", "l4-8b-fp8"], folder / f"{name}.log")


def clock_of(page: Any, text: str) -> float:
    """The time of today in a text, Unix seconds, in the time zone of the page."""
    hours, minutes, seconds = re.search(r"(\d\d):(\d\d):(\d\d)", text).groups()  # type: ignore[union-attr]
    return float(page.evaluate(f"new Date().setHours({int(hours)}, {int(minutes)}, {int(seconds)}, 0) / 1000"))


def test_an_engine_that_was_killed_before_the_page_was_opened(
    killed: tuple[Gateway, float], console: Callable[..., Console]
) -> None:
    gateway, at = killed
    opened = console(gateway.control, height=800)
    opened.page.add_init_script("const real = Date.now; Date.now = () => real() + 7200e3")  # its machine's clock
    page = opened.open()
    line = page.locator(".lines li.bad", has_text="Engine left is down. Other engines take its calls.")
    line.wait_for(timeout=20000)
    assert line.bounding_box()["y"] < 200, "it is the first"
    assert at - EARLY <= clock_of(page, line.locator(".since").inner_text()) <= at + LATE
    assert " h ago" not in line.locator(".since").inner_text()
    assert "connection refused" in line.locator(".why").inner_text()
    assert "Start vLLM there" in line.locator(".do").inner_text()
    line.get_by_role("button", name="Runbook").click()
    page.get_by_role("dialog").get_by_text("An engine fails its health checks.").wait_for()
    page.keyboard.press("Escape")
    alert = console(gateway.control).open("weirbreakeropen")  # as an alert's link leads to it
    alert.get_by_role("dialog").get_by_text("An engine answers its health checks and fails its calls.").wait_for()
    # What happened before the page was opened is drawn, and listed.
    event = page.locator(".events li", has_text="engine left is down")
    event.wait_for(timeout=20000)
    assert at - EARLY <= clock_of(page, event.inner_text()) <= at + LATE
    page.locator("svg.chart polyline.line-answered").wait_for(state="attached", timeout=20000)
    assert page.locator("svg.chart .event.warning title").first.text_content()
    assert {"0"} <= set(page.locator("svg.chart text").all_text_contents())
    assert opened.violations() == []


def test_calls_that_broke_off_are_red_and_say_why(
    killed: tuple[Gateway, float], console: Callable[..., Console]
) -> None:
    gateway, _ = killed
    page = console(gateway.control).open("calls")
    row = page.locator(".row .call", has_text="200, broken off (truncated)").first
    row.wait_for(timeout=20000)
    assert "left" in row.inner_text()
    assert row.locator("span").nth(5).get_attribute("class") == "bad"
    row.click()
    life = page.locator("section[aria-label='Life of the call']")
    life.get_by_text("the caller got 200, broken off (truncated)").wait_for()
    life.get_by_text("The engine failed in the middle of the answer").wait_for()
    page.get_by_label("engine").select_option("left")


def test_whoever_stands_on_a_button_of_a_line_stays_there(
    killed: tuple[Gateway, float], console: Callable[..., Console]
) -> None:
    gateway, _ = killed
    page = console(gateway.control).open()
    button = page.locator(".lines li button").first
    button.wait_for(timeout=20000)
    button.focus()
    with Traffic(lambda: call(gateway.url, chat("nobody-has-it", 1)), rate=10, threads=4):  # lines change
        page.locator(".lines li", has_text="were refused").wait_for(timeout=20000)
        page.wait_for_timeout(3000)
    assert page.evaluate("document.activeElement.textContent") == "Runbook"
