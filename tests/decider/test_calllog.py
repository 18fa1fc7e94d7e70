"""Call log: valid lines for all input of clients."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.call_log import LOOK, CallLog, text_line
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


@pytest.mark.parametrize("as_text", [False, True])
def test_a_clock_that_is_set_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_text: bool) -> None:
    async def main() -> None:
        log = CallLog(LineWriter.at(tmp_path / "log", print), text=as_text)
        now = time.monotonic()
        log.write(record(), now)
        before = time.time
        monkeypatch.setattr(time, "time", lambda: before() - 3600.0)  # as by NTP, or after a machine slept
        log.write(record(), now + LOOK)
        await log.aclose()

    asyncio.run(main())
    data = (tmp_path / "log").read_bytes()
    times = (
        [datetime.fromisoformat(line[:24]).timestamp() for line in data.decode().splitlines()]
        if as_text
        else [line["ts"] for line in lines(data)]
    )
    assert abs(times[0] - times[1] - 3600.0) < 60


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


def text(path: Path, *records: Record) -> list[str]:
    async def main() -> None:
        log = CallLog(LineWriter.at(path, print), text=True)
        for each in records:
            log.write(each, time.monotonic())
        await log.aclose()

    asyncio.run(main())
    return path.read_text().split("\n")


def test_lines_for_people_say_first_how_it_ended_for_whom_and_how_long_it_took() -> None:
    served = record(
        status=200,
        class_name="interactive",
        tenant="acme",
        model="llama",
        engine="10.0.0.1:8000",
        total=1.93,
        queue=0.4016,
        ttft=0.7129,
        prompt_tokens=812,
        completion_tokens=240,
        settled=True,
    )
    assert text_line(served, 1763844781.1239).decode() == (
        "2025-11-22 20:53:01.123Z info call: 200 (ok) interactive acme llama on 10.0.0.1:8000: 1.930 s, queue 0.402, "
        "first 0.713, 812+240 tokens, POST /v1/completions, id r\n"
    )
    more = {"attempts": 2, "shaped_tokens": 9, "predicted_wait": 3.5, "prompt_tokens": 5}
    assert text_line(record(reason="too late", trace_id="ab", request="{}", **more), 0.0).decode() == (
        "1970-01-01 00:00:00.000Z info call: 0 (ok) - - -: 0.000 s, predicted wait 3.500, about 5+0 tokens, "
        "output cut by 9, 2 attempts, reason: too late, POST /v1/completions, id r, trace ab, request: {}\n"
    )


def test_a_line_for_people_is_one_line_and_moves_no_terminal(tmp_path: Path) -> None:
    hostile = record(model=HOSTILE, reason=HOSTILE, tenant=HOSTILE, request=HOSTILE)
    line, end = text(tmp_path / "log", hostile)
    assert end == ""
    assert line.isprintable()
    assert abs(datetime.fromisoformat(line[:24]).timestamp() - time.time()) < 60
