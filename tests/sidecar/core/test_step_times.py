"""Durations of an engine's steps, foretold and measured, and what is left of a start under way."""

from __future__ import annotations

import time

import msgspec
import pytest

from gateway.shared.files.units import GIB
from sidecar.core.inventory import Size
from sidecar.core.start_progress import kind_of, share_of, stage_of
from sidecar.core.step_times import (
    COMPILE,
    DISK,
    DROPS,
    EAGER,
    ENCODER,
    EVICTION,
    GRAPHS,
    LOAD,
    PROCESS,
    WAKES,
    StartClock,
    StepTimes,
)

SIZE = Size(weights=15 * GIB, stored=30 * GIB)  # on two GPUs


def times(
    *, eager: bool = False, machine: dict[str, StepTimes] | None = None, name: str = "m", alike: str = ""
) -> StepTimes:
    return StepTimes(name, alike or name, eager=eager, machine={} if machine is None else machine)


# -- lines ------------------------------------------------------------------------------------------------------------

BAR = "Loading safetensors checkpoint shards:  75% Completed | 3/4 [00:13<00:04,  4.4s/it]"
HUNG = "(EngineCore pid=4076) INFO 08-20 17:{}:38 [shm_broadcast.py:705] No available shared memory broadcast block"


def test_lines_that_differ_in_numbers_are_of_one_kind() -> None:
    assert kind_of(HUNG.format(23)) == kind_of(HUNG.format(24)) != kind_of(BAR)
    assert kind_of("\x1b[32m(Worker_TP0 pid=7) loading\x1b[0m") == kind_of("(Worker_TP1 pid=8) loading") == "loading"
    assert kind_of("12:00 | 3/4 0x7f") == ""


def test_a_long_line_without_spaces_and_digits_is_read_as_quickly_as_others() -> None:
    began = time.process_time()
    for _ in range(256):  # as many as the sidecar reads at once
        assert kind_of("=" * 1000) == ""
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("line", "share"),
    [
        (BAR, 0.75),
        ("Loading safetensors using Runai Model Streamer:  41% Completed | 49353/119028 [00:13<00:13]", 49353 / 119028),
        ("model.safetensors:  12%|#2   | 1.2G/9.9G [00:10<01:20, 105MB/s]", 1.2 / 9.9),
        ("x: 512M/2.0G", 0.256),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%", 0.5),
        ("done: 100 %", 1.0),
        ("more than there is: 9/4", None),
        ("nothing of it: 0/0", None),
        ("[backends.py:278] on 2026/11/22 at 10:43:22", None),
        ("120% more", None),
        ("no number", None),
    ],
)
def test_the_share_of_a_progress_bar(line: str, share: float | None) -> None:
    assert share_of(line) == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (BAR, "weights"),
        ("INFO [gpu_model_runner.py:2602] Starting to load model /m...", "weights"),
        ("Loading pt checkpoint shards:   0% Completed | 0/2", "weights"),
        ("Loading safetensors using Runai Model Streamer:  41% Completed | 49353/119028 [00:13<00:13]", "weights"),
        ("[model_runner.py:407] Model loading took 15.0 GiB memory and 5.420225 seconds", "compile"),
        ("Loading model weights took 14.9888 GB", "compile"),
        ("[cpu_model_runner.py:87] Warming up model for the compilation...", "compile"),
        ("Capturing CUDA graphs (decode, FULL):  50%|##   | 17/35", "graphs"),
        ("Capturing cudagraphs for decoding. This may lead to unexpected consequences", "graphs"),
        ("Using FLASH_ATTN attention backend", None),
    ],
)
def test_the_stage_that_a_line_tells(line: str, stage: str | None) -> None:
    assert stage_of(line) == stage


# -- foretold ---------------------------------------------------------------------------------------------------------


def test_where_no_bytes_are_known_a_start_takes_what_it_always_did() -> None:
    made = times()
    assert (made.load_seconds(Size()), made.wake_seconds(Size())) == (LOAD, WAKES)
    assert (made.sleep_seconds(Size(), 1), made.stop_seconds) == (EVICTION, EVICTION)


def test_bytes_foretell_the_first_of_each_step() -> None:
    made = times()
    assert made.load_seconds(SIZE) == pytest.approx(PROCESS + 30 * GIB / DISK + COMPILE + GRAPHS)
    assert times(eager=True).load_seconds(SIZE) == pytest.approx(PROCESS + 30 * GIB / DISK + EAGER)
    assert made.wake_seconds(SIZE) == pytest.approx((0.5 + 15 / 8, 0.5 + 30 * GIB / DISK))
    assert made.sleep_seconds(SIZE, 1, first=True) == pytest.approx(0.5 + 15 / 1.1)
    assert made.sleep_seconds(SIZE, 1) == pytest.approx(0.5 + 15 / 8)
    assert made.sleep_seconds(SIZE, 2) == DROPS


def test_an_encoder_compiles_little_and_captures_no_graphs() -> None:
    reads = PROCESS + SIZE.stored / DISK
    encoder = msgspec.structs.replace(SIZE, encoder=True)
    assert times().load_seconds(encoder) == reads + ENCODER
    assert times(eager=True).load_seconds(encoder) == reads + EAGER


def test_what_was_measured_replaces_what_was_foretold_and_then_goes_by_halves() -> None:
    made = times()
    for seconds in (20.0, 30.0):
        made.loaded(seconds, {}, SIZE)
    for seconds in (1.0, 2.0):
        made.took("wake1", seconds)
    made.took("wake2", 4.0)
    made.took("sleep", 1.0)
    made.took("sleep", 2.0)
    made.took("stop", 6.0)
    assert (made.load_seconds(SIZE), made.wake_seconds(SIZE)) == (25.0, (1.5, 4.0))
    assert (made.sleep_seconds(SIZE, 1), made.stop_seconds) == (1.5, 6.0)
    assert made.sleep_seconds(SIZE, 1, first=True) == pytest.approx(0.5 + 15 / 1.1), "it has to pin the memory"
    assert made.sleep_seconds(Size(), 1, first=True) == 1.5
    assert sum(made.start_stages(Size()).values()) == pytest.approx(25.0), "without its bytes, by the whole"


def test_stages_are_measured_each_for_itself() -> None:
    made = times()
    made.loaded(40.0, {"process": 10.0, "weights": 20.0, "compile": 10.0}, SIZE)
    made.loaded(20.0, {"process": 10.0, "weights": 5.0, "compile": 5.0}, SIZE)
    assert made.start_stages(SIZE) == {"process": 10.0, "weights": 12.5, "compile": 7.5, "graphs": 0.0}
    assert made.load_seconds(SIZE) == 30.0


def test_a_disk_is_measured_for_all_models_of_the_machine() -> None:
    machine: dict[str, StepTimes] = {}
    for name, seconds in (("a", 10.0), ("b", 30.0), ("c", 60.0)):
        times(machine=machine, name=name).loaded(seconds + 5.0, {"process": 5.0, "weights": seconds}, SIZE)
    assert times(machine=machine, name="d").load_seconds(SIZE) == pytest.approx(PROCESS + 30.0 + COMPILE + GRAPHS)
    times(machine=machine, name="tiny").loaded(9.0, {"process": 5.0, "weights": 4.0}, Size(stored=GIB - 1))
    assert {name for name, each in machine.items() if each.seen.disk} == {"a", "b", "c"}, "a small one tells nothing"
    anew = times(machine=machine, name="a")
    assert (anew.seen.disk, anew.seen.load) == (pytest.approx(3 * GIB), None)
    assert anew.wake_seconds(SIZE)[1] == pytest.approx(10.5)


def test_a_profile_that_was_never_started_is_foretold_as_one_that_starts_alike() -> None:
    machine: dict[str, StepTimes] = {}
    made = times(machine=machine, name="a", alike="/m")
    copy, other, eager = (
        times(machine=machine, name=name, alike=alike, eager=eager)
        for name, alike, eager in (("a-2", "/m", False), ("b", "/n", False), ("a-3", "/m", True))
    )
    before = other.load_seconds(SIZE)
    made.loaded(7.0, {"process": 5.0, "weights": 2.0}, Size())
    assert copy.load_seconds(SIZE) == 7.0
    assert copy.start_stages(SIZE) == made.start_stages(SIZE)
    assert other.load_seconds(SIZE) == before
    assert eager.load_seconds(SIZE) != 7.0
    copy.loaded(9.0, {}, Size())
    assert (copy.load_seconds(SIZE), made.load_seconds(SIZE)) == (9.0, 7.0)


def test_a_download_is_foretold_and_tells_nothing_of_the_next_start() -> None:
    made, coming = times(), msgspec.structs.replace(SIZE, absent=5 * GIB)
    assert made.load_seconds(coming) == pytest.approx(made.load_seconds(SIZE) + 51.2)
    made.loaded(600.0, {"process": 10.0, "weights": 500.0, "compile": 90.0}, coming)
    made.loaded(600.0, {"process": 10.0, "weights": 500.0, "compile": 90.0}, Size(guessed=True))
    assert (made.seen.load, made.seen.stages, made.seen.disk) == (None, {}, None)
    made.loaded(40.0, {"process": 10.0, "weights": 20.0, "compile": 10.0}, SIZE)
    assert (made.load_seconds(SIZE), made.load_seconds(coming)) == (40.0, pytest.approx(91.2))


# -- under way --------------------------------------------------------------------------------------------------------

FORETOLD = {"process": 20.0, "weights": 40.0, "compile": 75.0, "graphs": 20.0}


def test_an_engine_that_tells_no_stage_is_foretold_by_the_whole() -> None:
    clock = StartClock(100.0)
    assert clock.phase == "its process begins"
    clock.heard(["Initializing a V1 LLM engine"], 101.0)
    assert clock.left(110.0, FORETOLD) == 145.0
    assert clock.left(300.0, FORETOLD) == 50.0, "a quarter of what it has taken"
    assert clock.ready(310.0) == {}


def test_the_rest_of_a_start_is_foretold_by_its_progress_bar() -> None:
    clock = StartClock(0.0)
    clock.heard(["Starting to load model /m"], 10.0)
    assert clock.left(12.0, FORETOLD) == 38.0 + 95.0
    assert clock.phase == "loading weights"
    clock.heard([BAR.replace("75", "50").replace("3/4", "2/4")], 14.0)
    assert clock.left(15.0, FORETOLD) == pytest.approx(3.0 + 95.0)
    assert clock.phase == "loading weights, 50%"
    clock.heard([BAR, BAR.replace("75", "50").replace("3/4", "2/4")], 16.0)
    assert clock.left(16.0, FORETOLD) == pytest.approx(2.0 + 95.0)
    assert clock.left(26.0, FORETOLD) == pytest.approx(2.5 + 95.0), "the bar stands still"


def test_stages_are_timed_and_never_go_back() -> None:
    clock = StartClock(0.0)
    clock.heard(["Starting to load model /m", "Model loading took 15 GiB"], 10.0)
    clock.heard(["Starting to load model /drafter", "Capturing CUDA graphs: 10%"], 30.0)
    assert clock.stage == "graphs"
    assert clock.left(32.0, FORETOLD) == pytest.approx(18.0 - 2.0), "how quick it is is not known yet"
    clock.heard(["Capturing CUDA graphs: 50%"], 35.0)
    assert clock.left(36.0, FORETOLD) == pytest.approx(4.0)
    assert clock.ready(41.0) == {"process": 10.0, "weights": 0.0, "compile": 20.0, "graphs": 11.0}
