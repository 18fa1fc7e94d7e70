"""Levels that a profile may sleep at, its residue, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.shared.files.units import GIB, MIB
from sidecar.core.inventory import Size
from sidecar.core.profile import Profile, Sleep
from sidecar.core.sleep import MeasuredSleep, levels, note, residue_exceeded, without_level_2

WRONG = MeasuredSleep(settings="a", wrong=True)


def profile(level: int | None = 2, *, pin: bool = False, **flags: Any) -> Profile:
    sleep = None if level is None else Sleep(level=level)  # type: ignore[arg-type] # 1 or 2
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return Profile(model_path="/m", sleep=sleep, pin=pin, flags=named)


DRAFTS = {"model": "/draft", "num_speculative_tokens": 5}
LEVELS: dict[str, tuple[Profile, MeasuredSleep | None, tuple[int, ...]]] = {
    "it never sleeps": (profile(None), None, ()),
    "pinned": (profile(1, pin=True), None, ()),
    "level 1": (profile(1), None, (1, 2)),
    "level 2": (profile(2), MeasuredSleep(settings="a", residue=5), (2,)),
    "a draft model": (profile(2, speculative_config=DRAFTS), None, (1,)),
    "a draft model at level 1": (profile(1, speculative_config=DRAFTS), None, (1,)),
    "layers of its own that draft": (profile(2, speculative_config={"method": "mtp"}), None, (1,)),
    "n-grams, which have no weights": (profile(2, speculative_config={"method": "ngram"}), None, (2,)),
    "LoRA": (profile(2, enable_lora=True), None, (1,)),
    "no LoRA": (profile(2, enable_lora=False), None, (2,)),
    "lora-modules": (profile(1, lora_modules=["a=/a"]), None, (1,)),
    "adapters": (Profile(model_path="/m", sleep=Sleep(level=2), adapters={"a": "/a"}), None, (1,)),
    "it answered otherwise": (profile(1), WRONG, (1,)),
}


@pytest.mark.parametrize("name", LEVELS)
def test_the_levels_that_it_may_sleep_at(name: str) -> None:
    given, measured, expected = LEVELS[name]
    assert levels(given, measured) == expected
    assert levels(given, measured, unified=True) == ((2,) if 2 in expected else ()), "level 1 would free nothing"


def test_where_the_memory_is_the_hosts_it_is_said_how_a_model_sleeps() -> None:
    assert note(profile(None), None, unified=True) == note(profile(2), None, unified=True) == ""
    assert note(profile(1), None, unified=True).startswith("it sleeps at level 2: level 1 would free nothing")
    lora = note(profile(1, enable_lora=True), None, unified=True)
    assert lora.startswith("it is stopped instead of put to sleep: no sleep at level 2, since vLLM does not load LoRA")


def test_where_level_2_was_asked_for_and_is_not_had_it_is_said() -> None:
    assert note(profile(2), None) == note(profile(1, enable_lora=True), WRONG) == note(profile(None), WRONG) == ""
    lora = note(profile(2, enable_lora=True), None)
    assert "LoRA adapters again (enable-lora)" in lora
    assert lora.endswith("at level 1 while host memory has room, else it is stopped")
    assert "draft model again" in note(profile(2, speculative_config=DRAFTS), None)
    assert "answered otherwise" in note(profile(2), WRONG)
    assert without_level_2(profile(2)) == ""


RESIDUES = [
    (0, 9 * GIB, False),  # it has not slept
    (2 * GIB, 4 * GIB - 1, False),
    (2 * GIB, 4 * GIB, True),
    (256 * MIB, 600 * MIB, False),  # too little to tell
    (256 * MIB, GIB, True),
]


@pytest.mark.parametrize(("first", "residue", "expected"), RESIDUES)
def test_an_engine_is_worn_once_it_keeps_twice_what_it_kept_first(first: int, residue: int, expected: bool) -> None:
    assert residue_exceeded(first, residue) is expected


def test_what_was_measured_of_its_sleep_replaces_the_estimate() -> None:
    size = Size(claim=20, residue=2, host=15)
    assert size.with_sleep(None) is size
    assert size.with_sleep(WRONG) == size
    assert size.with_sleep(MeasuredSleep(settings="a", residue=5, host=22)) == Size(claim=20, residue=5, host=22)
    assert size.with_sleep(MeasuredSleep(settings="a", residue=50)).residue == 20
    awake = Size(claim=20)
    assert awake.with_sleep(MeasuredSleep(settings="a", residue=5, host=22)) is awake
