"""Request parser: the fields of each route, refusals and the fields they name, splices into the body."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from gateway.core.request import json_body, prompt
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.headers import head_time_limit, time_limit
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.parser import parse
from gateway.core.request.prompt import Prompt
from gateway.core.request.routes import HELP_ROUTE, ROUTES, route_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DATA_URL = "data:image/png;base64,aGVsbG8="


def call(
    body: Any,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    *,
    settings: CallSettings | None = None,
    tenant: str = "t",
    metered: bool = False,
) -> Call:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    given = {"content-type": "application/json"} | (headers or {})
    fields = {name.encode(): value.encode("latin-1") for name, value in given.items()}
    return parse(
        ROUTES[path.encode()],
        fields,
        data,
        settings=settings or CallSettings(),
        request_id="r",
        tenant=tenant,
        now=100.0,
        metered=metered,
    )


def refusal(body: Any, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None) -> Refused:
    with pytest.raises(Refused) as caught:
        call(body, path, headers)
    assert caught.value.outcome is Outcome.BAD_REQUEST
    assert caught.value.status == 400
    return caught.value


def test_a_chat_call() -> None:
    made = call({**CHAT, "max_tokens": 5, "n": 2, "unknown": {"x": 1}})
    assert (made.model, made.tenant, made.request_id, made.arrived) == ("m", "t", "r", 100.0)
    assert (made.class_name, made.deadline) == ("default", 400.0)
    assert (made.max_tokens, made.n, made.messages, made.media, made.token_ids) == (5, 2, 1, 0, 0)
    assert (made.stream, made.wants_usage) == (False, False)
    assert made.ascii_bytes == len("user\0hi")
    assert json.loads(made.body)["unknown"] == {"x": 1}


def test_the_route_table() -> None:
    assert route_of(b"/v1/completions") is ROUTES[b"/v1/completions"]
    model = route_of(b"/v1/models/org/name")
    assert model is not None
    assert model.kind == "models"
    assert route_of(b"/v1/models/") is None
    assert route_of(b"/sleep") is None
    assert route_of(b"/outcomes/shed") is HELP_ROUTE


def test_settings_must_have_a_deadline_for_every_class_they_name() -> None:
    with pytest.raises(ValueError, match="batch"):
        CallSettings(class_deadlines={"default": 1.0, "interactive": 1.0})


# -- headers ------------------------------------------------------------------------------------------------------


def test_class_header_beats_service_tier_beats_default() -> None:
    tier = {**CHAT, "service_tier": "flex"}
    assert call(tier).class_name == "batch"
    assert call(tier, headers={"x-weir-class": "interactive"}).class_name == "interactive"
    assert call({**CHAT, "service_tier": "auto"}).class_name == "default"
    assert call({**CHAT, "service_tier": None}).class_name == "default"


@pytest.mark.parametrize(
    ("headers", "more", "asked"),
    [
        ({}, {}, ""),
        ({"x-weir-class": "batch"}, {}, "batch"),
        ({"x-weir-class": "default"}, {"service_tier": "priority"}, "default"),
        ({}, {"service_tier": "flex"}, "batch"),
        ({}, {"service_tier": "auto"}, ""),
    ],
)
def test_what_a_client_asks_for_by_name_or_tier(headers: dict[str, str], more: dict[str, Any], asked: str) -> None:
    assert call({**CHAT, **more}, headers=headers).asked_class == asked


def test_the_clients_own_times_are_kept_for_whoever_decides_the_class() -> None:
    made = call(CHAT, headers={"x-weir-deadline-ms": "2500", "x-stainless-read-timeout": "600"})
    assert (made.asked_deadline, made.sdk_timeout, made.deadline) == (2.5, 600.0, 102.5)
    made = call(CHAT, headers={"x-stainless-read-timeout": "junk"})
    assert (made.asked_deadline, made.sdk_timeout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("deadline", "timeout", "default", "limit"),
    [(0.0, 0.0, 60.0, 60.0), (5.0, 0.0, 60.0, 5.0), (5.0, 3.0, 60.0, 3.0), (0.0, 90.0, 60.0, 60.0)],
)
def test_time_limit(deadline: float, timeout: float, default: float, limit: float) -> None:
    assert time_limit(deadline, timeout, default) == limit


def test_an_unknown_class_is_refused_with_the_classes_there_are() -> None:
    refused = refusal(CHAT, headers={"x-weir-class": "vip"})
    assert refused.param == "x-weir-class"
    assert "interactive, default, long_context, batch" in refused.message
    assert "found vip" in refused.message


@pytest.mark.parametrize(("value", "seconds"), [("2000", 2.0), ("0.5", 0.0005), ("86400000", 86400.0), (".5", 0.0005)])
def test_deadline_header(value: str, seconds: float) -> None:
    assert call(CHAT, headers={"x-weir-deadline-ms": value}).deadline == pytest.approx(100.0 + seconds)


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "inf", "nan", "1e3", "1_000", "86400001", "9" * 400, "soon", " 5", "1.2.3", "."]
)
def test_bad_deadline_header_is_refused(value: str) -> None:
    refused = refusal(CHAT, headers={"x-weir-deadline-ms": value})
    assert refused.param == "x-weir-deadline-ms"


@pytest.mark.parametrize(
    ("patience", "deadline"),
    [("10", 110.0), ("10.5", 110.5), ("600", 400.0), ("not-given", 400.0), ("None", 400.0), ("0", 400.0), ("", 400.0)],
)
def test_the_sdk_read_timeout_bounds_the_deadline_and_junk_is_ignored(patience: str, deadline: float) -> None:
    assert call(CHAT, headers={"x-stainless-read-timeout": patience}).deadline == deadline


@pytest.mark.parametrize(
    ("path", "more", "deadline"),
    [
        ("/v1/chat/completions", {"stream": True}, 400.0),
        ("/v1/messages", {"stream": True, "max_tokens": 9}, 400.0),
        ("/v1/chat/completions", {"stream": False}, 110.0),
        ("/v1/embeddings", {"stream": True, "input": "x", "messages": None}, 110.0),  # whole, whatever is asked
    ],
)
def test_the_sdk_waits_for_each_event_of_a_stream_and_so_bounds_no_stream(
    path: str, more: dict[str, Any], deadline: float
) -> None:
    made = call({**CHAT, **more}, path, headers={"x-stainless-read-timeout": "10"})
    assert made.deadline == deadline
    assert made.sdk_timeout == (0.0 if deadline == 400.0 else 10.0)


@pytest.mark.parametrize(("max_tokens", "echo"), [(0, True), (1, True), (1, False)])
def test_a_prompt_may_be_echoed_without_an_answer(max_tokens: int, echo: bool) -> None:
    """vLLM generates one token for it, and drops that."""
    made = call({"model": "m", "prompt": ["a", "b"], "max_tokens": max_tokens, "echo": echo}, "/v1/completions")
    assert (made.max_tokens, made.n) == (1, 2)


@pytest.mark.parametrize("echo", [False, None, "true", 1])
def test_a_completion_without_an_echo_generates_something(echo: object) -> None:
    refused = refusal({"model": "m", "prompt": "a", "max_tokens": 0, "echo": echo}, "/v1/completions")
    assert refused.param == "max_tokens"


def conversation(body: Any, path: str = "/v1/chat/completions", tenant: str = "t", **headers: str) -> int:
    """The conversation of a call for a model route, which its session names."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    settings = CallSettings(model_routes=frozenset({"m"}))
    return call(body, path, named, settings=settings, tenant=tenant).conversation


def test_session_from_the_first_source_there_is() -> None:
    everything = {**CHAT, "prompt_cache_key": "k", "user": "u", "safety_identifier": "s"}
    by_key = conversation(everything)
    assert by_key == conversation({**CHAT, "prompt_cache_key": "k"})
    assert conversation({**CHAT, "user": "u"}) == conversation({**CHAT, "user": "u", "safety_identifier": "s"})
    assert conversation({**CHAT, "safety_identifier": "s"}) != conversation(CHAT)
    assert conversation(everything, x_weir_session="abc") != by_key
    assert by_key != conversation(everything, tenant="other")
    assert call(everything).conversation == 0, "no model route is named"


@pytest.mark.parametrize(
    "header",
    ["x-dynamo-session-id", "x-claude-code-session-id", "session-id", "x-session-id", "x-session-affinity"],
)
def test_session_from_the_header_that_a_client_sends_before_any_field(header: str) -> None:
    fields = {**CHAT, "prompt_cache_key": "k"}
    named = conversation(fields, **{header: "abc"})
    assert named == conversation(CHAT, x_weir_session="abc")
    assert conversation(fields, session_id="own", x_weir_session="abc") == named, "Weir's own goes first"
    assert conversation(fields, **{header: ""}) == conversation(fields), "an empty one names none"


def test_messages_session_from_metadata() -> None:
    body = {**CHAT, "max_tokens": 1}
    none = conversation(body, "/v1/messages")
    assert conversation({**body, "metadata": {"user_id": "u"}}, "/v1/messages") != none
    assert conversation({**body, "metadata": {"user_id": 5}}, "/v1/messages") == none
    assert conversation({**body, "metadata": "x"}, "/v1/messages") == none
    assert conversation({**CHAT, "metadata": {"user_id": "u"}}) == conversation(CHAT)


@pytest.mark.parametrize("value", ["application/json", "Application/JSON; charset=utf-8", "application/json;"])
def test_json_content_types(value: str) -> None:
    assert call(CHAT, headers={"content-type": value}).model == "m"


@pytest.mark.parametrize("value", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonl"])
def test_other_content_types_are_refused(value: str) -> None:
    assert refusal(CHAT, headers={"content-type": value}).param == "content-type"


def test_compressed_bodies_are_refused() -> None:
    assert refusal(CHAT, headers={"content-encoding": "gzip"}).param == "content-encoding"
    assert call(CHAT, headers={"content-encoding": "Identity"}).model == "m"


# -- bad bodies ---------------------------------------------------------------------------------------------------

_DIGITS = "9" * 400
_WITH = '{"model":"m","messages":[{"role":"user","content":"x"}],%s}'


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ("", None, "not valid JSON"),
        ("{", None, "not valid JSON"),
        ("[]", None, "expected `object`, got `array`"),
        ("5", None, "expected `object`"),
        ('{"model":"m",}', None, "not valid JSON"),
        ("{'model':1}", None, "not valid JSON"),
        (_WITH % '"temperature":NaN', None, "not valid JSON"),
        (_WITH % '"x":Infinity', None, "not valid JSON"),
        (_WITH % '"temperature":1e999', "temperature", "found 1e999"),
        (_WITH % f'"temperature":{_DIGITS}', "temperature", "out of range"),
        (_WITH % f'"seed":{_DIGITS}', "seed", "found 9999"),
        (_WITH % f'"seed":{2**63}', "seed", "found 9223372036854775808"),
        (_WITH % '"max_tokens":-1', "max_tokens", "from 1 to 1048576, found -1"),
        (_WITH % '"max_tokens":0', "max_tokens", "found 0"),
        (_WITH % '"max_tokens":1.5', "max_tokens", "found 1.5"),
        (_WITH % '"max_tokens":1e3', "max_tokens", "found 1e3"),
        (_WITH % '"max_tokens":true', "max_tokens", "found true"),
        (_WITH % '"max_tokens":"7"', "max_tokens", 'found "7"'),
        (_WITH % '"max_tokens":[1]', "max_tokens", "found [1]"),
        (_WITH % f'"max_tokens":{2**70}', "max_tokens", "an integer of 71 bits"),
        (_WITH % f'"max_tokens":{_DIGITS}', "max_tokens", "an integer of 1329 bits"),
        (_WITH % f'"max_tokens":{"9" * 5000}', "max_tokens", "found 999"),
        (_WITH % '"max_completion_tokens":0', "max_completion_tokens", "found 0"),
        (_WITH % '"n":0', "n", "from 1 to 8, found 0"),
        (_WITH % '"n":9', "n", "found 9"),
        (_WITH % '"n":false', "n", "found false"),
        (_WITH % '"stream":"yes"', "stream", 'found "yes"'),
        (_WITH % '"stream":1', "stream", "found 1"),
        (_WITH % '"stream_options":5', "stream_options", "found 5"),
        (_WITH % '"stream_options":{"include_usage":"x"}', "stream_options.include_usage", "got `str`"),
        (_WITH % '"user":5', "user", "found 5"),
        (_WITH % '"priority":0', "priority", "set by the gateway only"),
        (_WITH % '"\\u0070riority":0', "priority", "set by the gateway only"),
        (_WITH % '"cache_salt":"x"', "cache_salt", "set by the gateway only"),
        (_WITH % '"kv_transfer_params":{}', "kv_transfer_params", "set by the gateway only"),
        (_WITH % '"ec_transfer_params":{}', "ec_transfer_params", "set by the gateway only"),
        (_WITH % '"vllm_xargs":{"kv_transfer_params":"x"}', "kv_transfer_params", "set by the gateway only"),
        (_WITH % '"input":"x"', "input", "not a field of this route"),
        ('{"messages":[{"role":"user","content":"x"}]}', "model", "model is required"),
        ('{"model":null,"messages":[{"role":"user","content":"x"}]}', "model", "model is required"),
        ('{"model":"","messages":[]}', "model", "length >= 1"),
        ('{"model":5,"messages":[]}', "model", "found 5"),
        ('{"model":"' + "x" * 300 + '"}', "model", "..."),
        ('{"model":5,"messages":[', None, "not valid JSON"),
        ('{"model":"m"}', "messages", "messages is required"),
        ('{"model":"m","messages":[]}', "messages", "messages is required"),
        ('{"model":"m","messages":null}', "messages", "messages is required"),
        ('{"model":"m","messages":{}}', "messages", "found {}"),
        ('{"model":"m","messages":["x"]}', "messages[0]", "got `str`"),
        ('{"model":"m","messages":[{"content":"x"}]}', "messages[0].role", "is missing"),
        ('{"model":"m","messages":[{"role":5}]}', "messages[0].role", "got `int`"),
        ('{"model":"m","messages":[{"role":"u","content":5}]}', "messages[0].content", "got `int`"),
        ('{"model":"m","messages":[{"role":"u","content":1e999}]}', "messages[0].content", "out of range"),
    ],
)  # fmt: skip
def test_bad_chat_bodies_name_the_field(body: str, param: str | None, says: str) -> None:
    refused = refusal(body.encode())
    assert (refused.param, says in refused.message) == (param, True), refused.message
    assert len(refused.message) < 400
    assert json.loads(refused.body())["error"]["param"] == param


@pytest.mark.parametrize(
    "body", [b'{"x":"\xff","model":"m"}', b"\xff", b'{"model":"\xed\xa0\x80"}', '{"model":"é"}'.encode("latin-1")]
)
def test_a_body_that_is_not_utf8(body: bytes) -> None:
    assert "not UTF-8" in refusal(body).message


def test_a_lone_surrogate_is_not_json() -> None:
    assert "not valid JSON" in refusal(_WITH.encode() % b'"x":"\\ud800"').message


def test_too_many_messages() -> None:
    refused = refusal({"model": "m", "messages": [{"role": "user", "content": ""}] * 2049})
    assert refused.param == "messages"
    assert "2049" in refused.message
    assert "2048" in refused.message


def nested(depth: int) -> bytes:
    """A chat body whose deepest array is at `depth`."""
    return _WITH.encode() % (b'"x":' + b"[" * (depth - 1) + b"]" * (depth - 1))


def answer_to(body: bytes) -> str:
    """The message of a refusal; empty: none."""
    try:
        call(body)
    except Refused as refused:
        return refused.message
    return ""


def test_depth_is_bounded_exactly() -> None:
    assert call(nested(64)).model == "m"
    assert "nested deeper than 64" in refusal(nested(65)).message
    assert "nested deeper than 64" in refusal(nested(50_000)).message
    assert "nested deeper than 64" in refusal(b"[" * 65).message
    for pairs, deep in ((31, 63), (32, 65)):
        body = _WITH.encode() % (b'"x":' + b'[{"y":' * pairs + b"1" + b"}]" * pairs)
        assert (deep > 64) == ("nested deeper" in answer_to(body)), deep


def test_brackets_in_text_do_not_count_as_depth() -> None:
    text = '[[{{"\\' * 40
    made = call({"model": "m", "messages": [{"role": "user", "content": text}] * 3, "x": [[]] * 70})
    assert made.messages == 3
    assert call({**CHAT, "x": ["[" * 100] * 70}).model == "m"  # no backslash in the body
    assert "nested" in refusal({**CHAT, "x": '\\"', "y": json.loads(nested(65))}).message


def test_depth_behind_an_escape_that_is_none_is_never_reached() -> None:
    """The decoder stops at the escape, whatever the count of brackets made of it."""
    for letter in "xa[\n":
        body = _WITH.encode() % (b'"x":"\\' + letter.encode() + b'","y":' + b"[" * 50_000)
        assert "not valid JSON" in refusal(body).message or "nested" in refusal(body).message
        body = _WITH.encode() % (b'"x":"\\' + letter.encode() + b'"y":' + b'["x",' * 70 + b'"],"z":"')
        assert "not valid JSON" in refusal(body).message or "nested" in refusal(body).message


def holding(values: int, one: str) -> bytes:
    """A chat body with so many values and names, of which `one` is repeated: in all its arrays and objects together."""
    lists = [",".join([one] * 1000)] * (values // 1000) + [",".join([one] * (values % 1000))]
    return _WITH.encode() % (b'"x":[' + ",".join([f"[{each}]" for each in lists if each]).encode() + b"]")


@pytest.mark.parametrize("one", ["0", '""', "[]", "{}", "true", '"\\"[,{"'])
def test_the_number_of_values_is_bounded_whatever_they_are_and_wherever(one: str) -> None:
    """Arrays and objects count twice. The body itself and its arrays are some fifty."""
    settings = CallSettings(max_values=20_000)
    count = 10_000 if one in {"[]", "{}"} else 20_000
    with pytest.raises(Refused, match=r"more than 20000 JSON values and names of fields: one for each 20 bytes"):
        call(holding(count, one) + b" " * 40_000, settings=settings)
    assert call(holding(count - 100, one) + b" " * 40_000, settings=settings).model == "m"


def test_names_of_fields_are_counted_with_the_values() -> None:
    settings = CallSettings(max_values=20_000)
    fields = ",".join([f'"{number}":0' for number in range(10_000)]).encode()
    with pytest.raises(Refused, match="more than 20000"):
        call(_WITH.encode() % (b'"x":{' + fields + b"}"), settings=settings)
    fewer = ",".join([f'"{number}":0' for number in range(9_900)]).encode()
    assert call(_WITH.encode() % (b'"x":{' + fewer + b"}"), settings=settings).model == "m"


@pytest.mark.parametrize("text", ["a, b: {c} [d]\n", '\\",:', '","'])
def test_commas_and_brackets_in_text_are_no_values(text: str) -> None:
    settings = CallSettings(max_values=1000)
    assert call({"model": "m", "messages": [{"role": "u", "content": text * 1000}]}, settings=settings).model == "m"


def test_quotes_alone_are_too_many_strings() -> None:
    assert "more than 1000" in refused_by(b'{"x":[' + b'"",' * 10_000, CallSettings(max_values=1000))
    assert "found `str`" not in refused_by(b'"' * 10_000, CallSettings(max_values=1000))


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def a_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6) if depth else rng.randrange(3)
    if kind < 3:
        return rng.choice(['\\\\"[,{:', "\\", 'a"', 'a\n"{', '\\x"[', "é]}", 1.5, None, True, ""])
    if kind == 3:
        return [a_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(['k"', "\\", "l", "m{"]): a_value(rng, depth - 1) for _ in range(rng.randrange(1, 4))}


def test_depth_and_values_are_exact_wherever_the_body_is_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for _ in range(300):
        value = [a_value(rng, 6)]
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        monkeypatch.setattr(json_body, "_BLOCK", rng.choice([2, 3, 7, 50, 10_000]))
        deep = depth_of(value)
        json_body._check_structure(data, deep, 10_000)
        with pytest.raises(Refused, match="nested deeper"):
            json_body._check_structure(data, deep - 1, 10_000)
        most = 1 + sum(json.dumps(structure_of(value)).count(sign) for sign in "[{,:")
        json_body._check_structure(data, deep, most)
        with pytest.raises(Refused, match="more than"):
            json_body._check_structure(data, deep, most - 1)


def structure_of(value: Any) -> Any:
    """The same without anything in its strings and names that could be taken for structure."""
    if isinstance(value, dict):
        return {f"{number}": structure_of(each) for number, each in enumerate(value.values())}
    if isinstance(value, list):
        return [structure_of(each) for each in value]
    return 0


def test_a_body_of_too_many_values_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Seen(bytes):
        def __getitem__(self, at: Any) -> Any:
            seen.append(at)
            return super().__getitem__(at)

    for one in (b"0,", b'"",', b'""', b"[],", b'{"a":1},'):
        seen.clear()
        with pytest.raises(Refused, match="more than 10000"):
            json_body._check_structure(Seen(b"[" + one * 2_000_000), 64, 10_000)
        assert len(seen) <= 3
    with pytest.raises(Refused, match="do not match"):
        json_body._check_structure(b"[" + b"]" * 1_000_000, 64, 10_000)


def refused_by(body: bytes, settings: CallSettings) -> str:
    with pytest.raises(Refused) as caught:
        call(body, settings=settings)
    return caught.value.message


def test_text_is_bounded_beside_its_media() -> None:
    settings = CallSettings(max_text=10_000)
    picture = {"type": "image_url", "image_url": {"url": DATA_URL + "A" * 50_000}}
    parts = [picture, {"type": "text", "text": "x" * 9000}, picture]
    assert call({"model": "m", "messages": [{"role": "u", "content": parts}]}, settings=settings).media == 2
    for body in (
        {"model": "m", "messages": [{"role": "u", "content": [*parts, {"type": "text", "text": "x" * 1000}]}]},
        {**CHAT, "unread": "x" * 10_000},
    ):
        with pytest.raises(Refused, match=r"bytes beside its images, audio and files; .* at most 10000") as caught:
            call(body, settings=settings)
        assert (caught.value.outcome, caught.value.status) == (Outcome.TOO_LARGE, 413)
    form = b"--B\r\nContent-Disposition: form-data; name=model\r\n\r\nw\r\n--B\r\n"
    form += b"Content-Disposition: form-data; name=file; filename=a\r\n\r\n" + b"x" * 50_000 + b"\r\n--B--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=B"}
    assert call(form, "/v1/audio/transcriptions", headers, settings=settings).model == "w"


def test_duplicate_keys_are_read_as_engines_read_them() -> None:
    made = call(b'{"model":"a","max_tokens":-1,"messages":[{"role":"user","content":"x"}],"model":"b","max_tokens":3}')
    assert (made.model, made.max_tokens) == ("b", 3)


# -- what is prompt -----------------------------------------------------------------------------------------------


def test_bytes_by_script() -> None:
    made = call({"model": "m", "messages": [{"role": "u", "content": "aé漢字한😀"}]})
    assert (made.ascii_bytes, made.cjk_bytes, made.other_bytes) == (len("u\0a"), 9, 2 + 4)


def test_content_parts_tools_and_tool_calls_are_prompt() -> None:
    plain = call({"model": "m", "messages": [{"role": "u", "content": "ab"}]})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert call({"model": "m", "messages": [{"role": "u", "content": parts}]}).ascii_bytes == plain.ascii_bytes + 1
    tools = call({**CHAT, "tools": [{"type": "function"}]})
    assert tools.ascii_bytes == call(CHAT).ascii_bytes + len('[{"type": "function"}]') + 1
    calling = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    assert call({"model": "m", "messages": [calling]}).ascii_bytes == len('assistant\0[{"id": "x"}]')


def test_media_is_counted_and_not_read_as_text() -> None:
    picture = {"type": "image_url", "image_url": {"url": DATA_URL * 1000}}
    sound = {"type": "input_audio", "input_audio": {"data": "aGVsbG8=" * 1000, "format": "wav"}}
    made = call({"model": "m", "messages": [{"role": "u", "content": [picture, sound, {"type": "text", "text": "x"}]}]})
    assert made.media == 2
    assert made.ascii_bytes == len("u\0x") + 2 * 17
    again = call({"model": "m", "messages": [{"role": "u", "content": [{"image_url": "DATA:,x"}, {"text": "x"}]}]})
    assert again.media == 1


def test_images_are_bounded_as_messages_are() -> None:
    """Thousands of small ones cost as much time to read as megabytes of one."""
    images = [{"image_url": "data:,x"}] * CallSettings().max_messages
    assert call({"model": "m", "messages": [{"role": "u", "content": images}]}).media == len(images)
    refused = refusal({"model": "m", "messages": [{"role": "u", "content": [*images, images[0]]}]})
    assert "holds more than 2048 images, recordings and files (one for each KiB of body.max)" in refused.message
    assert refused.param == "messages[0].content"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "image_url", "image_url": "https://example.com/a.png"},
        {"image_url": {"url": "file:///etc/passwd"}},
        {"image_url": {"url": 5}},
        {"image_url": 5},
        {"type": "video_url", "video_url": {"url": "HTTP://x"}},
        {"type": "audio_url", "audio_url": {"url": "ftp://x"}},
        {"type": "input_file", "file_url": "https://x"},
        {"type": "image", "source": {"type": "url", "url": "https://x"}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]},
    ],
)
def test_media_by_reference_is_refused(part: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "u", "content": [part]}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/v1/messages"):
        refused = refusal(body, path)
        assert refused.param == "messages[0].content"
        assert "data: URL" in refused.message
    assert call(body, settings=CallSettings(media="any")).media == 1


@pytest.mark.parametrize(
    ("url", "taken"),
    [
        ("https://cdn.example.com/a.png", True),
        ("HTTP://CDN.example.com:8080?x=1", False),  # the scheme in capitals is nobody's usual way of writing it
        ("http://CDN.example.com:8080?x=1", True),
        ("https://cdn.example.com", True),
        ("https://cdn.example.com.evil.org/a", False),
        ("https://cdn.example.com@evil.org/a", False),
        ("https://user:pw@cdn.example.com/a", False),
        ("https://cdn.example.com\\\\@evil.org/a", False),
        ("https://evil.org/https://cdn.example.com/", False),
        ("https://[::1]/a", False),
        ("file:///etc/passwd", False),
        ("//cdn.example.com/a", False),
    ],
)
def test_engines_may_fetch_from_the_hosts_the_policy_names(url: str, taken: bool) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    settings = CallSettings(media_hosts=frozenset({"cdn.example.com"}))
    if taken:
        assert call(body, settings=settings).media == 1
    else:
        with pytest.raises(Refused, match="data: URL"):
            call(body, settings=settings)


def test_media_can_be_switched_off() -> None:
    with pytest.raises(Refused, match="text only"):
        call(
            {"model": "m", "messages": [{"role": "u", "content": [{"image_url": DATA_URL}]}]},
            settings=CallSettings(media="none"),
        )


def test_a_tools_own_arguments_may_have_any_keys() -> None:
    use = {"type": "tool_use", "id": "1", "name": "see", "input": {"image_url": "https://x", "source": "y"}}
    made = call({"model": "m", "max_tokens": 1, "messages": [{"role": "assistant", "content": [use]}]}, "/v1/messages")
    assert made.media == 0
    assert made.ascii_bytes == len('assistant\0see\0{"image_url":"https://x","source":"y"}')


def test_a_document_may_name_its_source() -> None:
    made = call({"model": "m", "query": "q", "documents": [{"source": "wiki", "text": "ab"}]}, "/v1/rerank")
    assert made.media == 0
    assert made.ascii_bytes == len("q\0wiki\0ab")


def test_numbers_in_content_are_not_text() -> None:
    content = [{"type": "text", "text": "x", "weight": 5, "flag": True, "none": None}]
    assert call({"model": "m", "messages": [{"role": "u", "content": content}]}).ascii_bytes == len("u\0x")


@pytest.mark.parametrize(
    ("path", "body", "steps"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": [1] * 90_000}]}, 1),
        ("/v1/messages", {"max_tokens": 1, "messages": CHAT["messages"], "system": [None] * 90_000}, 1),
        ("/v1/rerank", {"query": "q", "documents": {"a": [1.5] * 90_000}}, 3),
        ("/v1/completions", {"prompt": [7] * 90_000}, 0),
    ],
)
def test_what_is_no_text_takes_no_step(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], steps: int
) -> None:
    """Steps of Python for each value of a body, bounded as they are, keep the interpreter from other work."""
    taken = []
    gather, is_id = Prompt.gather, prompt._is_id
    monkeypatch.setattr(Prompt, "gather", lambda self, *what: (taken.append(1), gather(self, *what))[1])
    monkeypatch.setattr(prompt, "_is_id", lambda value: (taken.append(1), is_id(value))[1])
    call({"model": "m", **body}, path)
    assert len(taken) <= steps + 1


@pytest.mark.parametrize("ids", [[1, True], [1, -1], [1, 2**31], [1, 1.0], [1, "1"], [1, None]])
def test_what_is_no_token_id(ids: list[Any]) -> None:
    for given in (ids, [[3], ids]):
        assert "array of token ids" in refusal({"model": "m", "prompt": given}, "/v1/completions").message


def test_media_are_told_apart_by_a_sample_of_them() -> None:
    def prefix(url: str) -> tuple[int, ...]:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x" * 600}]
        return call({"model": "m", "messages": [{"role": "u", "content": parts}]}).prefix

    picture = DATA_URL + "".join(random.Random(1).choices("ABCDEFGH", k=100_000))
    assert prefix(picture) == prefix(picture)
    for other in (picture + "A", picture[:-1000] + "A" * 1000, picture[:50_000] + "A" * 50_026, "data:," + picture[6:]):
        assert prefix(other) != prefix(picture)


def test_prefix_is_a_chain_of_full_blocks() -> None:
    def prefix(text: str, **more: Any) -> tuple[int, ...]:
        return call({"model": "m", "messages": [{"role": "u", "content": text}]}, **more).prefix

    blocks = prefix("x" * (3 * 512))
    assert len(blocks) == 3  # "u\0" goes before; the rest of the fourth is not full
    assert prefix("x" * (3 * 512 - 3)) == blocks[:2]
    assert prefix("x" * 512 + "y" + "x" * 511 + "x" * 512)[0] == blocks[0]
    assert prefix("x" * 512 + "y" + "x" * 511 + "x" * 512)[1:] != blocks[1:]
    assert not set(prefix("x" * (3 * 512), tenant="other")) & set(blocks)
    assert len(prefix("x" * 512 * 600)) == 512
    assert prefix("x" * 500) == ()


# -- the other routes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "n", "ids", "text"),
    [
        ("abc", 2, 0, 3),
        (["ab", "c"], 4, 0, 4),
        ([1, 2, 3], 2, 3, 0),
        ([[1, 2], [3]], 4, 3, 0),
        (["ab", [1]], 4, 1, 2),
    ],
)
def test_completion_prompts(prompt: Any, n: int, ids: int, text: int) -> None:
    made = call({"model": "m", "prompt": prompt, "n": 2}, "/v1/completions")
    assert (made.n, made.token_ids, made.ascii_bytes, made.max_tokens) == (n, ids, text, None)


def test_token_ids_have_a_prefix() -> None:
    one = call({"model": "m", "prompt": list(range(1000))}, "/v1/completions")
    two = call({"model": "m", "prompt": [*range(999), 5]}, "/v1/completions")
    assert one.prefix[:-1] == two.prefix[:-1] != ()


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {"a": 1}, [1, -1], [1, 2**31], [1, True], [1, "a"], ["a", []], [[1], [1.5]], [[]], 10**25]
)
def test_bad_completion_prompts(prompt: Any) -> None:
    refused = refusal({"model": "m", "prompt": prompt}, "/v1/completions")
    assert refused.param == "prompt"
    assert "must be a string, an array of strings or an array of token ids" in refused.message


def test_too_many_prompts() -> None:
    assert refusal({"model": "m", "prompt": ["x"] * 2049}, "/v1/completions").param == "prompt"


def test_responses() -> None:
    body = {
        "model": "m",
        "instructions": "be",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call_output", "call_id": "x", "output": "out"},
        ],
        "tools": [],
        "max_output_tokens": 7,
        "n": 99,
        "stream": True,
    }
    made = call(body, "/v1/responses")
    assert made.ascii_bytes == len("[]\0be\0user\0hi\0out")
    assert (made.max_tokens, made.n, made.stream, made.wants_usage) == (7, 1, True, False)
    assert json.loads(made.body) == body
    assert call({"model": "m", "input": "hi"}, "/v1/responses").ascii_bytes == 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "conversation": {"id": "conv_1"}}, "conversation"),
        ({"input": [{"content": [{"type": "input_image", "image_url": "https://x"}]}]}, "input"),
    ],
)
def test_bad_responses(more: dict[str, Any], param: str) -> None:
    assert refusal({"model": "m", **more}, "/v1/responses").param == param


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_a_field_that_names_a_stored_conversation_is_told_that_none_is_stored(field: str) -> None:
    refused = refusal({"model": "m", "input": "x", field: "id_1"}, "/v1/responses")
    assert refused.message == f"{field} names what nobody stores here: send the whole conversation in the call"


def test_tokens_of_messages_are_counted_without_a_limit_of_the_answer() -> None:
    body = {"model": "m", "system": "be", **CHAT, "tools": []}
    made = call(body, "/v1/messages/count_tokens")
    assert (made.ascii_bytes, made.output_tokens, made.prefix) == (len("[]\0be\0user\0hi"), 0, ())
    assert json.loads(made.body) == body
    assert refusal({"model": "m"}, "/v1/messages/count_tokens").param == "messages"


def test_messages() -> None:
    body = {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be"}], **CHAT, "tools": [], "n": 0}
    made = call(body, "/v1/messages")
    assert made.ascii_bytes == len("[]\0be\0user\0hi")
    assert (made.max_tokens, made.n) == (9, 1)
    refused = refusal(CHAT, "/v1/messages")
    assert refused.param == "max_tokens"
    assert "required" in refused.message


@pytest.mark.parametrize(
    ("path", "body", "items"),
    [
        ("/v1/embeddings", {"input": "abcd"}, 1),
        ("/v1/embeddings", {"input": ["ab", "c"]}, 2),
        ("/v1/embeddings", {"messages": [{"role": "u", "content": "ab"}]}, 1),
        ("/pooling", {"input": "abcd"}, 1),
        ("/classify", {"input": ["abcd"]}, 1),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}, 3),
        ("/rerank", {"query": "ab", "documents": "c"}, 2),
        ("/v2/rerank", {"query": {"content": [{"type": "text", "text": "ab"}]}, "documents": ["c"]}, 2),
        ("/v1/score", {"text_1": "ab", "text_2": ["c"]}, 2),
        ("/score", {"queries": "ab", "documents": "c"}, 2),
        ("/score", {"data_1": "ab", "data_2": "c"}, 2),
        ("/score", {"queries": ["a"], "items": ["bc"]}, 2),
        ("/v1/chat/completions/render", {"messages": [{"role": "u", "content": "ab"}], "stream": True}, 1),
        ("/v1/completions/render", {"prompt": ["ab", "c"], "stream": True}, 2),
        ("/tokenize", {"prompt": "abcd"}, 1),
        ("/tokenize", {"messages": [{"role": "u", "content": "ab"}]}, 1),
    ],
)
def test_routes_that_generate_nothing(path: str, body: dict[str, Any], items: int) -> None:
    made = call({"model": "m", "max_tokens": 99, **body}, path)
    assert (made.messages, made.max_tokens, made.n, made.prefix) == (items, None, 1, ())
    assert made.ascii_bytes == 4 or path.endswith("rerank")
    assert not made.route.generates
    assert not made.stream


def test_token_ids_elsewhere() -> None:
    assert call({"model": "m", "tokens": [1, 2]}, "/detokenize").token_ids == 2
    assert call({"model": "m", "input": [[1], [2, 3]]}, "/v1/embeddings").token_ids == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": {}}, "input"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ("/tokenize", {}, "prompt"),
    ],
)
def test_what_other_routes_demand(path: str, body: dict[str, Any], param: str) -> None:
    assert refusal({"model": "m", **body}, path).param == param


def form(*parts: tuple[str, bytes], boundary: str = "B") -> bytes:
    out = b""
    for disposition, value in parts:
        out += f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + value + b"\r\n"
    return out + f"--{boundary}--\r\n".encode()


FORM = {"content-type": 'multipart/form-data; boundary="B"'}
FILE = ('form-data; name="file"; filename="a b.wav"', b"RIFF\x00\xff" * 1000)


def test_audio() -> None:
    body = form(FILE, ('form-data; name="model"', b"whisper"), ("form-data; name=stream", b"true"))
    made = call(body, "/v1/audio/transcriptions", FORM)
    assert (made.model, made.stream, made.media, made.messages, made.ascii_bytes) == ("whisper", True, 1, 1, 0)
    assert made.body is body


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([FILE], "model"),
        ([('form-data; name="model"', b"")], "model"),
        ([('form-data; name="model"', b"m" * 257)], "model"),
        ([('form-data; name="model"', b"m"), ('form-data; name="priority"', b"1")], "priority"),
        *(
            ([('form-data; name="model"', b"m"), ('form-data; name="stream"', word)], "stream")
            for word in (b"True", b"1", b"on", b"yes", b"y", b"t", b"0", b"", b" true", b"TRUE")
        ),
    ],
)
def test_bad_audio(parts: list[tuple[str, bytes]], param: str) -> None:
    assert refusal(form(*parts), "/v1/audio/translations", FORM).param == param


# -- include_usage ------------------------------------------------------------------------------------------------

USAGE = {"include_usage": True}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "m", "prompt": "x"})]
)
def test_usage_is_asked_of_every_stream(path: str, body: dict[str, Any]) -> None:
    sent = json.dumps({**body, "stream": True}).encode()
    made = call(sent, path)
    assert made.body == sent[:-1] + b',"stream_options":{"include_usage":true}}'
    assert not made.wants_usage
    assert json.loads(call(sent + b" \r\n\t", path).body) == {**body, "stream": True, "stream_options": USAGE}


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (None, USAGE),
        ({}, USAGE),
        ({"include_usage": None}, USAGE),
        ({"include_usage": False, "continuous_usage_stats": True}, {**USAGE, "continuous_usage_stats": True}),
    ],
)
def test_the_clients_own_stream_options_are_kept(options: Any, sent: dict[str, Any]) -> None:
    body = {**CHAT, "stream": True, "seed": 7, "stream_options": options}
    made = call(body)
    assert json.loads(made.body) == {**body, "stream_options": sent}
    assert not made.wants_usage


EACH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("options", "wants"),
    [("", False), ({}, False), (None, False), (USAGE, True), ({"continuous_usage_stats": True}, False), (EACH, True)],
)
def test_where_tokens_are_limited_usage_is_asked_of_every_event(options: Any, wants: bool) -> None:
    body = {**CHAT, "stream": True} | ({} if options == "" else {"stream_options": options})
    made = call(body, metered=True)
    assert json.loads(made.body)["stream_options"] == EACH
    assert (made.wants_usage, made.usage_cut) == (wants, options is not EACH)
    for path, plain in (
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "m", "input": "x", "stream": True}),
        ("/v1/messages", {**CHAT, "max_tokens": 5, "stream": True}),
    ):
        data = json.dumps(plain).encode()
        assert call(data, path, metered=True).body is data


def test_a_body_that_asks_for_usage_is_untouched() -> None:
    data = json.dumps({**CHAT, "stream": True, "stream_options": USAGE}).encode()
    made = call(data)
    assert made.body is data
    assert made.wants_usage


def test_a_body_without_stream_is_untouched() -> None:
    for more in ({}, {"stream": False}, {"stream": None}, {"stream_options": {"include_usage": False}}):
        data = json.dumps({**CHAT, **more}).encode()
        assert call(data).body is data


def test_what_we_do_not_change_is_not_re_encoded() -> None:
    data = (
        b'{"model":"m","stream":true,"stream_options":null,"x":1.000,"messages":[ {"role":"u","content":"\\u0041"} ]}'
    )
    assert b'"x":1.000' in call(data).body
    assert b'[ {"role":"u","content":"\\u0041"} ]' in call(data).body


# -- cache salts --------------------------------------------------------------------------------------------------

SALT = b',"cache_salt":"s"'


def salted(path: str, body: dict[str, Any], end: bytes = b"") -> Call:
    data = json.dumps(body).encode() + end
    headers = {b"content-type": b"application/json"}
    settings = CallSettings()
    return parse(
        ROUTES[path.encode()], headers, data, settings=settings, request_id="r", tenant="t", now=0.0, cache_salt=SALT
    )


@pytest.mark.parametrize("end", [b"", b" \r\n\t"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "m", "prompt": "x"}),
        ("/v1/responses", {"model": "m", "input": "x"}),
        ("/v1/messages", {**CHAT, "max_tokens": 1}),
        ("/v1/embeddings", {"model": "m", "input": "x"}),
        ("/pooling", {"model": "m", "input": "x"}),
        ("/classify", {"model": "m", "input": "x"}),
        ("/rerank", {"model": "m", "query": "x", "documents": ["y"]}),
        ("/score", {"model": "m", "text_1": "x", "text_2": "y"}),
    ],
)
def test_a_salt_is_put_into_what_an_engine_caches(path: str, body: dict[str, Any], end: bytes) -> None:
    assert json.loads(salted(path, body, end).body) == body | {"cache_salt": "s"}


def test_a_salt_and_the_wish_for_usage_go_together() -> None:
    body = {**CHAT, "stream": True}
    both = {"cache_salt": "s", "stream_options": USAGE}
    assert salted("/v1/chat/completions", body).body == json.dumps(body).encode()[:-1] + SALT + (
        b',"stream_options":{"include_usage":true}}'
    )
    for options in (None, {}, USAGE):
        made = salted("/v1/chat/completions", body | {"stream_options": options})
        assert json.loads(made.body) == body | both
    assert json.loads(salted("/v1/chat/completions", {**CHAT, "cache_salt": None}).body)["cache_salt"] == "s"


def test_what_is_not_cached_is_not_salted() -> None:
    assert json.loads(salted("/tokenize", {"model": "m", "prompt": "x"}).body) == {"model": "m", "prompt": "x"}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, math.inf),
        ({b"x-weir-deadline-ms": b"1500"}, 1.5),
        ({b"x-weir-deadline-ms": b"soon"}, math.inf),
        ({b"x-stainless-read-timeout": b"600"}, math.inf),
        ({b"x-weir-deadline-ms": b"1500", b"x-stainless-read-timeout": b"0.5"}, 1.5),
        ({b"x-weir-deadline-ms": b"-1", b"x-stainless-read-timeout": b"none"}, math.inf),
    ],
)
def test_the_head_tells_how_long_a_body_is_of_use(headers: dict[bytes, bytes], expected: float) -> None:
    assert head_time_limit(headers, CallSettings()) == expected
