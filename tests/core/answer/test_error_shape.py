"""Shape of an error's body: Anthropic's on its routes, with its own types, and OpenAI's on all others."""

from __future__ import annotations

import json

import pytest

from gateway.core.answer.error_shape import refusal_body, shaped
from gateway.core.request.outcome import STATUS, Outcome, Refused, error_body

BODY = error_body("why", "server_error", "internal_error", "model")
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
@pytest.mark.parametrize(("status", "type"), TYPES.items())
def test_anthropics_routes_have_its_shape_and_types(path: str, status: int, type: str) -> None:
    assert json.loads(shaped(path, status, BODY)) == {"type": "error", "error": {"type": type, "message": "why"}}


@pytest.mark.parametrize("path", ["", "/v1/chat/completions", "/v1/responses", "/v1/messagesx"])
def test_other_routes_keep_openais(path: str) -> None:
    assert shaped(path, 400, BODY) == BODY


@pytest.mark.parametrize("outcome", STATUS)
def test_every_refusal_has_it(outcome: Outcome) -> None:
    body = json.loads(refusal_body("/v1/messages", Refused(outcome, "why")))
    assert set(body) == {"type", "error"}
    assert set(body["error"]) == {"type", "message"}


def test_a_tenants_own_refusal_stays_as_its_policy_has_it() -> None:
    refused = Refused(Outcome.RATE_LIMITED, "why")
    refused.replace(402, b'{"pay":1}')
    assert refusal_body("/v1/messages", refused) == b'{"pay":1}'
