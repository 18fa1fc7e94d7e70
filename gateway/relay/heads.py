"""Header lines of a request to an engine and of an answer to a client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import UNSET

from gateway.core.admission.decider import Admission
from gateway.core.admission.shaping import shaped_header
from gateway.core.request.call import Call
from gateway.core.request.record import PrefillNote, Record
from gateway.core.request.trace_context import trace_parent
from gateway.relay.wire.server import Request

JSON = b"content-type: application/json\r\n"
TEXT = b"content-type: text/plain; charset=utf-8\r\n"
PASSED_ON = (b"traceparent", b"tracestate")  # of a request in a trace, for the engine
_HEADING = re.compile(r"^## `([a-z_]+)`$", re.MULTILINE)


def engine_lines(request: Request, call: Call, record: Record) -> bytes:
    """The head of a request to an engine."""
    content_type = request.fields.get(b"content-type") or b"application/json"
    # join: a format costs twice as much
    lines = b"".join((b"content-type: ", content_type, b"\r\nx-request-id: ", call.request_id.encode(), b"\r\n"))
    if call.trace is not None:  # each attempt adds its own traceparent
        return lines + b"tracestate: %b\r\n" % call.trace.state if call.trace.state else lines
    if record.trace_id is not UNSET:
        for name in PASSED_ON:
            value = request.fields.get(name)
            if value is not None:
                lines += b"%b: %b\r\n" % (name, value)
    return lines


def answer_lines(
    call: Call, admission: Admission, record: Record, engine_name: str, content_type: bytes, reader: str = ""
) -> bytes:
    """The head of an answer. `reader`: the name of the engine that was asked to read the prompt."""
    lines = b"".join((
        b"content-type: ", content_type,
        b"\r\nx-request-id: ", call.request_id.encode(),
        b"\r\nx-weir-engine: ", engine_name.encode(),
        b"\r\nx-weir-class: ", call.class_name.encode(),
        b"\r\nx-weir-queue-ms: %d\r\n" % (record.queue * 1000),
    ))  # fmt: skip
    if call.asked_model:
        lines += b"x-weir-model: %b\r\n" % call.model.encode()
    if call.dropped:
        lines += call.dropped
    if call.shaped:
        lines += shaped_header(call.shaped, call.asked)
    if record.prefill is not UNSET:
        lines += prefill_line(record.prefill, reader)
    if record.trace_id is not UNSET:
        lines += b"x-trace-id: %b\r\n" % record.trace_id.encode()
    if call.asked_class and call.asked_class != call.class_name:
        lines += b"x-weir-class-asked: %b\r\n" % call.asked_class.encode()
    return lines + admission.headers(call.arrived + record.ttft)


def prefill_line(note: PrefillNote, reader: str) -> bytes:
    """The answer's line that says where the prompt was read, and why."""
    words = [f"there; engine={reader}" if note.is_there else "here", f"reason={note.reason}"]
    if note.failure:
        words.append(f"failure={note.failure}")
    words.append(f"here_ms={1000 * note.here:.0f}")
    if note.there:
        words.append(f"there_ms={1000 * note.there:.0f}")
    return b"x-weir-prefill: %b\r\n" % "; ".join(words).encode()


def note_trace(request: Request, record: Record) -> None:
    """Note the trace that a request belongs to, if it tells of one."""
    parent = trace_parent(request.fields)
    record.trace_id = UNSET if parent is None else parent.trace_id


def outcome_help() -> Mapping[bytes, bytes]:
    """`/outcomes`: the whole page, and `/outcomes/REASON`: its entry, in Markdown. Reads the file; raises OSError."""
    text = _file().read_text(encoding="utf-8")
    _, *parts = _HEADING.split(text)
    entries = {b"/outcomes": text.encode()}
    for reason, entry in zip(parts[::2], parts[1::2], strict=True):
        entries[b"/outcomes/%b" % reason.encode()] = f"{reason}\n\n{entry.strip()}\n".encode()
    return MappingProxyType(entries)


def _file() -> Path:
    """Path of the page, in an installed package or at the top of the source tree."""
    here = Path(__file__).parents[1]
    installed = here / "docs" / "outcomes.md"
    return installed if installed.is_file() else here.parent / "docs" / "outcomes.md"
