"""Registry of sidecars: the fleet after reports, the soonest sidecar for a model, and the demand reported back."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.sidecars.model_index import MOST_MODELS
from gateway.core.sidecars.sidecar import BOOTS, LAST_PAUSE, STALE
from gateway.core.sidecars.sidecars import FORGOTTEN, MOST, Changes, NameConflict, Registry, RegistryFull
from gateway.shared.protocol import CapacityReport, Demand, GPUReport, ModelReport

ALLOW = ("10.0.0.0/8",)
ASLEEP = {"state": "sleeping", "ready_in": 2.0}
AWAKE = {"state": "running", "ready_in": 0.0, "url": "http://10.0.0.1:8000"}


def model(profile: str = "p", **fields: Any) -> ModelReport:
    return ModelReport(**{"profile": profile, "model": "m", "state": "stopped", "ready_in": 30.0} | fields)


def report(*models: ModelReport, sidecar: str = "a", sequence: int = 1, **fields: Any) -> CapacityReport:
    given = {"boot": "b", "control": "http://10.0.0.1:8002"} | fields
    return CapacityReport(sidecar=sidecar, sequence=sequence, models=models, **given)


class Told:
    """A registry, and reports in order; `now` is 100 unless said."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.registry.apply(ALLOW, ("10.0.0.99:8000",), 0.0)
        self.sequence = 0

    def __call__(self, *models: ModelReport, now: float = 100.0, local: bool = False, **fields: Any) -> Changes:
        self.sequence += 1
        return self.registry.take(report(*models, **{"sequence": self.sequence} | fields), now, local=local)


@pytest.fixture
def told() -> Told:
    return Told()


def ids(changes: Changes) -> tuple[list[str], list[tuple[str, bool]], list[str]]:
    """Who joins, of whom something else is said (and whether it may be given calls), who leaves."""
    return [m.id for m in changes.join], [(m.id, m.open) for m in changes.update], list(changes.leave)


# -- the fleet --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "joins"),
    [
        (AWAKE, True),
        (AWAKE | {"url": ""}, False),
        (AWAKE | {"pending": "drain"}, False),
        (AWAKE | {"pending": "sleep"}, False),
        (AWAKE | {"pending": "stop"}, False),
        (AWAKE | {"state": "starting", "pending": "start"}, False),
        (AWAKE | {"state": "sleeping"}, False),
        (AWAKE | {"state": "sleeping", "pending": "wake"}, False),
        (AWAKE | {"state": "error"}, False),
    ],
)
def test_an_engine_joins_when_it_runs_and_nothing_is_being_done_with_it(
    told: Told, fields: dict[str, Any], joins: bool
) -> None:
    assert ids(told(model(**fields))) == ((["10.0.0.1:8000"] if joins else []), [], [])


@pytest.mark.parametrize(
    "fields",
    [AWAKE | {"pending": "drain"}, AWAKE | {"state": "sleeping"}, AWAKE | {"state": "error", "ready_in": None}],
)
def test_an_engine_is_closed_and_opened_and_leaves_with_its_address(told: Told, fields: dict[str, Any]) -> None:
    told(model(**AWAKE))
    assert ids(told(model(**AWAKE))) == ([], [], []), "no news"
    assert ids(told(model(**fields))) == ([], [("10.0.0.1:8000", False)], [])
    assert ids(told(model(**AWAKE))) == ([], [("10.0.0.1:8000", True)], [])
    assert ids(told(model(state="stopped"))) == ([], [], ["10.0.0.1:8000"])
    assert ids(told(model(**AWAKE))) == (["10.0.0.1:8000"], [], [])
    assert ids(told()) == ([], [], ["10.0.0.1:8000"])


def test_hints_that_change_are_told(told: Told) -> None:
    told(model(**AWAKE))
    (member,) = told(model(**AWAKE, kv_tokens=5, context_length=6, max_concurrency=7)).update
    assert (member.kv_tokens, member.context_length, member.max_concurrency, member.open) == (5, 6, 7, True)


def test_reports_out_of_order_count_for_nothing(told: Told) -> None:
    told(model(**AWAKE), sequence=5)
    for sequence in (5, 4):
        assert told(sequence=sequence).dropped == f"report {sequence} after 5"
    assert told(sequence=1, boot="c").leave == ("10.0.0.1:8000",), "another start counts anew"
    assert told(sequence=9).dropped == "a report of an earlier start, b"
    assert told.registry.counts == {"taken": 2, "dropped": 3, "refused": 0, "address_refused": 0}
    for number in range(BOOTS + 1):
        assert not told(sequence=0, boot=f"d{number}").dropped


def test_nobody_speaks_for_a_sidecar_that_is_heard_without_its_key(told: Told) -> None:
    told(model(**AWAKE), key="own", sequence=5)
    for forged in ({"key": "guessed", "boot": "z", "sequence": 2**53}, {"key": ""}, {"key": "own "}):
        with pytest.raises(NameConflict, match="another sidecar reports as a: give each an `id` of its own"):
            told(now=109.0, **forged)
    assert told.registry.counts == {"taken": 1, "dropped": 0, "refused": 3, "address_refused": 0}
    assert ids(told(model(**AWAKE), key="own", boot="c", sequence=1)) == ([], [], []), "a restart needs no more"
    assert told.registry.sidecars["a"].report.key == "", "it is kept nowhere"


def test_one_that_has_lost_its_key_is_heard_once_the_other_has_fallen_silent(told: Told) -> None:
    told(model(**AWAKE), key="own", sequence=5)
    told(key="own", boot="c", sequence=1)
    assert ids(told(model(**AWAKE), key="new", boot="b", sequence=1, now=100.0 + STALE)) == (["10.0.0.1:8000"], [], [])
    with pytest.raises(NameConflict):
        told(key="own", now=111.0)


def test_a_socket_is_used_if_its_folder_is_a_sidecars_own(told: Told) -> None:
    asked = []

    def socket_refusal(path: str) -> str:
        asked.append(path)
        return "no" if path == "/run/docker.sock" else ""

    told.registry.socket_refusal = socket_refusal
    paths = {"p": "/e/p.sock", "q": "/run/docker.sock"}
    models = [model(name, **AWAKE | {"url": f"unix://{path}"}) for name, path in paths.items()]
    changes = told(*models, local=True)
    assert [member.url for member in changes.join] == ["unix:///e/p.sock"]
    assert changes.log == ("sidecar a: 'unix:///run/docker.sock' is not used: no",)
    assert asked == ["/e/p.sock", "/run/docker.sock"]
    assert told(*models, sidecar="b").join == (), "nor anybody's who is not on this machine"
    assert len(asked) == 2


def test_a_sidecar_that_restarts_keeps_the_engines_it_has_taken_over(told: Told) -> None:
    told(model(**AWAKE))
    assert ids(told(model(**AWAKE), boot="c")) == ([], [], [])


def test_addresses_that_may_not_be_used_are_left_out_and_said_once(told: Told) -> None:
    good, bad = model("good", **AWAKE), model("bad", **AWAKE | {"url": "http://127.0.0.1:1"})
    changes = told(good, bad)
    assert [member.profile for member in changes.join] == ["good"]
    assert changes.log == (
        "sidecar a: 'http://127.0.0.1:1' is not used: not in a network of fleet.sidecars.allow",
    )  # fmt: skip
    assert told(good, bad).log == ()
    assert told.registry.counts["address_refused"] == 1
    (named,) = told(model(**AWAKE | {"url": "http://10.0.0.99:8000"}), sidecar="x").log
    assert named.endswith("the policy names this engine itself")
    (twice,) = told(good, model("again", **AWAKE)).log
    assert twice.endswith("another profile of this sidecar has the same engine")


def test_the_first_of_two_keeps_an_engine_until_it_is_silent(told: Told) -> None:
    told(model(**AWAKE))
    second = told(model(**AWAKE), sidecar="z")
    assert ids(second) == ([], [], [])
    assert second.log[0].endswith("it belongs to sidecar a")
    third = told(model(**AWAKE | {"state": "sleeping"}), sidecar="z", now=100 + STALE)
    assert ids(third) == ([], [("10.0.0.1:8000", False)], []), "what it says counts from now on"
    late = told(model(**AWAKE), now=101 + STALE)
    assert (ids(late), late.expected) == (([], [], []), True)
    assert told.registry.sidecars["a"].members == {}


def test_with_other_networks_engines_leave_and_come_back(told: Told) -> None:
    told(model(**AWAKE))
    (changes,) = told.registry.apply(("10.1.0.0/16",), (), 101.0)
    assert changes.leave == ("10.0.0.1:8000",)
    assert len(changes.log) == 2, "its engine, and itself"
    (changes,) = told.registry.apply(ALLOW, (), 102.0)
    assert [member.id for member in changes.join] == ["10.0.0.1:8000"]
    (changes,) = told.registry.apply(ALLOW, {"10.0.0.1:8000"}, 102.0)
    assert changes.leave == ("10.0.0.1:8000",), "it is the policy's now"


def test_there_are_only_so_many(told: Told) -> None:
    for number in range(MOST):
        told(sidecar=f"s{number}")
    with pytest.raises(RegistryFull, match=f"{MOST} sidecars already"):
        told(sidecar="one-more")
    told(sidecar="s0")
    told.registry.clear()
    for number in range(MOST_MODELS // 256):
        told(*(model(f"{index}") for index in range(256)), sidecar=f"s{number}")
    with pytest.raises(RegistryFull, match=f"more than {MOST_MODELS} models"):
        told(*(model(f"{index}") for index in range(256)), sidecar="x")
    told(*(model(f"{index}") for index in range(256)), sidecar="s0")


def test_the_silent_are_forgotten_once_none_of_their_engines_serves(told: Told) -> None:
    told(model(**AWAKE))
    told(sidecar="other", now=100 + FORGOTTEN)
    assert told.registry.forget(100 + FORGOTTEN, lambda id: True).leave == ()
    assert told.registry.forget(99 + FORGOTTEN, lambda id: False).leave == ()
    assert told.registry.forget(100 + FORGOTTEN, lambda id: False).leave == ("10.0.0.1:8000",)
    assert list(told.registry.sidecars) == ["other"]
    assert not told.registry.models.knows("m")


def test_all_leave_where_none_is_wanted(told: Told) -> None:
    told(model(**AWAKE))
    assert told.registry.clear().leave == ("10.0.0.1:8000",)
    assert not told.registry.sidecars


# -- what can be had --------------------------------------------------------------------------------------------------


def soonest(told: Told, now: float = 100.0) -> tuple[str, str, float | None]:
    outlook = told.registry.outlook("m", now)
    assert outlook is not None
    return outlook.sidecar, outlook.profile, outlook.ready_in


def test_nothing_is_foretold_of_what_is_awake_unknown_silent_or_cannot_be_asked(told: Told) -> None:
    registry = told.registry
    assert registry.outlook("m", 100.0) is None
    told(model(**AWAKE))
    assert registry.outlook("m", 100.0) is None
    told(model(**ASLEEP))
    assert registry.outlook("m", 100.0 + STALE) is None
    assert registry.models.knows("m")
    assert told(model(**ASLEEP), control="http://8.8.8.8:1").log
    assert registry.outlook("m", 100.0) is None
    assert registry.cards(100.0) == {}


def test_the_soonest_is_chosen_then_the_least_loaded(told: Told) -> None:
    told(model("slow"), model("fast", **ASLEEP))
    assert soonest(told) == ("a", "fast", 2.0)
    busy = GPUReport(index=0, total=100, used=90, free=10, utilization=0.9)
    told(model("fast", **ASLEEP), gpus=(busy,))
    told(model(state="sleeping", ready_in=2.3), sidecar="b", gpus=(GPUReport(index=0, total=100, used=95, free=5),))
    assert soonest(told)[0] == "b", "as soon, and less busy"
    told(model(state="sleeping", ready_in=2.6), sidecar="b")
    assert soonest(told)[0] == "a"


def test_who_is_asked_is_stayed_with_while_it_can(told: Told) -> None:
    told(model())
    told(model(**ASLEEP), sidecar="b")
    told.registry.waking["m"] = ("a", "p")
    assert soonest(told) == ("a", "p", 30.0)
    told.registry.sidecars["a"].failed(100.0)
    assert soonest(told)[0] == "b"
    told.registry.sidecars["a"].answered(model(ready_in=None), 100.0)
    assert soonest(told)[0] == "b"


def test_what_has_begun_comes_nearer_and_what_has_not_does_not(told: Told) -> None:
    told(model(ready_in=5.0))
    assert soonest(told, 103.0)[2] == 5.0
    for fields in ({"pending": "start"}, {"state": "starting"}, {"state": "sleeping", "pending": "wake"}):
        told(model(**{"ready_in": 5.0} | fields))
        assert soonest(told, 103.0)[2] == 2.0
        assert soonest(told, 106.0)[2] == 0.0


def test_an_answer_moves_the_prediction_until_the_next_report_and_opens_nothing(told: Told) -> None:
    told(model(**ASLEEP))
    sidecar = told.registry.sidecars["a"]
    sidecar.answered(model(state="sleeping", pending="wake", ready_in=4.0), 101.0)
    assert soonest(told, 102.0)[2] == 3.0
    sidecar.answered(model(**AWAKE), 102.0)
    assert soonest(told, 102.0)[2] == 0.0
    assert sidecar.members == {}
    sidecar.answered(model("unknown"), 102.0)
    assert list(sidecar.answers) == ["p"]
    told(model(**ASLEEP), now=103.0)
    assert soonest(told, 103.0)[2] == 2.0


def test_of_those_that_cannot_the_one_that_may_soonest_says_why(told: Told) -> None:
    never = model("never", ready_in=None, why="error", message="it fails")
    told(never, model("later", ready_in=None, why="no_memory", message="full", retry_in=9.0))
    told(model(ready_in=None, why="no_memory", message="fuller", retry_in=20.0), sidecar="b")
    outlook = told.registry.outlook("m", 100.0)
    assert outlook is not None
    assert (outlook.profile, outlook.why, outlook.message, outlook.retry_in) == ("later", "no_memory", "full", 9.0)


def test_where_it_is_off_is_the_last_word_on_a_model(told: Told) -> None:
    told(model("switched", ready_in=None, why="off", message="off", retry_in=1.0))
    told(model("broken", ready_in=None, why="error", message="it fails"), sidecar="b")
    outlook = told.registry.outlook("m", 100.0)
    assert outlook is not None
    assert outlook.why == "error"
    told(sidecar="b")
    outlook = told.registry.outlook("m", 100.0)
    assert outlook is not None
    assert outlook.why == "off"


def test_who_does_not_answer_is_paused_ever_longer(told: Told) -> None:
    told(model(**ASLEEP))
    sidecar = told.registry.sidecars["a"]
    pauses = []
    for _ in range(7):
        sidecar.failed(100.0)
        pauses.append(sidecar.pause(100.0))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert soonest(told)[2] == 12.0
    told(model(**ASLEEP), boot="c")
    assert sidecar.failures == 0


def test_the_models_that_can_be_had(told: Told) -> None:
    other = {"model": "n", "context_length": 50}
    told(model("a", **AWAKE, context_length=10), model("b", context_length=30), model("c", ready_in=None, **other))
    told(model(context_length=20), model("d", **other), sidecar="b")
    cards = told.registry.cards(100.0)
    assert {id: card.max_model_len for id, card in cards.items()} == {"m": 30, "n": 50}
    assert told.registry.cards(100.0 + STALE) == {}
    assert told(model("a", **AWAKE, context_length=10)).expected
    assert not told(model("a", **AWAKE, context_length=10)).expected
    told(model(context_length=10, kv_tokens=9), model("q", kv_tokens=8), sidecar="c")
    assert told.registry.models.kv_tokens("m") == 9
    assert told.registry.models.kv_tokens("n") is None


# -- what sidecars are told -------------------------------------------------------------------------------------------


def demands(
    told: Told,
    name: str = "a",
    now: float = 100.0,
    running: int = 0,
    waiting: int = 0,
    serving: tuple[str, ...] = (),
) -> list[Demand]:
    return list(told.registry.demands(name, now, lambda id: running, lambda model: waiting, lambda model: serving))


def test_what_runs_is_told_of_each_engine_and_what_waits_once_a_model(told: Told) -> None:
    told(model("p", **AWAKE), model("q", **AWAKE | {"url": "http://10.0.0.1:8001"}), model("r"))
    first, second, third = demands(told, running=2, waiting=3)
    assert (first.in_flight, first.waiting, first.withdrawn, first.idle) == (2, 3, False, 0.0)
    assert (second.in_flight, second.waiting, second.withdrawn) == (2, 0, False)
    assert (third.in_flight, third.waiting, third.withdrawn, third.idle) == (0, 0, True, None)


def test_an_engine_that_only_reads_prompts_answers_for_no_model(told: Told) -> None:
    reads = AWAKE | {"transfer": "nixl-tp1", "role": "prefill"}
    (member,) = told(model("p", **reads)).join
    assert (member.transfer, member.role) == ("nixl-tp1@a", "prefill"), "of this machine alone"
    registry = told.registry
    assert (registry.models.knows("m"), registry.cards(100.0), registry.outlook("m", 100.0)) == (False, {}, None)
    told(model("p", **reads), model("q", transfer="nixl-tp1", role="decode"))
    assert registry.cards(100.0).keys() == {"m"}
    outlook = registry.outlook("m", 100.0)
    assert outlook is not None
    assert outlook.profile == "q"
    told(model("p", **reads), model("q", **AWAKE | {"url": "http://10.0.0.1:8001"}))
    assert [demand.waiting for demand in demands(told, waiting=3)] == [0, 3]
    told(model("q", role="prefill", **AWAKE))
    (member,) = registry.sidecars["a"].members.values()
    assert (member.transfer, member.role) == ("", "both"), "no role without an exchange"


def test_what_waits_counts_for_who_is_asked(told: Told) -> None:
    told(model("p", **AWAKE), model("q"))
    told(model("q"), sidecar="b")
    told.registry.waking["m"] = ("b", "q")
    assert [demand.waiting for demand in demands(told, waiting=3)] == [0, 0]
    assert [demand.waiting for demand in demands(told, "b", waiting=3)] == [3]


def test_an_engine_that_is_closed_is_withdrawn_and_what_runs_there_is_told(told: Told) -> None:
    told(model(**AWAKE))
    told(model(**AWAKE | {"pending": "drain"}))
    (demand,) = demands(told, running=1, waiting=4)
    assert (demand.in_flight, demand.waiting, demand.withdrawn) == (1, 0, True)


def test_what_runs_is_told_of_an_engine_that_drains_and_was_never_brought(told: Told) -> None:
    """As after two reloads, the first without sidecars: what ran before them still runs."""
    told(model(**AWAKE | {"pending": "drain"}))
    assert not told.registry.sidecars["a"].members
    (demand,) = demands(told, running=1)
    assert (demand.in_flight, demand.withdrawn) == (1, True)


def test_the_last_use_is_told(told: Told) -> None:
    told(model(**AWAKE), model("q", **ASLEEP))
    told.registry.used("10.0.0.1:8000", 90.0)
    told.registry.used("10.9.9.9:1", 90.0)
    outlook = told.registry.outlook("m", 100.0)
    assert outlook is not None
    told.registry.wanted(outlook, 95.0)
    assert [demand.idle for demand in demands(told)] == [10.0, 5.0]
    demands(told, now=101.0, running=1)
    assert demands(told, now=103.0)[0].idle == 2.0
    told(model(**AWAKE))
    assert list(told.registry.sidecars["a"].used) == ["p"], "of profiles that are gone nothing is kept"


# -- several names of one engine --------------------------------------------------------------------------------------


def test_a_model_of_before_is_recalled_until_a_sidecar_lists_it(told: Told) -> None:
    registry = told.registry
    registry.models.remembered = frozenset({"m", "gpt-4", "gone"})
    assert [name for name in ("m", "gpt-4", "gone", "new") if registry.models.recalls(name)] == ["m", "gpt-4", "gone"]
    told(model(aliases=("gpt-4",)))
    assert [name for name in ("m", "gpt-4", "gone", "new") if registry.models.recalls(name)] == ["gone"]
    assert registry.models.names == {"m", "gpt-4"}


def test_a_model_is_away_whose_sidecar_has_gone_without_a_word(told: Told) -> None:
    registry = told.registry
    registry.models.remembered = frozenset({"m", "gone"})
    told(model(aliases=("gpt-4",)))
    assert not any(map(registry.models.away, ("m", "gpt-4", "gone", "new")))  # what is remembered is awaited
    registry.models.forget_remembered()
    assert [name for name in ("m", "gpt-4", "gone", "new") if registry.models.away(name)] == ["gone"]
    registry.forget(100.0 + FORGOTTEN, lambda _: False)
    assert [name for name in ("m", "gpt-4", "gone", "new") if registry.models.away(name)] == ["m", "gpt-4", "gone"]
    registry.clear()
    assert not registry.models.away("m")
    registry.models.remembered = frozenset(map(str, range(MOST_MODELS + 1)))  # more than there can be
    registry.models.forget_remembered()
    assert not registry.models.away("1")


def test_an_alias_is_another_name_of_a_model_and_no_model(told: Told) -> None:
    told(model(aliases=("gpt-4", "m2")), model("q", model="m2"))
    assert told.registry.models.aliases == {"gpt-4": "m"}, "m2 is a model's own name"
    assert told.registry.models.knows("gpt-4")
    assert told.registry.outlook("gpt-4", 100.0) is None
    assert list(told.registry.cards(100.0)) == ["m", "m2"]
    told(model("r", model="other", aliases=("gpt-4",)), sidecar="b")
    assert told.registry.models.aliases == {"gpt-4": "m"}, "the first has it"
    told(model(aliases=()))
    assert told.registry.models.aliases == {"gpt-4": "other"}
    assert not told.registry.models.knows("m2")


def test_adapters_are_models_that_the_same_engine_serves(told: Told) -> None:
    asleep = model(adapters=("sql",), **ASLEEP)
    assert told(asleep).expected
    cards = told.registry.cards(100.0)
    assert [(card.id, card.parent) for card in cards.values()] == [("m", None), ("sql", "m")]
    outlook = told.registry.outlook("sql", 100.0)
    assert outlook is not None
    told.registry.waking["sql"] = ("a", "p")
    assert told.registry.outlook("sql", 100.0) == outlook
    changes = told(model(adapters=("sql",), **AWAKE))
    assert [member.served for member in changes.join] == [("m", "sql")]
    assert told(model(adapters=(), **AWAKE)).update[0].served == ("m",)
    assert told.registry.outlook("sql", 100.0) is None
    assert not told.registry.models.knows("sql")


def test_calls_that_wait_for_an_adapter_are_demand_for_its_engine(told: Told) -> None:
    told(model(adapters=("sql",), **AWAKE), model("q", adapters=("sql",), **AWAKE | {"url": "http://10.0.0.1:8001"}))
    waiting = {"m": 2, "sql": 3}.__getitem__

    def demands() -> list[int]:
        return [each.waiting for each in told.registry.demands("a", 100.0, lambda _: 0, waiting, lambda _: ())]

    assert demands() == [5, 0], "once, however many engines serve it"
    told.registry.waking["sql"] = ("a", "q")
    assert demands() == [2, 3]


def test_one_that_has_not_answered_for_hours_is_asked_as_rarely_as_before(told: Told) -> None:
    told(model())
    sidecar = told.registry.sidecars["a"]
    for _ in range(2000):
        sidecar.failed(100.0)
    assert (sidecar.failures, sidecar.pause(100.0)) == (2000, LAST_PAUSE)
