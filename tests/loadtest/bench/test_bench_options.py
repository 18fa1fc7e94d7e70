"""Command line of the bench: the resulting plan, and one line of advice for every mistake."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

import pytest

from loadtest.bench.options import Bench, add_arguments, bench_of
from loadtest.clients.targets import Address, parse_url
from loadtest.load.scenario import Mistake
from loadtest.report.records import Window

ROOT = Path(__file__).parents[3]


class Wrong(Exception):
    """What argparse would say."""


def read(*argv: str, environment: dict[str, str] | None = None) -> Bench:
    parser = argparse.ArgumentParser()

    def wrong(message: str) -> NoReturn:
        raise Wrong(message)

    parser.error = wrong  # type: ignore[method-assign] # as it is there to be
    add_arguments(parser)
    return bench_of(parser.parse_args(argv), environment or {})


def test_flags_go_before_the_scenario() -> None:
    bench = read(
        *("--scenario", "mixed", "--target", "a=http://h:81/v1", "--rate", "30/min", "--duration", "90s"),
        *("--warmup", "5", "--seed", "9", "--retries", "0", "--slo", "ttft.p90<1s", "--drain", "2s"),
    )
    scenario = bench.scenario
    assert scenario.rate == pytest.approx(0.5)
    assert scenario.window == Window(duration=90.0, warmup=5.0)
    assert (scenario.seed, scenario.retries, bench.drain) == (9, 0, 2.0)
    assert scenario.slos[0].ttft == 1.0
    (contender,) = bench.contenders
    assert contender.fixed is not None
    assert contender.fixed.addresses == [Address("h", 81)]
    assert contender.fixed.sources == [("a", Address("h", 81))]


@pytest.mark.parametrize("flags", ["--rate 5/s", "--clients 3"])
def test_flags_replace_the_arrivals_of_a_trace(tmp_path: Path, flags: str) -> None:
    file, trace = tmp_path / "s.yaml", '{"timestamp": 0, "input_length": 2, "output_length": 1}\n'
    (tmp_path / "t.jsonl").write_text(trace)
    file.write_text("version: 1\nduration: 1m\narrivals: trace\ntrace: {file: t.jsonl}\n")
    scenario = read("--scenario", str(file), "--target", "http://h", *flags.split()).scenario
    assert (scenario.trace, scenario.arrivals == "trace") == (None, False)


def test_what_may_still_be_in_time_is_waited_for() -> None:
    assert read("--target", "http://h", "--slo", "ttft.p99<1s").drain == 60.0
    assert read("--target", "http://h", "--slo", "e2e.p99<5m").drain == 300.0


def test_a_ramp_keeps_its_shape() -> None:
    bench = read("--scenario", "overload", "--target", "http://h", "--rate", "10/s")
    assert bench.scenario.rate == pytest.approx(10.0)
    assert not isinstance(bench.scenario.arrivals, str)
    assert bench.scenario.arrivals.ramp is not None


def test_the_same_seed_is_the_same_load_for_every_target_and_repeats_differ() -> None:
    bench = read("--target", "http://h")
    first, again, second = (bench.load(bench.scenario, repeat) for repeat in (0, 0, 1))
    one, same, other = (next(load.planned) for load in (first, again, second))
    assert (one.at, one.body) == (same.at, same.body)
    assert one.at != other.at
    assert b'"model":"theirs"' in next(bench.load(bench.scenario, 0, "theirs").planned).body


def test_engines_with_policies_and_baselines(tmp_path: Path) -> None:
    for name in ("now", "next"):
        (tmp_path / f"{name}.yaml").write_text("version: 1\n")
    bench = read(
        *("--engines", "sim:4:a100-8b", "--policy", f"{tmp_path}/now.yaml", "--policy", f"{tmp_path}/next.yaml"),
        *("--compare", "direct,round_robin"),
    )
    assert [one.name for one in bench.contenders] == ["now", "next", "direct", "round_robin"]
    assert [one.compared for one in bench.contenders] == [False, False, True, True]
    assert bench.fleet is not None
    assert (bench.fleet.count, bench.fleet.profile) == (4, "a100-8b")


def test_a_rival_that_is_not_installed_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VLLM_ROUTER", "")
    with pytest.raises(Mistake, match="--compare: vllm-router is not on the PATH: pip install vllm-router"):
        read("--engines", "sim", "--compare", "direct,vllm-router:round_robin")


def test_keys_come_from_the_environment_only() -> None:
    bench = read("--target", "http://h", "--key-env", "KEY", environment={"KEY": "sk-1"})
    assert bench.contenders[0].fixed is not None
    assert bench.contenders[0].fixed.headers == {b"authorization": b"Bearer sk-1"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "where to? Give --target URL"),
        ("--target http://h --target http://h", "two targets called h"),
        ("--target ftp://h", "write http://HOST:PORT"),
        ("--target A=http://h", "lower-case"),
        ("--engines sim:0", "1 to 64 simulated engines"),
        ("--engines sim:2:zx81", "there is no profile 'zx81'"),
        ("--engines sim --compare random", "'random' is not one of direct, round_robin"),
        ("--engines sim --policy nope.yaml", "nope.yaml: there is no such file"),
        ("--target http://h --policy x.yaml", "needs --engines"),
        ("--target http://h --compare direct", "needs --engines"),
        ("--target http://h --max-model-len 9000", "--max-model-len: needs --engines"),
        (
            "--engines sim --compare vllm-router:best",
            "'vllm-router:best' is not one of direct, round_robin, vllm-router",
        ),
        ("--target http://h --rate 5", "a rate such as 5/s"),
        ("--target http://h --rate 5/s --clients 3", "an open loop or a closed one"),
        ("--target http://h --duration 10s", "expected less than the duration, 10 s"),
        ("--target http://h --duration 10x", "is not a time such as"),
        ("--target http://h --slo ttft<1s", "is not an objective"),
        ("--target http://h --slo bulk.ttft.p99<1s", "slo: the class bulk, expected a class of the mix: interactive"),
        ("--target http://h --scenario nope", "neither a file nor one of the scenarios"),
        ("--target http://h --trace nope.csv", "no such file"),
        ("--target http://h --trace /dev/null", "no file, which each run reads"),
        (f"--target http://h --trace {__file__}", "test_bench_options.py, line 1: "),
        (f"--engines sim --policy {ROOT}/policies/one-engine.yaml", "its http://127.0.0.1:8100 would get the load too"),
        (f"--engines sim --policy {ROOT}/tests/policies_bad/reserves.yaml", "reserves.yaml:"),
        ("--target http://h --speed 2", "--speed is of a --trace"),
        ("--target http://h --key-env NOT_THERE", "NOT_THERE"),
        ("--target http://h --ca nope.pem", "--ca nope.pem: No such file"),
        ("--target http://h --ca /dev/null", "--ca /dev/null: not a plain file"),
        ("--target http://h --metrics b=http://h:1", "no target of this name"),
        ("--target http://h --repeat 0", "from 1 to 100"),
        ("--scenario embeddings --target http://h --clients 5 --find-capacity", "a closed loop has no rate"),
    ],
)
def test_mistakes(argv: str, said: str) -> None:
    with pytest.raises((Mistake, Wrong)) as error:
        read(*argv.split())
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://10.0.0.1:8000", Address("10.0.0.1", 8000)),
        ("https://gpu.example.com/v1/", Address("gpu.example.com", 443, tls=True)),
        ("http://[::1]/team/v1", Address("::1", 80, prefix=b"/team")),
        ("unix:///run/vllm.sock", Address("localhost", unix="/run/vllm.sock")),
    ],
)
def test_urls(text: str, address: Address) -> None:
    assert parse_url(text) == address


@pytest.mark.parametrize(
    "text", ["h:80", "http://", "http://h:99999", "http://u:p@h", "http://h?x=1", "unix:///", "http://h /"]
)
def test_urls_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="write "):
        parse_url(text)
