"""Messages between sidecars and gateways: they round-trip, and nothing else is accepted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.shared import protocol
from tests.examples import examples

REPORT = protocol.CapacityReport(
    sidecar="gpu-box-1",
    boot="b1",
    sequence=7,
    control="http://10.0.0.1:9000",
    gpus=(protocol.GPUReport(index=0, total=24 * 2**30, used=20 * 2**30, free=4 * 2**30, utilization=0.5),),
    models=(
        protocol.ModelReport(profile="a", model="llama", state="running", url="http://10.0.0.1:9100", ready_in=0.0),
        protocol.ModelReport(
            profile="b", model="qwen", state="stopped", why="no_memory", message="every model is busy"
        ),
    ),
)


def changed(**fields: Any) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(REPORT) | fields)


def test_messages_come_back_as_they_were_sent() -> None:
    assert protocol.capacity_report(protocol.encode(REPORT)) == REPORT
    demand = protocol.Demand(profile="a", in_flight=3, waiting=2, idle=0.5, withdrawn=True)
    answer = protocol.DemandReport(gateway="g", boot="b1", sequence=7, demands=(demand,))
    assert protocol.demand_report(protocol.encode(answer)) == answer
    assert protocol.ensured(protocol.encode(protocol.Ensured(model=REPORT.models[0]))).model == REPORT.models[0]


def test_what_a_newer_version_says_besides_is_ignored() -> None:
    assert protocol.capacity_report(changed(colour="blue")) == REPORT


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (changed(version=2), "version 2, expected 1: upgrade the older of the two"),
        (changed(sidecar=""), r"Expected `str` matching regex '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$' - at `$.sidecar`"),
        (changed(sidecar="a b"), r"Expected `str` matching regex '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$' - at `$.sidecar`"),
        (changed(sequence=-1), "Expected `int` >= 0 - at `$.sequence`"),
        (changed(models=[{"profile": "a", "model": "m", "state": "dancing"}]), "`$.models[0].state`"),
        (
            changed(models=[{"profile": "a", "model": "m", "state": "running", "ready_in": -1}]),
            "`$.models[0].ready_in`",
        ),
        (changed(models=[{"profile": "a", "model": "m", "state": "stopped"}] * 2), "models: a profile is there twice"),
        (changed(models=[{"profile": str(n), "model": "m", "state": "stopped"} for n in range(257)]), "`$.models`"),
        (changed(gpus=[{"index": 0, "total": 1, "used": 1, "free": 2**61}]), "`$.gpus[0].free`"),
        (b'{"x":' + b"[" * 100_000, "maximum recursion depth exceeded"),
        (b" " * (protocol.MAX_BYTES + 1), f"{protocol.MAX_BYTES + 1} bytes, expected at most {protocol.MAX_BYTES}"),
    ],
)
def test_bad_messages(data: bytes, message: str) -> None:
    with pytest.raises(protocol.ProtocolError) as error:
        protocol.capacity_report(data)
    assert message in str(error.value)


@settings(max_examples=examples(30))
@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode))
def test_nothing_else_is_ever_raised(data: bytes) -> None:
    for read in (protocol.capacity_report, protocol.demand_report, protocol.ensured):
        with pytest.raises(protocol.ProtocolError):
            read(data)
