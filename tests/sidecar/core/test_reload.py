"""Newer files of the sidecar: what takes effect, what waits, and what is refused."""

from __future__ import annotations

import pytest

from gateway.shared.files.checked import InvalidFile
from sidecar.core.config import SidecarConfig, decode
from sidecar.core.reload import CHANGED, GONE, LATER, NEW, RESTARTED, Changes, changes, newer

MODELS = "models: {a: {model_path: /m/a}, b: {model_path: /m/b}}\n"


def config(text: str = MODELS) -> SidecarConfig:
    return decode(text.encode())


def taken(text: str, started: str = MODELS, folder: str = "/etc/weir") -> tuple[SidecarConfig, SidecarConfig]:
    return newer(text.encode(), "f.yaml", config(started), folder)


def found(before: str, after: str, *, other: str = "") -> Changes:
    """Kinds of changes that there are, where the engines of `other` would be started otherwise."""
    file, effective = taken(after, before)
    told = changes(config(before), file, effective, lambda name: name not in other)
    return {kind: names for kind, names in told.items() if names}


def test_models_and_the_bound_of_host_memory_take_effect_and_what_is_opened_once_does_not() -> None:
    text = "host_memory_for_sleep: 9GiB\nlisten: 127.0.0.1:9000\nid: other\nmodels: {c: {model_path: /m/c}}\n"
    file, effective = taken(text)
    assert (file.listen.port, effective.listen.port, effective.id) == (9000, 8002, None)
    assert (list(effective.models), effective.host_memory_for_sleep) == (["c"], 9 << 30)
    assert found(MODELS, text) == {
        NEW: ("c",), GONE: ("a", "b"), CHANGED: ("host_memory_for_sleep",), LATER: ("id", "listen"),
    }  # fmt: skip


def test_changes_are_told_by_what_they_cost() -> None:
    after = "models: {a: {model_path: /m/x}, b: {model_path: /m/b, stop_after: 9m}, c: {model_path: /m/c}}\n"
    assert found(MODELS, after, other="a") == {NEW: ("c",), RESTARTED: ("a",), CHANGED: ("b",)}
    assert found(MODELS, MODELS) == {}


def test_a_file_with_mistakes_names_each_with_its_line() -> None:
    with pytest.raises(InvalidFile) as caught:
        taken("models:\n  a: {model_path: /m/a, sleep: 3}\n  b: {model_pat: /m/b}\n")
    assert [problem.at.line for problem in caught.value.problems] == [2, 3]


def test_what_stays_as_it_was_is_judged_with_the_new_models() -> None:
    more = "models: {a: {model_path: /m/a}, b: {model_path: /m/b}}\n"
    with pytest.raises(InvalidFile, match="fewer ports"):
        taken("engine_addresses: 8100-8199\n" + more, "engine_addresses: 8100-8100\nmodels: {a: {model_path: x}}\n")


def test_models_that_the_sidecar_as_it_was_started_cannot_have() -> None:
    long = "a" * 60
    with pytest.raises(InvalidFile, match=r"models\.a{60}: found a path of \d+ bytes for the socket"):
        taken(f"models: {{{long}: {{model_path: /m/a}}}}\n", folder="/etc/" + "w" * 40)
    with pytest.raises(InvalidFile, match="started for models on CPU alone"):
        taken(MODELS, "engine: {device: cpu}\n" + MODELS)
    assert taken(MODELS, "engine_addresses: 8100-8199\n" + MODELS)[1].models == config().models
