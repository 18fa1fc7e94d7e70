"""Election and fencing of one member, case by case."""

from __future__ import annotations

import copy

import pytest

from gateway.core.cluster.election import MARGIN, NEWCOMER_WAITS, RENEW, TTL, Election, Leader, StoreView, Turn
from loadtest.lab.dst.relays.cluster_store import SimulatedStore

HOUR = 3600.0
STANDS_BY = Turn(number=1, known=4, candidacy=0, term=0)


def turned(store: SimulatedStore, member: Election, now: float, *, clock: float = 0.0, took: float = 0.0) -> None:
    """A turn that is answered `took` seconds later. `clock`: the store's, beside the member's."""
    turn = member.turn(now)
    member.answered(now, now + took, turn, store.turn(member.name, turn, now + clock))


def micros(clock: float) -> int:
    """The lowest epoch of an election at this time of the store's clock."""
    return round(clock * 1e6)


def leading(*others: str) -> tuple[SimulatedStore, Election]:
    """A leader `a` in epoch 5 that all have told, over a store that is not new, at 0 s."""
    store, a = SimulatedStore(), Election("a")
    store.epoch = 4
    for each in others:
        store.turn(each, STANDS_BY, 0.0)
    turned(store, a, 0.0)
    for each in ("a", *others):
        a.synced(each)
    turned(store, a, 0.0)
    return store, a


def test_the_first_of_a_new_store_waits_as_long_as_a_forgotten_lease_could_last() -> None:
    store, a = SimulatedStore(), Election("a")
    for now in (10.0, 11.0, 12.0):
        turned(store, a, now, clock=HOUR)
        a.synced("a")
        assert a.term == micros(10.0 + HOUR)
        assert not a.may_grant(now)
    turned(store, a, 13.0, clock=HOUR)
    assert a.may_grant(13.0)


def test_a_leader_grants_until_its_lease_which_began_when_it_asked() -> None:
    store, a = leading()
    assert a.term == 5
    assert a.may_grant(TTL - MARGIN - 0.01)
    assert not a.may_grant(TTL - MARGIN)
    turned(store, a, 1.0, took=0.4)
    assert a.lease_until(0.7) == 1.0 + TTL - MARGIN
    assert a.voters == frozenset()


def test_a_leader_waits_for_what_members_hold_and_not_for_those_that_are_gone() -> None:
    store, b = SimulatedStore(), Election("b")
    store.epoch = 4
    for each in ("c", "d"):
        store.turn(each, STANDS_BY, 0.0)
    turned(store, b, 0.1)
    assert b.awaited == {"b", "c", "d"}
    b.synced("b")
    b.synced("c")
    assert not b.may_grant(0.2)
    turned(store, b, TTL + 0.05)  # c and d are past their time
    assert b.awaited == set()
    assert b.may_grant(TTL + 0.1)


def test_another_is_elected_once_the_store_forgets_the_leader_and_the_old_one_hears_of_it() -> None:
    store, a = leading("b")
    b = Election("b")
    turned(store, b, 1.0)
    assert b.leader == Leader("a", 5)
    assert b.since == 1.0
    turned(store, b, TTL - 0.01)
    assert not b.term
    turned(store, b, TTL)
    assert b.term == micros(TTL)
    assert not a.may_grant(TTL)
    turned(store, a, TTL + 0.1)
    assert a.term == 0
    assert a.leader == Leader("b", micros(TTL))
    assert a.turn(3.0).term == 0


def test_a_process_that_is_started_again_does_not_go_on_with_the_term_of_the_last() -> None:
    store, _ = leading()
    again = Election("a")
    turned(store, again, 0.5)
    assert again.term == micros(0.5)
    assert again.awaited == {"a"}


def test_without_the_store_a_leader_goes_on_with_the_votes_of_all_who_could_be_elected() -> None:
    store, a = leading("b", "c")
    b, c = Election("b"), Election("c")
    for each in (b, c):
        turned(store, each, 0.1)
        each.failed()
    a.failed()
    assert a.voters == {"b", "c"}
    assert b.vote(Leader("a", 5), 0.7)
    a.record_vote("b", 5, 0.65)
    assert a.lease_until(0.7) == TTL - MARGIN  # c has not spoken
    assert c.vote(Leader("a", 5), 0.7)
    a.record_vote("c", 5, 0.68)
    assert a.lease_until(0.7) == 0.65 + TTL - MARGIN
    a.record_vote("c", 5, 1.0)
    a.record_vote("b", 4, 1.0)  # of another term
    a.record_vote("x", 5, 1.0)  # nobody asked for it
    assert a.lease_until(0.7) == 0.65 + TTL - MARGIN
    assert b.turn(0.7 + TTL - 0.01).candidacy == 0
    assert b.turn(0.7 + TTL).candidacy == 1


def test_a_leader_that_knows_no_other_member_has_nobody_s_vote_without_the_store() -> None:
    """Whoever began meanwhile on the store's side may have been elected, where the store was emptied."""
    _, a = leading()
    a.failed()
    assert a.lease_until(0.7) == TTL - MARGIN


def test_a_member_gives_no_vote_that_it_may_not_keep() -> None:
    store, a = leading("b")
    b = Election("b")
    assert not b.vote(Leader("a", 5), 0.0)  # it has the store, as far as it knows
    turned(store, b, 0.1)
    b.failed()
    assert not b.vote(Leader("a", 4), 0.7)  # an old term
    assert not b.vote(Leader("c", 6), 0.7)  # it obeys another
    assert b.vote(Leader("a", 5), 0.7)
    assert b.leader == Leader("a", 5)
    a.failed()
    assert not a.vote(Leader("b", 6), 0.7)  # it leads


def test_who_votes_knows_the_leader() -> None:
    """The store had forgotten the leader when it answered this member last."""
    store, _ = leading("b")
    b = Election("b")
    turned(store, b, 0.1)
    turned(store, b, TTL - 0.05)
    store.clear()
    turned(store, b, TTL)
    turned(store, b, 2 * TTL)
    assert b.leader is None
    b.failed()
    assert b.vote(Leader("a", 5), 2 * TTL + 0.6)
    assert b.leader == Leader("a", 5)


def test_an_answer_takes_back_the_votes_that_were_given_before_it() -> None:
    store, a = leading("b")
    a.failed()
    a.record_vote("b", 5, 0.5)
    turned(store, a, 0.6)
    a.failed()
    assert a.lease_until(0.7) == 0.6 + TTL - MARGIN


def test_a_leader_that_could_not_renew_goes_on_in_its_term_where_nobody_was_elected() -> None:
    store, a = leading("b")
    a.failed()
    assert not a.may_grant(3.0)
    turned(store, a, 3.0)
    assert not a.may_grant(3.0)
    turned(store, a, 3.1)
    assert a.term == 5
    assert a.may_grant(3.1)


def test_a_leader_whose_turns_all_come_too_late_gives_way() -> None:
    store, a = leading("b")
    b = Election("b")
    turned(store, a, 0.0)  # it knows b
    turned(store, b, 0.1)
    for number in range(8):  # each is carried out, and answered when nobody waits any more
        now = 0.5 + number * (RENEW + 0.4)
        store.turn("a", a.turn(now), now + 0.4)
        a.failed()
        turned(store, b, now + 0.4)
    assert b.term > 5
    assert not a.may_grant(now)
    turned(store, a, now + 0.9)
    assert a.leader == Leader("b", b.term)


def test_a_store_that_was_emptied_costs_a_leader_nothing() -> None:
    store, a = leading("b")
    b = Election("b")
    turned(store, b, 0.2)
    store.clear()
    turned(store, b, 0.7)  # before the leader's next turn
    assert b.leader == Leader("a", 5), "the leader may have a lease"
    turned(store, a, 1.0)
    assert a.blind(1.0), "not every member has been there since"
    turned(store, b, 1.2)
    assert a.may_grant(1.2)
    assert b.leader == Leader("a", 5)
    assert b.roster == {"a", "b"}


def test_a_store_that_was_emptied_and_has_no_leader_for_long_is_believed() -> None:
    store, _ = leading("b")
    b = Election("b")
    turned(store, b, 0.2)
    store.clear()
    turned(store, b, 0.7)
    turned(store, b, 0.7 + TTL - 0.01)
    assert b.leader == Leader("a", 5)
    turned(store, b, 0.7 + TTL)
    assert b.leader is None


def test_a_member_that_has_not_heard_the_store_for_long_is_not_present() -> None:
    store, _ = leading("b")
    b = Election("b")
    turned(store, b, 0.2)
    b.failed()
    assert b.turn(0.2 + TTL).present
    assert not b.turn(0.3 + TTL).present
    turned(store, b, 0.4 + 2 * TTL)
    assert "b" not in b.members
    assert "b" in b.roster
    turned(store, b, 0.5 + 2 * TTL)
    assert "b" in b.members


def test_where_a_store_was_emptied_another_leader_is_patient() -> None:
    store, _ = leading("b")
    b = Election("b")
    turned(store, b, 0.2)
    store.clear()
    turned(store, b, 0.7)
    turned(store, b, 0.2 + NEWCOMER_WAITS)
    turned(store, b, 0.7 + NEWCOMER_WAITS)
    assert b.term == micros(0.7 + NEWCOMER_WAITS)
    assert b.awaited == {"a", "b"}
    for late in (0.5, 1.0, 1.5, 2.0):
        turned(store, b, 0.7 + NEWCOMER_WAITS + late)
        b.synced("b")
        assert not b.may_grant(0.7 + NEWCOMER_WAITS + late)
    turned(store, b, 0.7 + NEWCOMER_WAITS + 2.5)
    assert b.may_grant(0.7 + NEWCOMER_WAITS + 2.5)


def test_who_is_elected_as_the_store_is_back_waits_for_members_that_it_does_not_name_yet() -> None:
    """The keys of members ran out while nobody reached it, and their calls go on."""
    store, _ = leading("b", "c")
    b = Election("b")
    turned(store, b, 0.2)
    b.failed()
    back = 4.0
    turned(store, b, back - 0.5)  # its first turn tells it the store's clock
    turned(store, b, back)
    assert b.term == micros(back)
    assert b.members < {"a", "b", "c"}
    assert b.awaited == {"a", "b", "c"}
    for late in (0.5, 1.0, 1.5, 2.0):
        turned(store, b, back + late)
        b.synced("b")
        assert not b.may_grant(back + late)
    turned(store, b, back + 2.5)
    assert b.may_grant(back + 2.5)


def test_an_election_that_comes_after_the_vote_for_another_is_not_accepted() -> None:
    store, _ = leading("b")
    b = Election("b")
    turned(store, b, 0.7)
    b.failed()
    turn = b.turn(TTL)
    view = store.turn("b", turn, TTL)
    assert view.leader == Leader("b", micros(TTL))
    assert b.vote(Leader("a", 5), TTL + 0.1)
    b.answered(TTL, TTL + 0.2, turn, view)
    assert b.term == 0


def test_who_comes_back_to_an_emptied_store_after_its_lease_waits_too() -> None:
    store, a = leading()
    store.clear()
    turned(store, a, 5.0)
    assert not a.term, "another may have led meanwhile, whom the store has forgotten too"
    turned(store, a, 5.5)
    assert a.term == micros(5.5)
    assert not a.may_grant(5.5)


def test_a_leader_without_a_lease_is_elected_anew_by_a_store_that_was_emptied() -> None:
    """Another may have led meanwhile, whom the store has forgotten too."""
    store, a = leading("b")
    a.failed()
    store.clear()
    turned(store, a, 3.0)
    assert a.leader is None
    turned(store, a, 3.5)
    assert a.term == micros(3.5)
    assert not a.may_grant(3.5)


@pytest.mark.parametrize("waited", [NEWCOMER_WAITS - 0.1, NEWCOMER_WAITS])
def test_a_newcomer_that_no_leader_knew_waits_longer(waited: float) -> None:
    store, _ = leading("b")
    new = Election("n")
    for now in (TTL, TTL + waited - RENEW, TTL + waited):
        turned(store, new, now)
    assert bool(new.term) == (waited >= NEWCOMER_WAITS)


def test_a_replica_that_has_lost_the_leaders_last_turns_elects_nobody_before_its_time_is_over() -> None:
    store, a = leading("b")
    b = Election("b", 4)
    turned(store, b, 0.1)
    replica = copy.deepcopy(store)
    turned(store, a, 1.9)
    turned(store, b, 2.1)
    turned(replica, b, 2.3)
    b.synced("b")
    turned(replica, b, 2.35)
    assert (b.may_grant(2.36), a.may_grant(2.36)) == (False, True), "by the replica the leader's time is over"
    turned(replica, a, 2.4)
    turned(replica, b, 2.5)
    assert (a.term, b.leader) == (5, Leader("a", 5))
    turned(replica, b, 3.8)
    turned(replica, b, 2.4 + TTL + 0.1)
    assert b.term > 5, "it is over"


def test_who_resigns_leads_no_longer_and_is_not_elected() -> None:
    store, a = leading()
    turn = a.turn(0.5)
    a.resign(0.6)
    assert not a.may_grant(0.6)
    a.answered(0.5, 0.7, turn, store.turn("a", turn, 0.5))
    turned(store, a, 5.0)
    assert a.term == 0


def test_the_first_of_a_new_cluster_need_not_wait_for_votes_of_its_last_life() -> None:
    store, a = SimulatedStore(), Election("a", voted_until=2.0)
    turned(store, a, 0.0)
    turned(store, a, 0.5)
    assert a.term == micros(0.5)


def test_a_lower_epoch_than_was_met_is_not_obeyed() -> None:
    store, a = leading()
    a.observe(5, 0.1)
    assert a.may_grant(0.1)
    a.observe(9, 0.2)
    assert a.term == 0
    turned(store, a, 0.3)
    assert a.term == micros(0.3)
    b = Election("b", known=9)
    view = StoreView(leader=Leader("c", 5), members=frozenset({"b"}), roster=frozenset(), clock=0.0)
    b.answered(0.0, 0.1, b.turn(0.0), view)
    assert b.leader is None


def test_an_answer_that_comes_after_the_term_is_over_revives_nothing() -> None:
    store, a = leading("b")
    turn = a.turn(0.5)
    view = store.turn("a", turn, 0.5)
    a.observe(6, 0.6)
    a.answered(0.5, 0.7, turn, view)
    assert a.term == 0


def test_who_leaves_is_asked_for_nothing_and_need_not_be_waited_for() -> None:
    store, a = leading("b")
    b = Election("b")
    turned(store, b, 0.1)
    store.leave("a")
    turned(store, b, 0.1 + RENEW)
    assert b.term == micros(0.1 + RENEW)
    assert b.awaited == {"b"}
    assert a.may_grant(0.6)  # it says so only once it has stopped
    store.leave("b")
    c = frozenset({"c"})
    assert store.turn("c", STANDS_BY, 1.0) == StoreView(leader=None, members=c, roster=c, clock=1.0)


def test_a_turn_that_lay_in_a_stopped_store_elects_nobody() -> None:
    """The leader goes on by its votes; the store, when it goes on, finds its time over, and this turn first."""
    store, a = leading("b")
    b = Election("b")
    turned(store, b, 0.1)
    lay = b.turn(0.1 + RENEW)
    a.failed()
    b.failed()
    assert store.turn("b", lay, 9.0).leader is None
    turned(store, a, 9.1)
    assert a.term == 5
    # A store whose leader is gone elects by the turn after.
    turned(store, b, 19.0)
    assert not b.term
    turned(store, b, 19.0 + RENEW)
    assert b.term == micros(19.0 + RENEW)


def test_an_emptied_store_elects_in_no_epoch_that_has_been() -> None:
    """Whoever is elected has met nobody: the leader that the store has forgotten may hold on to a lease."""
    store, epochs = SimulatedStore(), []
    for now in (1.0, 2.0, 3.0):
        for started in (now, now + 0.1):  # the second in a store that knows the first
            newcomer = Election("a")
            turned(store, newcomer, started)
            epochs.append(newcomer.term)
        store.clear()
    assert epochs == sorted(set(epochs))


def test_a_store_whose_clock_is_behind_goes_on_from_the_highest_epoch_that_is_known() -> None:
    store, a = SimulatedStore(), Election("a", known=micros(HOUR))
    store.epoch = micros(HOUR)
    turned(store, a, 0.0)
    assert a.term == micros(HOUR) + 1
