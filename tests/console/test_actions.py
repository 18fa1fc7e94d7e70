"""Actions in the console: with the admin token alone, and only after a question that says what happens to calls."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadtest.processes import Gateway
from tests.console.conftest import Console
from tests.console.traffic import XSS, call, chat

pytestmark = [pytest.mark.slow, pytest.mark.console]

TOKEN = "correct-horse-battery-staple"  # noqa: S105 # a test's own
KEY = "sk-acme"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    (folder / "keys.txt").write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()} acme\n")
    (folder / "policy.yaml").write_text("keys_file: keys.txt\ntenants: {acme: {}}\n")
    engines = ("--engine", "demo", "--engine", "sim:1")
    words = (*engines, "--policy", str(folder / "policy.yaml"), "--admin-token-file", str(folder / "token"))
    with Gateway(folder / "log", *words, ready=False, timeout=60) as gateway:
        yield gateway


def entered(opened: Console, token: str = TOKEN) -> None:
    opened.page.goto(opened.control)
    opened.page.get_by_label("Admin token").fill(token)
    opened.page.keyboard.press("Enter")


def sure(opened: Console, answer: str) -> str:
    """What was asked."""
    opened.page.locator("dialog[open]").wait_for()
    text = str(opened.page.locator("dialog[open]").inner_text())
    opened.page.locator("dialog[open]").get_by_text(answer, exact=True).last.click()
    return text


def test_orders_want_the_token_and_ask_first(guarded: Gateway, console: Callable[..., Console], pictures: Path) -> None:
    opened = console(guarded.control)
    entered(opened, "not-the-admin-token")
    opened.page.get_by_text("this is not the admin token").wait_for()
    assert opened.violations() == []
    entered(opened)
    opened.page.locator("#state", has_text="version").wait_for()
    page = opened.page
    assert TOKEN not in page.url
    assert page.evaluate("Object.keys(localStorage).length + Object.keys(sessionStorage).length") == 0
    engine = page.locator(".engine", has_not_text="@").first  # no engine of the sidecar's
    engine.get_by_text("Drain", exact=True).click()
    assert "none is cut off" in sure(opened, "Leave it")
    assert engine.get_by_text("draining").count() == 0
    engine.get_by_text("Drain", exact=True).click()
    sure(opened, "Drain it")
    engine.get_by_text("draining").wait_for()
    engine.get_by_text("End drain").click()
    sure(opened, "End the drain")
    engine.get_by_text("up", exact=True).wait_for()
    row = page.locator("section", has=page.locator("h3")).locator("tbody tr", has_text="phi-3-mini")
    row.get_by_text("Load", exact=True).click()
    assert "make room" in sure(opened, "Load")
    row.get_by_text("running", exact=True).wait_for(timeout=60000)
    gpu = page.locator(".gpu", has_text=re.compile("held by .*phi-3-mini [1-9]"))
    gpu.wait_for()
    gpu.scroll_into_view_if_needed()
    page.screenshot(path=str(pictures / "gpus.png"))
    assert opened.violations() == []
    told = [words for words in opened.complaints if "401" in words]
    assert told  # the browser tells of each answer that wants the token, and of nothing else
    opened.complaints = [words for words in opened.complaints if words not in told]


def test_an_edited_policy_is_tried_on_the_calls_just_recorded(
    guarded: Gateway, console: Callable[..., Console], pictures: Path
) -> None:
    for _ in range(5):
        assert call(guarded.url, chat("sim", 4), authorization=f"Bearer {KEY}") == 200
    opened = console(guarded.control)
    page = opened.page
    page.goto(f"{guarded.control}/#policy")
    page.get_by_label("Admin token").fill(TOKEN)
    page.keyboard.press("Enter")
    text = page.get_by_label("Edited policy")
    for hostile in XSS[:2]:
        text.fill(f"tenants: {{'{hostile}': {{}}}}")
        page.get_by_text("Try it", exact=True).click()
        page.locator("p.bad", has_text=hostile).wait_for()
        page.get_by_text("Try it", exact=True).and_(page.locator(":enabled")).wait_for()
    assert page.locator("img, iframe, main script, svg[onload]").count() == 0
    page.get_by_text("Take the policy in force").click()
    from playwright.sync_api import expect  # noqa: PLC0415 # an extra

    expect(text).to_have_value(re.compile("acme"))  # the page lets no script of ours in
    text.fill("tenants: {acme: {limits: {requests: 1/min}}}")
    page.get_by_text("Try it", exact=True).click()
    told = page.get_by_role("region", name="Policy in force beside the edited one")
    told.get_by_text("rate_limited").first.wait_for(timeout=60000)
    assert opened.violations() == []
    page.set_viewport_size({"width": 320, "height": 900})
    page.screenshot(path=str(pictures / "trial-320.png"), full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    page.set_viewport_size({"width": 1280, "height": 900})
    page.screenshot(path=str(pictures / "trial-1280.png"), full_page=True)
    opened.complaints = [words for words in opened.complaints if "401" not in words]
