"""Metrics pages of engines and gateways, as the bench reads them."""

from __future__ import annotations

from loadtest.clients.target_metrics import samples_of
from loadtest.report.records import EngineSample

OLD = b"""\
# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage.
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:num_requests_running{model_name="m"} 4.0
vllm:num_requests_waiting{model_name="m"} 1.0
"""
RANKS = b"""\
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.4
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 7.0
"""
GATEWAY = b"""\
weir_engine_kv_usage_ratio{engine="a:1"} 0.25
weir_engine_kv_usage_ratio{engine="b:1"} 0.75
weir_engine_in_flight{engine="a:1"} 3.0
weir_queued_calls{class="batch",model="m"} 5.0
weir_queued_calls{class="default",model="m"} 2.0
vllm_requests_total{model_id="m"} 9.0
"""


def test_an_engine() -> None:
    assert samples_of(OLD, 1.0, 0, "e") == [EngineSample(1.0, "e", 0.5, 4, 1)]


def test_lines_that_no_report_draws_are_not_looked_at() -> None:
    odd = b'vllm:lora_requests_info{max_lora="0"} 1.0\nvllm:num_preemptions_total{} ?\n'
    assert samples_of(OLD + odd, 1.0, 0, "e") == [EngineSample(1.0, "e", 0.5, 4, 1)]


def test_ranks_are_one_engine() -> None:
    assert samples_of(RANKS, 2.0, 1, "e") == [EngineSample(2.0, "e", 0.4, 5, 1, 1)]


def test_a_gateway_names_its_engines() -> None:
    assert samples_of(GATEWAY, 1.0, 0, "gw") == [
        EngineSample(1.0, "a:1", 0.25, 3, 0),
        EngineSample(1.0, "b:1", 0.75, 0, 0),
        EngineSample(1.0, "", 0.0, 0, 7),
    ]


def test_anything_else_tells_nothing() -> None:
    assert samples_of(b"<html>", 1.0, 0, "e") == []
    assert samples_of(b"vllm:num_requests_running 3.0\n", 1.0, 0, "e") == []
    assert samples_of(b'vllm:kv_cache_usage_perc{engine="0"} much\n', 1.0, 0, "e") == []
