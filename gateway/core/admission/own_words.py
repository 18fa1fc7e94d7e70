"""A tenant's own words for a refusal by a limit, in place of OpenAI's error object."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from gateway.core.policy.traffic import Refusal
from gateway.core.request.outcome import Refused

_PLACEHOLDER = re.compile(r"\{(tenant|class|model|limit|retry_after|request_id)\}")


def refusal_body(
    template: Refusal, refused: Refused, *, tenant: str, class_name: str, model: str, request_id: str
) -> bytes:
    """JSON for a tenant's callers instead of OpenAI's error object: the template with its placeholders filled in.

    Only text is filled in, in one pass: what a client put into a name is data, also where it looks like a placeholder.
    `{retry_after}` is whole seconds, `-` where a retry cannot help.
    """
    seconds = "-" if refused.retry_after is None else str(math.ceil(refused.retry_after))
    words = {"tenant": tenant, "class": class_name, "model": model, "limit": refused.limit}
    words |= {"retry_after": seconds, "request_id": request_id}

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda found: words[found[1]], value)
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()}
        return [filled(item) for item in value] if isinstance(value, list) else value

    return msgspec.json.encode(filled(template.body))
