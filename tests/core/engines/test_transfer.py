"""Decision which engine reads a prompt: its call's own, or another that hands over the KV cache."""

from __future__ import annotations

import pytest

from gateway.core.admission.admission import AdmissionControl
from gateway.core.engines.choice import Choice, predicted_ttft
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.transfer import UNKNOWN_WITHIN, WITHIN, Prefill, where
from gateway.core.engines.transfers import BELIEVED, RATE, Transfers
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.request.call import Call
from gateway.shared.protocol import Role
from gateway.shared.vllm.answers import ModelCard
from tests.calls import a_call

NOW = 1000.0
TARGETS = {"chat": 0.05}


def engine(id: str, group: str = "kv", role: Role = "both", rate: float = 10_000.0) -> Engine:
    made = Engine(id, f"http://{id}", Policy(), capacity=100_000)
    made.check(True, 0.0)
    made.transfers.group, made.transfers.role = group, role
    made.speed.prefill_rate = rate
    return made


def call(prompt: int = 4000, ttft_by: float = NOW + 60.0, *, splits: bool = True) -> Call:
    return a_call(arrived=NOW, deadline=NOW + 60.0, prompt_tokens=prompt, splits=splits, ttft_by=ttft_by)


def decided(made: Call, own: Engine, readers: list[Engine], cached: int = 0) -> Prefill | None:
    unread = made.prompt_tokens - cached
    return where(made, Choice(own, unread, cached, predicted_ttft(own, unread, NOW)), readers, TARGETS, NOW)


def reason(plan: Prefill | None) -> tuple[str, str] | None:
    return None if plan is None else ("here" if plan.engine is None else plan.engine.id, plan.reason)


def test_nothing_is_to_be_decided_without_engines_that_exchange_caches() -> None:
    own, other = engine("own"), engine("other")
    assert decided(call(splits=False), own, [own, other]) is None
    assert decided(call(), own, [own]) is None
    assert decided(call(), own, [engine("other", "another group")]) is None
    assert decided(call(), engine("own", ""), [other]) is None


def test_a_prompt_goes_where_its_first_token_comes_sooner_and_the_soonest_reader_reads_it() -> None:
    own, slow, fast = engine("own", rate=1000.0), engine("slow", rate=9000.0), engine("fast", rate=20_000.0)
    for readers in ([slow, fast], [fast, slow]):
        plan = decided(call(), own, readers)
        assert plan is not None
        assert reason(plan) == ("fast", "sooner")
    read, moved = 0.03 + 4000 / 20_000, 4000 / RATE
    assert plan.here == pytest.approx(0.03 + 4.0)
    assert plan.there == pytest.approx(read + moved + 0.03)
    assert (plan.unread, plan.moved, plan.within) == (4000, 4000, 1.0)
    longer = decided(call(40_000), own, [fast])
    assert longer is not None
    assert longer.within == pytest.approx(WITHIN * (0.03 + 2.0))
    unknown = decided(call(), own, [engine("unknown")])
    assert unknown is not None
    assert unknown.within == UNKNOWN_WITHIN, "its speed is not known yet"


def test_what_the_own_engine_was_sent_before_delays_a_fetched_prompt_too() -> None:
    own, other = engine("own", rate=1000.0), engine("other", rate=20_000.0)
    own.hold(10_000, 10_000, NOW)
    plan = decided(call(), own, [other])
    assert plan is not None
    assert plan.there == pytest.approx(10.0 + 0.03)


def test_a_prompt_is_read_here_with_the_reason() -> None:
    own, same = engine("own"), engine("same")
    assert reason(decided(call(200), own, [same])) == ("here", "short")
    assert reason(decided(call(), own, [same], cached=3900)) == ("here", "short")
    later = decided(call(), own, [same])
    assert reason(later) == ("here", "later")
    assert later is not None
    assert later.there > later.here
    slow = engine("own", rate=100.0)
    full, failed, down = engine("full"), engine("failed"), engine("down")
    full.hold(90_000, 0, NOW)
    failed.transfers.failed(NOW - 1.0)
    down.down()
    assert reason(decided(call(), slow, [full, failed, down])) == ("here", "no_engine")
    failed.transfers.failed(NOW - BELIEVED)
    assert reason(decided(call(), slow, [full, failed, down])) == ("failed", "sooner")


def streams(on: Engine, output: int = 100, class_name: str = "chat") -> None:
    """Have the engine write two streams."""
    for _ in range(2):
        on.hold(output, 0, NOW, class_name, output=output)


def test_a_prompt_that_stalls_streams_beyond_their_target_is_read_elsewhere() -> None:
    own, other = engine("own"), engine("other")
    streams(own)  # 0.4 s of reading / 100 tokens: 0.034 s a token
    assert reason(decided(call(), own, [other])) == ("here", "later")
    assert reason(decided(call(30_000), own, [other])) == ("other", "stalls")  # 0.06 s a token
    assert reason(decided(call(30_000, ttft_by=NOW + 3.5), own, [other])) == ("here", "later"), "it would be late"
    streams(other)
    assert reason(decided(call(30_000), own, [other])) == ("here", "later"), "it would stall others instead"


def test_a_prompt_is_read_where_fewer_calls_wait_for_it() -> None:
    own, other = engine("own"), engine("other")
    for _ in range(7):  # 0.4 s of reading is worth 0.17 s to them, and moving the prompt takes 0.11 s
        own.hold(100, 0, NOW, "default", output=100)
    assert reason(decided(call(), own, [other])) == ("other", "crowded")
    assert reason(decided(call(ttft_by=NOW + 0.5), own, [other])) == ("here", "later"), "it would be late"
    other.hold(1000, 1000, NOW)  # 0.1 s more
    assert reason(decided(call(), own, [other])) == ("here", "later")
    idle = engine("idle", rate=9000.0)
    for _ in range(7):
        other.hold(100, 0, NOW, "default", output=100)
    assert reason(decided(call(), own, [other, idle])) == ("idle", "crowded"), "less is lost there than at the faster"


def test_streams_without_a_target_are_not_spared_and_no_call_waits_for_ever() -> None:
    own, other = engine("own"), engine("other")
    streams(own, class_name="default")
    assert reason(decided(call(30_000), own, [other])) == ("here", "later")
    streams(own)
    other.hold(70_000, 70_000, NOW)  # 7 s ahead, and 3 s here
    assert reason(decided(call(8000), own, [other])) == ("here", "later")
    own = engine("own")
    own.hold(100, 0, NOW, "chat", output=0)
    assert reason(decided(call(30_000), own, [engine("other")])) == ("here", "later")


def test_the_rate_is_the_median_of_fetches_and_a_low_one_is_doubted() -> None:
    transfers = Transfers()
    assert transfers.rate(NOW) == RATE
    transfers.fetched(100, 5.0, NOW)
    assert transfers.rate(NOW) == RATE, "too few tokens to teach"
    for seconds in (1.0, 2.0, 4.0):
        transfers.fetched(8000, seconds, NOW)
    assert transfers.rate(NOW) == 4000.0
    assert transfers.rate(NOW + BELIEVED) == RATE
    transfers.fetched(8000, 0.0, NOW)
    assert transfers.rate(NOW) == 8000.0


@pytest.mark.parametrize(
    ("role", "answers", "reads"), [("prefill", False, True), ("decode", True, False), ("both", True, True)]
)
def test_a_role_says_what_an_engine_is_asked_for(role: Role, answers: bool, reads: bool) -> None:
    fleet, one = Fleet(), engine("one", "")
    fleet.add(one)
    for transfer in ("kv", None):  # who exchanges with nobody can but answer
        one.go_by(EngineEntry(url="http://one", transfer=transfer, role=role))
        fleet.has_models(one, [ModelCard(id="m", max_model_len=10)])
        assert fleet.serving("m") == ((one,) if answers or not transfer else ())
        assert fleet.readers("m") == ((one,) if reads and transfer else ())
        assert list(fleet.models) == (["m"] if answers or not transfer else [])


def test_an_engine_that_reads_for_others_serves_beside_those_that_answer() -> None:
    fleet, reader, writer = Fleet(), engine("reader"), engine("writer")
    for each, role in ((reader, "prefill"), (writer, "decode")):
        fleet.add(each)
        each.go_by(EngineEntry(url=f"http://{each.id}", transfer="kv", role=role))
        fleet.has_models(each, [ModelCard(id="m", max_model_len=300 if each is reader else 100)])
    assert fleet.context("m") == fleet.models["m"].max_model_len == 100, "a call may have no other engine"
    assert fleet.serving("m") == (reader, writer)
    assert fleet.answering("m") == (writer,)
    fleet.remove("writer")
    assert fleet.serving("m") == ()


def test_a_prompt_that_is_read_here_after_all_counts_as_unread_again() -> None:
    own = engine("own")
    hold = own.hold(5000, 1, NOW)
    hold.reads(4000)
    assert (hold.prefill, own.prefills.queued) == (4000, 4000)
    hold.release()
    assert own.prefills.queued == 0


def test_an_engine_that_schedules_by_priority_reads_by_the_rank_of_the_class() -> None:
    control = AdmissionControl(Fleet(), Policy())
    own, other = engine("own", rate=1000.0), engine("other")
    choice = Choice(own, 4000, 0, predicted_ttft(own, 4000, NOW))
    assert control.read_where(call(), choice, NOW) is None
    for each in (own, other):
        control.fleet.add(each)
        control.fleet.has_models(each, [ModelCard(id="m", max_model_len=10)])
    for priorities, rank in ((False, 0), (True, 1)):
        other.priorities = priorities
        plan = control.read_where(call(), choice, NOW)
        assert plan is not None
        assert (reason(plan), plan.priority) == (("other", "sooner"), rank)
