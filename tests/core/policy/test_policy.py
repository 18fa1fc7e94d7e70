"""Policy file: defaults, units, and the message for every mistake.

Each file in tests/policies_bad stands next to the exact text an operator sees for it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.policy.file import decode, explain, read_policy
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.traffic import (
    Limit,
    Limits,
    ModeRule,
    Modes,
    RateLimit,
    Refusal,
    ShapingTier,
    Tenant,
    TenantLimits,
    Threshold,
    TrafficClass,
    When,
)
from gateway.core.policy.types import Rate, RouteKind
from gateway.core.request.routes import ROUTES
from gateway.shared.files.checked import InvalidFile, Mark, Value, listed, spelled
from gateway.shared.files.units import ABOVE, BYTES, COUNT, FACTOR, SAMPLE, SECONDS, SHARE, TIMES, Unit
from gateway.shared.files.yaml_file import MAX_BYTES, MAX_NODES
from tests.config_files import problems_of, structs_of
from tests.examples import examples

ROOT = Path(__file__).parents[3]
SLOWER = 4 if sys.gettrace() else 1  # coverage looks at every line
BAD = sorted((ROOT / "tests" / "policies_bad").glob("*.yaml"))


def problems(text: str) -> list[str]:
    return problems_of(decode, text, "p.yaml")


@pytest.mark.parametrize("file", BAD, ids=[file.stem for file in BAD])
def test_every_bad_file_gets_exactly_its_message(file: Path) -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(file.read_bytes(), file.name)
    assert f"{caught.value}\n" == file.with_suffix(".txt").read_text()


def test_there_are_bad_files() -> None:
    assert len(BAD) >= 45


def test_the_commented_default_file_is_the_defaults() -> None:
    assert decode((ROOT / "policies" / "default.yaml").read_bytes()) == Policy()


def test_the_commented_default_file_shows_every_field() -> None:
    text = (ROOT / "policies" / "default.yaml").read_text()
    kinds = structs_of(Policy)
    assert {TrafficClass, Tenant, Refusal, RateLimit, Threshold, EngineEntry} <= kinds
    expected = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    columns = {
        "strict",
        "reserve",
        "headroom",
        "tpot",
    }  # of its table of classes
    assert {name for name in expected - columns if f"{name}:" not in text} == set()
    assert {name for name in columns if f"#   {name} " not in text} == set()


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
budget: {kv_target: 0.7}
lengths: 50%
classes:
  default: {weight: 1.5, max_concurrency: 2k}
  night: {}
retries: 0%
fleet:
  engines:
    - {url: "unix:///run/vllm/a.sock", models: [meta/llama-3, b], max_concurrency: 400, api_key_file: keys/engine.key}
    - url: https://[::1]:8443/base
logging: {calls: false}
"""
    )
    assert policy.budget == msgspec.structs.replace(Policy().budget, kv_target=0.7)
    assert policy.lengths == 0.5
    assert policy.classes == {"default": TrafficClass(weight=1.5, max_concurrency=2000), "night": TrafficClass()}
    assert policy.retries == 0.0
    first, second = policy.fleet.engines
    assert (first.models, first.max_concurrency, first.api_key_file) == (("meta/llama-3", "b"), 400, "keys/engine.key")
    assert second == EngineEntry(url="https://[::1]:8443/base")
    assert policy.logging.calls == 0.0
    assert policy.timeouts == Policy().timeouts


def test_the_part_about_traffic() -> None:
    policy = decode(
        """
classes:
  interactive: {strict: true, reserve: 20%, max_concurrency: 64}
  default: {ttft: 10s}
  long: {when: {prompt_tokens: "> 8k", routes: [chat], models: [a/b]}}
tenants:
  acme:
    class: default
    best_class: interactive
    limits: {requests: 600/min, tokens: {rate: 1.5k/s, burst: 500k}, classes: {long: {tokens: unlimited}}}
    refusal: {body: {resultStatus: 1002, tips: "顾客太多,客官请稍候", code: "1002", more: [1.5, null, yes, {a: true}]}}
limits: {global: {requests: 1M/day}, models: {a/b: {}}}
shaping: [{kv_above: 90%, max_tokens: 64, except: []}, {kv_above: 1, max_tokens: 16}]
modes:
  tight: {enter: {ttft: 1.5x}, leave: {ttft: 1x}, refuse: all_but_most_important}
batching: {embeddings: 20ms, rerank: 10ms}
hedging: 750ms
trusted_proxies: [unix, 10.0.0.1, 10.0.0.0/8, "fd00::/8", "::1"]
""".encode()
    )
    assert policy.classes == {
        "interactive": TrafficClass(strict=True, reserve=0.2, max_concurrency=64),
        "default": TrafficClass(ttft=10.0),
        "long": TrafficClass(when=When(prompt_tokens=8000, routes=("chat",), models=("a/b",))),
    }
    assert policy.tenants == {
        "acme": Tenant(
            class_="default",
            best_class="interactive",
            limits=TenantLimits(
                requests=RateLimit(rate=Rate(600, 60.0)),
                tokens=RateLimit(rate=Rate(1500, 1.0), burst=500_000),
                classes={"long": Limit(tokens="unlimited")},
            ),
            refusal=Refusal(
                body={
                    "resultStatus": 1002,
                    "tips": "顾客太多,客官请稍候",
                    "code": "1002",
                    "more": [1.5, None, "yes", {"a": True}],
                }
            ),
        )
    }
    assert policy.limits == Limits(
        global_=Limit(requests=RateLimit(rate=Rate(1_000_000, 86_400.0))), models={"a/b": Limit()}
    )
    assert policy.shaping == (
        ShapingTier(kv_above=0.9, max_tokens=64, except_=()),
        ShapingTier(kv_above=1.0, max_tokens=16),
    )
    tight = ModeRule(enter=Threshold(ttft=1.5), leave=Threshold(ttft=1.0), refuse="all_but_most_important")
    assert policy.modes == Modes(tight=tight)
    assert policy.batching == {"embeddings": 0.02, "rerank": 0.01}
    assert policy.hedging == 0.75
    assert decode(explain(policy).encode()) == policy


@pytest.mark.parametrize(
    "text",
    [
        "classes: {default: {ttft: 60s, deadline: 60s}}",
        "classes: {default: {reserve: 60%}, batch: {reserve: 39%}}",
        "classes: {default: {when: {models: [m]}}}",
        "tenants: {acme: {class: default, best_class: default}}",
        "tenants: {acme: {class: batch, best_class: interactive}}",
        f"tenants: {{acme: {{keys: [{1:064d}, {2:064d}]}}}}",
        "modes: {tight: {enter: {kv: 80%, waiting: 1}, leave: {kv: 79%, waiting: 0}}}",
        "modes: {tight: {enter: {kv: 80%, waiting: 1}, leave: {}}}",
        "modes: {tight: {enter: {}, leave: {}}}",
        "trusted_proxies: [10.0.0.0/32, 10.1.2.3/32, '::1', '::/0', unix]",
        "service_tiers: {}",
        "shaping: []",
        "tenants: {}",
    ],
)
def test_what_just_agrees_is_good(text: str) -> None:
    decode(text.encode())


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1),
        ("-1.5", -1.5),
        ("1e3", 1000.0),
        ("true", True),
        ("True", "True"),
        ("yes", "yes"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("'null'", "null"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("007", "007"),
        (str(2**64 - 1), 2**64 - 1),
        (str(2**64), str(2**64)),  # more than most readers take for a number
        (str(-(2**63)), -(2**63)),
        (str(-(2**63) - 1), str(-(2**63) - 1)),
        (".inf", ".inf"),
        ("2026-11-21", "2026-11-21"),
        ("[]", []),
        ("{}", {}),
        ("{'': {'a: b': [a, '{b}']}}", {"": {"a: b": ["a", "{b}"]}}),
        ('"\\x7f\\u2028 \\" \\\\ 😀"', '\x7f\u2028 " \\ 😀'),
    ],
)
def test_json_in_yaml(written: str, value: Any) -> None:
    policy = decode(f"tenants: {{t: {{refusal: {{body: {{x: {written}}}}}}}}}".encode())
    refusal = policy.tenants["t"].refusal
    assert refusal is not None
    assert refusal.body == {"x": value}
    assert type(refusal.body["x"]) is type(value)
    assert decode(explain(policy).encode()) == policy


def test_kinds_of_route_are_those_of_the_calls_that_engines_answer() -> None:
    assert set(get_args(RouteKind)) == {route.kind for route in ROUTES.values()} - {"models", "health", "help"}


@pytest.mark.parametrize(
    ("text", "amount", "period"),
    [("600/min", 600, 60.0), ("1.5k/s", 1500, 1.0), ("1.001k/h", 1001, 3600.0), ("2M/day", 2_000_000, 86_400.0)],
)
def test_rates(text: str, amount: int, period: float) -> None:
    rate = Rate.parse(text)
    assert rate == Rate(amount, period)
    assert Rate.parse(str(rate)) == rate


@pytest.mark.parametrize("text", ["", "600", "/min", "0/s", "0.5/s", "1.5/s", "1/ms", "1 /s", "-1/s", "1K/s", "1/s\n"])
def test_what_is_no_rate(text: str) -> None:
    assert Rate.parse(text) is None


def test_lines_are_found_by_path_as_far_as_it_is_written() -> None:
    root = read_policy(b"version: 1\nshaping:\n  - {kv_above: 90%,\n     max_tokens: 1}\n").root
    paths: list[tuple[str | int, ...]] = [
        ("version",),
        ("shaping", 0),
        ("shaping", 0, "max_tokens"),
        ("shaping", 0, "except"),
        ("shaping", 1),
        ("shaping", "0"),
        ("version", 0),
        ("modes", "tight"),
        (),
    ]
    marks = map(root.mark_of, paths)
    assert [mark and mark.line for mark in marks] == [1, 3, 4, 3, 2, 2, 1, None, None]


def test_paths_are_spelled_as_people_write_them() -> None:
    assert spelled(("shaping", 0, "except", 1)) == "shaping[0].except[1]"
    assert spelled(()) == ""


def test_long_lists_of_names_are_shortened() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(map(str, range(50))).endswith(", 39 and 10 more")


@pytest.mark.slow
def test_a_large_file_is_read_in_little_time() -> None:
    lines = [f'{{url: "http://10.0.{i // 250}.{i % 250}:8000", models: [llama-3-8b], name: e{i}}}' for i in range(3000)]
    data = ("fleet:\n  engines:\n" + "".join(f"    - {line}\n" for line in lines)).encode()
    began = time.process_time()
    assert len(decode(data).fleet.engines) == 3000
    assert time.process_time() - began < 10 * SLOWER


@pytest.mark.slow
def test_many_unknown_names_are_told_in_few_words() -> None:
    classes = "".join(f"  c{i}: {{}}\n" for i in range(6000))
    wrong = ", ".join(f"d{i}: {{}}" for i in range(500))
    began = time.process_time()
    found = problems(f"classes:\n  default: {{}}\n{classes}limits: {{classes: {{{wrong}}}}}\n")
    assert len(found) == 500
    assert max(map(len, found)) < 500
    assert time.process_time() - began < 10 * SLOWER


def test_the_order_of_classes_is_the_order_of_importance() -> None:
    assert list(decode(b"classes: {b: {}, a: {}, default: {}}").classes) == ["b", "a", "default"]


def test_default_tiers_of_classes_that_do_not_exist_are_dropped() -> None:
    assert decode(b"classes: {default: {}}").service_tiers == {"default": "default"}


def test_words_that_yaml_1_1_takes_for_booleans_are_words() -> None:
    policy = decode(b"classes: {default: {}, no: {}, on: {}}\nservice_tiers: {off: no}\n")
    assert policy.service_tiers == {"off": "no"}


def test_an_alias_is_read_as_what_it_names() -> None:
    policy = decode(b"classes:\n  default: &all {weight: 3}\n  batch: *all\n")
    assert policy.classes["batch"] == TrafficClass(weight=3)


def test_what_is_explained_has_a_line_for_each_field_and_more_where_it_is_long() -> None:
    models = ", ".join(f"model-{i}" for i in range(20))
    policy = decode(
        f"""
tenants: {{a: {{models: [{models}]}}}}
shaping: [{{kv_above: 90%, max_tokens: 9}}, {{kv_above: 95%, max_tokens: 8}}, {{kv_above: 99%, max_tokens: 7}}]
fleet: {{engines: [{{url: "http://h:1"}}]}}
""".encode()
    )
    text = explain(policy)
    assert "\nlengths: by_model\n" in text
    assert "\nkeys_file: null\n" in text
    assert "\n  classes: {}\n" in text
    assert "\n  per_tenant: {requests: null, tokens: null}\n" in text
    assert "\n  a:\n    class: null\n" in text
    assert "\n    models:\n      - model-0\n      - model-1\n" in text
    assert "\nshaping:\n  - {kv_above: 90%, max_tokens: 9, except: null}\n" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_policy_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Policy().budget.kv_target = 1.0  # type: ignore[misc]  # the rule under test


def test_a_file_too_long_is_refused_before_it_is_read() -> None:
    assert decode(b"#" * MAX_BYTES) == Policy()
    assert problems("#" * (MAX_BYTES + 1)) == ["p.yaml:1: found 262145 bytes, expected at most 262144 bytes"]


def test_a_file_too_deep_or_with_too_many_values_is_read_no_further() -> None:
    """A mistake in the YAML behind the bound is not reached."""
    deep = ["p.yaml:2: found more than 16 levels, expected a flatter file"]
    assert problems(f"{'[' * 16}\n[ }}") == deep
    assert problems(f"\n{'[' * 100_000}") == deep
    assert problems(f"\n{'? ' * 100_000}") == deep
    many = ["p.yaml:2: found more than 20000 values, aliases counted in full, expected a smaller file"]
    assert problems(f"[{'a,' * (MAX_NODES - 1)}\na, }}") == many
    assert problems(f"[&a a, {'*a,' * (MAX_NODES - 2)}\n*a, }}") == many


def test_keys_are_not_counted() -> None:
    fields = "".join(f" f{number}: 1\n" for number in range(MAX_NODES - 2))
    (line,) = problems(f"base:\n{fields}")
    assert line.startswith("p.yaml:1: found unknown field 'base'"), "the file's and base's own mapping are counted"


@pytest.mark.parametrize(
    ("text", "path", "tag"),
    [
        ("keys_file: !!str null", "keys_file: ", "tag:yaml.org,2002:str"),
        ("keys_file: ! null", "keys_file: ", "!"),
        ("budget: !!map {}", "budget: ", "tag:yaml.org,2002:map"),
        ("shaping: !!seq []", "shaping: ", "tag:yaml.org,2002:seq"),
        ("!!map {}", "", "tag:yaml.org,2002:map"),
        ("!!str version: 1", "", "tag:yaml.org,2002:str"),
    ],
)
def test_no_tag_is_taken_not_even_the_one_of_plain_text(text: str, path: str, tag: str) -> None:
    expected = "no tags: a field's name says what it is"
    assert problems(text) == [f"p.yaml:1: {path}found the tag '{tag}', expected {expected}"]


def test_an_anchor_may_be_set_again() -> None:
    policy = decode(b"classes:\n  default: &a {weight: 3}\n  b: *a\n  c: &a {weight: 4}\n  d: *a\n")
    assert [each.weight for each in policy.classes.values()] == [3, 3, 4, 4]


def test_long_and_odd_text_is_shortened_and_escaped() -> None:
    (line,) = problems('routing: {cache_isolation: "\\e[2J' + "x" * 5000 + '"}')
    assert line.isprintable()
    assert len(line) < 150


def test_problems_come_in_the_order_of_lines_and_say_where_they_are() -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(b"timeouts: {drain: 1}\nversion: 2\n", "x.yaml")
    first, second = caught.value.problems
    assert (first.file, first.at.line, first.path, first.found) == ("x.yaml", 1, "timeouts.drain", "'1'")
    assert (second.at.line, second.path, second.expected, second.nearest) == (2, "version", "1", None)


def test_values_describe_themselves() -> None:
    assert Value(mark=Mark(1)).describe() == "nothing"


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
        (COUNT, "010", None),
        (COUNT, "0", 0),
        (SHARE, "0.05", 0.05),
        (SECONDS, "007s", None),
        (SHARE, "80%", 0.8),
        (SHARE, "0.8", 0.8),
        (SAMPLE, "true", 1.0),
        (SAMPLE, "false", 0.0),
        (SAMPLE, "yes", None),
        (SAMPLE, "10%", 0.1),
        (FACTOR, "1.5", 1.5),
        (FACTOR, "1.5x", None),
        (TIMES, "1.5x", 1.5),
        (TIMES, "1.5", None),
        (ABOVE, "> 8000", 8000),
        (ABOVE, "> 8k", 8000),
        (ABOVE, ">8000", None),
        (ABOVE, ">  8000", None),
        (ABOVE, "8000", None),
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
        (TIMES, 2.0, "2x"),
        (ABOVE, 8000, "> 8k"),
    ],
)
def test_numbers_are_shown_as_people_write_them(unit: Unit, value: float, text: str) -> None:
    assert unit.show(value) == text


shares = st.integers(5, 100).map(lambda percent: percent / 100)
seconds = st.integers(1, 86_400_000).map(lambda ms: ms / 1000)
counts = st.integers(1, 1_000_000_000)
model_names = st.sampled_from(["null", "true", "a/b", "1", "~", "*x", "a:b", "-", "--", "\"'", "\\", "1e5", "#", "{}"])
class_names = st.sampled_from(["null", "true", "on", "a-b", "default"])
quotas = st.builds(
    RateLimit,
    rate=st.builds(Rate, st.integers(1, 10**12), st.sampled_from([1.0, 60.0, 3600.0, 86_400.0])),
    burst=st.none() | counts,
)
quantities = st.none() | st.just("unlimited") | quotas
limits = st.builds(Limit, requests=quantities, tokens=quantities)
json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=20), values, max_size=2),
    max_leaves=4,
)
printable = st.characters(min_codepoint=32, exclude_categories=["Cs"])  # halves of surrogates are no text
traffic_classes = st.builds(
    TrafficClass,
    weight=st.integers(1, 1000).map(float),
    strict=st.booleans(),
    deadline=seconds,
    max_queue=st.integers(0, 1_000_000),
    max_concurrency=st.none() | counts,
    reserve=st.integers(0, 10).map(lambda percent: percent / 100),
    when=st.none() | st.builds(When, prompt_tokens=st.integers(0, 10**9), models=st.lists(model_names).map(tuple)),
)
tenants = st.builds(
    Tenant,
    best_class=st.none() | st.just("default"),
    limits=st.builds(
        TenantLimits,
        requests=quantities,
        tokens=quantities,
        classes=st.dictionaries(st.just("default"), limits),
        models=st.dictionaries(model_names, limits, max_size=2),
    ),
    models=st.lists(model_names, max_size=3).map(tuple),
    refusal=st.none()
    | st.builds(
        Refusal,
        body=st.dictionaries(st.text(printable, min_size=1, max_size=9), json, max_size=2),
    ),
)
engines = st.lists(
    st.builds(
        EngineEntry,
        url=st.from_regex(r"http://[a-z]{1,8}:[1-9][0-9]{1,3}|unix:///[a-z'\"]{1,9}[a-z]", fullmatch=True),
        models=st.lists(model_names, max_size=3).map(tuple),
        api_key_file=st.none() | st.sampled_from(["key file #1", "\x7f", "\u2028\\", "钥匙"]),
    ),
    max_size=3,
    unique_by=lambda engine: engine.url,
).map(tuple)


@settings(max_examples=examples(40))
@given(
    classes=st.dictionaries(class_names, traffic_classes, max_size=3),
    paying=st.dictionaries(st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,9}", fullmatch=True), tenants, max_size=2),
    limit=limits,
    share=shares,
    engines=engines,
)
def test_what_is_explained_reads_back_as_the_same_policy(
    classes: dict[str, TrafficClass],
    paying: dict[str, Tenant],
    limit: Limit,
    share: float,
    engines: tuple[EngineEntry, ...],
) -> None:
    base = Policy()
    policy = msgspec.structs.replace(
        base,
        classes={"default": TrafficClass(), **classes},
        service_tiers={"flex": "default"},
        tenants=paying,
        limits=Limits(global_=limit, models={"null": limit}),
        budget=msgspec.structs.replace(base.budget, kv_target=share),
        lengths=share,
        shaping=(
            ShapingTier(kv_above=share, max_tokens=7, except_=tuple(classes)),
            ShapingTier(kv_above=1.0, max_tokens=5),
        ),
        fleet=msgspec.structs.replace(base.fleet, engines=engines),
    )
    text = explain(policy)
    assert decode(text.encode()) == policy


@given(st.text(alphabet="abc:{}[]&*!|>-#\"' \n\t0123%~?,\0é", max_size=60) | st.text(max_size=40))
def test_any_text_is_a_policy_or_a_list_of_problems(text: str) -> None:
    # Surrogates, which text may hold and UTF-8 may not, become bytes that are not UTF-8.
    try:
        decode(text.encode("utf-8", "surrogatepass"))
        problems = None
    except InvalidFile as error:
        problems = error.problems
    assert problems != []


@pytest.mark.parametrize(
    ("text", "meant"),
    [("10/sec", "10/s"), ("600 per minute", "600/min"), ("2k / hours", "2k/h"), ("5/d", "5/day"), ("10/year", None),
     ("ten", None), ("0/sec", None)],
)  # fmt: skip
def test_what_was_meant_by_a_rate(text: str, meant: str | None) -> None:
    (line,) = problems(f'limits: {{per_tenant: {{requests: "{text}"}}}}')
    assert (f"(did you mean {meant}?)" in line) if meant else ("did you mean" not in line)


def test_a_route_with_a_mirror_beside_headroom_is_good() -> None:
    route = "{members: [{model: a}, {model: b, weight: 5, until: {errors: 2%}}], mirror: {model: c, share: 1%}}"
    text = f"version: 1\nclasses: {{default: {{}}, batch: {{headroom: 30%}}}}\nmodels: {{support: {route}}}\n"
    assert decode(text.encode()).models["support"].models == ("a", "b")
