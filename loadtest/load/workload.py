"""Workload: kinds of requests in a mix, their tenants, alone or in conversations.

`plan.py` makes requests of it. Lengths are tokens of the simulated tokenizer (four bytes each). The engine decides how
long an answer gets (`tokens.natural_length`, log-normal with a median of 129); clients only say how much they would
take. The Structs are sections of scenario files (`scenario.py`), so their annotations are the gateway's kinds of
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Protocol

import msgspec

from gateway.core.policy.types import FileName, ModelName, Name, TenantName, Weight
from gateway.shared.files.kinds import Text
from gateway.shared.files.units import Count, Factor, Share
from loadtest.load.arrivals import Span
from loadtest.load.lengths import Length, LogNormal, Tokens
from loadtest.load.prompts import PATHS, Route

Variable = Annotated[str, Text(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "the name of an environment variable")]
GENERATING = ("chat", "completions")


class Prefix(msgspec.Struct, frozen=True):
    """The beginning that requests share: a system prompt in a chat, the first words of a completion.

    `tokens`: Length, added to the prompt.
    `count`: Number of different ones, equally frequent.
    """

    tokens: Tokens = 400
    count: Annotated[Count, msgspec.Meta(ge=1, le=10_000)] = 8


class SubAgents(msgspec.Struct, frozen=True, kw_only=True):
    """Sub-agents: conversations that an agent starts, beside its own. They begin as it began, and name its session.

    `share`: Share of conversations with sub-agents.
    `count`: Sub-agents of such a conversation, each started at a random turn.
    `turns`: Turns of a sub-agent.
    """

    share: Share = 0.5
    count: Length = Length(constant=2)
    turns: Length = Length(geometric=8.0)


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations: each turn sends all that was said before, some time after the answer to the one before. With
    `prompt: trace` turns are a trace's, by its hash_ids; only `think` and `spread` can be given.

    `first`: Tokens of the first turn's prompt, beside the prefix; null: as of other turns.
    `turns`: Turns of a conversation.
    `think`: Mean time between an answer and the next turn.
    `spread`: Sigma of a log-normal time with the median `think`; null: exponential.
    `context`: Tokens above which the next turn leaves out what was said, as agents that compact it; null: never.
    `subagents`: Conversations that these start; null: none.
    """

    first: Length | None = None
    turns: Length = Length(geometric=6.5)
    think: Span = 8.0
    spread: Annotated[Factor, msgspec.Meta(ge=0, le=5)] | None = None
    context: Tokens | None = None
    subagents: SubAgents | None = None


class Kind(msgspec.Struct, frozen=True, kw_only=True, rename={"class_name": "class"}):
    """Kind of request in the mix.

    `class`: Traffic class to ask for.
    `share`: Share of requests (of conversations: of their beginnings), relative to other kinds.
    `kind`: Route.
    `model`: Model to name; null: the workload's.
    `prompt`: Tokens of the prompt, of each turn, or of each text of an embedding or rerank; trace: as recorded.
    `output`: max_tokens to ask for; trace: as recorded.
    `ignore_eos`: Whether vLLM generates exactly that many.
    `stream`: Whether the answer is streamed.
    `prefix`: Beginning that prompts share.
    `session`: Conversation that the request begins; null: none.
    `inputs`: Texts of an embeddings request, documents of a rerank.
    `query`: Tokens of a rerank's query.
    """

    class_name: Name = "default"
    share: Annotated[Share, msgspec.Meta(ge=0.0001, le=1_000_000)] = 1.0
    kind: Route = "chat"
    model: ModelName | None = None
    prompt: Literal["trace"] | Length = Length(log_normal=LogNormal(300, 0.6), least=16, most=6000)
    output: Literal["trace"] | Length = Length(empirical=(512, 1024))
    ignore_eos: bool = False
    stream: bool = True
    prefix: Prefix | None = None
    session: Sessions | None = None
    inputs: Length = Length(constant=8)
    query: Length = Length(constant=32)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Tenant that sends some of the requests.

    `weight`: Share of requests, relative to other tenants.
    `key_env`: Environment variable with its API key.
    `key_file`: File with its API key alone in it, relative to the scenario. Without both no key is sent.
    """

    weight: Weight = 1.0
    key_env: Variable | None = None
    key_file: FileName | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to send.

    `model`: Model that requests name.
    `named`: Whether requests name class and conversation in the gateway's headers, as few clients do.
    `mix`: Kinds of requests.
    `tenants`: Tenants that send them; a conversation belongs to one. Without any no tenant is named.
    """

    model: ModelName = "sim"
    named: bool = True
    mix: tuple[Kind, ...] = (Kind(),)
    tenants: Mapping[TenantName, Tenant] = {}


class Planned(msgspec.Struct, gc=False):
    """Request to send at `at` (seconds from the start of the run). `session` gets the answer, and may have a request
    that follows. `path`, `body` and `fields` (the headers, names in lower case) are sent. The rest is for the records:
    its number, its route's name, who sends it, its conversation and turn, and its size in tokens, as intended."""

    at: float  # of a closed loop 0.0, until it is known
    class_name: str
    body: bytes
    fields: dict[bytes, bytes]
    session: Session | None = None
    path: bytes = PATHS["chat"]
    index: int = -1
    kind: Route = "chat"
    tenant: str = ""
    conversation: str = ""
    turn: int = 1
    prompt_tokens: int = 0
    max_tokens: int = 0


class Session(Protocol):
    """A conversation: the next request goes out some time after the answer to the one before."""

    def follow(self, answer: bytes, now: float) -> list[Planned]:
        """Return the requests that follow `answer`, the text as it stands in JSON, with its escapes: the next turn, if
        there is one, and the first turns of sub-agents. `now` counts as `Planned.at` does. Call once for each request,
        and only after it was answered."""


class OpenConversations:
    """Calls of conversations that are open or to come, of a closed loop whose clients go on after the last of each."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def end(self, planned: Planned, following: int) -> bool:
        """Whether the client has nothing else under way, now that `planned` has ended and so many calls follow it."""
        if planned.session is None:
            return True
        name = planned.conversation
        left = self._left.pop(name, 1) - 1 + following
        if left:
            self._left[name] = left
        return not left
