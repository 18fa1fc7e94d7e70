"""Token usage requested of an engine by `stream_options`, a field of chat and completion bodies.

An engine sends the usage of a stream only where `stream_options.include_usage` asks for it. The gateway needs it for
every call, so it adds the option where the client left it out. For a call with a token limit it also asks for vLLM's
`continuous_usage_stats`, the usage so far in every event.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.request.json_body import StreamOptions

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_options = msgspec.json.Decoder(dict[str, Raw] | None).decode
_INCLUDE_USAGE = b',"stream_options":{"include_usage":true}'
_USAGE_IN_EVERY_EVENT = b',"stream_options":{"include_usage":true,"continuous_usage_stats":true}'


def request_usage(
    body: bytes, options: StreamOptions | UnsetType | None, metered: bool
) -> tuple[bytes, bytes, bool, bool]:
    """Make a streaming body ask the engine for usage. `metered`: in every event, for a token limit counts this call.

    Returns the body; the JSON field to add to it, with a comma before it, or nothing; whether the client itself asked
    for usage; and whether usage must be cut from the events that the client receives.
    """
    if options is UNSET:
        return body, _USAGE_IN_EVERY_EVENT if metered else _INCLUDE_USAGE, False, metered
    wanted = in_every_event = False
    if isinstance(options, StreamOptions):
        wanted, in_every_event = options.include_usage is True, options.continuous_usage_stats is True
    if not wanted or (metered and not in_every_event):
        body = _with_usage(body, every_event=metered)
    return body, b"", wanted, metered and not (wanted and in_every_event)


def _with_usage(body: bytes, *, every_event: bool) -> bytes:
    """`body` with usage requested in the `stream_options` that the client wrote itself."""
    fields = _decode_fields(body)
    options = _decode_options(fields["stream_options"]) or {}
    options["include_usage"] = Raw(b"true")
    if every_event:
        options["continuous_usage_stats"] = Raw(b"true")
    fields["stream_options"] = Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)
