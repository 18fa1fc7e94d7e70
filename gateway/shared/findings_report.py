"""Report of the commands that check files: findings as they come, for a person or a program."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from gateway.shared.files.findings import Shown, as_github, as_json, as_text
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.yaml_file import MAX_BYTES


class Report:
    """Findings, printed in one of FORMATS. As text they go to standard error, and good files to standard output; in the
    other formats findings alone go to standard output."""

    def __init__(self, form: str) -> None:
        self.mistakes = self.warnings = 0
        self._form = form
        self._found: list[Shown] = []
        self._lines: dict[str, list[str]] = {}

    def add(self, *found: Shown) -> None:
        """Mistakes, and warnings."""
        for shown in found:
            if shown.finding.severity == "error":
                self.mistakes += 1
            else:
                self.warnings += 1
            if self._form == "text":
                print(as_text(shown, self._source), file=sys.stderr)
            elif self._form == "github":
                print(as_github(shown))
        self._found += found

    def good(self, text: str) -> None:
        """Print the text for a file without mistakes, in text form only."""
        if self._form == "text":
            print(text)

    def end(self) -> None:
        if self._form == "json":
            print(as_json(self._found))

    def _source(self, file: str) -> list[str]:
        if file not in self._lines:
            text = b""
            with suppress(OSError), open_plain(Path(file)) as opened:
                text = opened.read(MAX_BYTES)
            self._lines[file] = text.decode("utf-8-sig", "replace").split("\n")
        return self._lines[file]
