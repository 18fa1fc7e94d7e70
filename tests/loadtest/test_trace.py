"""Reading recorded traffic."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.replay import main
from loadtest.trace import Arrival, TraceError, read_azure

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,396,109\n2023-11-16 18:15:51.2224670,879,55\n"


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + ROWS)
    assert read_azure(path, 2) == [Arrival(0.0, 374, 44), Arrival(1.5, 396, 109)]
    assert len(read_azure(path)) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD, "has no rows"),
        ("", "has no rows"),
        (HEAD + ROWS + "yesterday,1,2\n", "line 5"),
        (HEAD + "2023-11-16 18:15:46,many,2\n", "line 2"),
        (HEAD + "2023-11-16 18:15:46,1\n", "line 2"),
        ("a,b\n1,2\n", "line 2"),
    ],
)
def test_not_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_azure(path)
    assert main(["--trace", str(path), "--target", "http://127.0.0.1:9", "--model", "m"]) == 2
    assert says in capsys.readouterr().err
