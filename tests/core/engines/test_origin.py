"""Engines' URLs: accepted forms, and refusals with a reason."""

from __future__ import annotations

import re

import pytest

from gateway.core.engines.origin import engine_id, meant_url, parse_origin, url_fault

GOOD = [
    # url, host, port, tls, base path, Host header
    ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, "", b"127.0.0.1:8000"),
    ("http://localhost", "localhost", 80, False, "", b"localhost"),
    ("http://localhost:80/", "localhost", 80, False, "", b"localhost"),
    ("HTTP://Engine-1.example.ORG:8000/", "engine-1.example.org", 8000, False, "", b"engine-1.example.org:8000"),
    ("https://engine", "engine", 443, True, "", b"engine"),
    ("https://engine:8443/vllm/a/", "engine", 8443, True, "/vllm/a", b"engine:8443"),
    ("https://engine:80", "engine", 80, True, "", b"engine:80"),
    ("http://[::1]:8000", "::1", 8000, False, "", b"[::1]:8000"),
    ("http://[2001:db8::1]", "2001:db8::1", 80, False, "", b"[2001:db8::1]"),
    ("http://my_engine.svc.cluster.local.:1", "my_engine.svc.cluster.local.", 1, False, "",
     b"my_engine.svc.cluster.local.:1"),
    ("http://engine:65535", "engine", 65535, False, "", b"engine:65535"),
    ("http://engine:1/v1/models/a", "engine", 1, False, "/v1/models/a", b"engine:1"),
    ("http://engine:1/v10", "engine", 1, False, "/v10", b"engine:1"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "host", "port", "tls", "base", "authority"), GOOD)
def test_good(url: str, host: str, port: int, tls: bool, base: str, authority: bytes) -> None:
    origin = parse_origin(url)
    assert (origin.url, origin.host, origin.port, origin.tls, origin.unix) == (url, host, port, tls, None)
    assert (origin.base_path, origin.authority.encode()) == (base, authority)


def test_unix() -> None:
    origin = parse_origin("unix:///run/vllm/0.sock")
    assert (origin.unix, origin.tls, origin.base_path, origin.authority) == ("/run/vllm/0.sock", False, "", "localhost")
    assert parse_origin("unix:///" + "a" * 106).unix == "/" + "a" * 106


BAD = [
    ("", "write http://HOST:PORT"),
    ("127.0.0.1:8000", "write http://HOST:PORT"),
    ("localhost:8000", "write http://HOST:PORT"),
    ("//localhost:8000", "write http://HOST:PORT"),
    ("http://", "write http://HOST:PORT"),
    ("http:localhost", "write http://HOST:PORT"),
    ("http://:8000", "write http://HOST:PORT"),
    ("ftp://engine", "write http://HOST:PORT"),
    ("file:///etc/passwd", "write http://HOST:PORT"),
    ("127.0.0.1:8000", "(did you mean http://127.0.0.1:8000?)"),
    ("localhost/v1", "(did you mean http://localhost?)"),
    ("[::1]:8000/v1/", "(did you mean http://[::1]:8000?)"),
    ("/run/vllm.sock", "(did you mean unix:///run/vllm.sock?)"),
    ("http://engine:8000/v1", "write it without /v1, which is added to it (did you mean http://engine:8000?)"),
    ("http://engine/llm/v1/models", "(did you mean http://engine/llm?)"),
    ("http://engine:8000/v1/chat/completions/", "(did you mean http://engine:8000?)"),
    ("http://user@engine", "no user"),
    ("http://user:pass@engine", "no user"),
    ("http://@engine", "no user"),
    ("http://engine?a=b", "no user, query"),
    ("http://engine?", "no user, query"),
    ("http://engine/#a", "no user, query"),
    ("http://engine#", "no user, query"),
    ("http://engine:0", "the port is"),
    ("http://engine:65536", "the port is"),
    ("http://engine:-1", "the port is"),
    ("http://engine:+80", "the port is"),
    ("http://engine:http", "the port is"),
    ("http://a b", "printable ASCII"),
    ("http://engine\r\nx: y", "printable ASCII"),
    (" http://engine", "printable ASCII"),
    ("http://engine\0", "printable ASCII"),
    ("http://münchen", "printable ASCII"),
    ("http://[::1", "Invalid IPv6"),
    ("http://[engine]", "IPv"),
    ("http://a..b", "neither a host name nor"),
    ("http://.a", "neither a host name nor"),
    ("http://a,b", "neither a host name nor"),
    ("http://a%20b", "neither a host name nor"),
    ("http://a\\b", "neither a host name nor"),
    ("http://" + "a" * 64, "neither a host name nor"),
    ("http://" + "a." * 127 + "a", "neither a host name nor"),
    ("unix:", "write unix:///PATH"),
    ("unix:/run/x.sock", "write unix:///PATH"),
    ("unix://run/x.sock", "write unix:///PATH"),
    ("unix:///" + "a" * 107, "at most 107"),
]


@pytest.mark.parametrize(("url", "reason"), BAD)
def test_bad(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(repr(url))}: .*{re.escape(reason)}"):
        parse_origin(url)


@pytest.mark.parametrize("url", ["http://engine:8000", "$ENGINE_URL", "", "http://", "vllm"])
def test_nothing_better_is_known(url: str) -> None:
    assert meant_url(url) is None


def test_a_fault_is_told_without_the_url_and_an_id_without_the_scheme() -> None:
    assert url_fault("http://engine:8000") is None
    assert url_fault("http://engine:99999") == "the port is a number from 1 to 65535"
    assert engine_id("http://engine:8000/") == engine_id("https://engine:8000") == "engine:8000"
