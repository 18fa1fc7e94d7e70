"""Agent hints: those of a tenant that may, those of one that may not, and values out of any range."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.admission.queues import Ticket
from gateway.core.agent_hints import MOST_SECONDS, NO_HINTS, hints_of
from gateway.core.policy.file import decode
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.parser import parse
from gateway.core.request.routes import ROUTES
from gateway.core.request.tenants import Tenants
from tests.calls import a_call


def call(hints: Any, path: str = "/v1/chat/completions", *, hinted: bool = True, **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "nvext": {"agent_hints": hints}} | fields
    return parse(
        ROUTES[path.encode()], {b"content-type": b"application/json"}, json.dumps(body).encode(),
        settings=CallSettings(model_routes=frozenset({"m"})), request_id="r", tenant="t", now=0.0, hinted=hinted,
    )  # fmt: skip


UNNAMED = call({}).conversation


def test_hints_name_the_session_the_length_and_the_turn() -> None:
    made = call({"prefix_id": "s", "osl": 300, "priority": 5, "strict_priority": 9, "speculative_prefill": True})
    assert (made.hinted_tokens, made.hinted_ahead) == (300, 5.0)
    assert made.conversation == call({"prefix_id": "s"}).conversation != call({"prefix_id": "z"}).conversation
    assert made.conversation != UNNAMED
    assert json.loads(made.body)["nvext"]["agent_hints"]["strict_priority"] == 9, "the body is passed on as it came"


def test_what_openai_calls_the_session_goes_before_the_hint_and_the_hint_before_its_user() -> None:
    named = call({"prefix_id": "s"}, prompt_cache_key="k")
    assert named.conversation == call({}, prompt_cache_key="k").conversation
    assert call({"prefix_id": "s"}, user="u").conversation == call({"prefix_id": "s"}).conversation


@pytest.mark.parametrize("hints", [None, {}, {"osl": None, "priority": None, "prefix_id": None}])
def test_hints_that_say_nothing(hints: Any) -> None:
    made = call(hints)
    assert (made.hinted_tokens, made.hinted_ahead, made.conversation) == (0, 0.0, UNNAMED)
    assert call({}, nvext=None).hinted_tokens == 0
    assert hints_of(b'{"model": "m"}') is NO_HINTS


ABSURD: list[dict[str, Any]] = [
    {"osl": 0}, {"osl": -1}, {"osl": 2**20 + 1}, {"osl": 10**400}, {"osl": 1.5}, {"osl": "100"}, {"osl": [1]},
    {"priority": 2**31}, {"priority": -(2**31) - 1}, {"priority": 0.5}, {"priority": True},
    {"prefix_id": "s" * 257}, {"prefix_id": 7}, {"prefix_id": {}},
]  # fmt: skip


@pytest.mark.parametrize("hints", ABSURD, ids=lambda hints: str(hints)[:30])
def test_absurd_hints_are_refused_and_named(hints: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        call(hints)
    assert (caught.value.outcome, caught.value.status) == (Outcome.BAD_REQUEST, 400)
    assert caught.value.param == f"nvext.agent_hints.{next(iter(hints))}"


@pytest.mark.parametrize("nvext", [[], "x", {"agent_hints": []}, {"agent_hints": "all"}])
def test_hints_of_a_wrong_shape_are_refused(nvext: Any) -> None:
    with pytest.raises(Refused) as caught:
        call({}, nvext=nvext)
    assert (caught.value.param or "").startswith("nvext")


@pytest.mark.parametrize("hints", [{"prefix_id": "s", "osl": 1, "priority": 9}, "all of it", *ABSURD])
def test_forged_hints_of_a_tenant_that_may_not_change_nothing(hints: Any) -> None:
    made = call(hints, hinted=False)
    assert (made.hinted_tokens, made.hinted_ahead, made.conversation) == (0, 0.0, UNNAMED)


def test_only_tenants_of_the_policy_that_may_have_hints() -> None:
    policy = decode(b"tenants: {acme: {agent_hints: true}, anonymous: {}}")
    accounts = Tenants(policy).accounts
    assert (accounts["acme"].hinted, accounts["anonymous"].hinted) == (True, False)


@pytest.mark.parametrize(("priority", "seconds"), [(2**31 - 1, MOST_SECONDS), (-(2**31), -MOST_SECONDS), (-3, -3.0)])
def test_a_priority_is_worth_no_more_than_a_minute(priority: int, seconds: float) -> None:
    made = call({"priority": priority})
    assert made.hinted_ahead == seconds


def test_a_priority_orders_the_calls_of_one_tenant() -> None:
    first, later = a_call(deadline=100.0), a_call(arrived=3.0, deadline=103.0, hinted_ahead=5.0)
    tickets = [Ticket(each, each.arrived, ahead=each.hinted_ahead) for each in (first, later)]
    assert min(tickets, key=lambda ticket: ticket.key).call is later


def estimated(alpha: float | None = None, **fields: Any) -> Call:
    made = call({"osl": 300}, **fields)
    cost = CostModel("auto" if alpha is None else alpha)
    cost.estimate(made, 4096)
    return made


def test_an_expected_length_sets_the_end_and_never_books_less() -> None:
    plain = estimated(max_tokens=1000)
    assert plain.expected_tokens == 300
    assert plain.output_tokens == 501, "what is booked is more anyway"
    assert estimated(max_tokens=200, n=2).output_tokens == 400, "no more than it may generate"
    assert estimated(alpha=0.1, max_tokens=1000).output_tokens == 101, "as the policy has it"


def test_a_recording_has_no_hints() -> None:
    form = (
        b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b\r\n'
        b'content-disposition: form-data; name="prompt"\r\n\r\n"nvext"\r\n--b\r\n'
        b'content-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
    )
    made = parse(
        ROUTES[b"/v1/audio/transcriptions"], {b"content-type": b"multipart/form-data; boundary=b"}, form,
        settings=CallSettings(), request_id="r", tenant="t", now=0.0, hinted=True,
    )  # fmt: skip
    assert made.hinted_tokens == 0
