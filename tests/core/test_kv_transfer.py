"""Bodies of a prompt that another engine reads, and what that engine must answer."""

from __future__ import annotations

import json

import pytest

from gateway.core.kv_transfer import NoParams, decode_body, params_of, prefill_body

GOOD = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "chatcmpl-r1-0", "remote_port": 1}


def test_the_request_to_read_keeps_what_makes_the_prompt_and_asks_for_one_token() -> None:
    sent = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "max_completion_tokens": 9,
        "min_tokens": 3, "n": 1, "stream": True, "stream_options": {"include_usage": True}, "stop": ["x"],
        "cache_salt": "s", "tools": [1], "echo": False,
    }  # fmt: skip
    found = json.loads(prefill_body(json.dumps(sent).encode(), "chat"))
    assert found.pop("kv_transfer_params")["do_remote_decode"] is True
    kept = {name: sent[name] for name in ("model", "messages", "cache_salt", "tools", "echo")}
    assert found == kept | {"max_tokens": 1, "stream": False, "ignore_eos": True}


@pytest.mark.parametrize(
    ("kind", "limit", "more"),
    [
        ("message", "max_tokens", {}),
        ("completion", "max_tokens", {"ignore_eos": True}),
        ("response", "max_output_tokens", {"store": False}),
    ],
)
def test_each_route_has_its_own_limit_of_tokens(kind: str, limit: str, more: dict[str, bool]) -> None:
    found = json.loads(prefill_body(b'{"max_output_tokens":7}', kind))
    del found["kv_transfer_params"]
    assert found == {limit: 1, "stream": False} | more


@pytest.mark.parametrize("field", ["echo", "prompt_logprobs", "use_beam_search", "previous_response_id", "background"])
def test_an_answer_that_tells_of_the_prompt_is_of_the_engine_that_reads_it(field: str) -> None:
    assert prefill_body(json.dumps({"prompt": "x", field: 1}).encode(), "completion") == b""
    assert prefill_body(json.dumps({"prompt": "x", field: None}).encode(), "completion") != b""


def test_parameters_are_passed_on_as_they_are() -> None:
    raw = b'{ "do_remote_prefill":true,"remote_engine_id":"e","of_a_later_version":[1.0, null]}'
    params = params_of(b'{"id":"x","kv_transfer_params":' + raw + b"}", "r1")
    assert params == raw
    assert decode_body(b'{"a":1} \n', params) == b'{"a":1,"kv_transfer_params":' + raw + b"}"
    assert json.loads(params_of(json.dumps({"kv_transfer_params": GOOD}).encode(), "r1")) == GOOD
    other = {"kv_transfer_params": GOOD | {"remote_request_id": "resp_77"}}
    assert params_of(json.dumps(other).encode(), "") != b""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "without kv_transfer_params"),
        ({"kv_transfer_params": None}, "without kv_transfer_params"),
        ({"kv_transfer_params": []}, "cannot be read"),
        ({"kv_transfer_params": GOOD | {"do_remote_prefill": "yes"}}, "cannot be read"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "cannot be read"),
        ({"kv_transfer_params": GOOD | {"do_remote_prefill": False}}, "name no blocks"),
        ({"kv_transfer_params": GOOD | {"remote_engine_id": ""}}, "name no blocks"),
        ({"kv_transfer_params": GOOD | {"remote_request_id": "chatcmpl-r2-0"}}, "of another call"),
        ([], "cannot be read"),
    ],
)
def test_an_answer_without_parameters_of_its_call_is_none(answer: object, message: str) -> None:
    with pytest.raises(NoParams, match=message):
        params_of(json.dumps(answer).encode(), "r1")


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"",
        b'{"kv_transfer_params":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"\xff"}}',
    ],
    ids=["html", "empty", "deep", "deep beside", "no text"],
)
def test_an_answer_of_a_hostile_engine_has_none(answer: bytes) -> None:
    with pytest.raises(NoParams):
        params_of(answer, "r1")
