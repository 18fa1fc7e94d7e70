"""Peers of `make bench-overhead`: started where they are installed, named where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.cost.overhead import peers, report


def test_peers_are_found_on_the_path_and_named_where_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ROUTER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("smg", "envoy"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    found = peers({"smg", "envoy", "vllm-router"}, tmp_path)
    routers = ("vllm-router round_robin", "vllm-router cache_aware")
    assert [found[name] for name in routers] == [None, None]
    smg, envoy = found["smg cache_aware"], found["envoy"]
    assert smg is not None
    assert smg(19399)[:2] == [str(tmp_path / "smg"), "launch"]
    assert envoy is not None
    assert "port_value: 19399" in Path(envoy(19399)[-1]).read_text()
    picker = found["envoy picker"]
    assert picker is not None
    assert "--epp 127.0.0.1:19899" in picker(19399)[-1]
    config = (tmp_path / "19399.yaml").read_text()
    assert ("port_value: 19899" in config, "port_value: 19399" in config) == (True, True)


def test_the_streamed_call_is_the_first_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"us/stream of 200": [4.0, 6.0, 5.0], "us/request": [2.0], "us/event": [1.0]}
    report({"nginx": row, "gateway": row})
    _, _, first, *rest = capsys.readouterr().out.splitlines()
    assert first.split() == ["us/stream", "of", "200", "5.0", "5.0"]
    assert rest[-1].split()[-2:] == ["1.00", "1.00"]
