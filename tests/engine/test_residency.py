"""GPU memory of the simulated engine, and its times to start, sleep and wake, as the simulated driver reports them."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from loadtest.engine import memory_stages
from loadtest.engine.engine_memory import GpuShare, Resident
from loadtest.engine.faults import Faults, faults_of
from loadtest.engine.profile_file import profiles
from loadtest.processes import Child, answers, get, until
from sidecar.core.diagnosis import diagnosis
from sidecar.gpus.simulated import OutOfMemory, SimulatedGPUs, claim
from tests.engine.test_sim_faults import ask, faults, send, text
from tests.sidecar.laid_out import lay_out

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

Start = Callable[..., Any]
GIB = 1 << 30
TOTAL = 24 * GIB
HALF = TOTAL // 2
WEIGHTS = profiles()["l4-8b-fp8"].weights


def used(folder: Path) -> tuple[int, ...]:
    return tuple(gpu.used for gpu in SimulatedGPUs(folder).snapshot())


def take(folder: Path, size: int, index: int = 0) -> None:
    """What somebody else holds: the process 1, which is always there."""
    start = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    (folder / f"GPU-{index}.1.{start}").write_text(str(size))


def share(folder: Path, *gpus: int, cache: int | None = None) -> GpuShare:
    return GpuShare(folder=folder, gpus=gpus or (0,), utilization=0.5, cache=cache)


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """A folder of two GPUs of 24 GiB."""
    lay_out(tmp_path / "gpus", (TOTAL, TOTAL))
    return tmp_path / "gpus"


def engine(gpus: Path, *more: str) -> Child:
    argv = [sys.executable, "-m", "loadtest.engine", "--profile", "l4-8b-fp8", "--model", "m", "--speed", "50"]
    argv += ["--gpu-folder", str(gpus), "--gpu-memory-utilization", "0.5", *more]
    return Child("engine", argv, gpus.parent / "log")


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_a_start_takes_the_sum_of_its_stages_and_memory_step_by_step() -> None:
    stages = list(memory_stages.start(WEIGHTS, HALF))
    assert sum(stage.seconds for stage in stages) == pytest.approx(14.55)
    sizes = [
        memory_stages.held(WEIGHTS, HALF, loaded=stage.loaded, cache=stage.cache)
        for stage in stages
        if stage.loaded is not None
    ]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (GIB, HALF)
    assert len(set(sizes)) == 6


@pytest.mark.parametrize("weights", [0, 1, GIB, WEIGHTS, TOTAL])
@pytest.mark.parametrize("claim", [0, 1, GIB, HALF, HALF + 1])
def test_what_is_held_is_the_claim_awake_and_the_residue_asleep(weights: int, claim: int) -> None:
    assert memory_stages.held(weights, claim, loaded=1.0, cache=True) == claim
    assert (
        memory_stages.held(weights, claim, loaded=0.0, cache=False) == memory_stages.residue(claim) == min(claim, GIB)
    )


@pytest.mark.parametrize(
    ("profile", "slow", "fast", "again"),
    [("l4-4b-fp8", 12, 0.7, 1.2), ("h100-8b", 18, 1.7, 2.8), ("h100-70b-tp4", 28, 3.3, 5.2)],
)
def test_waking_is_quicker_than_starting(profile: str, slow: float, fast: float, again: float) -> None:
    weights = profiles()[profile].weights
    assert sum(stage.seconds for stage in memory_stages.start(weights, weights)) == pytest.approx(slow, abs=0.5)
    assert memory_stages.wake_seconds(weights, 1) == pytest.approx(fast, abs=0.1)
    assert memory_stages.wake_seconds(weights, 2) == pytest.approx(again, abs=0.1)


# -- start ------------------------------------------------------------------------------------------------------------


def test_it_takes_memory_in_steps_and_listens_when_it_has_it_all(gpus: Path) -> None:
    seen: dict[str, int] = {}  # what it holds as it says each line: whoever looks from outside may come too late
    resident = Resident(share(gpus), WEIGHTS, 8)
    asyncio.run(resident.start(("m",), 100.0, lambda line: seen.update({line: used(gpus)[0]})))
    assert [*seen.values()] == sorted(seen.values())
    assert len(set(seen.values())) == 7
    assert [size for line, size in seen.items() if "Capturing" in line] == [HALF, HALF], "it comes after the claim"
    resident.release()
    with engine(gpus, "--port", "0") as child:
        url = child.line(r"^ready (\S+)", 60)
        assert answers(f"{url}/health")
        assert used(gpus) == (HALF, 0)
        for said in (" 25% Completed | 1/4", "Capturing CUDA graphs", "Application startup complete.\nready"):
            assert said in child.output()
        assert child.stop(60.0) == 0
        assert used(gpus) == (0, 0)


def test_it_does_not_start_where_its_share_is_not_free(gpus: Path) -> None:
    take(gpus, HALF + GIB // 2)
    with engine(gpus) as child:
        assert until(lambda: not child.alive, 60) is not None
        assert child.process.returncode == 1
        told = diagnosis(child.output().splitlines())
    assert told.out_of_memory
    assert told.line == (
        "ValueError: Free memory on device cuda:0 (11.50/24.00 GiB) on startup is less than desired GPU memory "
        "utilization (0.5, 12.00 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    assert used(gpus) == (HALF + GIB // 2, 0)


def test_a_start_that_fails_says_why(gpus: Path) -> None:
    (gpus / "m.faults").write_text('{"fail_start": "ValueError: no such model"}')
    with engine(gpus) as child:
        assert until(lambda: not child.alive, 60) is not None
        assert child.process.returncode == 1
        told = diagnosis(child.output().splitlines())
    assert (told.line, told.out_of_memory, used(gpus)) == ("ValueError: no such model", False, (0, 0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_ends_while_it_loads_has_given_its_memory_back(gpus: Path, number: signal.Signals) -> None:
    with engine(gpus, "--speed", "1") as child:
        child.wait(lambda: used(gpus)[0] > 0, 60, "memory")
        child.signal(number)
        assert child.process.wait(60) == (0 if number == signal.SIGTERM else -9)
        assert used(gpus) == (0, 0)


def test_a_gpu_that_is_not_there_is_a_mistake(gpus: Path) -> None:
    with engine(gpus, "--gpus", "0,7") as child:
        assert until(lambda: not child.alive, 60) is not None
        assert child.process.returncode == 2
        assert child.output() == f"python -m loadtest.engine: there is no GPU 7 in {gpus}\n"


def test_the_environment_says_where_and_which_and_how_fast(gpus: Path) -> None:
    env = {"WEIR_SIMULATED_GPUS": str(gpus), "CUDA_VISIBLE_DEVICES": "1", "WEIR_SIMULATED_SPEED": "50"}
    argv = [sys.executable, "-m", "loadtest.engine", "--profile", "l4-8b-fp8"]
    with Child("engine", argv, gpus.parent / "log", env=env) as child:
        child.line(r"^ready (\S+)", 60)
        assert used(gpus) == (0, int(TOTAL * 0.9))
    with Child("engine", argv, gpus.parent / "log", env=env | {"CUDA_VISIBLE_DEVICES": ""}) as child:
        child.line(r"^ready (\S+)", 60)
        assert used(gpus) == (0, 0)


# -- sleep and wake ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_keeps_a_residue_and_awake_it_takes_all_back(sim: Start, gpus: Path, level: int) -> None:
    server = sim(profile="l4-8b-fp8", share=share(gpus, 0, 1), speed=200.0)
    right = text(ask(server, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}))
    assert used(gpus) == (HALF, HALF)
    assert ask(server, "POST", f"/sleep?level={level}")[0] == 200
    assert used(gpus) == (GIB, GIB)
    assert ask(server, "POST", "/sleep")[0] == 200
    assert ask(server, "POST", "/wake_up?tags=weights")[1]["status"] == "sleeping"
    assert used(gpus) == (GIB + WEIGHTS,) * 2
    assert ask(server, "POST", "/collective_rpc", {"method": "reload_weights"})[0] == 200
    assert ask(server, "POST", "/wake_up?tags=kv_cache")[1]["status"] == "awake"
    assert used(gpus) == (HALF, HALF)
    again = ask(server, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    assert text(again) == right


def test_a_capped_cache_claims_no_more(sim: Start, gpus: Path) -> None:
    sim(profile="l4-8b-fp8", share=share(gpus, cache=GIB), speed=200.0)
    assert used(gpus) == (2 * GIB + WEIGHTS, 0)


def test_while_it_falls_asleep_everything_else_waits(sim: Start, gpus: Path) -> None:
    server = sim(profile="l4-8b-fp8", share=share(gpus), speed=200.0)
    server.do(lambda it: setattr(it, "config", structs.replace(it.config, speed=0.2)))
    seconds = memory_stages.sleep_seconds(WEIGHTS, 1) / 0.2
    began = time.monotonic()
    with server.raw() as sleep:
        sleep.sendall(b"POST /sleep?level=1 HTTP/1.1\r\nhost: x\r\n\r\n")
        server.until(lambda it: it.engine.asleep == 1)
        assert used(gpus) == (HALF, 0), "given back at the end"
        assert ask(server, "GET", "/health")[0] == 200
        assert used(gpus) == (HALF, 0), "health alone is told meanwhile"
        assert ask(server, "GET", "/is_sleeping")[1] == {"is_sleeping": True}
        assert time.monotonic() - began >= seconds
        assert used(gpus) == (GIB, 0)
        assert sleep.recv(100).startswith(b"HTTP/1.1 200 OK")
    began = time.monotonic()
    assert ask(server, "POST", "/wake_up")[1]["status"] == "awake"
    assert time.monotonic() - began >= memory_stages.wake_seconds(WEIGHTS, 1)


def test_one_that_cannot_have_its_memory_back_dies(sim: Start, gpus: Path) -> None:
    server = sim(profile="l4-8b-fp8", share=share(gpus), speed=50.0)
    ask(server, "POST", "/sleep")
    take(gpus, HALF + 1)
    status, body = ask(server, "POST", "/wake_up")
    assert (status, body["error"]["message"]) == (
        500,
        "CUDA out of memory. Tried to allocate 11.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 11.00 GiB "
        "is free. Including non-PyTorch memory, this process has 1.00 GiB memory in use.",
    )
    assert ask(server, "GET", "/health")[0] == 503
    assert ask(server, "GET", "/is_sleeping")[0] == 500
    assert used(gpus) == (HALF + 1, 0)
    server.until(lambda it: it.died.is_set())


def test_one_that_has_died_ends_its_process(gpus: Path) -> None:
    with engine(gpus, "--port", "0") as child:
        url = child.line(r"^ready (\S+)", 60)
        assert get(f"{url}/sleep", method="POST")[0] == 200
        take(gpus, TOTAL - GIB)
        assert get(f"{url}/wake_up", method="POST")[0] == 500
        assert child.process.wait(60) == 0


def test_its_cache_can_be_had_without_its_weights(sim: Start, gpus: Path) -> None:
    server = sim(profile="l4-8b-fp8", share=share(gpus), speed=200.0)
    ask(server, "POST", "/sleep?level=2")
    assert ask(server, "POST", "/wake_up?tags=kv_cache")[1]["status"] == "sleeping"
    assert used(gpus) == (HALF - WEIGHTS, 0)


def test_faults_are_a_file_of_the_models_name(gpus: Path) -> None:
    assert faults_of(gpus, "org/m") == Faults()
    (gpus / "org%2Fm.faults").write_text('{"hang_end": true}')
    assert faults_of(gpus, "org/m") == Faults(hang_end=True)
    (gpus / "m.faults").write_text('{"fail_weak": true}')
    with pytest.raises(ValueError, match=r"m.faults: Object contains unknown field `fail_weak`"):
        faults_of(gpus, "m")


# -- EngineCore -------------------------------------------------------------------------------------------------------


def test_one_that_hangs_answers_nothing_that_its_core_would_have_to(sim: Start) -> None:
    server = sim()
    faults(server, hang=True)
    with server.raw() as sock:
        sock.sendall(b"GET /is_sleeping HTTP/1.1\r\nhost: x\r\n\r\n")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(60)
        assert ask(server, "GET", "/health")[0] == 200
        faults(server)
        assert sock.recv(1000).endswith(b'{"is_sleeping":false}')


def test_it_says_that_it_sleeps_while_it_waits_to(sim: Start) -> None:
    server = sim(speed=1.0)
    faults(server, slow=50.0)  # what runs is not over before somebody waits for it
    with send(server, max_tokens=300), server.raw() as sleep:
        server.until(lambda it: bool(it.engine.scheduler.running))
        sleep.sendall(b"POST /sleep?mode=wait HTTP/1.1\r\nhost: x\r\n\r\n")
        server.until(lambda it: bool(it.sleeping.when_idle))
        assert ask(server, "GET", "/is_sleeping")[1] == {"is_sleeping": True}
        assert ask(server, "POST", "/wake_up")[0] == 200


def test_whoever_asked_is_left_by_an_answer_that_fails(sim: Start, gpus: Path) -> None:
    server = sim(profile="l4-8b-fp8", share=share(gpus), speed=200.0)
    gpus.rename(gpus.with_name("away"))
    with pytest.raises(ConnectionResetError):
        ask(server, "POST", "/sleep")
    gpus.with_name("away").rename(gpus)
    assert ask(server, "POST", "/wake_up")[1]["status"] == "awake"


# -- the folder -------------------------------------------------------------------------------------------------------


def test_what_one_gpu_refuses_is_taken_of_none(gpus: Path) -> None:
    take(gpus, HALF + 1, index=1)
    with pytest.raises(OutOfMemory, match=r"GPU 1 has a total capacity of 24.00 GiB of which 12.00 GiB is free"):
        claim(gpus, {0: HALF, 1: HALF})
    assert used(gpus) == (0, HALF + 1)
    for size in itertools.chain(range(3), range(3, 0, -1)):
        claim(gpus, {0: size, 1: size})
        assert used(gpus)[0] == size
    claim(gpus, {0: 0, 1: 0})
    assert used(gpus)[0] == 0
