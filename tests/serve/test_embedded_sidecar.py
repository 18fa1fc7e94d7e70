"""Embedded sidecar of `--engine demo`: its file, and one that does not start. e2e/test_demo.py tests all of it."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from gateway.core.policy.policy import SidecarsPolicy
from gateway.serve import sidecar_process
from gateway.serve.policy_file import OwnToken, first_read
from gateway.serve.sidecar_process import CONFIG, GPUS, MODELS, TRUE
from loadtest.engine.memory_stages import RESIDUE, start, wake_seconds
from loadtest.engine.profile_file import profiles
from loadtest.processes import free_port
from sidecar.core.config import SidecarConfig, decode
from sidecar.core.profile import KvMemory
from sidecar.process import engine_api, process, vllm_engine
from sidecar.residency.state_file import Times
from sidecar.residency.state_file import decode as known
from sidecar.sizing import estimate


def config(token: str = "") -> SidecarConfig:
    return decode(
        CONFIG.substitute(gateway="http://127.0.0.1:8001", token=token, listen="127.0.0.1:8002", folder="/r").encode()
    )


def test_the_models_fit_in_pairs_and_not_all() -> None:
    given = config()
    assert tuple(given.models) == MODELS
    *shares, claimed = [model.gpu_memory for model in given.models.values()]
    large = shares[0]
    assert shares == [large] * 3
    assert isinstance(large, float)
    assert isinstance(claimed, KvMemory), "of which the first start tells that it is too little"
    small = (TRUE["rest"] + TRUE["context"]) / GPUS[0]
    assert 2 * large > 1 >= large + small + 2 * RESIDUE / GPUS[0], "two large ones asleep beside a large and the small"
    for name in MODELS:
        simulated = given.engine_of(name).simulated
        assert simulated in profiles()
        room = large * GPUS[0] if name != MODELS[-1] else TRUE["rest"]
        assert profiles()[simulated].weights < room


@pytest.mark.parametrize("speed", [1.0, 2.0, 50.0])
def test_what_it_expects_is_about_what_it_takes(speed: float) -> None:
    times = known(sidecar_process._known(speed)).times
    assert set(times) == set(MODELS)
    weights = profiles()["l4-8b-fp8"].weights
    starting = sum(stage.seconds for stage in start(weights, weights))
    for each in times.values():
        assert isinstance(each, Times)
        assert each.load == pytest.approx(starting / speed, abs=1.1)
        assert each.wake1 == pytest.approx(wake_seconds(weights, 1) / speed, abs=1.1)


def test_it_listens_beside_the_gateway_or_where_the_kernel_puts_nobody() -> None:
    port = free_port()
    assert sidecar_process._free_port(port - 1) == port
    with socket.create_server(("127.0.0.1", port)):
        assert 10_000 <= sidecar_process._free_port(port - 1) < 20_000
        assert sidecar_process._free_port(port - 1) != port
    for given_by_the_kernel in (32_768, 40_000, 65_535):
        assert 10_000 <= sidecar_process._free_port(given_by_the_kernel) < 20_000


def test_one_that_does_not_start_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_process, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))

    async def main() -> None:
        with sidecar_process.embedded_sidecar("http://127.0.0.1:9", "0123456789abcdef", print) as sidecar:
            with pytest.raises(RuntimeError, match=r"the sidecar of .* did not start: exit code 3"):
                await sidecar.start()
            assert decode(sidecar.config.read_bytes()).token_file == "token"  # noqa: S105 # a file's name
            await sidecar.stop()
            await sidecar.stop()
        assert not sidecar.config.parent.exists()

    asyncio.run(main())


@pytest.mark.parametrize("text", [None, "version: 1\n"])
def test_a_gateway_with_one_hears_it_whatever_its_policy_says(tmp_path: Path, text: str | None) -> None:
    file = None if text is None else tmp_path / "p.yaml"
    if file is not None and text is not None:
        file.write_text(text)
    own = OwnToken(None, print, own=True)
    watched, configuration = first_read(file, complete=own.complete)
    assert configuration.policy.fleet.sidecars == SidecarsPolicy()
    assert len(configuration.sidecar_tokens[0]) > 40
    assert not list(tmp_path.glob("*token*")), "it is in memory"
    assert first_read(file)[1].policy.fleet.sidecars is None
    if watched is not None and file is not None:
        assert watched.first().policy.fleet.sidecars == SidecarsPolicy()
        file.write_text("version: 1\nfleet: {sidecars: {allow: [10.0.0.0/8]}}\n")
        reloaded = first_read(file, complete=own.complete)[1]
        sidecars = reloaded.policy.fleet.sidecars
        assert sidecars is not None
        assert reloaded.sidecar_tokens == configuration.sidecar_tokens, "its sidecar goes on being heard"
        assert sidecars.allow == ("10.0.0.0/8",)


def test_a_sidecar_has_the_time_to_read_files_on_a_disk_that_hangs_and_to_end_an_engine_that_hangs() -> None:
    files = 3 * estimate.READ_WITHIN  # adapters, model, draft model: one after the other
    engines = 4 * engine_api.LIVENESS + vllm_engine.STEP_WITHIN + process.GRACE + 2 * process.KILL_WITHIN
    assert files + engines < sidecar_process.READY_WITHIN
    unit = Path(__file__).parents[2] / "deploy" / "systemd" / "weir-sidecar.service"
    assert f"TimeoutStartSec={sidecar_process.READY_WITHIN:g}\n" in unit.read_text()
