"""Token usage as engines report it, under the field names of each API."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct, gc=False):
    """A usage object with the names of chat and completions, of Responses, and of Anthropic's messages."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    total_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens | None = None

    def read(self) -> tuple[int | None, int | None, int | None]:
        """Prompt, completion and cached tokens; None: not reported."""
        prompt = self.prompt_tokens if self.input_tokens is None else self.input_tokens
        completion = self.completion_tokens if self.output_tokens is None else self.output_tokens
        if prompt is None and self.total_tokens is not None:  # rerank reports only a total
            prompt = max(0, self.total_tokens - (completion or 0))
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else None
        if self.cache_read_input_tokens is not None and prompt is not None:
            # Anthropic's input_tokens do not include tokens read from the cache or written to it.
            cached = self.cache_read_input_tokens
            prompt += cached + (self.cache_creation_input_tokens or 0)
        return prompt, completion, cached
