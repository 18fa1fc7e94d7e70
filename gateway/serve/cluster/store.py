"""Store of a cluster: a Valkey (7.2 or later) or Redis (7 or later) that knows its members and their leader.

A turn is one script, hence one step. Keys of the cluster NAME begin with `weir:{NAME}:`. `member:*` and `leader` live
for TTL; `roster`, `term` and `token` stay. An epoch is one more than the highest that is known, and at least the
microseconds from 1970 to its election: so a store that has forgotten all gives none that was given before.
`loadtest/lab/dst/relays/cluster_store.py` is the same in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateway.core.cluster.election import FORGOTTEN, STALE, TTL, Leader, StoreView, Turn

if TYPE_CHECKING:
    from redis.asyncio import Redis

WITHIN = 0.4  # seconds for an answer
STATE_WITHIN = 1.0  # seconds for that to a checkpoint's, which a new decider waits for
KEPT = 3600.0  # seconds that a checkpoint is kept
MONEY_KEPT = 62 * 86_400.0  # seconds that money is: longer than a month
TURN = """
local p, name, life, record = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local ttl, forgotten = tonumber(ARGV[4]), tonumber(ARGV[5])
local known, candidacy, term, number = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local seen, print = ARGV[10], ARGV[11]
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local after = tonumber(ARGV[13])
if after and math.abs(now - after) > tonumber(ARGV[14]) then candidacy = 0 end

local other = redis.call('GET', p .. 'token')
if other and other ~= print then return {'token'} end
if term == 0 or redis.call('GET', p .. 'leader') ~= string.format('%.0f %s', term, name) then
  local before = redis.call('GET', p .. 'member:' .. name)
  if before and cjson.decode(before).life ~= life then return {'taken'} end
end -- else it leads, and whatever is in its place is a stranger's
redis.call('SET', p .. 'token', print, 'PX', forgotten)
if ARGV[12] == '1' then redis.call('SET', p .. 'member:' .. name, record, 'PX', ttl) end

local had = tonumber(redis.call('HGET', p .. 'term', 'epoch') or '0')
local epoch = math.max(had, known)
local emptied = had < epoch or had == 0
if emptied then
  for each in string.gmatch(seen, '%S+') do redis.call('HSETNX', p .. 'roster', each, now) end
end
redis.call('HSET', p .. 'roster', name, now)

local leader, leads = redis.call('GET', p .. 'leader'), 0
if leader then
  local at, who = string.match(leader, '^(%d+) (.*)$')
  leads, leader = tonumber(at), who
  if leads < epoch or (leader == name and leads ~= term) then leader = false end
end
local known_to_leader = redis.call('HGET', p .. 'term', 'seen') or ''
if not leader then
  local listed = string.find(' ' .. known_to_leader .. ' ', ' ' .. name .. ' ', 1, true)
  if term > 0 and term == epoch then
    leader, leads = name, epoch
  elseif candidacy == 2 or (candidacy == 1 and (listed or (known_to_leader == '' and had >= known))) then
    leader, leads = name, math.max(epoch + 1, micros)
    if not listed then known_to_leader = known_to_leader .. ' ' .. name end
    redis.call('HSET', p .. 'term', 'seen', known_to_leader)
  end
end
local until_ = tonumber(redis.call('HGET', p .. 'term', 'emptied_until') or '0')
if leader == name then
  local last = tonumber(redis.call('HGET', p .. 'term', 'number') or '0')
  if term ~= leads or had < leads then last = 0 end
  if emptied then until_ = now + ttl end
  redis.call('SET', p .. 'leader', string.format('%.0f %s', leads, name), 'PX', ttl)
  redis.call('HSET', p .. 'term', 'epoch', leads, 'number', last, 'emptied_until', until_)
  if emptied and known > 0 then redis.call('HSET', p .. 'term', 'lost', 1) end
  if term > 0 and number > last then
    redis.call('HSET', p .. 'term', 'number', number, 'seen', seen .. ' ' .. name)
  end
end

local members = {}
local roster = redis.call('HGETALL', p .. 'roster')
for i = 1, #roster, 2 do
  local its = redis.call('GET', p .. 'member:' .. roster[i])
  if its or tonumber(roster[i + 1]) + ttl + forgotten > now then
    members[#members + 1] = {roster[i], its or ''}
  else
    redis.call('HDEL', p .. 'roster', roster[i])
  end
end
return {'ok', leader or '', leads, (emptied or now < until_) and 1 or 0, now, members}
"""
RESIGN = """
local leader = redis.call('GET', KEYS[1] .. 'leader')
if leader and string.match(leader, '^%d+ (.*)$') == ARGV[1] then redis.call('DEL', KEYS[1] .. 'leader') end
return 1
"""
LEAVE = """
local p, name, life, term = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local leader = redis.call('GET', p .. 'leader')
if term == 0 or leader ~= string.format('%.0f %s', term, name) then
  local before = redis.call('GET', p .. 'member:' .. name)
  if before and cjson.decode(before).life ~= life then return 0 end
end -- as in a turn
redis.call('DEL', p .. 'member:' .. name)
redis.call('HDEL', p .. 'roster', name)
if leader and string.match(leader, '^%d+ (.*)$') == name then redis.call('DEL', p .. 'leader') end
local left = ''
for each in string.gmatch(redis.call('HGET', p .. 'term', 'seen') or '', '%S+') do
  if each ~= name then left = left .. ' ' .. each end
end
if redis.call('EXISTS', p .. 'term') == 1 then redis.call('HSET', p .. 'term', 'seen', left) end
return 1
"""
SAVE = """
if redis.call('GET', KEYS[1] .. 'leader') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1] .. 'checkpoint', ARGV[2], 'PX', ARGV[3])
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[1] .. 'money', ARGV[4], 'PX', ARGV[5])
  redis.call('HDEL', KEYS[1] .. 'term', 'lost')
end
return 1
"""
LOAD_MONEY = "return {redis.call('GET', KEYS[1] .. 'money') or '', redis.call('HEXISTS', KEYS[1] .. 'term', 'lost')}"
LOAD = """
local found = redis.call('GET', KEYS[1] .. 'checkpoint')
if not found then return {} end
return {found, redis.call('PTTL', KEYS[1] .. 'checkpoint')}
"""
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
    """The keys of one `cluster`, as its member `me` uses them. `record` may change at any time. `fingerprint`: of its
    token."""

    def __init__(self, redis: Redis, cluster: str, me: str, record: MemberRecord, fingerprint: str) -> None:
        self._redis = redis
        self._prefix = f"weir:{{{cluster}}}:"
        self._cluster = cluster
        self._me = me
        self.record = record
        self._fingerprint = fingerprint

    async def turn(self, turn: Turn) -> tuple[StoreView, dict[str, MemberRecord]]:
        """Carry out a turn. Raises StoreError, and ClusterConflict."""
        record = msgspec.json.encode(self.record).decode()
        arguments = (
            self._me, self.record.life, record, int(TTL * 1000), int(FORGOTTEN * 1000), turn.known,
            turn.candidacy, turn.term, turn.number, " ".join(sorted(turn.seen)), self._fingerprint,
            int(turn.present), "" if turn.after is None else round(turn.after * 1000), int(STALE * 1000),
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
            _, leader, epoch, emptied, clock, members = msgspec.convert(
                answer, tuple[str, str, int, int, int, list[tuple[str, str]]]
            )
            records = {name: msgspec.json.decode(text, type=MemberRecord) for name, text in members if text}
        except ValueError as error:
            raise StoreError(f"it answers what no store of a cluster does: {error}") from error
        view = StoreView(
            leader=Leader(leader, epoch) if leader else None,
            members=frozenset(records),
            roster=frozenset([name for name, _ in members]),
            clock=clock / 1000,
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
