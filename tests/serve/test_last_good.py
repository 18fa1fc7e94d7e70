"""Files that are faulty when a decider is started again: the gateway goes on by what they said before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.decider.loading import Configuration
from gateway.serve.policy_file import TOKEN_FILE
from gateway.serve.processes import last_good
from gateway.serve.processes.last_good import LastGood
from gateway.serve.starting import ApplyError
from loadtest.processes import get, until
from tests.e2e.children import post
from tests.serve.test_processes import POLICY, Processes, processes

OLD = "of-sixteen-characters"
CALL = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def heard(made: Processes, token: str) -> bool:
    """Whether whoever shows this token may report; what it sends is no report."""
    return get(f"{made.gateway.control}/sidecars/report", method="POST", token=token)[0] == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sidecars", "spoil"),
    [
        ("{token_file: t}", lambda folder: (folder / "t").unlink()),
        ("{token_file: t}", lambda folder: (folder / "policy.yaml").write_text("classes: 7\n")),
        ("{}", lambda folder: (folder / TOKEN_FILE).unlink()),
    ],
)
def test_a_decider_that_is_started_again_goes_on_by_what_the_files_said(
    tmp_path: Path, sidecars: str, spoil: Callable[[Path], object]
) -> None:
    for name in ("t", TOKEN_FILE):
        (tmp_path / name).write_text(OLD)
        (tmp_path / name).chmod(0o600)
    policy = POLICY.replace("health: 20s", f"health: 20s, sidecars: {sidecars}")
    with processes(tmp_path, policy=policy) as made:
        said = made.gateway.child
        spoil(tmp_path)
        said.says("version 1 stays active")
        pid = made.pid("decider")
        os.kill(pid, signal.SIGKILL)
        made.replaced("decider", pid)
        assert until(lambda: said.output().count("version 1 stays active") == 2, 60.0) is not None, "told again"
        assert post(f"{made.gateway.url}/v1/chat/completions", CALL)[0] == 200
        assert heard(made, OLD)
        for name in ("t", TOKEN_FILE):
            (tmp_path / name).write_text(OLD[::-1])
            (tmp_path / name).chmod(0o600)
        (tmp_path / "policy.yaml").write_text(policy)
        assert until(lambda: heard(made, OLD[::-1]), 60.0) is not None, "and by new ones once they are mended"


@pytest.mark.slow
@pytest.mark.parametrize(
    "refused",
    [
        lambda made: POLICY.replace("{poll", f"{{engines: [{{url: '{made.engine.url}'}}], poll"),
        lambda _: f"{POLICY}cluster: {{url: 'redis://127.0.0.1:1', advertise: '127.0.0.1:7777', token_file: t}}\n",
    ],
)
def test_a_decider_that_is_started_again_goes_on_without_a_policy_that_was_refused(
    tmp_path: Path, refused: Callable[[Processes], str]
) -> None:
    (tmp_path / "t").write_text(OLD)
    (tmp_path / "t").chmod(0o600)
    with processes(tmp_path) as made:
        said = made.gateway.child
        made.policy.write_text(refused(made))
        for times in (1, 2):
            assert until(lambda: said.output().count("version 1 stays active") == times, 60.0) is not None  # noqa: B023
            pid = made.pid("decider")
            os.kill(pid, signal.SIGKILL)
            made.replaced("decider", pid)
            assert post(f"{made.gateway.url}/v1/chat/completions", CALL)[0] == 200
        made.policy.write_text(POLICY.replace("4", "5"))
        said.says("version 2 is active")


def test_a_configuration_that_is_not_applied_or_has_no_room_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    last: LastGood[Configuration] = LastGood()
    assert last.load() is None

    def refused(_: Configuration) -> None:
        raise ApplyError

    one, two = (Configuration(sidecar_tokens=(token,)) for token in (OLD, OLD[::-1]))
    with pytest.raises(ApplyError):
        last.saving(refused, one)(two)
    assert last.load() == one
    last.saving(lambda _: None, one)(two)
    assert last.load() == two
    monkeypatch.setattr(last_good, "SIZE", 10)
    last.saving(lambda _: None, one)
    assert last.load() == two
    last._shared[last_good.HEAD] ^= 1
    assert last.load() is None, "whoever wrote it was killed, or somebody else wrote too"
