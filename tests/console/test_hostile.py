"""Hostile texts in the console: models' names, request ids, headers, errors of engines. They are shown as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from loadtest.processes import Gateway
from tests.console.conftest import Console
from tests.console.traffic import XSS, HostileEngine, call, chat

pytestmark = [pytest.mark.slow, pytest.mark.console]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that has heard every text, from its engine and from its clients."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "policy.yaml").write_text("breaker: {failures: 1}\n")
    with (
        HostileEngine(XSS) as engine,
        Gateway(folder / "log", "--policy", str(folder / "policy.yaml"), "--engine", engine.url) as gateway,
    ):
        for text in XSS:
            id = text.replace(" ", "/")
            call(gateway.url, chat(text), x_request_id=id, user_agent=text)
            call(gateway.url, chat(text + "-unknown"), x_request_id=id)
        yield gateway


@pytest.mark.parametrize("view", ["now", "calls", "policy", "tenants"])
def test_no_text_becomes_markup(hostile: Gateway, console: Callable[..., Console], view: str) -> None:
    page = console(hostile.control).open(view)
    if view in {"now", "calls"}:  # the texts of the other two are the policy's, which takes no such names
        page.locator(".row, tbody tr, option, pre", has_text=XSS[0]).first.wait_for(state="attached")
    page.wait_for_timeout(1500)
    for call_ in page.locator(".row .call").all():
        call_.click()
    if view == "calls":
        page.locator("dl.life", has_text=XSS[0]).wait_for()
    assert page.locator("img, iframe, main script, svg[onload]").count() == 0
    assert page.evaluate("document.scripts.length") == 1
