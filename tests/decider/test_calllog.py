"""Call log: valid lines for all input of clients."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.call_log import CallLog
from gateway.shared.lines import LineWriter

HOSTILE = 'a"b\\c\n{"ts":0}\r\x00\x1b[2J\u2028é\U0001f600' + "x" * 5000


def record(**more: Any) -> Record:
    return Record(request_id=more.pop("request_id", "r"), route="/v1/completions", outcome=Outcome.OK, **more)  # type: ignore[arg-type]  # by name


def lines(data: bytes) -> list[dict[str, Any]]:
    """Every line as JSON. Split at line feeds only, as a log shipper does."""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def written(path: Path, *records: Record) -> list[dict[str, Any]]:
    async def main() -> None:
        log = CallLog(LineWriter.at(path, print))
        for each in records:
            log.write(each, time.monotonic())
        await log.aclose()

    asyncio.run(main())
    return lines(path.read_bytes())


def test_lines_are_json_whatever_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = written(path, record(request_id="one"), record(model=HOSTILE, reason=HOSTILE, tenant=HOSTILE))
    assert (first["request_id"], first["outcome"], first["route"]) == ("one", "ok", "/v1/completions")
    assert abs(first["ts"] - time.time()) < 60
    assert second["model"] == second["reason"] == second["tenant"] == HOSTILE
    assert not set(path.read_bytes()) & {0x00, 0x0D, 0x1B}, "control characters reach no terminal"


def test_times_are_whole_microseconds(tmp_path: Path) -> None:
    noisy = record(queue=0.0010000000002037268, ttft=1234.5000004999, total=86_399.123456789, predicted_wait=1e-9)
    (line,) = written(
        tmp_path / "log",
        noisy,
    )
    assert (line["queue"], line["ttft"], line["total"], line["predicted_wait"]) == (0.001, 1234.5, 86_399.123457, 0.0)
    assert b'"queue":0.001,' in (tmp_path / "log").read_bytes()


def test_a_request_is_in_its_line_only_where_the_policy_wants_it() -> None:
    plain, full = Record(request_id="a", route="r"), Record(request_id="b", route="r", request='{"x":"\u00e9\\n"}')
    assert "request" not in msgspec.json.decode(msgspec.json.encode(plain))
    assert msgspec.json.decode(msgspec.json.encode(full))["request"] == '{"x":"\u00e9\\n"}'
