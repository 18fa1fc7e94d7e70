"""Runs in real time: real processes and sockets under the same clients, with a clean end."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab.figures.runs import MIX, Setting
from loadtest.lab.realtime import Processes, main
from loadtest.load.plan import poisson


@pytest.mark.slow
@pytest.mark.parametrize("gateway", [False, True])
def test_a_run_over_sockets(gateway: bool, tmp_path: Path) -> None:
    setting = Setting(engines=2, warm=0.0, measured=4.0, blocks=1024, place=Processes(tmp_path))
    outcome = setting.run("run", poisson(MIX, 5.0, 3.0, 1), gateway=gateway, ends=4.0, grace=20.0)
    tries = outcome.result.tries
    assert len(tries) == outcome.result.calls > 5
    assert {tried.outcome for tried in tries} == {"ok"}
    for tried in tries:
        assert 0.0 <= tried.intended <= tried.sent < tried.first_byte < tried.finished
        assert tried.prompt_tokens > 0
        assert tried.completion_tokens > 0
        assert tried.upstream == 1
        assert (tried.queue >= 0.0) is gateway
    assert outcome.left_over == []
    assert max(max(sample.kv) for sample in outcome.result.samples) > 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "6,16"], "--rows: there is no row 16; one of 6, 7, 8, 9, 10"),
        (["--policy", "no-such-file"], "--policy: "),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 2
    assert message in capsys.readouterr().err
