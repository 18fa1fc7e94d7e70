"""A real Chromium, driven by Playwright, on the console of a real gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.console.install import axe_file, chromium, folder

WHY_NOT = [
    (find_spec("playwright") is None, "Playwright is not installed"),
    (chromium() is None, "Chromium is not installed (apt-get install chromium)"),
    (not axe_file().is_file(), "axe-core is not there"),
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    for absent, why in WHY_NOT:
        if absent:
            pytest.skip(f"{why}: `make test-console` installs what it can, and runs this")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 # an extra

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


class Console:
    """One open page of the console. What its script complains of is kept, and no dialog may open."""

    def __init__(self, browser: Any, control: str, theme: str, width: int, height: int) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.control = control
        self.page.on("console", lambda told: self.complaints.append(f"{told.type}: {told.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def open(self, view: str = "now") -> Any:
        self.page.goto(f"{self.control}/#{view}")
        self.page.locator("#state", has_text="version").wait_for()
        return self.page

    def violations(self) -> list[str]:
        """What axe-core finds, of WCAG 2.1 A and AA."""
        # The page's policy lets no script in: axe runs in a world of its own.
        session = self.context.new_cdp_session(self.page)
        tree = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
        world = session.send("Page.createIsolatedWorld", {"frameId": tree, "worldName": "axe"})["executionContextId"]
        run = "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})"
        report = (
            ".then(r => JSON.stringify(r.violations.map(v => v.id + ': ' + v.nodes.slice(0, 3)"
            ".map(n => n.html.slice(0, 150) + ' ' + n.failureSummary).join(' | '))))"
        )
        session.send("Runtime.evaluate", {"expression": axe_file().read_text(), "contextId": world})
        found = session.send("Runtime.evaluate", {"expression": run + report, "contextId": world, "awaitPromise": True})
        session.detach()
        return list(json.loads(found["result"]["value"]))


@pytest.fixture
def console(browser: Any) -> Iterator[Callable[..., Console]]:
    """Opens consoles, and sees in the end that none has complained."""
    opened: list[Console] = []

    def open_one(control: str, theme: str = "light", width: int = 1280, height: int = 900) -> Console:
        opened.append(Console(browser, control, theme, width, height))
        return opened[-1]

    yield open_one
    for each in opened:
        each.context.close()
    assert [words for each in opened for words in each.complaints] == []


@pytest.fixture(scope="session")
def pictures() -> Path:
    """The folder of the run's pictures."""
    made = folder() / "pictures"
    made.mkdir(parents=True, exist_ok=True)
    return made
