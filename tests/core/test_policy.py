"""The policy file: its defaults, its units, and what every mistake is answered with.

Each file in tests/policies_bad stands next to the exact text an operator sees for it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.checked import Value
from gateway.core.policy import MAX_BYTES, EngineEntry, Policy, PolicyError, TrafficClass, decode, explain
from gateway.core.units import BYTES, COUNT, FACTOR, SAMPLE, SECONDS, SHARE, Unit

ROOT = Path(__file__).parents[2]
BAD = sorted((ROOT / "tests" / "policies_bad").glob("*.yaml"))


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        decode(text.encode(), "p.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("file", BAD, ids=[file.stem for file in BAD])
def test_every_bad_file_gets_exactly_its_message(file: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        decode(file.read_bytes(), file.name)
    assert f"{caught.value}\n" == file.with_suffix(".txt").read_text()


def test_there_are_bad_files() -> None:
    assert len(BAD) >= 25


def test_the_commented_default_file_is_the_defaults() -> None:
    assert decode((ROOT / "policies" / "default.yaml").read_bytes()) == Policy()


def test_the_commented_default_file_shows_every_field() -> None:
    text = (ROOT / "policies" / "default.yaml").read_text()

    def names(kind: type[msgspec.Struct]) -> set[str]:
        return {field.name for field in msgspec.structs.fields(kind)}

    policy = Policy()
    expected = names(Policy) | names(TrafficClass) | names(EngineEntry)
    for name in names(Policy):
        section = getattr(policy, name)
        if isinstance(section, msgspec.Struct):
            expected |= names(type(section))
    assert {name for name in expected if f"{name}:" not in text} == set()


def test_every_shipped_policy_is_good() -> None:
    for file in (ROOT / "policies").glob("*.yaml"):
        decode(file.read_bytes(), file.name)


@pytest.mark.parametrize(
    "data", [b"", b"# nothing\n", b"\xef\xbb\xbfversion: 1\n", b"version: 1\n", b"budget:\n", b"---\n...\n"]
)
def test_what_is_absent_is_the_default(data: bytes) -> None:
    assert decode(data) == Policy()


def test_a_file_changes_what_it_says_and_nothing_else() -> None:
    policy = decode(
        b"""
budget: {kv_target: 0.7, alpha: 50%}
classes:
  default: {weight: 1.5, max_concurrency: 2k}
  night: {}
retries: {on: [connect], budget: 0%}
fleet:
  engines:
    - {url: "unix:///run/vllm/a.sock", models: [meta/llama-3, b], capacity: 400k, api_key_file: keys/engine.key}
    - url: https://[::1]:8443/base
logging: {calls: false}
"""
    )
    assert policy.budget == msgspec.structs.replace(Policy().budget, kv_target=0.7, alpha=0.5)
    assert policy.classes == {"default": TrafficClass(weight=1.5, max_concurrency=2000), "night": TrafficClass()}
    assert (policy.retries.on, policy.retries.budget, policy.retries.per_call) == (("connect",), 0.0, 2)
    first, second = policy.fleet.engines
    assert (first.models, first.capacity, first.api_key_file) == (("meta/llama-3", "b"), 400_000, "keys/engine.key")
    assert second == EngineEntry(url="https://[::1]:8443/base")
    assert policy.logging.calls == 0.0
    assert policy.timeouts == Policy().timeouts


def test_the_order_of_classes_is_the_order_of_importance() -> None:
    assert list(decode(b"classes: {b: {}, a: {}, default: {}}").classes) == ["b", "a", "default"]


def test_default_tiers_of_classes_that_do_not_exist_are_dropped() -> None:
    assert decode(b"classes: {default: {}}").service_tiers == {"default": "default"}


def test_words_that_yaml_1_1_takes_for_booleans_are_words() -> None:
    policy = decode(b"classes: {default: {}, no: {}, on: {}}\nretries: {on: [reset]}\nservice_tiers: {off: no}\n")
    assert policy.service_tiers == {"off": "no"}


def test_an_alias_is_read_as_what_it_names() -> None:
    policy = decode(b"classes:\n  default: &all {weight: 3}\n  batch: *all\n")
    assert policy.classes["batch"] == TrafficClass(weight=3)


def test_the_policy_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Policy().budget.kv_target = 1.0  # type: ignore[misc]  # the rule under test


def test_a_file_too_long_is_refused_before_it_is_read() -> None:
    assert problems("#" * (MAX_BYTES + 1)) == ["p.yaml:1: found 262145 bytes, expected at most 262144 bytes"]


def test_long_and_odd_text_is_shortened_and_escaped() -> None:
    (line,) = problems('routing: {affinity: "\\e[2J' + "x" * 5000 + '"}')
    assert line.isprintable()
    assert len(line) < 150


def test_problems_come_in_the_order_of_lines_and_say_where_they_are() -> None:
    with pytest.raises(PolicyError) as caught:
        decode(b"timeouts: {drain: 1}\nversion: 2\n", "x.yaml")
    first, second = caught.value.problems
    assert (first.file, first.line, first.path, first.found) == ("x.yaml", 1, "timeouts.drain", "'1'")
    assert (second.line, second.path, second.expected, second.nearest) == (2, "version", "1", None)


def test_values_describe_themselves() -> None:
    assert Value(line=1).describe() == "nothing"


@pytest.mark.parametrize(
    ("unit", "text", "value"),
    [
        (SECONDS, "250ms", 0.25),
        (SECONDS, "100ms", 0.1),
        (SECONDS, "1.5h", 5400.0),
        (SECONDS, "10", None),
        (SECONDS, "10 s", None),
        (SECONDS, "10S", None),
        (SECONDS, "-1s", None),
        (SECONDS, "1e3s", None),
        (SECONDS, "infs", None),
        (SECONDS, "s", None),
        (SECONDS, "", None),
        (SECONDS, "1s\n", None),
        (SECONDS, "\u0661s", None),
        (SECONDS, "9" * 400 + "s", None),
        (BYTES, "512", 512),
        (BYTES, "64KiB", 65536),
        (BYTES, "1.5KiB", 1536),
        (BYTES, "0.3B", None),
        (BYTES, "16MB", None),
        (COUNT, "200k", 200_000),
        (COUNT, "1.5M", 1_500_000),
        (COUNT, "2.5", None),
        (COUNT, "1_000", None),
        (SHARE, "80%", 0.8),
        (SHARE, "0.8", 0.8),
        (SAMPLE, "true", 1.0),
        (SAMPLE, "false", 0.0),
        (SAMPLE, "yes", None),
        (SAMPLE, "10%", 0.1),
        (FACTOR, "1.5", 1.5),
        (FACTOR, "1.5x", None),
    ],
)
def test_units(unit: Unit, text: str, value: float | None) -> None:
    assert unit.parse(text) == value


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (SECONDS, 0.25, "250ms"),
        (SECONDS, 90.0, "90s"),
        (SECONDS, 3600.0, "1h"),
        (SECONDS, 0.0, "0ms"),
        (SECONDS, 0.0005, "0.0005s"),
        (SECONDS, 1e-14, "1e-14"),  # finer than the format can say
        (BYTES, 16 * 1024**2, "16MiB"),
        (BYTES, 1000, "1000B"),
        (COUNT, 100_000, "100k"),
        (COUNT, 0, "0"),
        (SHARE, 1.0, "100%"),
        (SHARE, 0.125, "12.5%"),
    ],
)
def test_numbers_are_shown_as_people_write_them(unit: Unit, value: float, text: str) -> None:
    assert unit.show(value) == text


shares = st.integers(5, 100).map(lambda percent: percent / 100)
seconds = st.integers(1, 86_400_000).map(lambda ms: ms / 1000)
classes = st.builds(
    TrafficClass,
    weight=st.integers(1, 1000).map(float),
    deadline=seconds,
    max_queue=st.integers(0, 1_000_000),
    max_concurrency=st.none() | st.integers(1, 1000),
)
engines = st.lists(
    st.builds(
        EngineEntry,
        url=st.from_regex(r"http://[a-z]{1,8}:[0-9]{2,4}|unix:///[a-z 'é\"]{1,9}[a-z]", fullmatch=True).filter(
            lambda url: " " not in url
        ),
        models=st.lists(st.sampled_from(["null", "true", "a/b", "1", "~", "*x", "a: b".replace(" ", "")])).map(tuple),
        api_key_file=st.none() | st.just("key file #1"),
    ),
    max_size=3,
    unique_by=lambda engine: engine.url,
).map(tuple)


@settings(max_examples=40)
@given(
    names=st.dictionaries(st.from_regex(r"[a-z][a-z0-9_-]{0,31}", fullmatch=True), classes),
    share=shares,
    engines=engines,
)
def test_what_is_explained_reads_back_as_the_same_policy(
    names: dict[str, TrafficClass], share: float, engines: tuple[EngineEntry, ...]
) -> None:
    base = Policy()
    policy = msgspec.structs.replace(
        base,
        classes={"default": TrafficClass(), **names},
        service_tiers={"flex": "default"},
        budget=msgspec.structs.replace(base.budget, kv_target=share, alpha=share),
        fleet=msgspec.structs.replace(base.fleet, engines=engines),
    )
    assert decode(explain(policy).encode()) == policy


@given(st.text(alphabet="abc:{}[]&*!|>-#\"' \n\t0123%~?,\0é", max_size=60) | st.text(max_size=40))
def test_any_text_is_a_policy_or_a_list_of_problems(text: str) -> None:
    # Surrogates, which text may hold and UTF-8 may not, become bytes that are not UTF-8.
    try:
        decode(text.encode("utf-8", "surrogatepass"))
        problems = None
    except PolicyError as error:
        problems = error.problems
    assert problems != []
