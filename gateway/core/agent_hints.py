"""Agent hints: what an agent's harness says of a call in NVIDIA Dynamo's `nvext.agent_hints`.

Read are `prefix_id` (the session, as NVIDIA's NeMo Agent Toolkit names it), `osl` (tokens of its answer) and `priority`
(seconds by which it counts as having come earlier; negative: later). All others are left alone. vLLM ignores `nvext`,
so the body goes to the engine as it came. Only the hints of tenants with `agent_hints` are read: with another tenant's
nothing is done, whatever they hold.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gateway.core.request.call import Call
from gateway.core.request.json_body import explained

MOST_SECONDS = 60.0  # that a priority is worth
MOST_TOKENS = 2**20

_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class AgentHints(msgspec.Struct, frozen=True, gc=False):
    """The hints that are read. None: not given."""

    prefix_id: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    osl: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None = None
    priority: _Int32 | None = None

    @property
    def seconds(self) -> float:
        """Seconds by which the call goes before its turn among its tenant's; negative: after it."""
        return max(-MOST_SECONDS, min(MOST_SECONDS, float(self.priority or 0)))

    def given(self, call: Call) -> Call:
        """The call, which is told of its length and its turn."""
        call.hinted_tokens, call.hinted_ahead = self.osl or 0, self.seconds
        return call


class _Extensions(msgspec.Struct, gc=False):
    agent_hints: AgentHints | None = None


class _Hinted(msgspec.Struct, gc=False):
    nvext: _Extensions | None = None


NO_HINTS = AgentHints()
_decode = msgspec.json.Decoder(_Hinted).decode


def hints_of(body: bytes) -> AgentHints:
    """The hints in a body that was parsed before. Raises Refused (400), which names the hint that is out of range."""
    if b'"nvext"' not in body:
        return NO_HINTS
    try:
        extensions = _decode(body).nvext
    except msgspec.ValidationError as error:
        raise explained(str(error), body) from None
    return (extensions and extensions.agent_hints) or NO_HINTS
