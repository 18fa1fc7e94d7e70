"""Store of a cluster: a Valkey (7.2 or later) or Redis (7 or later) that knows its members and their leader.

A turn is one script (`turn.lua` beside this file), hence one step. Keys of the cluster NAME begin with `weir:{NAME}:`.
`member:*` and `leader` live for TTL; `roster`, `term` and `token` stay. An epoch is one more than the highest that is
known, and at least the microseconds from 1970 to its election: so a store that has forgotten all gives none that was
given before.
`loadtest/lab/dst/relays/cluster_store.py` is the same in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateway.core.cluster.election import FORGOTTEN, STALE, TTL, Leader, StoreView, Turn
from gateway.decider.relays.elsewhere import process_of, relay_number, relay_of
from gateway.shared.addresses import EVERY_INTERFACE, is_loopback, split_address
from gateway.shared.protocol import MAX_MEMBERS, ClusterMember

if TYPE_CHECKING:
    from redis.asyncio import Redis

WITHIN = 0.4  # seconds for an answer
STATE_WITHIN = 1.0  # seconds for that to a checkpoint's, which a new decider waits for
KEPT = 3600.0  # seconds that a checkpoint is kept
MONEY_KEPT = 62 * 86_400.0  # seconds that money is: longer than a month


def _script(name: str) -> str:
    """The text of a script, which Valkey carries out as one step."""
    return Path(__file__).with_name(f"{name}.lua").read_text(encoding="utf-8")


TURN = _script("turn")
RESIGN = _script("resign")
LEAVE = _script("leave")
SAVE = _script("save")
LOAD_MONEY = "return {redis.call('GET', KEYS[1] .. 'money') or '', redis.call('HEXISTS', KEYS[1] .. 'term', 'lost')}"
LOAD = _script("load")
NO_REDIS = "cluster: the Python package redis is not installed: pip install 'WEIR.whl[cluster]'"


class MemberRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Record of a member in the store, for members of other versions too. `life`: of its machine's gateway, drawn at
    its start; `relays`: their number. `control`: URL of its control port, for sidecars; empty where they cannot reach
    it from other machines. `numbers`: of its relays, those of a gateway that it has taken over too; None: 1 to
    `relays`.
    """

    life: str
    relays: int
    control: Annotated[str, Meta(max_length=300)] = ""
    numbers: tuple[int, ...] | None = None

    def has(self, relay: int) -> bool:
        """Whether it has a relay of this number, or may have: those that are new have the highest."""
        return self.numbers is None or relay in self.numbers or relay > max(self.numbers, default=relay)

    @property
    def there(self) -> Sequence[int]:
        """The numbers of its relays."""
        return range(1, self.relays + 1) if self.numbers is None else self.numbers


class StoreError(Exception):
    """The store has not answered as it should; the message says how."""


class OtherCluster(StoreError):
    """The store has another token than this cluster's."""


class ClusterConflict(Exception):
    """Another gateway is this member."""


class Store:
    """The keys of one `cluster`, as its member `me` uses them. `record` may change at any time. `fingerprints`:
    of its tokens."""

    def __init__(self, redis: Redis, cluster: str, me: str, record: MemberRecord, fingerprints: Sequence[str]) -> None:
        self._redis = redis
        self._prefix = f"weir:{{{cluster}}}:"
        self._cluster = cluster
        self._me = me
        self.record = record
        self.fingerprints = fingerprints

    async def turn(self, turn: Turn) -> tuple[StoreView, dict[str, MemberRecord]]:
        """Carry out a turn. Raises StoreError, and ClusterConflict."""
        record = msgspec.json.encode(self.record).decode()
        arguments = (
            self._me, self.record.life, record, int(TTL * 1000), int(FORGOTTEN * 1000), turn.known,
            turn.candidacy, turn.term, turn.number, " ".join(sorted(turn.seen)), " ".join(self.fingerprints),
            int(turn.present), "" if turn.after is None else round(turn.after * 1000), int(STALE * 1000),
            int(turn.waits),
        )  # fmt: skip
        answer = await self._asked(TURN, *arguments)
        if answer == ["token"]:
            # Or a stranger's text is in the key: a leader that steps down would be followed by nobody for a while.
            raise OtherCluster(
                f"another cluster named {self._cluster!r} is in this store: its members have another token. Give this "
                "one another cluster.name, or all members the same cluster.token_file"
            )
        if answer == ["taken"]:
            raise ClusterConflict(f"another gateway is the member {self._me}: cluster.advertise must be each one's own")
        try:
            _, leader, epoch, emptied, clock, members, left = msgspec.convert(
                answer, tuple[str, str, int, int, int, list[tuple[str, str]], int]
            )
            records = {name: msgspec.json.decode(text, type=MemberRecord) for name, text in members if text}
        except ValueError as error:
            raise StoreError(f"it answers what no store of a cluster does: {error}") from error
        view = StoreView(
            leader=Leader(leader, epoch) if leader else None,
            members=frozenset(records),
            roster=frozenset([name for name, _ in members]),
            clock=clock / 1000,
            left=left / 1000 if leader else 0.0,
            emptied=bool(emptied),
        )
        return view, records

    async def resign(self) -> None:
        """Lead no longer, and stay a member, which reports to the next leader what its relays hold. Raises
        StoreError."""
        await self._asked(RESIGN, self._me)

    async def leave(self, term: int) -> None:
        """Leave the cluster in good order. `term`: as in Turn. Raises StoreError."""
        await self._asked(LEAVE, self._me, self.record.life, term)

    async def _asked(self, script: str, *arguments: Any) -> Any:
        return _text(await command(self._redis, WITHIN, "EVAL", script, 1, self._prefix, *arguments))

    async def aclose(self) -> None:
        await self._redis.aclose()


class CheckpointStore:
    """The checkpoint of the decider that leads `cluster`. A client of its own, so that no turn waits for large answers,
    or loses its connection with them."""

    def __init__(self, redis: Redis, cluster: str, me: str) -> None:
        self._redis = redis
        self._prefix = f"weir:{{{cluster}}}:"
        self._me = me

    async def save(self, checkpoint: bytes, epoch: int, money: bytes = b"") -> bool:
        """Keep it, with the money if there is any, if this member leads in this epoch. Return whether it does. Raises
        StoreError."""
        lives = int(KEPT * 1000), money, int(MONEY_KEPT * 1000)
        return bool(await self._asked(SAVE, f"{epoch} {self._me}", checkpoint, *lives) == 1)

    async def load_money(self) -> tuple[bytes, bool]:
        """Return the money that was kept last (empty: none was), and whether the store was emptied or set back since.
        Raises StoreError."""
        try:
            money, lost = msgspec.convert(await self._asked(LOAD_MONEY), tuple[bytes, int])
        except msgspec.ValidationError as error:
            raise StoreError(f"it answers what no store of a cluster does: {error}") from error
        return money, bool(lost)

    async def load(self) -> tuple[bytes, float]:
        """Return the last checkpoint, and its age in seconds by the store's clock; empty: there is none. Raises
        StoreError."""
        found = await self._asked(LOAD)
        try:
            state, left = msgspec.convert(found, tuple[bytes, int])
        except msgspec.ValidationError:
            return b"", 0.0
        return state, max(0.0, KEPT - left / 1000)

    async def _asked(self, script: str, *arguments: Any) -> Any:
        return await command(self._redis, STATE_WITHIN, "EVAL", script, 1, self._prefix, *arguments)

    async def aclose(self) -> None:
        await self._redis.aclose()


async def command(redis: Redis, within: float, *words: Any) -> Any:
    """The store's answer. Raises StoreError."""
    from redis.exceptions import RedisError  # noqa: PLC0415 # redis is an extra

    try:
        async with asyncio.timeout(within):
            return await redis.execute_command(*words)  # type: ignore[no-untyped-call] # redis leaves it so
    except TimeoutError:
        why = StoreError(f"no answer within {within:g} s")
    except (RedisError, OSError, ValueError, RuntimeError) as error:  # uvloop's, for a transport that was closed
        why = StoreError(str(error) or type(error).__name__)
    with contextlib.suppress(RedisError, OSError, RuntimeError):
        await redis.connection_pool.disconnect()
    raise why


def _text(answer: Any) -> Any:
    """Strings in place of bytes. Raises StoreError."""
    try:
        if isinstance(answer, list):
            return [_text(each) for each in answer]
        return answer.decode() if isinstance(answer, bytes) else answer
    except UnicodeDecodeError as error:
        raise StoreError(f"it answers what no store of a cluster does: {error}") from error


def opened(url: str, password: str | None) -> Redis:
    """A client of the store at `url`: nothing is tried again, one connection at most. Raises ValueError where redis is
    not installed."""
    try:
        from redis.asyncio import Redis as Client  # noqa: PLC0415 # it is an extra
        from redis.asyncio.retry import Retry  # noqa: PLC0415 # the same
        from redis.backoff import NoBackoff  # noqa: PLC0415 # the same
    except ModuleNotFoundError as error:
        raise ValueError(NO_REDIS) from error
    plain = "redis" + url.removeprefix("valkey").removeprefix("redis")
    client: Redis = Client.from_url(
        plain, password=password, protocol=2, decode_responses=False, max_connections=4,
        socket_connect_timeout=WITHIN, socket_timeout=WITHIN, retry=Retry(NoBackoff(), 0),
    )  # fmt: skip
    return client


def control_url(control: socket.socket, advertise: str, *, secure: bool) -> str:
    """The URL of a member's control port. Empty where other machines cannot reach it: a unix socket, and loopback where
    the member advertises another address."""
    if control.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host, port = control.getsockname()[:2]
    own = f"[{host}]" if ":" in host else host
    advertised, _ = split_address(advertise)
    if own in EVERY_INTERFACE:
        own = f"[{advertised}]" if ":" in advertised else advertised
    elif is_loopback(own) and not is_loopback(advertised):
        return ""
    return f"{'https' if secure else 'http'}://{own}:{port}"


def members_of(records: Mapping[str, MemberRecord]) -> tuple[ClusterMember, ...]:
    """Members that sidecars can report to, by what the store has of them; what is no address is left out."""
    found = []
    for name, record in sorted(records.items()):
        try:
            found.append(msgspec.convert({"name": name, "control": record.control}, ClusterMember))
        except msgspec.ValidationError:
            continue
    return tuple(found[:MAX_MEMBERS])


class Machines:
    """Machines of a cluster, as its leader tells their relays apart: by a place for each. `records` gives what the
    store has of the members that are there."""

    def __init__(self, records: Callable[[], Mapping[str, MemberRecord]]) -> None:
        self._records = records
        self._places: dict[tuple[str, str], int] = {}  # by name and life

    def place(self, name: str, life: str) -> int:
        """The number of a machine's place among the others."""
        return self._places.setdefault((name, life), len(self._places) + 1)

    def relays_of(self, names: Iterable[str]) -> dict[int, int]:
        """The relays of these members, with what stands for their processes."""
        found: dict[int, int] = {}
        records = self._records()
        for name in names:
            record = records.get(name)
            if record is not None:
                place = self.place(name, record.life)
                found |= {relay_number(place, each): process_of(place, each) for each in record.there}
        return found

    def has(self, process: int) -> bool:
        """Whether the relay that this stands for is there."""
        place, relay = relay_of(process)
        records = self._records().items()
        return any(self._places.get((name, each.life)) == place and each.has(relay) for name, each in records)
