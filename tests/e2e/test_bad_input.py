"""Bad input over real sockets: each row has exactly one answer, and the next call is served.

The numbers at a field's limits are here with their neighbours beyond; what only looks like a number is beside them.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadtest.processes import until
from tests.e2e.traffic import MESSAGES, QUICK, Site, Tree, Wire, body, sha256

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

KEY = "weir-a-key-of-acme"
AUTHORIZED = (b"authorization", b"Bearer " + KEY.encode())
POLICY: Tree = {"tenants": {"acme": {"keys": [sha256(KEY)]}}, "fleet": QUICK}
INVALID = "invalid_request_error"
HUGE = "9" * 400


@pytest.fixture(scope="module")
def site(shared: Site) -> Iterator[Site]:
    shared.use(POLICY)
    yield shared
    assert until(shared.empty, 60.0) is not None
    assert shared.gateway.total("weir_requests_total", outcome="bug") == 0


def check(
    site: Site, data: bytes, headers: list[tuple[bytes, bytes]], status: int, code: str, param: str | None
) -> None:
    """The answer, and that of an innocent call after it: on the same connection where that was left open."""
    if not any(name == b"authorization" for name, _ in headers):
        headers = [*headers, AUTHORIZED]
    with Wire(site.gateway.url) as wire:
        answer, told, text = wire.ask(data, headers)
        found = json.loads(text)
        error = found.get("error", {})
        assert (answer, error.get("code"), error.get("param")) == (status, code or None, param), text
        if status in (400, 401, 404):
            assert told["x-should-retry"] == "false"
            assert set(error) == {"message", "type", "param", "code"}
            assert param is None or param.split("[")[0] in error["message"]
            assert "x-weir-engine" not in told
        if told.get("connection") != "close":
            assert wire.ask(json.dumps(body()).encode(), [AUTHORIZED])[0] == 200
            return
    assert site.ask(key=KEY).status_code == 200


def with_value(field: str, value: str) -> bytes:
    """The bytes of a call in which `field` has this JSON text."""
    text = json.dumps(body(**{field: "@"}))
    return text.replace('"@"', value).encode()


INTEGERS = ["0", "-1", "1.5", "1.0", "1e3", '"5"', "true", "[]", "{}", HUGE, f"-{HUGE}", str(2**63), str(2**64)]
GOOD = {
    "max_tokens": ["1", "16", "null"],
    "max_completion_tokens": ["1", "16", "null"],
    "n": ["1", "8", "null"],
    "temperature": ["0", "2", "-1", "1e308", "null"],  # what of it makes sense is the engine's to say
    "seed": [str(2**63 - 1), str(-(2**63))],
    "stream": ["null", "false"],
    "service_tier": ['"gold"', '"auto"', "null"],
}
BAD = {
    "max_tokens": [*INTEGERS, str(2**20 + 1)],
    "max_completion_tokens": [*INTEGERS, str(2**20 + 1)],
    "n": [*INTEGERS, "9", "1000000"],
    "temperature": ["1e400", "-1e400", '"hot"', "true", HUGE],
    "top_p": ["1e400", '"1"'],
    "seed": [str(2**63), HUGE, "1.5"],
    "stream": ['"yes"', "1", "0"],
    "service_tier": ["5", "[]"],
    "stream_options": ["1", '"x"'],
    "model": ["5", '""', "null", "[]", json.dumps("x" * 257)],
    "messages": ['"hello"', "{}", "[]", "null"],
    "priority": ["0", "1", '"high"'],
    "cache_salt": ['""', '"mine"', "{}"],
    "kv_transfer_params": ["{}", '{"do_remote_decode": true}'],
}


def rows(table: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}={value[:24]}") for field, values in table.items() for value in values
    ]


@pytest.mark.parametrize(("field", "value"), rows(GOOD))
def test_values_within_the_limits_pass(site: Site, field: str, value: str) -> None:
    data = with_value(field, value)
    if value == "null":
        data = data.replace(b'"ignore_eos": true', b'"min_tokens": 0')  # else it writes to the end of the context
    check(site, data, [], 200, "", None)


@pytest.mark.parametrize(("field", "value"), rows(BAD))
def test_values_beyond_them_are_refused_by_name(site: Site, field: str, value: str) -> None:
    check(site, with_value(field, value), [], 400, INVALID, field)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b'{"model":', None),
        (with_value("temperature", "NaN"), None),
        (with_value("max_tokens", "-Infinity"), None),
        (b'{"model":"sim","messages":[{"role":"user","content":"\xff"}]}', None),
        (b'{"model":"sim","messages":[{"role":"user","content":"\\ud800"}]}', None),
        (b'{"model":"sim","messages":' + b"[" * 65 + b"]" * 65 + b"}", None),
        (with_value("messages", "[1]"), "messages[0]"),
        (with_value("messages", '[{"role": 1, "content": "x"}]'), "messages[0].role"),
        (with_value("messages", '[{"content": "x"}]'), "messages[0].role"),
        (with_value("messages", '[{"role": "user", "content": 5}]'), "messages[0].content"),
        (json.dumps(body()).encode()[:-1] + b',"max_tokens":-1}', "max_tokens"),  # of equal keys, the last
        (json.dumps(body(messages=MESSAGES * 2049)).encode(), "messages"),
        (json.dumps(body(messages=MESSAGES * 10_000)).encode(), "messages"),
    ],
)
def test_bodies_that_are_none(site: Site, data: bytes, param: str | None) -> None:
    check(site, data, [], 400, INVALID, param)


def test_as_many_messages_as_the_policy_allows(site: Site) -> None:
    check(site, json.dumps(body(messages=[{"role": "user", "content": "x"}] * 2000)).encode(), [], 200, "", None)


def picture(url: str) -> bytes:
    part = {"type": "image_url", "image_url": {"url": url}}
    return json.dumps(body(messages=[{"role": "user", "content": [part]}])).encode()


ADDRESSES = [
    "http://169.254.169.254/latest",
    "https://a/b.png",
    "HTTP://a",
    "file:///etc/passwd",
    "//a",
    " data:,x",
    "",
]


@pytest.mark.parametrize("url", ADDRESSES)
def test_no_engine_is_made_to_fetch_an_address(site: Site, url: str) -> None:
    check(site, picture(url), [], 400, INVALID, "messages[0].content")


INLINE = picture("data:image/png;base64,iVBORw0KGgo=")


def test_pictures_that_are_in_the_call_pass(site: Site) -> None:
    check(site, INLINE, [], 200, "", None)


def test_pictures_and_numbers_as_the_policy_says(site: Site) -> None:
    site.use(POLICY | {"body": {"media": "any", "max_n": 2}})
    check(site, picture("https://a/b.png"), [], 200, "", None)
    check(site, with_value("n", "3"), [], 400, INVALID, "n")
    check(site, json.dumps(body(messages=MESSAGES * 2049)).encode(), [], 400, INVALID, "messages")
    site.use(POLICY | {"body": {"media": "none"}})
    check(site, INLINE, [], 400, INVALID, "messages[0].content")
    site.use(POLICY)


DEADLINE = "x-weir-deadline-ms"
CLASS = "x-weir-class"
NO_TIMES = [b"0", b"-1", b"1e12", b"1000000000000", b"86400001", b"NaN", b"inf", b"1e3", b"", b".", b"+5", b"5_000"]
NO_TIMES += [b"5000, 6000", b"0x10", b"9" * 400, b"\xff", b"\xd9\xa5"]  # the last is a digit, in Arabic
NO_CLASSES = [b"Batch", b"", b"batch, default", b"nobody", b"\xc3\x28", b"\xff"]
UNAUTHORIZED = (401, "invalid_api_key", None)


@pytest.mark.parametrize(
    ("name", "value", "status", "code", "param"),
    [
        (DEADLINE, b"86400000", 200, "", None),
        (DEADLINE, b"60000.5", 200, "", None),
        *((DEADLINE, value, 400, INVALID, DEADLINE) for value in NO_TIMES),
        (CLASS, b"batch", 200, "", None),
        *((CLASS, value, 400, INVALID, CLASS) for value in NO_CLASSES),
        ("content-type", b"text/plain", 400, INVALID, "content-type"),
        ("content-type", b"\xff", 400, INVALID, "content-type"),
        ("content-encoding", b"gzip", 400, INVALID, "content-encoding"),
        ("x-stainless-read-timeout", b"NaN", 200, "", None),  # an SDK's own; only ours are refused
        ("x-weir-session", b"s" * 10_240, 200, "", None),
        ("x-weir-session", b"\xff\xfe", 200, "", None),
        ("x-weir-session", b"s" * 17_000, 431, "headers_too_large", None),
        ("x-request-id", b"\xff", 200, "", None),
        ("authorization", b"Bearer \xff\xfe", *UNAUTHORIZED),
        ("authorization", b"Basic " + KEY.encode(), *UNAUTHORIZED),
        ("authorization", b"", *UNAUTHORIZED),
    ],
)
def test_headers(site: Site, name: str, value: bytes, status: int, code: str, param: str | None) -> None:
    check(site, json.dumps(body()).encode(), [(name.encode(), value)], status, code, param)


def test_a_repeated_header_that_decides_is_refused(site: Site) -> None:
    data = json.dumps(body()).encode()
    other = (b"authorization", b"Bearer weir-nobody's")
    classes = [(CLASS.encode(), b"batch"), (CLASS.encode(), b"interactive")]
    for twice in ([AUTHORIZED, *classes], [AUTHORIZED, other], [other, AUTHORIZED], [AUTHORIZED, AUTHORIZED]):
        with Wire(site.gateway.url) as wire:
            assert wire.ask(data, twice)[0] == 400
    check(site, data, [other, (b"x-api-key", KEY.encode())], 401, "invalid_api_key", None)


def test_what_only_answers_carry_means_nothing_in_a_request(site: Site) -> None:
    forged = {
        b"x-weir-engine": b"another",
        b"x-weir-queue-ms": b"-5",
        b"x-weir-max-tokens": b"1; asked=1",
        b"x-weir-reason": b"rate_limited",
        b"x-weir-class-asked": b"interactive",
        b"x-ratelimit-limit-requests": b"0",
    }
    with Wire(site.gateway.url) as wire:
        status, told, text = wire.ask(json.dumps(body()).encode(), [AUTHORIZED, *forged.items()])
    assert (status, told["x-weir-engine"], told["x-weir-class"]) == (200, "engine-1", "default")
    assert int(told["x-weir-queue-ms"]) >= 0
    absent = {"x-weir-max-tokens", "x-weir-reason", "x-weir-class-asked", "x-ratelimit-limit-requests"}
    assert not absent & set(told)
    assert json.loads(text)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("method", "path", "extra", "status", "says"),
    [
        ("POST", "/v1/chat/completions/", {}, 200, '"choices"'),
        ("GET", "/v1/models/", {}, 200, '"data"'),
        ("GET", "/outcomes", {}, 200, "# How a call can end"),
        (
            "GET",
            "/outcomes/deadline_unreachable",
            {"authorization": "Bearer wrong"},
            200,
            "503, code `deadline_unreachable`",
        ),
        ("GET", "/outcomes/bogus", {}, 404, "GET /outcomes/bogus is not offered here"),
        ("POST", "/v1/batches", {}, 404, "POST /v1/batches is not offered here. Batches are offered where"),
        ("POST", "/api/chat", {}, 404, "use /v1/chat/completions"),
        ("POST", "/chat/completions", {}, 404, "Did you mean /v1/chat/completions?"),
        (
            "GET",
            "/v1/realtime",
            {"connection": "Upgrade", "upgrade": "websocket"},
            404,
            "GET /v1/realtime is not offered here. There are no sessions of speech",
        ),
        ("GET", "/v1/chat/completions/", {}, 405, "it takes POST"),
    ],
)
def test_what_is_no_route_is_told_so(
    site: Site, method: str, path: str, extra: dict[str, str], status: int, says: str
) -> None:
    parts = urlsplit(site.gateway.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **extra}
    connection.request(method, path, json.dumps(body()) if method == "POST" else None, headers)
    answer = connection.getresponse()
    found = answer.read().decode()
    connection.close()
    assert (answer.status, says in found) == (status, True), found
