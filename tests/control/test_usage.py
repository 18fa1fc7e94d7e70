"""GET /usage on the control port: this day and month as JSON, and all that is kept as CSV."""

from __future__ import annotations

import asyncio

from gateway.control.console.reading import money_entries
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.quotas import Calendar, Used
from gateway.core.money.book import MoneyBook, Spent
from gateway.core.money.engine_time import HOME
from gateway.core.policy.file import decode
from gateway.decider.metrics.families import money_families
from gateway.shared.storage import StorageError
from tests.control.parts import Parts, play
from tests.core.money.test_money import book, call

POLICY = decode(b"tenants: {acme: {limits: {quota: {day: 1M}}}}\nstorage: kept\n")
HEAD = "tenant,window,start,tokens,provider,model,money\n"
NOON = 1_764_504_000.0  # 2025-11-30 12:00 UTC


async def history() -> list[Used]:
    return [Used("acme", "day", 1_764_374_400, 5), Used("acme", "month", 1_761_955_200, 12)]


async def broken() -> list[Used]:
    raise StorageError("/kept/weir.db: the disk fails: see the system's log")


def test_a_tenants_windows_of_now() -> None:
    async def scene(parts: Parts) -> None:
        now = asyncio.get_running_loop().time()
        book.quotas.calendar.offset = NOON - now
        book.charge("acme", "default", "m", 200, now).settle(150, now)
        book.charge("acme", "default", "m", 20, now)
        answer = await parts.get("/usage")
        assert answer.status_code == 200
        found = answer.json()["tenants"]
        for window in found["acme"].values():
            window["resets_in_s"] = round(window["resets_in_s"], -2)
        assert found == {
            "acme": {
                "day": {"start": "2025-11-30", "used": 150, "reserved": 20, "quota": 1_000_000, "resets_in_s": 43200},
                "month": {"start": "2025-11-01", "used": 150, "reserved": 20, "quota": None, "resets_in_s": 43200},
            }
        }

    book = LimitBook(POLICY, calendar=Calendar())
    play(scene, limits=book, used_tokens=history)


def test_csv_has_all_that_is_kept() -> None:
    async def scene(parts: Parts) -> None:
        answer = await parts.get("/usage?format=csv")
        assert answer.headers["content-type"].startswith("text/csv")
        assert answer.text == f"{HEAD}acme,day,2025-11-29,5,,,\nacme,month,2025-11-01,12,,,\n"
        assert (await parts.get("/usage?format=xml")).status_code == 400

    play(scene, used_tokens=history)


def test_a_gateway_that_keeps_nothing_says_so_and_a_disk_that_fails_is_told() -> None:
    async def keeps_nothing(parts: Parts) -> None:
        assert (await parts.get("/usage")).json() == {"tenants": {}}
        assert (await parts.get("/usage?format=csv")).text == HEAD

    async def fails(parts: Parts) -> None:
        answer = await parts.get("/usage?format=csv")
        assert answer.status_code == 503
        assert "the disk fails" in answer.json()["error"]["message"]

    play(keeps_nothing)
    play(fails, used_tokens=broken)


async def spent() -> list[Spent]:
    return [Spent("cloud", "acme", "mini", "day", 1_764_374_400, 1_000_005, 12)]


def test_money_by_provider_tenant_and_model() -> None:
    async def scene(parts: Parts) -> None:
        now = asyncio.get_running_loop().time()
        money.restore([], now, kept=True)
        spending = money.reserve("cloud", call(), now)
        spending.usage = (900, 0, 50)
        spending.end(now)
        money.reserve("cloud", call(), now)
        found = (await parts.get("/usage")).json()["providers"]["cloud"]
        for each in (found["budgets"]["day"], found["shares"]["acme"]["day"]):
            assert (each["spent"], each["reserved"], each["kept"]) == (0.001, 0.003, 0.0)
        assert [found["budgets"]["day"]["budget"], found["shares"]["other"]["day"]["budget"]] == [1.0, 0.5]
        rows = [
            (each["window"], each["tenant"], each["model"], each["money"], each["tokens"]) for each in found["spent"]
        ]
        assert rows == [(span, "acme", "mini", 0.001, 950) for span in ("day", "month")]
        text = (await parts.get("/usage?format=csv")).text
        assert text.splitlines()[-1] == "acme,day,2025-11-29,12,cloud,mini,1.000005"

    money = book("[1/day, 50%/tenant]")
    limits = LimitBook(POLICY)
    limits.money = money
    play(scene, limits=limits, used_tokens=history, spent=spent)


async def spent_at_home() -> list[Spent]:
    return [Spent(HOME, "acme", name, "day", 1_764_374_400, 2_100_000, 12) for name in ("=1+1", "big")]


def test_money_of_own_engines_by_tenant_and_model() -> None:
    async def scene(parts: Parts) -> None:
        now = asyncio.get_running_loop().time()
        time = money.begin("e", call(), 100, now)
        time.usage = (900, 0, 50)
        time.end(now + 3600.0)
        money.begin("e", call(), 100, now + 3600.0)  # still runs
        found = (await parts.get("/usage")).json()
        assert "providers" not in found
        assert found["engines"]["price"] == "2.1/hour"
        rows = [
            (each["window"], each["tenant"], each["model"], each["money"], each["tokens"])
            for each in found["engines"]["spent"]
        ]
        assert rows == [(span, "acme", "mini", 2.1, 950) for span in ("day", "month")]
        text = (await parts.get("/usage?format=csv")).text
        lines = [f"acme,day,2025-11-29,12,own engines,{name},2.100000" for name in ("'=1+1", "big")]
        assert text.splitlines()[-2:] == lines
        assert dict(money_entries(money, now)) == {
            "provider/own engines": {"budgets": [], "spent": [["acme", "mini", 950, 2.1]]}
        }
        families = {family.name: family for family in money_families(money, lambda: now)}
        (sample,) = families["weir_money"].samples
        assert (sample.labels, sample.value) == ({"provider": HOME, "tenant": "acme", "model": "mini"}, 2.1)

    money = MoneyBook(decode(b"engines_price: 2.10/hour\nstorage: kept\n"), Calendar(NOON))
    limits = LimitBook(POLICY)
    limits.money = money
    play(scene, limits=limits, used_tokens=history, spent=spent_at_home)
