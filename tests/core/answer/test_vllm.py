"""Metrics of vLLM 0.9 and 0.32, data parallelism, and impossible numbers."""

from __future__ import annotations

import json

import pytest

from gateway.core.answer.engine_error import BEGINNING, LOGGED_AT_MOST, engine_error
from gateway.shared.vllm.answers import AnswerError, ModelCard, ModelLoad, models_from, sample_from

V9 = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/m"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/m"} 2.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="org/m"} 0.25
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="org/m"} 1000.0
vllm:gpu_prefix_cache_queries_created{engine="0",model_name="org/m"} 1.7e+09
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="org/m"} 750.0
vllm:num_preemptions_total{engine="0",model_name="org/m"} 4.0
vllm:prompt_tokens_total{engine="0",model_name="org/m"} 1.234567e+06
vllm:generation_tokens_total{engine="0",model_name="org/m"} 500.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",sliding_window="None"} 1.0
"""

V32 = """\
vllm:num_requests_running{engine="0",model_name="a, \\"b\\" } 1"} 1.0
vllm:num_requests_running{engine="1",model_name="a, \\"b\\" } 1"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a, \\"b\\" } 1"} 0.0
vllm:num_requests_waiting{engine="1",model_name="a, \\"b\\" } 1"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="a",reason="deferred"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="a, \\"b\\" } 1"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="a, \\"b\\" } 1"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="a"} 10.0
vllm:prefix_cache_queries_total{engine="1",model_name="a"} 20.0
vllm:prefix_cache_hits_total{engine="0",model_name="a"} 1.0
vllm:num_preemptions_total{engine="0",model_name="a"} 1.0
vllm:num_preemptions_total{engine="1",model_name="a"} 2.0
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="weights_offloaded"} 0.0
vllm:cache_config_info{block_size="8",engine="0",kv_cache_size_tokens="463459",num_gpu_blocks="640"} 1.0
vllm:cache_config_info{block_size="8",engine="1",kv_cache_size_tokens="463459",num_gpu_blocks="640"} 1.0
"""

LEAST = """\
vllm:num_requests_running 1
vllm:num_requests_waiting 0
vllm:kv_cache_usage_perc 0.5
"""


def test_vllm_0_9() -> None:
    sample = sample_from(V9.encode())
    assert (sample.running, sample.waiting, sample.kv_usage) == (3, 2, 0.25)
    assert sample.capacity_tokens == 16_000
    assert (sample.preemptions_total, sample.prompt_tokens_total, sample.generation_tokens_total) == (4, 1234567, 500)
    assert sample.sleep_state is None
    assert sample.models == {"org/m": ModelLoad(3, 2)}


def test_vllm_0_32_with_two_data_parallel_engines() -> None:
    sample = sample_from(V32.encode())
    assert (sample.running, sample.waiting, sample.queued) == (3, 5, 1)
    assert sample.kv_usage == 0.625, "of the sum of both caches: one that is full leaves the other's room"
    assert sample.capacity_tokens == 2 * 463459
    assert sample.preemptions_total == 3
    assert sample.sleep_state == "awake"
    assert sample.models == {'a, \\"b\\" } 1': ModelLoad(3, 5)}


def test_the_new_name_wins_where_both_are_told() -> None:
    assert sample_from((LEAST + "vllm:gpu_cache_usage_perc 0.9\n").encode()).kv_usage == 0.5


def test_other_metrics_are_not_our_concern() -> None:
    assert sample_from((LEAST + "vllm:num_lora NaN\nvllm:cache_hit{ broken\nnonsense\n\n").encode()).running == 1


def test_several_models() -> None:
    text = "".join(
        f'vllm:{name}{{engine="0",model_name="{model}"}} {value}\n'
        for model, running, waiting, usage in (("a", 1, 2, 0.1), ("b", 3, 4, 0.2))
        for name, value in (
            ("num_requests_running", running), ("num_requests_waiting", waiting), ("kv_cache_usage_perc", usage)
        )
    )  # fmt: skip
    sample = sample_from(text.encode())
    assert sample.models == {"a": ModelLoad(1, 2), "b": ModelLoad(3, 4)}
    assert (sample.running, sample.waiting, sample.kv_usage) == (4, 6, 0.2)


def test_the_least_there_must_be() -> None:
    sample = sample_from(LEAST.replace("\n", " \r\n").replace("0.5", "5e-1 1732171234000").encode())
    assert (sample.running, sample.waiting, sample.kv_usage) == (1, 0, 0.5)
    assert (sample.capacity_tokens, sample.sleep_state) == (None, None)
    assert sample.models == {"": ModelLoad(1, 0)}


@pytest.mark.parametrize(
    ("rows", "capacity"),
    [
        # Under data parallelism each row of num_gpu_blocks is the sum over all cores already.
        (['num_gpu_blocks="100",block_size="16",engine="0"', 'num_gpu_blocks="100",block_size="16",engine="1"'], 1600),
        (['num_gpu_blocks="None",block_size="16"'], None),
        (['num_gpu_blocks="100",block_size="None"'], None),
        (['num_gpu_blocks="0",block_size="16"'], None),
        (['kv_cache_size_tokens="None",num_gpu_blocks="10",block_size="16"'], 160),
        (['kv_cache_size_tokens="99",num_gpu_blocks="None"', 'num_gpu_blocks="None"'], None),
        (['enable_prefix_caching="False"'], None),
    ],
)
def test_capacity(rows: list[str], capacity: int | None) -> None:
    text = LEAST + "".join(f"vllm:cache_config_info{{{row}}} 1.0\n" for row in rows)
    assert sample_from(text.encode()).capacity_tokens == capacity


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"awake": 1, "weights_offloaded": 0, "discard_all": 0}, "awake"),
        ({"awake": 0, "weights_offloaded": 1, "discard_all": 0}, "weights_offloaded"),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 1}, "discard_all"),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 0}, "paused"),
    ],
)
def test_sleep_states(states: dict[str, int], expected: str) -> None:
    text = LEAST + "".join(f'vllm:engine_sleep_state{{sleep_state="{s}"}} {v}.0\n' for s, v in states.items())
    assert sample_from(text.encode()).sleep_state == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cut off"),
        (LEAST[:-1], "cut off"),
        ("<html>404</html>\n", "no vllm:num_requests_running"),
        ("# nothing\n", "no vllm:num_requests_running"),
        (LEAST.replace("vllm:num_requests_waiting 0\n", ""), "no vllm:num_requests_waiting"),
        (LEAST.replace("vllm:kv_cache_usage_perc 0.5\n", ""), "no vllm:kv_cache_usage_perc"),
        (LEAST.replace("0.5", "NaN"), "cannot read"),
        (LEAST.replace("0.5", "+Inf"), "cannot read"),
        (LEAST.replace("0.5", "-0.5"), "cannot read"),
        (LEAST.replace("0.5", "1.5"), "KV usage of 1.5"),
        (LEAST.replace("0.5", "0.5.5"), "cannot read"),
        (LEAST.replace("running 1", "running -1"), "cannot read"),
        (LEAST.replace("running 1", "running 1e300"), "cannot read"),
        (LEAST.replace("running 1", "running 1e999"), "cannot read"),
        (LEAST.replace("running 1", "running"), "cannot read"),
        (LEAST.replace("running 1", "running 1 2 3"), "cannot read"),
        (LEAST.replace("running 1", "running one"), "cannot read"),
        (LEAST.replace("running 1", "running{engine=0} 1"), "cannot read"),
        (LEAST.replace("running 1", 'running{engine="0} 1'), "cannot read"),
        (LEAST.replace("running 1", 'running{engine="\udcff"} 1'), "cannot read"),
        (LEAST + LEAST, "told twice"),
        (LEAST.replace("running 1", 'running{engine="1"} 1'), "different engines"),
        (LEAST + 'vllm:num_requests_running{engine="1"} 1\n', "different engines"),
        (LEAST + "vllm:num_preemptions_total NaN\n", "cannot read"),
        (LEAST + 'vllm:cache_config_info{num_gpu_blocks="many",block_size="16"} 1\n', "num_gpu_blocks='many'"),
        (LEAST + f'vllm:cache_config_info{{num_gpu_blocks="{"9" * 16}",block_size="16"}} 1\n', "num_gpu_blocks='999"),
        (LEAST + 'vllm:cache_config_info{num_gpu_blocks="-1",block_size="16"} 1\n', "num_gpu_blocks='-1'"),
    ],
)
def test_what_is_not_believed(text: str, says: str) -> None:
    with pytest.raises(AnswerError, match=says):
        sample_from(text.encode(errors="surrogateescape"))


def exposition() -> bytes:
    """About 200 KB in the shape of a vLLM that serves: mostly histogram buckets."""
    lines = []
    for name in ("time_to_first_token_seconds", "request_prompt_tokens", "inter_token_latency_seconds", "e2e_request"):
        for series in range(5):
            lines.append(f"# HELP vllm:{name}_{series} A histogram.\n# TYPE vllm:{name}_{series} histogram\n")
            lines += [
                f'vllm:{name}_{series}_bucket{{engine="0",le="{bound}.0",model_name="meta-llama/Llama-3.1-8B"}} 1.0\n'
                for bound in range(50)
            ]
    return "".join([*lines, V9, *lines]).encode()


def test_a_real_size_exposition() -> None:
    text = exposition()
    assert 150_000 < len(text) < 250_000
    assert sample_from(text) == sample_from(V9.encode())


# -- models -------------------------------------------------------------------------------------------------------


def test_models() -> None:
    body = {
        "object": "list",
        "data": [
            {
                "id": "m", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/m", "parent": None,
                "max_model_len": 4096, "permission": [{"id": "x"}],
            },
            {"id": "lora", "root": "/lora", "parent": "m", "max_model_len": None},
            {"id": "orphan", "parent": "gone"},
            {"id": "short", "parent": "m", "max_model_len": 1024},
            {"id": "bare"},
        ],
    }  # fmt: skip
    assert models_from(json.dumps(body).encode()) == [
        ModelCard(id="m", created=1, root="/models/m", max_model_len=4096),
        ModelCard(id="lora", root="/lora", parent="m", max_model_len=4096),
        ModelCard(id="orphan", parent="gone"),
        ModelCard(id="short", parent="m", max_model_len=1024),
        ModelCard(id="bare"),
    ]
    assert models_from(b'{"data": []}') == []


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"data": 5}', b'{"data": [{}]}', b'{"data": [{"id": ""}]}', b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "m", "max_model_len": 0}]}', b'{"data": [{"id": "m", "max_model_len": 1e99}]}',
        b'{"data": [{"id": "\xff"}]}', b'{"x": ' + b"[" * 9999,
    ],
)  # fmt: skip
def test_models_that_are_not_believed(body: bytes) -> None:
    with pytest.raises(AnswerError, match="cannot read the engine's list of models"):
        models_from(body)


TOO_LONG = "context_length_exceeded"
TOO_MANY = "This model's maximum context length is 8 tokens. However, your prompt contains 9 input tokens."
LONGER = "The decoder prompt (length 9) is longer than the maximum model length of 8."
PASSED = (  # vllm/renderers/params.py
    "You passed 7 input tokens and requested 2 output tokens. However, the model's context length is only 8 tokens, "
    "resulting in a maximum input length of 6 tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=7)"
)


@pytest.mark.parametrize(
    ("status", "body", "message", "type", "code", "param"),
    [
        (400, {"error": {"message": "no", "type": "T", "param": "n", "code": "c"}}, "no", "T", "c", "n"),
        (400, {"error": {"message": "no", "type": "T", "param": None, "code": 400}}, "no", "T", None, None),
        (400, {"object": "error", "message": "no", "type": "T", "param": "n", "code": 400}, "no", "T", None, "n"),
        (400, {"error": "boom"}, "boom", None, None, None),
        (
            400,
            {"error": {"message": TOO_MANY, "code": 400, "param": "input_tokens"}},
            TOO_MANY,
            None,
            TOO_LONG,
            "input_tokens",
        ),
        (400, {"error": {"message": LONGER, "code": 400}}, LONGER, None, TOO_LONG, None),
        (400, {"error": {"message": PASSED, "code": 400}}, PASSED, None, TOO_LONG, None),
        (404, {"detail": "no such thing"}, "no such thing", None, None, None),
        (422, {"detail": [{"loc": ["n"]}]}, '[{"loc":["n"]}]', None, None, None),
        (429, {"error": "slow"}, "slow", "rate_limit_error", "rate_limit_exceeded", None),
        (403, {}, "The engine answered 403 without saying why.", None, None, None),
        (402, b"<html>", "The engine answered 402 without saying why.", None, None, None),
        (402, b'{"x": ' + b"[" * 9999, "The engine answered 402 without saying why.", None, None, None),
        (400, b'{"message": "\xff"}', "The engine answered 400 without saying why.", None, None, None),
        (400, b'{"error":{"message":"too \\"long\\" \\u00e9 \xc3', 'too "long" \u00e9 ...', None, None, None),
        (400, b'{"error":{"message":"cut at \\u00', "cut at ...", None, None, None),
        (
            400,
            b'{"error":{"message":"half a pair \\ud83d',
            "The engine answered 400 without saying why.",
            None,
            None,
            None,
        ),
        (
            400,
            b'{"error":{"message":"maximum model length ' + b"x" * 9000,
            "maximum model length " + "x" * (BEGINNING - 21) + "...",
            None,
            "context_length_exceeded",
            None,
        ),
    ],
)
def test_engine_errors_in_the_one_form(
    status: int, body: object, message: str, type: str | None, code: str | None, param: str | None
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    default = "invalid_request_error"
    told, detail = engine_error(status, data, "/v1/chat/completions", "m")
    assert json.loads(told) == {
        "error": {"message": message, "type": type or default, "param": param, "code": code or default}
    }
    assert detail == ""


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"error": {"message": "Traceback: /opt/vllm/x.py at 10.0.0.7", "type": "T", "param": "p", "code": 500}}',
         "Traceback: /opt/vllm/x.py at 10.0.0.7"),
        (b'{"error": "boom"}', "boom"),
        (b'{"detail": "' + b"x" * 5000 + b'"}', "x" * LOGGED_AT_MOST),
        (b"<html>", ""),
        (b'{"x": ' + b"[" * 9999, ""),
    ],
)  # fmt: skip
def test_what_an_engine_says_of_its_own_failure_is_for_the_log(body: bytes, detail: str) -> None:
    told, logged = engine_error(500, body, "/v1/chat/completions", "m")
    message = "The engine failed with status 500. The gateway's log has its message, under this request's id."
    assert json.loads(told)["error"] == {
        "message": message, "type": "server_error", "param": None, "code": "upstream_error"
    }  # fmt: skip
    assert logged == detail


@pytest.mark.parametrize(
    ("status", "body", "path", "says"),
    [
        (404, b'{"detail":"Not Found"}', "/v1/embeddings", "It takes an embedding model"),
        (405, b'{"detail":"Method Not Allowed"}', "/v1/audio/translations", "It takes a model that hears"),
        (404, b"", "/classify", "Choose another model"),
    ],
)
def test_an_engine_without_the_route_is_told_apart_from_one_without_the_model(
    status: int, body: bytes, path: str, says: str
) -> None:
    told, logged = engine_error(status, body, path, "m")
    error = json.loads(told)["error"]
    assert (error["code"], error["param"], logged) == ("unsupported_route", "model", "")
    assert error["message"].startswith(f"The model 'm' does not offer {path}: its engine has no such route")
    assert says in error["message"]
