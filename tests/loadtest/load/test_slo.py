"""SLOs as people write them."""

from __future__ import annotations

import re

import pytest

from loadtest.load.slo import Objective, parse_slo, slos_of
from loadtest.report.records import Slo


@pytest.mark.parametrize(
    ("text", "objective", "shown"),
    [
        ("interactive.ttft.p99<2s", Objective("interactive", "ttft", 0.99, 2.0), "interactive.ttft.p99<2s"),
        (" e2e.p99.9 <= 1.5m ", Objective("", "e2e", 0.999, 90.0), "e2e.p99.9<90s"),
        ("batch.tpot.p50<80ms", Objective("batch", "tpot", 0.5, 0.08), "batch.tpot.p50<80ms"),
        ("goodput>=0.95", Objective("", "goodput", 0.95), "goodput>=95%"),
        ("a.goodput > 99.5%", Objective("a", "goodput", 0.995), "a.goodput>=99.5%"),
        ("goodput>=1", Objective("", "goodput", 1.0), "goodput>=100%"),
    ],
)
def test_objectives(text: str, objective: Objective, shown: str) -> None:
    assert parse_slo(text) == (objective,)
    assert str(objective) == shown
    assert Objective.parse(shown) == objective
    assert re.fullmatch(Objective.pattern, text.strip()), "editors take what the reader takes"


@pytest.mark.parametrize(
    "text",
    ["", "ttft<2s", "ttft.p99>2s", "ttft.p99<2", "ttft.p99<0s", "ttft.p0<2s", "ttft.p100<2s", "ttft.99<2s", "p99<2s",
     "goodput<0.95", "goodput>=95", "goodput>=0", "goodput>=120%", "A.ttft.p99<2s", "ttft.p99<2s;", "a.b.ttft.p99<2s",
     "itl.p99<2s", "goodput.p99>=0.5"],
)  # fmt: skip
def test_no_objectives(text: str) -> None:
    with pytest.raises(ValueError, match="is not an objective such as interactive") as caught:
        parse_slo(f"goodput>=0.9, {text}")
    assert str(caught.value).startswith(f"{text!r} is not")


def test_one_share_of_all_that_is_asked_of_a_class() -> None:
    with pytest.raises(ValueError, match=r"^a\.e2e\.p95<9s: expected one share of all .*: 99%, as in a\.ttft\.p99<2s$"):
        parse_slo("a.ttft.p99<2s, b.e2e.p95<9s, a.e2e.p95<9s")


@pytest.mark.parametrize(
    ("text", "slos"),
    [
        ("interactive.ttft.p99<2s, goodput>=0.95",
         [Slo(class_name="interactive", ttft=2.0, attainment=0.99), Slo(attainment=0.95)]),
        ("a.ttft.p90<2s, a.ttft.p90<1s, a.tpot.p90<80ms, a.goodput>=90%",
         [Slo(class_name="a", ttft=1.0, tpot=0.08, attainment=0.9)]),
        ("e2e.p95<9s, ttft.p95<3s, a.ttft.p99<5s, b.ttft.p50<1s",
         [Slo(ttft=3.0, e2e=9.0, attainment=0.95), Slo(class_name="a", ttft=3.0, e2e=9.0, attainment=0.99),
          Slo(class_name="b", ttft=1.0, e2e=9.0, attainment=0.5)]),
    ],
)  # fmt: skip
def test_what_makes_a_request_good(text: str, slos: list[Slo]) -> None:
    assert list(slos_of(parse_slo(text))) == slos


def test_nothing_asked_is_no_slo() -> None:
    assert slos_of(()) == ()
