"""Case of a simulation: the list of its events and their times, all of which follow from the seed.

Nothing here runs. A part of the list is a simulation too (`only` of command.py), which is how a failure is made
smaller: what one thing does depends on its own fields and on the seed, never on random numbers shared with others.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadtest.load.prompts import Route
from loadtest.simulate.simulation import Fault

# A proxy that asks the endpoint picker and forwards by itself: it reports once; it reports each thing twice; it hangs
# before it sends the call; it hangs after the first event of a stream.
Proxied = Literal["plain", "doubled", "lost", "dies"]
KEYS = {"": "anonymous", "key-of-acme": "acme", "key-of-zeta": "zeta"}  # and whose they are


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Call of one client; times are in seconds. `within`: the deadline asked for, 0 for the class's. `leaves`: time
    from sending until the client leaves, negative for never; `leaves_granted`: it leaves in the very moment it gets its
    turn. `retries`: retries at most. `usage`: the answer must tell usage. `items`: texts of `prompt` tokens to embed or
    to rank; `top`: how many of a ranking to return, 0 for all. `session`: its conversation, 0 for none. `upload`: time
    from the head to the end of the body. `proxied`: the call goes through a proxy, which asks the picker. `history`:
    tokens that its prompt has in common with its group's; 0: fewer than one block of a prefix."""

    at: float
    class_name: str
    key: str
    model: str
    prompt: int
    asked: int
    stream: bool
    group: int  # calls of one group begin alike
    within: float = 0.0
    leaves: float = -1.0
    leaves_granted: bool = False
    retries: int = 0
    usage: bool = False
    kind: Route = "chat"
    items: int = 1
    top: int = 0
    session: int = 0
    upload: float = 0.0
    proxied: Proxied | None = None
    history: int = 0


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """Reload of another policy, as YAML. `bad`: the policy names an engine twice, so it must be refused and change
    nothing."""

    at: float
    policy: str
    bad: bool = False


class OperatorDrain(msgspec.Struct, frozen=True, kw_only=True):
    """An operator drains an engine of the command line's, or gives it back; None: all of the gateway is drained."""

    at: float
    engine: int | None
    drain: bool = True


SidecarActKind = Literal[
    "sleep", "stop", "drain", "wake", "error", "vanish", "silence", "reboot", "late", "deaf", "lost"
]


class SidecarAct(msgspec.Struct, frozen=True, kw_only=True):
    """Act of a sidecar on a profile, or on itself for `seconds`."""

    at: float
    sidecar: int
    what: SidecarActKind
    profile: int = 0
    seconds: float = 0.0


class RelayFault(msgspec.Struct, frozen=True, kw_only=True):
    """Fault of relay number `relay`. `kill`: SIGKILL; another relay starts after `seconds`. `break`: its connection
    breaks, messages under way are lost, and the decider cannot be reached for `seconds`. `hold`: nothing arrives on its
    connection, either way. `echo`: messages of calls that an earlier connection carried come once more, on the present
    connection and in any order."""

    at: float
    what: Literal["kill", "break", "hold", "echo"]
    relay: int
    seconds: float = 0.0


class DeciderFault(msgspec.Struct, frozen=True, kw_only=True):
    """Fault of the decider. `kill`: SIGKILL; another decider starts after `seconds`. `hang`: the decider sends nothing
    for `seconds`, then is killed and replaced."""

    at: float
    what: Literal["kill", "hang"]
    seconds: float


class MemberFault(msgspec.Struct, frozen=True, kw_only=True):
    """Fault of a cluster's member for `seconds`; member -1: the leader. `kill`: its decider ends, and another begins;
    `reboot`: its relays too; `stop`: its decider pauses, then goes on. `cut`: the member does not reach the store;
    `parted`: it and the others do not reach each other; `lost`: no member reaches the store; `emptied`: the store
    forgets all; `began_anew`: no member reaches the store, which has forgotten all when it is back; `refused`: a
    process before the store accepts connections and closes them."""

    at: float
    what: Literal["kill", "reboot", "stop", "cut", "parted", "lost", "emptied", "began_anew", "refused"]
    member: int
    seconds: float = 0.0


Event = Call | Fault | Reload | OperatorDrain | SidecarAct | RelayFault | DeciderFault | MemberFault


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Engine of a case: sizes in blocks of 16 tokens and sequences; seconds per step and per prompt token. `more`:
    other names, as those of adapters, of its model."""

    model: str
    blocks: int
    sequences: int
    step: float
    prefill: float
    jitter: float
    more: tuple[str, ...] = ()


class SidecarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sidecar of a case: its profiles' engines, which of them run at first, and the seconds until one is ready."""

    engines: tuple[EngineSpec, ...]
    running: tuple[bool, ...]
    takes: float


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Simulation. `fixed` engines are the command line's, `extra` ones are there while the policy names them.

    `cancels`: what runs past its deadline is cancelled, by every policy. `lost`: the share of the engines' messages of
    their caches that do not come; negative: they send none. `exchanges`: the `fixed` engines exchange KV caches.
    `relays`: relay processes beside the decider; 0: one process is both. `members`: machines of a cluster; 0: no
    cluster, and one decider. `delay`: least seconds from a relay to the decider; `spread`: how much more it may be.
    """

    seed: int
    policy: str
    fixed: tuple[EngineSpec, ...]
    events: tuple[Event, ...]  # in order of time
    numbers: tuple[int, ...]  # of the events, in the whole case
    extra: tuple[EngineSpec, ...] = ()
    sidecars: tuple[SidecarSpec, ...] = ()
    cancels: bool = True
    lost: float = -1.0
    exchanges: bool = False
    relays: int = 0
    members: int = 0
    delay: float = 0.0
    spread: float = 0.0
