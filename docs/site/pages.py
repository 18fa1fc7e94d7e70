"""Pages of the documentation site: every Markdown page of the tree but the tests', where it stands in the tree.

MkDocs builds one folder; README.md, SECURITY.md and others stand outside of docs/. So the pages are collected here,
under their paths from the top, and links between them need no other form than on GitHub. A file that a page links to is
part of the site as it is; a link to a folder is left as words. Mermaid diagrams become pictures while the site is
built, so that reading it takes no script and no other host.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path
from typing import Any

from mermaidx import render
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
_LEFT_OUT = re.compile(r"\..*|build|dist|.*\.egg-info|node_modules|tests")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
_TARGET = re.compile(r"\]\(([^()\s#]+)")
_LOADED = re.compile(r"""(?:\bsrc(?:set)?|<link[^>]*\bhref)=["'](?:https?:)?//[^"']*""")
_SHIM = "https://unpkg.com/iframe-worker/shim"  # the theme's
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Anchors of headings are GitHub's, so that one link serves both."""
    config.mdx_configs["toc"] = {"slugify": _slug}
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages, what they link to, and a picture for each diagram."""
    found = {str(page.relative_to(ROOT)): page for page in _pages(ROOT)}
    found |= {f"docs/site/{name}": ROOT / "docs" / "site" / name for name in ("weir.css", "worker.js")}
    pictures: dict[str, str] = {}
    for uri, page in list(found.items()):
        text = page.read_text()
        for target in _TARGET.findall(text):
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(uri), target))
            if (ROOT / linked).is_file():
                found.setdefault(linked, ROOT / linked)
        pictures |= {_picture(diagram): diagram for diagram in _MERMAID.findall(text)}
    return Files(
        [
            *(file for file in files if file.src_dir != config.docs_dir),  # the theme's
            *(File.generated(config, uri, abs_src_path=str(path)) for uri, path in found.items()),
            *(File.generated(config, uri, content=render(diagram).svg()) for uri, diagram in pictures.items()),
        ]
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with pictures for its diagrams, and without links to folders."""
    folder = posixpath.dirname(page.file.src_uri)

    def pictured(match: re.Match[str]) -> str:
        return f"![diagram]({posixpath.relpath(_picture(match[1]), folder or '.')})"

    def linked(match: re.Match[str]) -> str:
        return match[1] if (ROOT / folder / match[2]).is_dir() else match[0]

    return _LINK.sub(linked, _MERMAID.sub(pictured, markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page, whose search works from its folder too. Raises PluginError if it loads something from another host."""
    output = output.replace(_SHIM, get_relative_url("docs/site/worker.js", page.url))
    loaded = _LOADED.search(output)
    if loaded is not None:
        raise PluginError(f"{page.file.src_uri} loads {loaded[0]}")
    return output


def _pages(folder: Path) -> list[Path]:
    pages = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not _LEFT_OUT.fullmatch(entry.name):
            pages += _pages(entry)
        elif entry.suffix == ".md":
            pages.append(entry)
    return pages


def _picture(diagram: str) -> str:
    """Where the picture of a diagram stands in the site."""
    return f"diagrams/{hashlib.sha256(diagram.encode()).hexdigest()[:16]}.svg"


def _slug(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)
