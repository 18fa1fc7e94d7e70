"""Script of the store: on a real Valkey it does what the store of the simulations does."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.core.cluster.election import Turn
from gateway.serve.cluster import store as store_module
from gateway.serve.cluster.store import ClusterConflict, MemberRecord, Store, StoreError, opened
from loadtest.lab.dst.relays import cluster_store as simulated
from loadtest.lab.dst.relays.cluster_store import SimulatedStore
from loadtest.processes import free_port
from tests.cluster.valkey import Valkey
from tests.programs import VALKEY, required

pytestmark = pytest.mark.slow
NAMES = ("a:1", "b:1", "c:1")
TOO_OLD = 600.0  # seconds since an answer, of a turn that elects nobody


def of(url: str, me: str, cluster: str = "prod", life: str = "1", fingerprint: str = "t") -> Store:
    return Store(opened(url, None), cluster, me, MemberRecord(life, 2), fingerprint.split())


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is late and no turn has run out while a test lasts, however slow the machine is."""
    monkeypatch.setattr(store_module, "WITHIN", 60.0)
    for each in (store_module, simulated):
        monkeypatch.setattr(each, "TTL", 3600.0)
        monkeypatch.setattr(each, "STALE", TOO_OLD / 2)


@pytest.fixture
def valkey(tmp_path: Path):  # type: ignore[no-untyped-def]
    required(VALKEY)
    with Valkey(tmp_path / "valkey.log", free_port()) as server:
        yield server


def test_it_answers_as_the_simulated_store(valkey: Valkey) -> None:
    """Turns at random, within one TTL. The leader's key and the whole store go away at random."""

    async def main() -> None:
        for seed in range(60):
            rng, model, cluster = random.Random(seed), SimulatedStore(), f"c{seed}"
            stores = {name: of(valkey.url, name, cluster) for name in NAMES}
            redis = stores["a:1"]._redis
            terms = dict.fromkeys(NAMES, 0)
            known = dict.fromkeys(NAMES, 0)
            highest, now = 0, 0.0  # epoch, seconds
            for number in range(1, 20):
                name = rng.choice(NAMES)
                what = rng.randrange(12)
                if what == 0:
                    model.clear()
                    keys = await redis.keys(f"weir:{{{cluster}}}:*")
                    if keys:
                        await redis.delete(*keys)
                elif what == 1:
                    model._leader = None
                    await redis.delete(f"weir:{{{cluster}}}:leader")
                elif what == 2:
                    model.leave(name)
                    await stores[name].leave(terms[name])
                turn = Turn(
                    number=number,
                    known=known[name],
                    candidacy=0 if terms[name] else rng.choice((0, 1, 1, 2)),
                    term=terms[name],
                    seen=frozenset(rng.sample(NAMES, rng.randrange(3))) - {name},
                    waits=not rng.randrange(4),
                )
                age = rng.choice((None, 0.2, 0.2, TOO_OLD))  # seconds since the answer before
                if age is not None:
                    seconds, micros = await redis.time()
                    turn = replace(turn, after=seconds + micros / 1e6 - age)
                view, records = await stores[name].turn(turn)
                epoch = 0 if view.leader is None else view.leader.epoch
                now = max(now, epoch / 1e6 if epoch > highest else view.clock)  # an election tells the microsecond
                highest = max(highest, epoch)
                told = model.turn(name, turn, now)
                assert (view.left > 0.0) == (told.left > 0.0)
                assert view == replace(told, clock=view.clock, left=view.left), (seed, turn, age)
                assert records == dict.fromkeys(view.members, MemberRecord("1", 2))
                if view.leader is not None:
                    known[name] = max(known[name], view.leader.epoch)
                    terms[name] = view.leader.epoch if view.leader.name == name else 0
            for store in stores.values():
                await store.aclose()

    asyncio.run(main())


def test_a_store_that_is_emptied_gives_no_epoch_that_was_given_before(valkey: Valkey) -> None:
    """Whoever is elected has met no epoch; as fast as a client can ask for it."""

    async def main() -> None:
        rng, epochs = random.Random(1), []
        stores = [of(valkey.url, name) for name in NAMES]
        for _ in range(300):
            match rng.randrange(3):
                case 0:
                    await stores[0]._redis.flushall()
                case 1:
                    await stores[0]._redis.delete("weir:{prod}:leader")
            store = rng.choice(stores)
            view, _ = await store.turn(Turn(number=1, known=0, candidacy=2, term=0))
            assert view.leader is not None
            if view.leader.name == store._me:  # else another leads
                epochs.append(view.leader.epoch)
        assert len(epochs) > 200
        assert epochs == sorted(set(epochs))
        for store in stores:
            await store.aclose()

    asyncio.run(main())


def test_two_clusters_of_one_name_and_two_members_of_one_address_are_told(valkey: Valkey) -> None:
    async def main() -> None:
        turn = Turn(number=1, known=0, candidacy=1, term=0)
        first = of(valkey.url, "a:1")
        await first.turn(turn)
        other, twin = of(valkey.url, "b:1", fingerprint="u"), of(valkey.url, "a:1", life="2")
        with pytest.raises(StoreError, match="another cluster named 'prod' is in this store"):
            await other.turn(turn)
        with pytest.raises(ClusterConflict, match="another gateway is the member a:1"):
            await twin.turn(turn)
        view, _ = await first.turn(turn)
        assert view.members == {"a:1"}
        for each in (first, other, twin):
            await each.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("record", ['{"life":"2","relays":1}', "no record"])
def test_a_leader_whose_record_a_stranger_has_written_goes_on_and_leaves(valkey: Valkey, record: str) -> None:
    async def main() -> None:
        leader = of(valkey.url, "a:1")
        elected, _ = await leader.turn(Turn(number=1, known=0, candidacy=2, term=0))
        assert elected.leader is not None
        epoch = elected.leader.epoch
        await leader._redis.set("weir:{prod}:member:a:1", record)
        with pytest.raises((ClusterConflict, StoreError)):
            await leader.turn(Turn(number=2, known=epoch, candidacy=0, term=epoch - 1))
        view, records = await leader.turn(Turn(number=3, known=epoch, candidacy=0, term=epoch))
        assert (view.leader, records) == (elected.leader, {"a:1": leader.record})
        await leader._redis.set("weir:{prod}:member:a:1", record)
        with contextlib.suppress(StoreError):
            await leader.leave(epoch - 1)
        assert await leader._redis.exists("weir:{prod}:leader")
        await leader.leave(epoch)
        assert not await leader._redis.exists("weir:{prod}:leader", "weir:{prod}:member:a:1", "weir:{prod}:roster")
        await leader.aclose()

    asyncio.run(main())


def test_who_resigns_is_followed_at_once_and_is_a_member_still(valkey: Valkey) -> None:
    """Whoever is elected then waits for what its relays hold."""

    async def main() -> None:
        a, b = of(valkey.url, "a:1"), of(valkey.url, "b:1")
        view, _ = await a.turn(Turn(number=1, known=0, candidacy=1, term=0))
        first = view.leader
        assert first is not None
        await b.turn(Turn(number=1, known=1, candidacy=0, term=0))
        await b.resign()  # it does not lead
        view, _ = await a.turn(Turn(number=2, known=1, candidacy=0, term=first.epoch, seen=frozenset({"b:1"})))
        assert view.leader == first
        await a.resign()
        view, _ = await b.turn(Turn(number=2, known=1, candidacy=1, term=0))
        assert view.leader is not None
        assert (view.leader.name, view.members) == ("b:1", {"a:1", "b:1"})
        assert view.leader.epoch > first.epoch
        for each in (a, b):
            await each.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"),
        (b"*1\r\n$2\r\nok\r\n", "what no store of a cluster does"),
        (b"*5\r\n$2\r\nok\r\n$1\r\nx\r\n$1\r\ny\r\n:0\r\n*0\r\n", "what no store of a cluster does"),
        (b"$3\r\n\xff\xfe\xfd\r\n", "what no store of a cluster does"),
        (b"-NOSCRIPT no\r\n", "no"),
        (b"", "no answer within"),
    ],
)
def test_nonsense_is_an_error_and_no_more(answer: bytes, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not answer:
        monkeypatch.setattr(store_module, "WITHIN", 0.4)

    async def main() -> None:
        async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                # The client's own commands at the start of a connection are answered as a Valkey does.
                writer.write(b"+OK\r\n" * data.count(b"CLIENT") if b"EVAL" not in data else answer)
            writer.close()

        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        store = of(f"valkey://127.0.0.1:{port}/0", "a:1")
        with pytest.raises(StoreError, match=told):
            await store.turn(Turn(number=1, known=0, candidacy=1, term=0))
        await store.aclose()
        server.close()
        await asyncio.sleep(0.01)  # for the server's side to see it

    asyncio.run(main())
