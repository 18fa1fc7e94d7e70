"""Load plan: bodies as the servers read them, the requested mix, and all of it from the seed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice, pairwise
from statistics import median
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine import tokens
from loadtest.load.arrivals import Arrivals, Closed, Rate
from loadtest.load.lengths import Length, Uniform
from loadtest.load.plan import plan, poisson
from loadtest.load.prompts import WORDS
from loadtest.load.scenario import find, load
from loadtest.load.scenario import planned as scenario_calls
from loadtest.load.trace import BLOCK, Arrival
from loadtest.load.workload import Kind, Planned, Prefix, Sessions, SubAgents, Tenant, Workload

TIMES = [float(at) for at in range(3000)]
SHORT = Length(uniform=Uniform(20, 60))


def planned(*kinds: Kind, times: Iterable[Any] = TIMES[:20], seed: int = 1, **more: Any) -> list[Planned]:
    keys = more.pop("keys", None)
    return list(plan(Workload(mix=kinds, **more), times, seed, keys=keys))


def body(call: Planned) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(call.body)
    return read


# -- bodies -----------------------------------------------------------------------------------------------------------


def test_a_chat_request_is_as_long_as_it_says() -> None:
    for call in planned(Kind(class_name="chat", prompt=SHORT, output=Length(empirical=(5, 9)))):
        read = body(call)
        assert tokens.count(tokens.chat(read["messages"])) == call.prompt_tokens
        assert 20 <= call.prompt_tokens <= 60
        assert read["max_tokens"] == call.max_tokens
        assert call.max_tokens in (5, 9)
        assert (read["model"], read["stream"], read["stream_options"]) == ("sim", True, {"include_usage": True})
        assert "ignore_eos" not in read
        assert call.path == b"/v1/chat/completions"
        assert call.fields == {b"content-type": b"application/json", b"x-weir-class": b"chat"}
        assert (call.kind, call.class_name) == ("chat", "chat")
        assert (call.tenant, call.conversation, call.turn) == ("", "", 1)


def test_a_completion_is_its_prefix_and_prompt() -> None:
    kind = Kind(
        kind="completions", prompt=SHORT, prefix=Prefix(tokens=100, count=2), stream=False, ignore_eos=True,
        model='a"b', output=Length(constant=3),
    )  # fmt: skip
    calls = planned(kind)
    for call in calls:
        read = body(call)
        assert tokens.count(tokens.units(read["prompt"])) == call.prompt_tokens
        assert 120 <= call.prompt_tokens <= 160
        assert (read["stream"], read["ignore_eos"], read["max_tokens"], read["model"]) == (False, True, 3, 'a"b')
        assert call.path == b"/v1/completions"
    assert len({body(call)["prompt"][:400] for call in calls}) == 2
    assert len({body(call)["prompt"][400:480] for call in calls}) == len(calls)


def test_embeddings_are_texts() -> None:
    for call in planned(Kind(kind="embeddings", prompt=Length(constant=10), inputs=Length(constant=3))):
        read = body(call)
        assert [tokens.count(tokens.units(text)) for text in read["input"]] == [10, 10, 10]
        assert (call.path, call.prompt_tokens, call.max_tokens) == (b"/v1/embeddings", 30, 0)


def test_a_rerank_reads_its_query_with_every_document() -> None:
    kind = Kind(kind="rerank", prompt=Length(constant=10), inputs=Length(constant=3), query=Length(constant=4))
    for call in planned(kind):
        read = body(call)
        assert tokens.count(tokens.units(read["query"])) == 4
        assert [tokens.count(tokens.units(text)) for text in read["documents"]] == [10, 10, 10]
        assert (call.path, call.prompt_tokens, call.max_tokens) == (b"/v1/rerank", 42, 0)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 100, 50_000])
def test_prompts_of_any_length(length: int) -> None:
    (call,) = planned(Kind(kind="completions", prompt=Length(constant=length)), times=[0.0])
    words = body(call)["prompt"].split()
    assert len(words) == length
    assert set(words) <= set(WORDS.split())


def test_words_are_as_many_as_a_mark_needs() -> None:
    words = WORDS.split()
    assert len(set(words)) == len(words) == 64
    assert {len(word) for word in words} == {tokens.BYTES - 1}


# -- the mix ----------------------------------------------------------------------------------------------------------


def test_shares_and_weights_are_kept() -> None:
    mix = (Kind(class_name="a", share=0.6, prompt=SHORT), Kind(class_name="b", share=0.2, prompt=SHORT))
    tenants = {"acme": Tenant(weight=3), "bolt": Tenant(weight=1)}
    calls = planned(*mix, times=TIMES, tenants=tenants, keys={"acme": "k1"})
    found = Counter((call.class_name, call.tenant) for call in calls)
    expected = {("a", "acme"): 9, ("a", "bolt"): 3, ("b", "acme"): 3, ("b", "bolt"): 1}
    for name, parts in expected.items():
        assert found[name] / len(calls) == pytest.approx(parts / 16, abs=0.03)
    for call in calls:
        assert call.fields.get(b"authorization") == (b"Bearer k1" if call.tenant == "acme" else None)


def test_one_seed_is_one_list() -> None:
    mix = (Kind(prompt=SHORT), Kind(kind="embeddings", prompt=SHORT), Kind(prompt=SHORT, session=Sessions()))
    tenants = {"acme": Tenant(), "bolt": Tenant()}
    first, again, other = (
        [msgspec.structs.replace(call, session=None) for call in planned(*mix, seed=seed, tenants=tenants)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert [call.at for call in first] == [call.at for call in other]
    assert not {call.body for call in first} & {call.body for call in other}, "another run finds nothing cached"


@given(st.integers(0, 2**32), st.floats(1.0, 50.0), st.floats(1.0, 20.0), st.floats(0.0, 1e6))
def test_poisson_is_in_order_and_in_its_time(seed: int, rate: float, seconds: float, start: float) -> None:
    calls = list(islice(poisson((Kind(prompt=Length(constant=9)),), rate, seconds, seed, start=start), 50))
    assert all(start <= call.at < start + seconds * 1.001 for call in calls)
    assert all(before.at <= after.at for before, after in pairwise(calls))
    assert [call.index for call in calls] == list(range(len(calls)))


def test_a_plan_is_made_as_it_is_taken() -> None:
    calls = plan(Workload(), Arrivals(closed=Closed(clients=8)).times(1), 1)
    assert [call.at for call in islice(calls, 3)] == [0.0, 0.0, 0.0]
    assert next(calls).index == 3


# -- traces -----------------------------------------------------------------------------------------------------------

TRACE = Kind(prompt="trace", output="trace")


def test_a_trace_says_how_long_and_when() -> None:
    rows = [Arrival(0.5, 100, 7), Arrival(2.0, 0, 0)]
    first, failed = planned(TRACE, times=rows)
    assert (first.at, first.prompt_tokens, first.max_tokens) == (0.5, 100, 7)
    assert (failed.at, failed.prompt_tokens, failed.max_tokens) == (2.0, 9, 1), "the least that can be sent"


def test_the_same_hashes_are_the_same_text() -> None:
    rows = [Arrival(0.0, 2 * BLOCK, 1, (5, 6)), Arrival(1.0, 3 * BLOCK - 40, 1, (5, 7, 8)), Arrival(2.0, 9, 1, (5,))]
    first, second, third = planned(TRACE, times=rows)
    blocks = [tokens.block_hashes(tokens.chat(body(call)["messages"]), 0) for call in (first, second)]
    shared = [one == other for one, other in zip(*blocks, strict=False)]
    # The template's header shifts the text, so that the block of the engine's where they part is not shared.
    assert shared == [True] * (BLOCK // 16) + [False] * (BLOCK // 16)
    assert [call.prompt_tokens for call in (first, second, third)] == [row.prompt_tokens for row in rows]
    texts = [body(call)["messages"][0]["content"] for call in (first, third)]
    assert texts[0].startswith(texts[1])
    (other,) = planned(TRACE, times=rows[:1], seed=2)
    assert other.body != first.body


def test_recorded_lengths_need_a_trace() -> None:
    with pytest.raises(ValueError, match="a length is a trace's, and there is no trace"):
        planned(TRACE)


# -- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_sends_all_that_was_said() -> None:
    kind = Kind(
        prompt=SHORT, prefix=Prefix(tokens=50, count=1), output=Length(constant=5),
        session=Sessions(turns=Length(constant=3), think=2.0),
    )  # fmt: skip
    call, other = planned(kind, times=[1.0, 2.0], tenants={"acme": Tenant()}, keys={"acme": "k"})
    assert other.index == 3, "each turn has a number, whether it comes or not"
    seen = [call]
    while call.session is not None and (following := call.session.follow(b"so it is", call.at + 10.0)):
        (call,) = following
        seen.append(call)
    assert [(each.index, each.turn) for each in seen] == [(0, 1), (1, 2), (2, 3)]
    assert {(each.conversation, each.fields[b"x-weir-session"]) for each in seen} == {("s0", b"s0")}
    assert {each.fields[b"authorization"] for each in seen} == {b"Bearer k"}
    for before, after in pairwise(seen):
        assert after.at > before.at + 10.0
        spoken = body(after)["messages"]
        assert spoken[:-1] == [*body(before)["messages"], {"role": "assistant", "content": "so it is"}]
        assert after.prompt_tokens == tokens.count(tokens.chat(spoken))
    assert [each["role"] for each in body(seen[0])["messages"]] == ["system", "user"]


def test_what_a_conversation_says_does_not_depend_on_others() -> None:
    kind = Kind(prompt=SHORT, session=Sessions(turns=Length(constant=5)))
    alone, among = planned(kind, times=TIMES[:2]), planned(kind, times=TIMES[:2])
    assert among[0].session is not None
    assert alone[1].session is not None
    assert among[1].session is not None
    among[0].session.follow(b"an answer", 5.0)
    (first,), (second,) = alone[1].session.follow(b"x", 9.0), among[1].session.follow(b"x", 9.0)
    assert (first.body, first.at) == (second.body, second.at)


def test_sub_agents_begin_as_their_parent_did_and_name_its_session() -> None:
    agents = SubAgents(share=1.0, count=Length(constant=2), turns=Length(constant=2))
    kind = Kind(
        prompt=SHORT, prefix=Prefix(tokens=50, count=3), session=Sessions(turns=Length(constant=3), subagents=agents)
    )
    first, other = planned(kind, times=[1.0, 2.0])
    assert other.index == 3 + 2 * 2, "a sub-agent's turns have numbers too"
    seen, open_ = [], [first]
    while open_:
        call = open_.pop(0)
        seen.append(call)
        assert call.session is not None
        open_ += call.session.follow(b"so it is", call.at + 1.0)
    assert sorted(each.index for each in seen) == list(range(7))
    assert {each.fields[b"x-weir-session"] for each in seen} == {b"s0"}
    starts = [each for each in seen if each.turn == 1]
    assert len(starts) == 3
    assert len({body(each)["messages"][0]["content"] for each in starts}) == 1
    assert len({body(each)["messages"][1]["content"] for each in starts}) == 3


def test_conversations_that_grow_too_long_begin_anew() -> None:
    kind = Kind(
        prompt=SHORT, prefix=Prefix(tokens=50, count=1), session=Sessions(turns=Length(constant=9), context=200)
    )
    (call,) = planned(kind, times=[1.0])
    sizes = [call.prompt_tokens]
    while call.session is not None and (following := call.session.follow(b"xxxx", 0.0)):
        (call,) = following
        sizes.append(call.prompt_tokens)
    assert max(sizes) > 200
    assert any(after < before for before, after in pairwise(sizes))
    assert all(after < before for before, after in pairwise(sizes) if before > 200)


@pytest.mark.slow
def test_agents_are_as_published() -> None:
    """The statistics that loadtest/scenarios/agentic.yaml quotes."""
    turns, prompts, outputs, grown, thought, parents = [], [], [], [], [], 0
    for call in islice(scenario_calls(load(find("agentic"))), 120):
        agent, planned_calls, parent = call.session, [call], False
        while (last := planned_calls[-1]).session is agent and agent is not None:
            following = agent.follow(b"x" * (tokens.BYTES * last.max_tokens), 0.0)
            parent |= any(each.session is not agent for each in following)
            if not following or following[0].session is not agent:
                break
            planned_calls.append(following[0])
        turns.append(len(planned_calls))
        parents += parent
        prompts += [each.prompt_tokens for each in planned_calls]
        outputs += [each.max_tokens for each in planned_calls]
        grown += [before.prompt_tokens / after.prompt_tokens for before, after in pairwise(planned_calls)]
        thought += [each.at for each in planned_calls[1:]]
    assert median(turns) == pytest.approx(43, rel=0.1)
    assert median(prompts) == pytest.approx(142_000, rel=0.05)
    assert median(outputs) == pytest.approx(444, rel=0.05)
    assert median(grown) > 0.96
    assert sum(pause < 1.0 for pause in thought) / len(thought) == pytest.approx(0.86, abs=0.015)
    assert sum(pause < 10.0 for pause in thought) / len(thought) == pytest.approx(0.95, abs=0.01)
    assert parents / len(turns) == pytest.approx(0.44, abs=0.08)


@pytest.mark.parametrize(("spread", "typical"), [(None, 10.0 * 0.693), (0.0, 10.0), (1.0, 10.0)])
def test_people_think_for_a_while(spread: float | None, typical: float) -> None:
    kind = Kind(prompt=SHORT, session=Sessions(turns=Length(constant=2), think=10.0, spread=spread))
    pauses = []
    for call in planned(kind, times=TIMES[:800]):
        assert call.session is not None
        (following,) = call.session.follow(b"x", 100.0)
        pauses.append(following.at - 100.0)
    assert sorted(pauses)[400] == pytest.approx(typical, rel=0.1)


def test_a_recorded_conversation_is_sent_as_recorded_a_pause_after_each_answer() -> None:
    turns = tuple(Arrival(9.0, BLOCK * size, size, tuple(range(size))) for size in (2, 3))
    rows = [Arrival(1.0, BLOCK, 1, (0,), turns), Arrival(4.0, BLOCK, 1, (8,))]
    kind = Kind(prompt="trace", output="trace", session=Sessions(think=2.0, spread=0.0))
    first, other = planned(kind, times=rows)
    assert first.session is not None
    assert other.session is not None
    (second,) = first.session.follow(b"not said again", 10.0)
    (third,) = first.session.follow(b"x", 20.0)
    assert first.session.follow(b"x", 30.0) == other.session.follow(b"x", 30.0) == []
    assert [call.at for call in (first, second, third, other)] == [1.0, 12.0, 22.0, 4.0]
    assert [(call.index, call.turn, call.max_tokens) for call in (first, second, third, other)] == [
        (0, 1, 1), (1, 2, 2), (2, 3, 3), (3, 1, 1),
    ]  # fmt: skip
    assert {call.conversation for call in (first, second, third)} == {"s0"}
    words = [body(call)["messages"][0]["content"] for call in (first, second, third)]
    assert words[1].startswith(words[0])
    assert words[2].startswith(words[1])


def test_times_are_of_the_seed_and_not_of_the_mix() -> None:
    times = Arrivals(poisson=Rate(5.0)).times(4)
    assert [call.at for call in poisson((Kind(),), 5.0, 20.0, 4)] == [at for at in islice(times, 200) if at < 20.0]
