"""Schedules: hours across midnight, weekdays and summer time, and the time of the next change."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.config import decode
from sidecar.core.file.schedule import DAYS, Hours, changes_at, instant, kept
from sidecar.serve.time_zone import offset_of

BERLIN = offset_of("Europe/Berlin")
NIGHT = (Hours(between="22:00-06:00", keep="off"),)
OFFICE = (Hours(between="08:00-18:00", days=("mon", "tue", "wed", "thu", "fri"), keep="on"),)


def at(text: str, zone: str = "Europe/Berlin", fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


@pytest.mark.parametrize(
    ("time", "keep", "until"),
    [
        ("2026-01-14 21:59:59", "", "2026-01-14 22:00"),
        ("2026-01-14 22:00", "off", "2026-01-15 06:00"),
        ("2026-01-15 00:00", "off", "2026-01-15 06:00"),
        ("2026-01-15 05:59:59", "off", "2026-01-15 06:00"),
        ("2026-01-15 06:00", "", "2026-01-15 22:00"),
    ],
)
def test_hours_across_midnight(time: str, keep: str, until: str) -> None:
    assert (kept(NIGHT, at(time), BERLIN), changes_at(NIGHT, at(time), BERLIN)) == (keep, at(until))


@pytest.mark.parametrize(
    ("time", "keep", "until"),
    [
        ("2026-01-16 17:59", "", "2026-01-16 18:00"),  # a Friday
        ("2026-01-16 18:00", "off", "2026-01-19 08:00"),
        ("2026-01-18 12:00", "off", "2026-01-19 08:00"),
        ("2026-01-19 08:00", "", "2026-01-19 18:00"),
    ],
)
def test_on_is_off_at_all_other_hours(time: str, keep: str, until: str) -> None:
    assert (kept(OFFICE, at(time), BERLIN), changes_at(OFFICE, at(time), BERLIN)) == (keep, at(until))


@pytest.mark.parametrize(
    ("between", "time", "seconds"),
    [
        ("22:00-06:00", "2026-03-28 22:00", 7 * 3600),  # summer time begins in this night, an hour is left out
        ("22:00-06:00", "2026-10-24 22:00", 9 * 3600),
        ("02:30-04:00", "2026-03-29 03:30", 1800),  # 02:30 is not there: half past three
        ("02:00-03:00", "2026-10-25 02:00", 3600 * 2),  # until the clock shows 03:00 the first time, which is late
        ("01:00-02:30", "2026-10-25 01:00", 5400),  # until the first 02:30
    ],
)
def test_summer_time(between: str, time: str, seconds: int) -> None:
    schedule = (Hours(between=between, keep="off"),)
    begins = at(time)
    assert (kept(schedule, begins - 1, BERLIN), kept(schedule, begins, BERLIN)) == ("", "off")
    assert changes_at(schedule, begins, BERLIN) == begins + seconds


def test_the_hour_that_comes_twice_counts_once() -> None:
    schedule = (Hours(between="01:00-02:30", keep="off"),)
    assert kept(schedule, at("2026-10-25 02:15", fold=1), BERLIN) == ""


def test_what_overlaps_and_what_never_changes() -> None:
    both = (Hours(between="00:00-24:00", keep="pinned"), Hours(between="10:00-11:00", keep="off"))
    assert [kept(both, at(f"2026-01-14 {hour}:30"), BERLIN) for hour in ("09", "10", "11")] == [
        "pinned", "off", "pinned"
    ]  # fmt: skip
    loaded = (Hours(between="07:00-08:00", keep="preloaded"), Hours(between="00:00-24:00", keep="on"))
    assert [kept(loaded, at(f"2026-01-14 {hour}:30"), BERLIN) for hour in ("06", "07")] == ["", "preloaded"]
    assert changes_at((Hours(between="00:00-24:00", keep="pinned"),), 0.0, BERLIN) is None
    assert (kept((), 0.0, BERLIN), changes_at((), 0.0, BERLIN)) == ("", None)


HOUR = st.integers(0, 23).map("{:02}".format)
MINUTE = st.sampled_from(["00", "15", "30", "59"])
TIME = st.builds("{}:{}".format, HOUR, MINUTE)
HOURS = st.builds(
    lambda begin, end, days, keep: Hours(between=f"{begin}-{end}", days=days, keep=keep),
    TIME,
    TIME,
    st.none() | st.lists(st.sampled_from(DAYS), min_size=1, unique=True).map(tuple),
    st.sampled_from(["off", "on", "pinned", "preloaded"]),
)


@given(
    st.lists(HOURS, max_size=3).map(tuple),
    st.integers(1_767_225_600, 1_798_761_600),  # of 2026
    st.sampled_from(["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "UTC", "Asia/Kolkata"]),
)
def test_nothing_changes_before_the_next_change(schedule: tuple[Hours, ...], now: int, zone: str) -> None:
    offset = offset_of(zone)
    was, change = kept(schedule, now, offset), changes_at(schedule, now, offset)
    end = now + 7 * 86_400 if change is None else change
    for part in range(1, 200):
        assert kept(schedule, now + (end - now) * part / 200, offset) == was
    if change is not None:
        assert change > now
        assert kept(schedule, change, offset) != was


@given(st.integers(1_767_225_600, 1_798_761_600), st.sampled_from(["Europe/Berlin", "America/St_Johns"]))
def test_an_instant_is_the_first_at_which_the_clock_shows_the_time(local: int, zone: str) -> None:
    offset = offset_of(zone)
    found = instant(local, offset)
    assert found + offset(found) >= local
    assert found - 1 + offset(found - 1) < local or found - 1 + offset(found - 1) >= local + 1700, (
        "or an hour comes again"
    )


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("[{between: 24:00-01:00, keep: off}]", "hours of the day such as 22:00-06:00"),
        ("[{between: 8-9, keep: off}]", "hours of the day such as 22:00-06:00"),
        ("[{between: 08:00-08:00, keep: off}]", "two times that differ, 00:00-24:00 for all day"),
        ("[{between: 08:00-09:00, keep: asleep}]", "expected off or on or pinned or preloaded"),
        ("[{between: 08:00-09:00, days: [monday], keep: off}]", "expected mon or tue"),
        ("[{between: 08:00-09:00, days: [], keep: off}]", "at least one of mon, tue"),
        ("[{keep: off}]", "between"),
    ],
)
def test_bad_schedules(schedule: str, says: str) -> None:
    with pytest.raises(Exception, match=says):
        decode(f"models: {{a: {{model_path: /m, schedule: {schedule}}}}}".encode())
