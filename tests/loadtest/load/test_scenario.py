"""Scenario files: their meaning, the message for every mistake, and the shipped ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.schema import described
from loadtest.load.arrivals import Arrivals, Closed, Gamma, Rate, RateStep
from loadtest.load.lengths import Length, LogNormal, Uniform
from loadtest.load.scenario import (
    LONGEST_KEY,
    SHIPPED,
    Mistake,
    Scenario,
    decode,
    explain,
    find,
    key_of,
    keys_of,
    load,
    of_trace,
    planned,
    schema_text,
    shipped,
)
from loadtest.load.trace import TraceError
from loadtest.load.workload import Kind, Planned, Prefix, Sessions, Tenant, Workload
from loadtest.report.records import Slo, Window
from tests.config_files import problems_of, structs_of

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens\n10,m,100,7\n12,m,200,8\n14,m,300,9\n"


def problems(text: str) -> list[str]:
    return problems_of(decode, text, "s.yaml")


def body_of(call: Planned) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(call.body)
    return read


# -- what is right ----------------------------------------------------------------------------------------------------


def test_an_empty_file_is_a_scenario() -> None:
    assert decode(b"") == Scenario()


def test_a_file_says_everything() -> None:
    scenario = decode(
        b"""
what: all of it
arrivals: {gamma: {rate: 600/min, burstiness: 0.5}}
trace: {file: t.csv, format: azure, speed: 2.5x}
workload:
  model: org/m
  mix:
    - {class: chat, share: 40%, prompt: {log_normal: {median: 1k}, most: 4k}, output: 64, ignore_eos: true,
       prefix: {}, session: {turns: {uniform: {from: 2, to: 9}}, think: 500ms, spread: 1.2}}
    - {kind: rerank, model: r, prompt: trace, inputs: {empirical: [3, 4]}, query: 9, stream: false}
  tenants: {acme: {weight: 3, key_env: ACME}, bolt: {key_file: k}, c: }
duration: 10m
warmup: 1m
cooldown: 30s
seed: 7
retries: 0
timeout: 90s
slo: ["chat.ttft.p99 < 2s", goodput>=95%]
"""
    )
    assert scenario.arrivals == Arrivals(gamma=Gamma(Rate(600.0, 60.0), 0.5))
    assert scenario.trace is not None
    assert (scenario.trace.file, scenario.trace.format, scenario.trace.speed) == ("t.csv", "azure", 2.5)
    assert scenario.workload == Workload(
        model="org/m",
        mix=(
            Kind(
                class_name="chat", share=0.4, prompt=Length(log_normal=LogNormal(1000), most=4000),
                output=Length(constant=64), ignore_eos=True, prefix=Prefix(tokens=400, count=8),
                session=Sessions(turns=Length(uniform=Uniform(2, 9)), think=0.5, spread=1.2),
            ),
            Kind(kind="rerank", model="r", prompt="trace", inputs=Length(empirical=(3, 4)), query=Length(constant=9),
                 stream=False),
        ),
        tenants={"acme": Tenant(weight=3.0, key_env="ACME"), "bolt": Tenant(key_file="k"), "c": Tenant()},
    )  # fmt: skip
    assert scenario.window == Window(duration=600.0, warmup=60.0, cooldown=30.0)
    assert (scenario.seed, scenario.retries, scenario.timeout, scenario.rate) == (7, 0, 90.0, 10.0)
    assert scenario.slos == (Slo(class_name="chat", ttft=2.0, attainment=0.99), Slo(attainment=0.95))
    assert decode(explain(scenario).encode()) == scenario


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("0.5/s", Arrivals(poisson=Rate(0.5))),
        ("{closed: 64}", Arrivals(closed=Closed(clients=64))),
        ("{closed: {clients: 20, within: 700ms, rounds: 1}}",
         Arrivals(closed=Closed(clients=20, within=0.7, rounds=1))),
        ("{steps: [{rate: 0/s, for: 1s}, {rate: 2k/h, for: 1d}]}",
         Arrivals(steps=(RateStep(Rate(0.0), 1.0), RateStep(Rate(2000.0, 3600.0), 86_400.0)))),
    ],
)  # fmt: skip
def test_arrivals(text: str, arrivals: Arrivals) -> None:
    scenario = decode(f"arrivals: {text}".encode())
    assert scenario.arrivals == arrivals
    assert scenario.clients == (arrivals.closed.clients if arrivals.closed else 0)
    assert decode(explain(scenario.scaled(1 / 3)).encode()) == scenario.scaled(1 / 3)


# -- what is wrong ----------------------------------------------------------------------------------------------------


MISTAKES = [
    ("arivals: 5/s",
     "1: found unknown field 'arivals', expected one of version, what, arrivals, trace, workload, duration, "
     "warmup, cooldown, seed, retries, timeout, slo (did you mean arrivals?)"),
    ("arrivals: 5",
     "1: arrivals: found '5', expected trace or a rate such as 5/s, 0.5/s, 600/min or a mapping with poisson, "
     "gamma, constant, ramp, steps, closed"),
    ("arrivals: 0/s", "1: arrivals.poisson: found 0/s, expected a rate above 0"),
    ("arrivals: {}", "1: arrivals: found none, expected one of poisson, gamma, constant, ramp, steps, closed"),
    ("arrivals:\n  poisson: 1/s\n  closed: 4",
     "1: arrivals: found poisson and closed, expected one of poisson, gamma, constant, ramp, steps, closed"),
    ("arrivals: {constant: 0/s}", "1: arrivals.constant: found 0/s, expected a rate above 0"),
    ("arrivals: {gamma: {rate: 0/s}}", "1: arrivals.gamma.rate: found 0/s, expected a rate above 0"),
    ("arrivals: {ramp: {from: 0/s, to: 0/s, over: 1s}}", "1: arrivals.ramp.to: found 0/s, expected a rate above 0"),
    ("arrivals: {ramp: {from: 0/s, over: 1s}}",
     "1: arrivals.ramp: found no to, expected to: a rate such as 5/s, 0.5/s, 600/min"),
    ("arrivals: {steps: [{rate: 0/s, for: 1s}]}",
     "1: arrivals.steps: found no step with a rate above 0, expected at least one"),
    ("workload: {mix: [{session: {first: {}}}]}",
     "1: workload.mix[0].session.first: found none, expected one of constant, uniform, log_normal, geometric, "
     "empirical"),
    ("arrivals: trace", "1: arrivals: found trace, expected a trace beside it: trace: {file: ...}"),
    ("trace: t.csv",
     "1: trace: found a trace that nothing uses, expected arrivals: trace, or a prompt or output of trace"),
    ("trace: {file: t, speed: 2}\narrivals: trace",
     "1: trace.speed: found '2', expected a multiple such as 1.2x, 2x, at least 0.01x, at most 1000x "
     "(did you mean 2x?)"),
    ("workload: {mix: []}", "1: workload.mix: found no kind of request, expected at least one"),
    ("workload:\n  mix:\n    - kind: chat\n      promt: 3",
     "4: workload.mix[0]: found unknown field 'promt', expected one of class, share, kind, model, prompt, output, "
     "ignore_eos, stream, prefix, session, inputs, query (did you mean prompt?)"),
    ("workload: {mix: [{prompt: 0}]}",
     "1: workload.mix[0].prompt: found '0', expected trace or a number such as 256, 200k, 1M, at least 1, at most "
     "10M or a mapping with constant, uniform, log_normal, geometric, empirical, least, most"),
    ("workload: {mix: [{prompt: {constant: 3, geometric: 3}}]}",
     "1: workload.mix[0].prompt: found constant and geometric, expected one of constant, uniform, log_normal, "
     "geometric, empirical"),
    ("workload: {mix: [{prompt: {uniform: {from: 3, to: 2}}}]}",
     "1: workload.mix[0].prompt.uniform: found 3 to 2, expected from at most to"),
    ("workload: {mix: [{output: {empirical: []}}]}",
     "1: workload.mix[0].output.empirical: found an empty list, expected lengths to draw from"),
    ("workload: {mix: [{inputs: {constant: 3, least: 5, most: 4}}]}",
     "1: workload.mix[0].inputs.least: found 5, expected at most 4, which is most"),
    ("workload: {mix: [{output: trace}]}",
     "1: workload.mix[0].output: found trace, expected a trace beside it: trace: {file: ...}"),
    ("workload: {mix: [{kind: rerank, session: {}}]}",
     "1: workload.mix[0].session: found a conversation of rerank, expected kind: chat"),
    ("workload: {mix: [{session: {turns: {}}}]}",
     "1: workload.mix[0].session.turns: found none, expected one of constant, uniform, log_normal, geometric, "
     "empirical"),
    ("trace: t\nworkload: {mix: [{session: {think: 3s, context: 9k}, prompt: trace}]}",
     "2: workload.mix[0].session: found a prefix, or turns, beside those of a trace, expected no more than think and "
     "spread"),
    ("trace: t\nworkload: {mix: [{session: {}, output: trace}]}",
     "2: workload.mix[0].output: found a trace's lengths in a conversation of its own, expected prompt: trace, too"),
    ("workload: {mix: [{kind: embeddings, prefix: {}}]}",
     "1: workload.mix[0].prefix: found a shared prefix of embeddings, expected kind: chat or completions"),
    ("workload: {mix: [{prefix: {tokens: 10k, count: 10k}}]}",
     "1: workload.mix[0].prefix: found 100000000 tokens in all prefixes, expected at most 50000000: they are held in "
     "memory"),
    ("workload:\n  tenants:\n    a: {key_env: A, key_file: a}",
     "3: workload.tenants.a.key_file: found a second place for the key, expected either key_env or key_file"),
    ("duration: 30s\nwarmup: 20s\ncooldown: 10s",
     "2: warmup: found 30 s of warm-up and cool-down, expected less than the duration, 30 s"),
    ("slo: [chat.ttft.p99<2s]\nworkload: {mix: [{class: chart}]}",
     "1: slo[0]: found the class chat, expected a class of the mix: chart (did you mean chart?)"),
    ("slo:\n  - ttft.p99<2s\n  - goodput>=95%",
     "3: slo[1]: found goodput>=95%, expected one share of all that is asked of a class: 99%, as in ttft.p99<2s"),
    ("slo: [ttft<2s]",
     "1: slo[0]: found 'ttft<2s', expected an objective such as interactive.ttft.p99<2s (or tpot, e2e) or "
     "goodput>=95%"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), MISTAKES)
def test_every_mistake_has_its_line(text: str, problem: str) -> None:
    assert problems(text) == [f"s.yaml:{problem}"]


def test_all_mistakes_are_found_at_once() -> None:
    assert len(problems("arrivals: {}\nduration: 1s\nwarmup: 1m\nslo: [x.goodput>=1%]\ntrace: t\n")) == 4


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_a_trace_can_give_its_times_or_its_lengths(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(BURSTGPT)
    recorded = decode(
        b"{trace: {file: t.csv, speed: 2x}, arrivals: trace, workload: {mix: [{prompt: trace, output: trace}]}}"
    )
    calls = [(call.at, call.prompt_tokens, call.max_tokens) for call in planned(recorded, folder=tmp_path)]
    assert calls == [(0.0, 100, 7), (1.0, 200, 8), (2.0, 300, 9)]
    assert [call.at for call in planned(recorded.scaled(2.0), folder=tmp_path)] == [0.0, 0.5, 1.0]
    assert recorded.rate == 0.0
    own = decode(b"{trace: t.csv, arrivals: {constant: 4/s}, workload: {mix: [{prompt: trace, output: 5}]}}")
    calls = [(call.at, call.prompt_tokens, call.max_tokens) for call in planned(own, folder=tmp_path)]
    assert calls == [(0.0, 100, 5), (0.25, 200, 5), (0.5, 300, 5)]
    whole = of_trace("t.csv", speed=4.0, model="m")
    assert [(call.at, body_of(call)["ignore_eos"]) for call in planned(whole, folder=tmp_path)] == [
        (0.0, True), (0.5, True), (1.0, True),
    ]  # fmt: skip
    assert decode(explain(whole).encode()) == whole
    assert (whole.seconds, own.seconds) == (float("inf"), 60.0)
    short = decode(b"{trace: t.csv, arrivals: trace, duration: 3s}")
    assert [call.at for call in planned(short, folder=tmp_path)] == [0.0, 2.0]


def test_a_trace_of_another_format_is_found_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(BURSTGPT)
    scenario = decode(b"{trace: {file: t.csv, format: azure}, arrivals: trace}")
    with pytest.raises(TraceError, match="line 1: 'Timestamp,"):
        next(planned(scenario, folder=tmp_path))


def test_duration_ends_and_a_seed_changes_it() -> None:
    scenario = Scenario(arrivals=Arrivals(poisson=Rate(50.0)), duration=10.0, seed=3)
    first, again, other = ([call.at for call in planned(scenario, seed=seed)] for seed in (None, 3, 4))
    assert first == again != other
    assert len(first) == pytest.approx(500, rel=0.2)
    assert 9.0 < first[-1] < 10.0


def test_keys_are_in_the_environment_or_in_files(tmp_path: Path) -> None:
    (tmp_path / "b.key").write_text("secret-b\n")
    scenario = decode(b"workload: {tenants: {a: {key_env: A}, b: {key_file: b.key}, c: {}}}")
    keys = keys_of(scenario, tmp_path, {"A": "secret-a"})
    assert keys == {"a": "secret-a", "b": "secret-b"}
    sent = {call.fields.get(b"authorization") for call in islice(planned(scenario, keys=keys), 50)}
    assert sent == {b"Bearer secret-a", b"Bearer secret-b", None}


@pytest.mark.parametrize(
    ("tenant", "says"),
    [
        (Tenant(key_env="A"), "t: the environment variable A holds no API key, expected one alone, without spaces"),
        (Tenant(key_file="absent"), "t.key_file: {}/absent: No such file or directory"),
        (Tenant(key_file="two"), "t: {}/two holds no API key, expected one alone, without spaces"),
        (Tenant(key_file="long"), "t: {}/long holds no API key, expected one alone, without spaces"),
        (Tenant(key_file="bytes"), "t: {}/bytes holds no API key, expected one alone, without spaces"),
    ],
)
def test_keys_that_are_none(tmp_path: Path, tenant: Tenant, says: str) -> None:
    (tmp_path / "two").write_text("secret one\n")
    (tmp_path / "long").write_text("x" * (LONGEST_KEY + 1))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(Mistake) as caught:
        key_of(tenant, "t", tmp_path, {})
    assert str(caught.value) == says.format(tmp_path)


# -- shipped scenarios ------------------------------------------------------------------------------------------------


def test_shipped_scenarios_are_found_by_name(tmp_path: Path) -> None:
    assert set(shipped()) >= {
        "agentic",
        "agents",
        "claude-code",
        "burst",
        "chat",
        "embeddings",
        "mixed",
        "multi-turn",
        "overload",
    }
    assert find("chat") == SHIPPED / "chat.yaml"
    (tmp_path / "own.yaml").write_text("what: mine")
    assert load(find(str(tmp_path / "own.yaml"))).what == "mine"
    with pytest.raises(Mistake, match="chatt: neither a file nor one of the scenarios agentic, agents, burst, chat,"):
        find("chatt")
    (tmp_path / "own.yaml").write_text("wat: mine")
    with pytest.raises(InvalidFile, match=r"own\.yaml:1: found unknown field 'wat'.*did you mean what"):
        load(tmp_path / "own.yaml")


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_scenario_is_valid_and_says_what_it_is(name: str) -> None:
    text = find(name).read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n#\n# ")
    scenario = load(find(name))
    assert scenario.what
    assert scenario.slos
    calls = list(islice(planned(scenario), 200))
    closed = None if isinstance(scenario.arrivals, str) else scenario.arrivals.closed
    if closed is None:
        assert len(calls) == 200
        assert all(before.at <= after.at for before, after in pairwise(calls))
    else:
        assert len(calls) == (closed.clients * closed.rounds if closed.rounds else 200)
    validate = jsonschema.Draft202012Validator(msgspec.json.decode(schema_text())).validate
    validate(yaml.safe_load(text))
    validate(yaml.safe_load(explain(scenario)))


# -- the schema -------------------------------------------------------------------------------------------------------


def test_the_schema_is_what_the_code_says() -> None:
    """If not: make generate"""
    jsonschema.Draft202012Validator.check_schema(msgspec.json.decode(schema_text()))
    assert (SHIPPED / "schema.json").read_text() == schema_text()


def schemas() -> Iterator[tuple[str, Any]]:
    for struct in structs_of(Scenario):
        known = {field.encode_name for field in msgspec.structs.fields(struct)}
        yield struct.__name__, (known, set(described(struct)[1]))


def test_every_field_is_described() -> None:
    assert {name: known - said for name, (known, said) in schemas()} == {name: set() for name, _ in schemas()}
    assert {name: said - known for name, (known, said) in schemas()} == {name: set() for name, _ in schemas()}


@pytest.mark.parametrize(
    "text",
    ["arrivals: 5", "arivals: 5/s", "workload: {mix: [{kind: chatt}]}", "slo: [ttft<2s]", "seed: -1",
     "workload: {mix: [{prompt: {uniform: {from: 3}}}]}", "duration: 5", "targets: {a: 5}"],
)  # fmt: skip
def test_editors_find_mistakes_of_form(text: str) -> None:
    assert not jsonschema.Draft202012Validator(msgspec.json.decode(schema_text())).is_valid(yaml.safe_load(text))
