"""Head of an engine's answer: whether its body can be the one asked for."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.request.call import Call

EVENTS = b"text/event-stream"
USUAL = {False: b"application/json", True: b"text/event-stream; charset=utf-8"}  # by whether it streams; as vLLM has it
BODILESS = (204, 205)
SHOWN = 60  # characters of a content type


def wrong_body(call: Call, status: int, headers: Mapping[bytes, bytes], length: int | None) -> str:
    """Fault of the body of a good answer (2xx), judged by its head; empty: none.

    A stream is `text/event-stream`. Any other answer is JSON, or bytes that the caller asked for: a page or plain text
    is of something else that answers in the engine's place. Transcripts may be plain text. An answer that does not tell
    its type is passed on. A compressed body is one that nobody has asked for, and no client could read it.
    """
    if length == 0 or status in BODILESS:
        return f"it answered {status} without a body"
    coding = headers.get(b"content-encoding", b"identity")
    if coding.lower() != b"identity":
        return f"it answered {status} compressed ({coding[:SHOWN].decode('latin-1')!a}), which was not asked for"
    found = headers.get(b"content-type", b"")
    if found == USUAL[call.stream]:
        return ""
    found = found.partition(b";")[0].strip().lower()
    if not found or (found == EVENTS if call.stream else call.route.form or not found.startswith(b"text/")):
        return ""
    due = "an event stream" if call.stream else "JSON"
    return f"it answered {status} with {found[:SHOWN].decode('latin-1')!a} instead of {due}"
