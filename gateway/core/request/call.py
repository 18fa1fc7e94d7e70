"""Parsed client request (`Call`), and the limits that the policy sets on requests (`CallSettings`).

`parser.py` makes a `Call` from a route, headers and a body. `cost.py` fills in its token estimates, `classes.py` its
class and deadlines.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from gateway.core.request.call_trace import CallTrace
from gateway.core.request.routes import Route


class Call(msgspec.Struct, kw_only=True, gc=False):
    """Parsed client request. Times are monotonic seconds; sizes are tokens unless they say bytes.

    `max_tokens`: the client's limit; None: the client gave none, and the engine generates up to the end of its context.
    `n`: sequences to generate, over all prompts. `prefix`: chained hashes of the prompt's fixed-size blocks, seeded by
    model and tenant salt. `ascii_bytes`, `cjk_bytes`, `other_bytes`: the prompt's UTF-8 bytes by script. `media`: the
    number of its images and audio parts. `token_ids`: the number of prompt tokens that the client sent as numbers.
    `messages`: the number of messages, prompts, inputs or documents.

    `asked_model`: the model route that the client named, empty: none; `model` is then the member that answers. Of such
    calls alone `conversation` is a hash of what stays the same in all calls of a conversation, and `no_fallback` true
    where the client accepts no fallback. `others`: the models that may answer in place of `model`, in order.

    `asked_class`: the class the client named by header or service tier, empty: none; `classify` in `classes.py` sets
    `class_name` from it. `asked_deadline`: the client's deadline. `sdk_timeout`: its SDK's read timeout, of a
    whole answer. Both are in seconds from `arrived`, 0: not given.
    """

    request_id: str
    route: Route
    model: str
    tenant: str
    class_name: str
    arrived: float
    deadline: float
    stream: bool
    wants_usage: bool = False  # the client itself asked for stream_options.include_usage
    max_tokens: int | None = None
    n: int = 1
    prefix: tuple[int, ...] = ()
    body: bytes = b""  # as the engine receives it, with `stream_options` and `cache_salt` spliced in where needed
    ascii_bytes: int = 0
    cjk_bytes: int = 0
    other_bytes: int = 0
    media: int = 0
    messages: int = 0
    token_ids: int = 0
    asked_model: str = ""
    conversation: int = 0
    no_fallback: bool = False
    others: tuple[str, ...] = ()
    asked_class: str = ""
    asked_deadline: float = 0.0
    sdk_timeout: float = 0.0
    ttft_by: float = math.inf  # deadline of its first token
    asked: int = 0  # tokens each sequence may generate, filled in by cost.py
    prompt_tokens: int = 0  # estimate, filled in by cost.py
    output_tokens: int = 0  # estimate, filled in by cost.py
    expected_tokens: int = 0  # likely output of each sequence, 0: not known; filled in by cost.py
    shaped: int = 0  # the lower output limit that replaced `asked`, 0: none did
    predicted_wait: float = 0.0  # seconds, where it had to wait
    usage_cut: bool = False  # the engine reports usage in every event, and the client did not ask for that
    leaves: int = 0  # bytes of its body, where a provider may be asked by tenant and class; 0: none may be
    splits: bool = False  # its prompt may be read on another engine than that which answers it
    merged: bool = False  # made by the batcher from several clients' calls: no client can retry it
    woken: float = 0.0  # seconds that it waited for its model to be made ready
    trace: CallTrace | None = None  # where it is sampled
    dropped: bytes = b""  # the answer's line about fields that its provider does not get
    answers_as: str = ""  # the model that its answer names, where that is not the engine's word; empty: it is
    subset: frozenset[str] | None = None  # ids of the only engines that it may go to; None: any
    sent_at: float | None = None  # when it was sent to an engine; None: no engine has it, or that engine failed

    @property
    def cost(self) -> int:
        """KV-cache tokens it may take. Admission books so many, and queues count so many."""
        return self.prompt_tokens + self.output_tokens


class CallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's limits on requests. `class_deadlines`: every class with its deadline in seconds.

    `media`: `data_urls_only` (default), `none`, or `any`. With `any` engines fetch whatever URL a client names. With
    `data_urls_only` they fetch from `media_hosts` only. `model_routes`: names of the policy's model routes.
    Raises ValueError where a class has no deadline.
    """

    class_deadlines: dict[str, float] = msgspec.field(
        default_factory=lambda: {"interactive": 60.0, "default": 300.0, "long_context": 600.0, "batch": 3600.0}
    )
    default_class: str = "default"
    service_tiers: dict[str, str] = msgspec.field(
        default_factory=lambda: {"priority": "interactive", "default": "default", "flex": "batch"}
    )
    max_deadline: float = 86_400.0
    max_messages: int = 2048
    max_n: int = 8
    max_output: int = 2**20  # tokens
    max_depth: int = 64
    max_values: int = 104_857  # JSON values and names of fields in a body
    max_text: int = 2 * 1024**2  # bytes of a body, without its media
    media: Literal["data_urls_only", "any", "none"] = "data_urls_only"
    media_hosts: frozenset[str] = frozenset()
    model_routes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = {self.default_class, *self.service_tiers.values()}.difference(self.class_deadlines)
        if unknown:
            raise ValueError(f"no deadline for the classes {', '.join(sorted(unknown))}")
