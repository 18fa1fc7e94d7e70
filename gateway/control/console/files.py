"""Files of the console: markup, style and script as they are, which may load nothing but each other."""

from __future__ import annotations

from importlib import resources

import msgspec

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
FOLDER = "/console/"
TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


class File(msgspec.Struct, frozen=True):
    """File of the console, with its content type."""

    body: bytes
    type: str


def console_files() -> dict[str, File]:
    """The files by their paths on the control port, read from the package."""
    found = {}
    for each in resources.files("gateway.control.console").joinpath("web").iterdir():
        _, _, ending = each.name.rpartition(".")
        if ending in TYPES:
            path = "/" if each.name == "index.html" else FOLDER + each.name
            found[path] = File(each.read_bytes(), TYPES[ending])
    return found
