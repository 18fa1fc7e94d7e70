"""Memory of sessions: the branch of a conversation that a call goes on with, and the room kept for its next call.

A session is known by what the client calls it; its calls form branches (an agent and its sub-agents), each known by its
growing prefix: the last block of one call's prompt is in the next one's. A call that names no session belongs to its
branch's, and one without either begins a session.

What an engine has cached of a branch is kept for a while after its answer: for the time in which nine of ten calls of
the tenant's sessions come back, `keep` at most. Kept tokens are room that calls which know nothing of it leave free.
Bounded: a tenant has `per_tenant` branches at most and loses its own oldest; where all tenants together have too many,
the one with most does. Of another tenant's kept tokens a call leaves no more than that tenant's even share.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from math import inf

from gateway.core.engines.fleet import Engine
from gateway.core.policy.sessions import SessionsPolicy
from gateway.core.quantile import TTFTQuantile
from gateway.core.request.call import Call

BRANCHES = 100_000  # of all tenants together
OF_TENANT = 2000  # of one tenant, which loses its own oldest
COMES_BACK = 0.9  # of calls, in the time that is kept


class Branch:
    """Conversation of a session. `kept`: tokens kept for it on `engine`, until `until` (infinite: its
    next call has come, and waits)."""

    __slots__ = ("calls", "ended_at", "engine", "kept", "session", "tenant", "tip", "tokens", "until")

    def __init__(self, tenant: str, session: int, tip: int) -> None:
        self.tenant = tenant
        self.session = session
        self.tip = tip
        self.engine = ""
        self.tokens = 0  # of its last call: prompt and answer
        self.calls = 0
        self.ended_at = -inf
        self.kept = 0
        self.until = -inf


class TenantSessions:
    """The branches of one tenant by their tips, least recent first, and how soon their calls come back."""

    __slots__ = ("branches", "returns")

    def __init__(self) -> None:
        self.branches: dict[int, Branch] = {}
        self.returns = TTFTQuantile()


class SessionMemory:
    """The sessions of all tenants, under one policy."""

    def __init__(self, policy: SessionsPolicy) -> None:
        self.policy = policy
        self._tenants: dict[str, TenantSessions] = {}
        self._branches = 0
        self._kept: dict[str, dict[str, int]] = {}  # tokens, by engine and tenant
        self._kept_on: dict[str, dict[Branch, None]] = {}  # by engine, in order of their calls' ends
        self._due: list[tuple[float, int, Branch]] = []  # heap: what is kept, by when it no longer is
        self._sequence = count()

    # -- steps --------------------------------------------------------------------------------------------------

    def advance(self, now: float, engines: Iterable[Engine] = ()) -> None:
        """Time has passed: what nobody has come back for is kept no longer, nor what these engines have evicted."""
        due = self._due
        while due and due[0][0] <= now:
            until, _, branch = heappop(due)
            if branch.until == until:
                self._release(branch)
        for engine in engines:
            kept = self._kept_on.get(engine.id)
            while kept:
                first = next(iter(kept))
                if first.ended_at > engine.evicted_until:
                    break
                self._release(first)

    def arrive(self, call: Call, now: float) -> None:
        """A call has come. It gets the session of its branch, where it names none."""
        self.advance(now)
        if not call.prefix:
            return
        tenant = self._tenants.get(call.tenant)
        if tenant is None:
            tenant = self._tenants[call.tenant] = TenantSessions()
        branch = self._found(tenant, call)
        tip = call.prefix[-1]
        if branch is None:
            branch = Branch(call.tenant, call.session or tip, tip)
            self._branches += 1
        else:
            del tenant.branches[branch.tip]
            branch.tip = tip
            branch.session = call.session or branch.session
            tenant.returns.add(now - branch.ended_at)
            if branch.kept:
                branch.until = inf
        tenant.branches[tip] = branch
        call.session = branch.session
        branch.calls += 1
        self._bound(tenant)

    def granted(self, call: Call) -> None:
        """The call has an engine: what was kept for it is in use now."""
        branch = self._of(call)
        if branch is not None:
            self._release(branch)

    def left(self, call: Call) -> None:
        """The call has gone without an engine."""
        branch = self._of(call)
        if branch is not None and branch.until == inf:
            self._release(branch)

    def ended(self, call: Call, engine: str, tokens: int, now: float) -> None:
        """The call's answer has ended: the engine has its `tokens` cached, prompt and answer."""
        branch, tenant = self._of(call), self._tenants.get(call.tenant)
        if branch is None or tenant is None:
            return
        self._release(branch)  # of the engine that another of its calls was on
        branch.engine, branch.tokens, branch.ended_at = engine, tokens, now
        usual = tenant.returns.value(COMES_BACK)
        seconds = self.policy.keep if usual is None else min(usual, self.policy.keep)
        if branch.calls > 1 and seconds > 0.0:  # one that never came back is not waited for
            branch.kept, branch.until = tokens, now + seconds
            by_tenant = self._kept.setdefault(engine, {})
            by_tenant[branch.tenant] = by_tenant.get(branch.tenant, 0) + tokens
            self._kept_on.setdefault(engine, {})[branch] = None
            heappush(self._due, (branch.until, next(self._sequence), branch))

    # -- questions ----------------------------------------------------------------------------------------------

    def spoken_for(self, engine: str, share: int, call: Call) -> int:
        """Tokens on an engine that the call leaves to others: what is kept there, of each other tenant an even share of
        its `share` tokens at most."""
        kept = self._kept.get(engine)
        if not kept:
            return 0
        each = share // (len(kept) + (call.tenant not in kept))
        tokens = sum([held if name == call.tenant else min(held, each) for name, held in kept.items()])
        branch = self._of(call)
        if branch is not None and branch.kept and branch.engine == engine:
            tokens -= branch.kept
        return max(0, tokens)

    def returns(self, call: Call) -> bool:
        """Whether the call goes on with a conversation that had calls before."""
        branch = self._of(call)
        return branch is not None and branch.calls > 1

    def __len__(self) -> int:
        return self._branches

    # -- inside -------------------------------------------------------------------------------------------------

    def _found(self, tenant: TenantSessions, call: Call) -> Branch | None:
        """The branch that the call goes on with: the one whose last prompt is the longest beginning of its own."""
        branches = tenant.branches
        for block in reversed(call.prefix):
            branch = branches.get(block)
            if branch is not None:
                return branch
        return None

    def _of(self, call: Call) -> Branch | None:
        tenant = self._tenants.get(call.tenant)
        return tenant.branches.get(call.prefix[-1]) if tenant is not None and call.prefix else None

    def _bound(self, tenant: TenantSessions) -> None:
        if len(tenant.branches) > OF_TENANT:
            self._forget(tenant.branches.pop(next(iter(tenant.branches))))
        elif self._branches > BRANCHES:
            name, most = max(self._tenants.items(), key=lambda each: len(each[1].branches))
            self._forget(most.branches.pop(next(iter(most.branches))))
            if not most.branches:
                del self._tenants[name]

    def _forget(self, branch: Branch) -> None:
        self._branches -= 1
        self._release(branch)

    def _release(self, branch: Branch) -> None:
        if branch.kept:
            by_tenant = self._kept[branch.engine]
            by_tenant[branch.tenant] -= branch.kept
            if not by_tenant[branch.tenant]:
                del by_tenant[branch.tenant]
                if not by_tenant:
                    del self._kept[branch.engine]
            kept_on = self._kept_on[branch.engine]
            del kept_on[branch]
            if not kept_on:
                del self._kept_on[branch.engine]
            branch.kept, branch.until = 0, -inf
