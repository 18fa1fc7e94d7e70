"""Log of a process that is started again while it cannot be opened: its folder has gone, or the disk is read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.serve.starting import Options, StartError, call_log
from gateway.shared.lines import LineWriter


def test_a_relay_that_is_started_again_serves_without_its_log_until_it_can_be_opened(tmp_path: Path) -> None:
    path, said = tmp_path / "gone" / "weir.jsonl", list[str]()
    options, errors = Options(announce=lambda _: None, log=str(path)), LineWriter(2)
    with pytest.raises(StartError):  # at the gateway's start it is the operator's mistake
        call_log(options, errors)
    log = call_log(options, errors, lambda line: said.append(str(line)), later=True)
    assert log is not None
    log.lines.write(b"one\n")
    log.lines.drain()
    assert log.lines.lost == 1
    assert f"{path}: cannot be written" in "".join(said)
    path.parent.mkdir()
    log.lines.write(b"two\n")
    log.lines.drain()
    assert path.read_bytes().endswith(b"two\n")
