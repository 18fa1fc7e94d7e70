"""Answers of vLLM to the sidecar: the metrics of old and new versions, and all that is refused."""

from __future__ import annotations

import pytest

from loadtest.engine import metrics
from loadtest.engine.config import sim_config
from loadtest.engine.engine import Engine
from sidecar.core.vllm import (
    Acknowledgement,
    AnswerError,
    Completion,
    Gauges,
    done_from,
    gauges_from,
    models_from,
    said_from,
    sleeping_from,
)

LEAST = """vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 2.5e-1
"""
TWO_CORES = LEAST + LEAST.replace('engine="0"', 'engine="1"').replace("2.5e-1", "0.75 1700000000000")


def cache(**labels: object) -> str:
    told = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{told}}} 1.0\n"


def sleeping(**states: int) -> str:
    return "".join(f'vllm:engine_sleep_state{{sleep_state="{name}"}} {value}\n' for name, value in states.items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LEAST, Gauges(running=3, waiting=1, kv_usage=0.25)),
        (LEAST.replace("kv_cache_usage", "gpu_cache_usage"), Gauges(running=3, waiting=1, kv_usage=0.25)),
        (LEAST.replace('{engine="0",model_name="m"}', ""), Gauges(running=3, waiting=1, kv_usage=0.25)),
        (TWO_CORES, Gauges(running=6, waiting=2, kv_usage=0.75)),
        ("# HELP vllm:num_requests_running x\nother 1\n" + LEAST, Gauges(running=3, waiting=1, kv_usage=0.25)),
        ("vllm:num_preemptions_total nonsense\nvllm: {\n" + LEAST, Gauges(running=3, waiting=1, kv_usage=0.25)),
        (
            LEAST + 'vllm:iteration_tokens_total_count 7\nvllm:iteration_tokens_total_bucket{le="1"} 9\n',
            Gauges(running=3, waiting=1, kv_usage=0.25, steps=7.0),
        ),
    ],
)
def test_gauges(text: str, expected: Gauges) -> None:
    assert gauges_from(text.encode()) == expected


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", None),
        (cache(block_size=16, num_gpu_blocks="None"), None),
        (cache(block_size=16), None),
        (cache(block_size=16, num_gpu_blocks=100), 1600),
        (cache(block_size=16, num_gpu_blocks=100, engine=0) + cache(block_size=16, num_gpu_blocks=100, engine=1), 1600),
        (cache(block_size=16, num_gpu_blocks=100, kv_cache_size_tokens=1000), 1000),
        (cache(kv_cache_size_tokens=1000, engine=0) + cache(kv_cache_size_tokens=1000, engine=1), 2000),
    ],
)
def test_the_size_of_the_kv_cache(text: str, tokens: int | None) -> None:
    assert gauges_from((LEAST + text).encode()).kv_tokens == tokens


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", None),
        (sleeping(awake=1, weights_offloaded=0, discard_all=0), "awake"),
        (sleeping(awake=0, weights_offloaded=1, discard_all=0), "weights_offloaded"),
        (sleeping(awake=0, weights_offloaded=0, discard_all=1), "discard_all"),
        (sleeping(awake=0, weights_offloaded=0, discard_all=0), "paused"),
        (sleeping(awake=1, discard_all=1, weights_offloaded=1), "discard_all"),
    ],
)
def test_the_state_of_sleep(text: str, state: str | None) -> None:
    assert gauges_from((LEAST + text).encode()).sleep_state == state


def test_only_an_engine_with_nothing_to_do_is_idle() -> None:
    states = [Gauges(running=running, waiting=waiting, kv_usage=0.0).idle for running in (0, 1) for waiting in (0, 1)]
    assert states == [True, False, False, False]


def test_the_simulated_engine_is_read() -> None:
    text = metrics.text(Engine(sim_config().engine), "m")
    assert gauges_from(text) == Gauges(running=0, waiting=0, kv_usage=0.0, kv_tokens=409_600, sleep_state="awake")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cut off: 0 bytes"),
        (LEAST[:-1], "cut off"),
        (LEAST.split("\n", 1)[1], "not all told"),
        ("".join(LEAST.splitlines(keepends=True)[::2]), "not all told"),
        (LEAST.rsplit("vllm", 1)[0], "not all told"),
        (TWO_CORES.rsplit("vllm", 1)[0], "not all told"),
        (LEAST.replace("2.5e-1", "1.5"), "KV usage of 1.5"),
        (LEAST.replace("3.0", "-3"), "cannot read"),
        (LEAST.replace("3.0", "NaN"), "cannot read"),
        (LEAST.replace("3.0", "9e99"), "cannot read"),
        (LEAST.replace("3.0", "1.2.3"), "cannot read"),
        (LEAST.replace("3.0", ""), "cannot read"),
        (LEAST.replace('"0"', '"0'), "cannot read"),
        (LEAST.replace('engine="0"', 'engine="\udcff"'), "cannot read"),
        (LEAST + cache(block_size=16, num_gpu_blocks="many"), "num_gpu_blocks='many'"),
        (LEAST + cache(block_size=16, num_gpu_blocks="9" * 16), "num_gpu_blocks"),
        (LEAST + cache(block_size=16, num_gpu_blocks="²"), "num_gpu_blocks"),
    ],
)
def test_metrics_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(AnswerError, match=why):
        gauges_from(text.encode(errors="surrogateescape"))


def test_the_other_answers() -> None:
    assert models_from(b'{"data":[{"id":"m","max_model_len":4096},{"id":"adapter","x":[]}]}') == {
        "m": 4096,
        "adapter": None,
    }
    assert sleeping_from(b'{"is_sleeping":true}') is True
    assert said_from(b'{"choices":[{"text":" Paris","token_ids":[1,2]}]}') == Completion(" Paris", (1, 2))
    assert said_from(b'{"choices":[{"text":" Paris","token_ids":null}]}') == Completion(" Paris")
    assert done_from(b"") == done_from(b"{}") == Acknowledgement()
    assert done_from(b'{"status":"sleeping","level":2}') == Acknowledgement(status="sleeping", level=2)


DEEP = b'{"x":' + b"[" * 100_000


@pytest.mark.parametrize(
    ("reader", "bodies"),
    [
        (models_from, [b'{"data":[{"id":""}]}', b'{"data":[{"id":"m","max_model_len":0}]}', b'{"data":[{"id":1}]}']),
        (sleeping_from, [b'{"is_sleeping":"false"}', b'{"is_sleeping":0}']),
        (said_from, [b'{"choices":[]}', b'{"choices":[{"text":1}]}', b'{"choices":[{"text":"\xff"}]}']),
        (done_from, [b'{"level":"2"}', b'{"success":"no"}']),
    ],
)
def test_answers_that_are_refused(reader: object, bodies: list[bytes]) -> None:
    assert callable(reader)
    for body in (*bodies, b"[]", b"null", b"<html>", b"{", DEEP):
        with pytest.raises(AnswerError):
            reader(body)
