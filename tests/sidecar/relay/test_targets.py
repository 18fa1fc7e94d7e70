"""Targets of the relay: the table is what gateways send, and every other spelling is none."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request.routes import ROUTES
from sidecar.relay.relay import CALLS, LOOKS, RelayTarget, target_of

# vLLM's routes that are no inference: sleep, workers' methods, adapters, profiles, weights, and its documents.
NEVER = (
    *(
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/server_info",
    ),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/stop_profile", "/scale_elastic_ep"),
    *("/load", "/version", "/docs", "/openapi.json", "/invocations", "/pause", "/resume", "/abort_requests", "/"),
)


def test_calls_are_the_routes_that_a_gateway_forwards() -> None:
    assert {path for path, route in ROUTES.items() if not route.here} == CALLS
    assert b"/v1/chat/completions" in CALLS
    assert not CALLS & LOOKS
    assert not {path.encode() for path in NEVER} & (CALLS | LOOKS)


@pytest.mark.parametrize(
    ("method", "target", "found"),
    [
        (b"POST", b"/engines/a.b-1/v1/completions", RelayTarget("call", "a.b-1", b"/v1/completions")),
        (b"GET", b"/engines/a/health", RelayTarget("look", "a", b"/health")),
        (b"GET", b"/engines/a/v1/models", RelayTarget("look", "a", b"/v1/models")),
        (b"POST", b"/models/a/ensure", RelayTarget("ensure", "a")),
        (b"POST", b"/engines/a/health", None),
        (b"GET", b"/engines/a/v1/completions", None),
        (b"GET", b"/models/a/ensure", None),
        *((b"POST", b"/models/a/" + order, None) for order in (b"sleep", b"wake", b"stop", b"drain", b"logs", b"plan")),
        *((b"GET", path, None) for path in (b"/status", b"/gpu", b"/metrics", b"/v1/models", b"/healthz", b"/", b"*")),
        (b"POST", b"/stop", None),
        *((method, b"/engines/a" + path.encode(), None) for path in NEVER for method in (b"GET", b"POST")),
        # other spellings of what is there
        (b"POST", b"/engines/a//v1/completions", None),
        (b"POST", b"/engines/a/v1/completions/", None),
        (b"POST", b"/engines/a/v1/../v1/completions", None),
        (b"POST", b"/engines/a/%2fv1/completions", None),
        (b"POST", b"/engines/a/v1/completion%73", None),
        (b"POST", b"/Engines/a/v1/completions", None),
        (b"POST", b"//engines/a/v1/completions", None),
        (b"POST", b"/engines/a/b/v1/completions", None),
        (b"POST", b"/engines/a/v1/completions;x", None),
        (b"post", b"/engines/a/v1/completions", None),
        (b"HEAD", b"/engines/a/health", None),
    ],
)
def test_a_target_has_one_spelling(method: bytes, target: bytes, found: RelayTarget | None) -> None:
    assert target_of(method, target, b"") == found
    assert target_of(method, target, b"x=1") is None


PIECES = st.sampled_from(
    [b"/", b"//", b"..", b".", b"%2e", b"%2f", b"%00", b"\\", b";", b"engines", b"a", b"v1", b"completions", b"health"]
    + [path.encode() for path in NEVER]
    + [*CALLS, *LOOKS]
)


@pytest.mark.parametrize(
    ("method", "path", "query", "lines"),
    [
        (b"GET", b"/models/a/logs", b"lines=2000", 2000),
        (b"GET", b"/models/a/logs", b"lines=1", 1),
        (b"POST", b"/models/a/logs", b"lines=1", None),
        (b"GET", b"/models/a/plan", b"lines=1", None),
        (b"GET", b"/models/a/logs/", b"lines=1", None),
        *((b"GET", b"/models/a/logs", query, None) for query in (
            b"", b"lines=0", b"lines=2001", b"lines=-1", b"lines=1&lines=2", b"lines=01", b"lines=1\n", b"Lines=1",
        )),
    ],
)  # fmt: skip
def test_a_log_is_asked_for_in_one_way(method: bytes, path: bytes, query: bytes, lines: int | None) -> None:
    assert target_of(method, path, query) == (None if lines is None else RelayTarget("log", "a", lines=lines))


@given(st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE"]), st.lists(PIECES | st.binary(max_size=3), max_size=12))
def test_what_passes_is_exactly_a_row_of_the_table(method: bytes, pieces: list[bytes]) -> None:
    path = b"/engines/a" + b"".join(pieces)
    found = target_of(method, path, b"")
    rows = CALLS if method == b"POST" else LOOKS if method == b"GET" else frozenset()
    reference = path.split(b"/", 3)  # "", engines, the profile, the rest
    expected = b"/" + reference[3] if len(reference) == 4 else b""
    assert (found is not None) == (expected in rows)
    if found is not None:
        assert found.path == expected == unquote_to_bytes(expected)
