"""Properties of parsers and stream readers: any bytes are only refused, and any cuts give the same result."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.answer.json_usage import JSONUsage
from gateway.core.answer.sse_usage import SSEUsage
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.parser import parse
from gateway.core.request.routes import ROUTES
from gateway.shared.vllm.answers import AnswerError, models_from, sample_from
from tests.examples import examples

FORWARDED = [route for route in ROUTES.values() if route.kind not in ("models", "health", "help")]
NAMES = [
    "model", "messages", "prompt", "input", "stream", "stream_options", "include_usage", "max_tokens", "n", "tools",
    "max_completion_tokens", "max_output_tokens", "role", "content", "type", "text", "image_url", "url", "source",
    "query", "documents", "text_1", "text_2", "tokens", "user", "service_tier", "temperature", "system", "metadata",
    "instructions", "tool_calls", "user_id", "priority", "usage",
]  # fmt: skip

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20)
    | st.sampled_from(["m", "user", "data:x", "http://x", "tool_use"])
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=8)
message = st.fixed_dictionaries({"role": st.text(max_size=9), "content": st.text(max_size=2000)})
chats = st.fixed_dictionaries(
    {"model": st.text(min_size=1, max_size=9), "messages": st.lists(message, min_size=1, max_size=4)},
    optional={"stream": st.booleans() | st.none(), "stream_options": st.none() | st.dictionaries(
        st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans() | st.none()
    ), "unknown": values.filter(lambda value: "NaN" not in json.dumps(value) and "Infinity" not in json.dumps(value))},
)  # fmt: skip
header_names = st.sampled_from([
    b"content-type", b"x-weir-class", b"x-weir-deadline-ms", b"x-weir-session", b"session-id",
    b"x-stainless-read-timeout", b"content-encoding", b"host",
])  # fmt: skip
headers = st.lists(st.tuples(header_names, st.binary(max_size=20)), max_size=3)


def parsed(route: Any, head: list[tuple[bytes, bytes]], body: bytes) -> Call | Refused:
    try:
        lines = {b"content-type": b"application/json"} | dict(head)
        return parse(route, lines, body, settings=CallSettings(), request_id="r", tenant="t", now=5.0)
    except Refused as error:
        refused = error
    assert refused.outcome is Outcome.BAD_REQUEST
    assert json.loads(refused.body())["error"]["message"]
    return refused


@given(st.sampled_from(FORWARDED), headers, st.binary(max_size=200))
def test_parse_of_any_bytes_returns_or_refuses(route: Any, head: list[tuple[bytes, bytes]], body: bytes) -> None:
    parsed(route, head, body)


@given(st.sampled_from(FORWARDED), bodies, st.booleans(), st.integers(0, 400))
def test_parse_of_any_json_returns_or_refuses(route: Any, body: dict[str, Any], escape: bool, cut: int) -> None:
    data = json.dumps(body, ensure_ascii=escape).encode(errors="surrogatepass")
    for sent in (data, data[:cut]):
        call = parsed(route, [], sent)
        if isinstance(call, Call):
            assert call.ascii_bytes >= 0
            assert call.cjk_bytes >= 0
            assert call.other_bytes >= 0
            CostModel().estimate(call, None)
            assert call.prompt_tokens >= 1


@given(st.binary(max_size=300), st.booleans())
def test_parse_of_any_form_returns_or_refuses(middle: bytes, framed: bool) -> None:
    route = ROUTES[b"/v1/audio/transcriptions"]
    body = b"--B\r\nContent-Disposition: form-data; " + middle + b"\r\n--B--\r\n" if framed else middle
    parsed(route, [(b"content-type", b"multipart/form-data; boundary=B")], body)


@given(chats, st.booleans(), st.sampled_from([None, 1]))
def test_what_is_sent_is_what_came_plus_include_usage(body: dict[str, Any], escape: bool, indent: int | None) -> None:
    data = json.dumps(body, ensure_ascii=escape, indent=indent).encode(errors="surrogatepass")
    call = parsed(ROUTES[b"/v1/chat/completions"], [], data)
    if isinstance(call, Refused):  # lone surrogates
        return
    expected = json.loads(data)
    if body.get("stream"):
        expected["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    assert json.loads(call.body) == expected
    assert call.wants_usage is bool(body.get("stream") and (body.get("stream_options") or {}).get("include_usage"))


END = st.sampled_from(["\n", "\r\n", "\r"])
usages = st.none() | st.fixed_dictionaries(
    {"prompt_tokens": st.integers(-1, 9), "completion_tokens": st.integers(0, 9)},
    optional={"prompt_tokens_details": st.just({"cached_tokens": 3})},
)
datas = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(st.just({"delta": {"content": 'x "usage" \n\n [DONE]'}}), max_size=1),
        "usage": usages,
        "error": st.none() | st.just({"message": "boom"}),
        "type": st.sampled_from(["message_delta", "response.completed", "error"]),
    },
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    out = b""
    for _ in range(draw(st.integers(0, 5))):
        end = draw(END)
        data = draw(st.sampled_from(["[DONE]", "junk", ""]) | datas.map(json.dumps))
        name = draw(st.sampled_from(["", f"event: x{end}", f": ping{end}", end]))
        out += f"{name}data: {data}{end}{end}".encode()
    return out + draw(st.sampled_from([b"", b"data: [DONE]", b'data: {"usage": {"prompt_tokens": 7}}\n', b"\n", b"\r"]))


def in_parts(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def told(reader: SSEUsage | JSONUsage) -> list[Any]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "done", "error")
    return [getattr(reader, name, None) for name in names]


@settings(max_examples=examples(200))
@given(streams(), st.lists(st.integers(0, 2000), max_size=8), st.booleans())
def test_a_stream_may_be_cut_anywhere(data: bytes, cuts: list[int], hide: bool) -> None:
    whole, cut = SSEUsage(hide), SSEUsage(hide)
    relayed = whole.feed(data) + whole.finish()
    assert b"".join([cut.feed(part) for part in in_parts(data, cuts)]) + cut.finish() == relayed
    assert told(cut) == told(whole)
    if not hide:
        assert relayed == data


answers = st.fixed_dictionaries(
    {"choices": st.lists(st.text(max_size=30), max_size=2), "usage": usages},
    optional={"tools": st.just([{"usage": {"type": "object"}}]), "more": st.just({"usage": "usage"})},
)


@given(answers, st.lists(st.integers(0, 2000), max_size=8), st.sampled_from([None, 1]))
def test_an_answer_may_be_cut_anywhere(answer: dict[str, Any], cuts: list[int], indent: int | None) -> None:
    data = json.dumps(answer, indent=indent).encode()
    whole, cut = JSONUsage(), JSONUsage()
    whole.whole(data)
    assert b"".join([cut.feed(part) for part in in_parts(data, cuts)]) + cut.finish() == data
    assert told(cut) == told(whole)
    usage = answer["usage"]
    if usage is not None and usage["prompt_tokens"] >= 0:
        assert whole.prompt_tokens == usage["prompt_tokens"]
    else:
        assert whole.prompt_tokens is None


metric_lines = st.sampled_from([
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:engine_sleep_state",
    "vllm:cache_config_info", "vllm:num_preemptions_total", "other",
]).flatmap(
    lambda name: st.sampled_from(['{engine="0"}', "", '{num_gpu_blocks="5",block_size="16"}', "{", '{a="}"}']).flatmap(
        lambda labels: st.sampled_from([" 0.5", " 1", " NaN", "", " 1e999", " -1", "\t1 5"]).map(
            lambda value: name + labels + value + "\n"
        )
    )
)  # fmt: skip


@given(st.lists(metric_lines, max_size=8).map("".join) | st.text(max_size=60))
def test_an_exposition_is_read_or_refused(text: str) -> None:
    with suppress(AnswerError):
        sample = sample_from(text.encode(errors="surrogatepass"))
        assert 0.0 <= sample.kv_usage <= 1.0
        assert sample.running >= 0


cards = st.dictionaries(st.sampled_from(["id", "max_model_len", "parent", "created"]), scalars, max_size=4)


@given(st.binary(max_size=60) | st.lists(cards, max_size=3).map(lambda data: json.dumps({"data": data}).encode()))
def test_models_are_read_or_refused(body: bytes) -> None:
    with suppress(AnswerError):
        assert all(card.id for card in models_from(body))
