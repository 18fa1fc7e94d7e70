"""Record of one ended call: the source of its metrics and of its line in the call log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from gateway.core.request.outcome import Outcome

if TYPE_CHECKING:
    from gateway.core.request.call import Call


COPY, MEMBER = "copy", "member"


class PrefillNote(msgspec.Struct, kw_only=True, gc=False):
    """Place where a call's prompt was read. `engine` read it for the call's own; empty: none was asked."""

    reason: str  # of the decision, as in transfer.py
    here: float  # predicted seconds to the first token, if the call's own engine reads the prompt
    there: float = 0.0  # the same with the other engine; 0: none was compared
    engine: str = ""
    failure: str = ""  # why the call's own engine read the prompt all the same

    @property
    def is_there(self) -> bool:
        """Whether another engine read the prompt."""
        return bool(self.engine) and not self.failure


class Record(msgspec.Struct, kw_only=True, gc=False):
    """The facts of one ended call.

    Times are in seconds. `queue`, `ttft` and `total` count from the first byte of the request. Token numbers are the
    engine's own where it reported usage (`settled` is then true), else estimates.
    """

    request_id: str
    route: str
    method: str = "POST"
    tenant: str = ""
    class_name: str = ""
    model: str = ""
    engine: str = ""
    outcome: Outcome = Outcome.BUG
    status: int = 0
    stream: bool = False
    reason: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated_prompt_tokens: int = 0
    held_tokens: int = 0
    settled: bool = False
    queue: float = 0.0
    ttft: float = 0.0
    total: float = 0.0
    bytes_in: int = 0
    predicted_wait: float = 0.0
    affinity_tokens: int = 0  # prompt tokens expected in the chosen engine's prefix cache
    shaped_tokens: int = 0  # tokens by which shaping cut the client's output limit
    prefill: PrefillNote | UnsetType = UNSET  # where its prompt was read, if engines exchange KV caches
    trace_id: str | UnsetType = UNSET  # of the client's traceparent, or of a trace that begins here
    traced: bool | UnsetType = UNSET  # its spans are sent
    asked_model: str | UnsetType = UNSET  # the model route that the client named; `model` is then the member
    mirrored: str | UnsetType = UNSET  # COPY, or MEMBER: the call of which a copy was made
    finish: str | UnsetType = UNSET  # of a call for a model route: its finish reason
    request: str | UnsetType = UNSET  # the client's body, where the policy wants it logged

    def note(self, call: Call) -> None:
        """Take over what is known of a call once it was judged."""
        self.class_name, self.model, self.stream = call.class_name, call.model, call.stream
        self.prompt_tokens = self.estimated_prompt_tokens = call.prompt_tokens
        self.held_tokens = call.cost
        if call.asked_model:
            self.asked_model = call.asked_model
