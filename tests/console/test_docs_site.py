"""Documentation site in a real Chromium, read from its folder: no table or picture is wider than its column."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT

pytestmark = pytest.mark.console

WIDER = """() => {
    const column = document.querySelector(".md-content__inner").getBoundingClientRect();
    return [...document.querySelectorAll(".md-content__inner table, .md-content__inner img")]
        .filter(part => part.getBoundingClientRect().right > column.right + 1
            || part.scrollWidth > part.clientWidth + 1)
        .map(part => (part.alt || part.innerText).slice(0, 60));
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("material") is None:
        pytest.skip("Material for MkDocs is not installed: `make test-console` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    config = ["--config-file", str(ROOT / "docs/site/mkdocs.yml")]
    subprocess.run([*command, *config], check=True, timeout=240, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_wider_than_its_column(browser: Any, site: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    wider = {}
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        if page.locator(".md-content__inner").count():
            wider[str(file.relative_to(site))] = page.evaluate(WIDER)
    page.close()
    assert len(wider) > 30
    assert {name: found for name, found in wider.items() if found} == {}


def test_search_works_from_the_folder(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()  # the index is read once the search is open
    page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()
    page.keyboard.type("retry-after")
    page.locator(".md-search-result__link").first.wait_for()
    page.close()
