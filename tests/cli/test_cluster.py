"""`gateway cluster status`: what it prints, and how it ends."""

from __future__ import annotations

import msgspec
import pytest

from gateway.cli import cluster, main
from gateway.cli.control_client import Unfit
from gateway.control.cluster import ClusterView

VIEW = ClusterView(
    name="prod",
    member="10.0.0.2:8010",
    leader="10.0.0.1:8010",
    epoch=7,
    since_s=12.3,
    leads=False,
    granting=False,
    awaited=["10.0.0.2:8010"],
    members=["10.0.0.1:8010", "10.0.0.2:8010"],
    candidates=[],
    gone=["10.0.0.3:8010"],
    store_error=None,
    store_heard_s=0.2,
)


def asked(monkeypatch: pytest.MonkeyPatch, view: ClusterView | Exception) -> None:
    async def answer(*_: object) -> ClusterView:
        if isinstance(view, Exception):
            raise view
        return view

    monkeypatch.setattr(cluster, "ask", answer)


def test_it_says_who_leads_who_is_there_and_who_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(monkeypatch, VIEW)
    assert main(["cluster", "status"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cluster prod: 10.0.0.1:8010 leads in epoch 7 for 12 s, and waits for what 10.0.0.2:8010 hold",
        "  10.0.0.1:8010   leads",
        "  10.0.0.2:8010   stands by, has not told what its calls hold, this gateway",
        "  10.0.0.3:8010   silent: forgotten 10 minutes after its last sign",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"leader": None, "since_s": None}, "nobody leads"),
        ({"store_error": "no answer within 0.4 s", "leads": True}, "the store does not answer: no answer within"),
    ],
)
def test_its_status_is_1_where_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    told: str,
) -> None:
    asked(monkeypatch, msgspec.structs.replace(VIEW, **changes))
    assert main(["cluster", "status", "--json"]) == 1
    assert main(["cluster", "status"]) == 1
    assert told in capsys.readouterr().out


def test_a_gateway_that_is_alone_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(monkeypatch, Unfit("it is alone: its policy has no cluster"))
    assert main(["cluster", "status"]) == 2
    assert "it is alone" in capsys.readouterr().err


def test_where_nobody_is_asked_that_is_told_with_its_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status", "--url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert said == "gateway: http://127.0.0.1:9: no connection: no gateway has its control port there\n"
