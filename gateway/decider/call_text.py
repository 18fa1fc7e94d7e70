"""Line of the call log for people (`--log-format text`): what is looked for first of the facts of the JSON line.

    2026-11-22 20:53:01.123Z info call: 200 (ok) interactive acme llama-3-8b on 10.0.0.11:8000: 1.930 s, queue 0.402,
    first 0.713, 812+240 tokens, id 4f1c (one line)

Programs read the JSON lines. Text of clients keeps to its line and moves no terminal.
"""

from __future__ import annotations

from msgspec import UNSET

from gateway.core.request.outcome import LEVELS, got
from gateway.core.request.record import Record
from gateway.shared.operator_log import stamp
from gateway.shared.printable import printable


def text_line(record: Record, ended: float) -> bytes:
    """The line of a call that ended at `ended`, seconds since 1970; with its line feed."""
    who = (record.class_name, record.tenant, record.model)
    level = LEVELS[record.outcome].decode()
    words = [f"{stamp(ended)} {level} call: {got(record.outcome, record.status)}"]
    words += [word or "-" for word in who]
    if record.engine:
        words.append(f"on {record.engine}")
    facts = [f"{record.total:.3f} s"]
    if record.queue:
        facts.append(f"queue {record.queue:.3f}")
    if record.ttft:
        facts.append(f"first {record.ttft:.3f}")
    if record.predicted_wait:
        facts.append(f"predicted wait {record.predicted_wait:.3f}")
    if record.prompt_tokens or record.completion_tokens:
        facts.append(f"{'' if record.settled else 'about '}{record.prompt_tokens}+{record.completion_tokens} tokens")
    if record.shaped_tokens:
        facts.append(f"output cut by {record.shaped_tokens}")
    if record.attempts > 1:
        facts.append(f"{record.attempts} attempts")
    if record.reason:
        facts.append(f"reason: {record.reason}")
    facts.append(f"{record.method} {record.route}, id {record.request_id}")
    if record.trace_id is not UNSET:
        facts.append(f"trace {record.trace_id}")
    if record.request is not UNSET:
        facts.append(f"request: {record.request}")
    line = printable(f"{' '.join(words)}: {', '.join(facts)}").replace("\n", "?")
    return f"{line}\n".encode()
