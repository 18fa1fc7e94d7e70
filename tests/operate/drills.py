"""Drills of the alerts: for each the fault that it is for, as it happens in use, and the mending of that fault."""

from __future__ import annotations

import signal
from collections.abc import Callable

import msgspec

from loadtest.processes import until
from tests.operate.site import POLICY, OperatedSite

OVERLOAD = 60.0  # calls a second, several times what the site carries

UNDRILLED = {
    "WeirCallsEndInBugs": "no fault is known that makes the gateway itself fail",
    "WeirClusterNobodyGrants": "the site has one gateway: tests/cluster has several, and each fault",
    "WeirClusterStoreGone": "the site has one gateway: tests/cluster has several, and each fault",
}


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """`fault` in words; `strike` makes it happen, `again` repeats it until the alert fires, `mend` ends it."""

    alert: str
    fault: str
    strike: Callable[[OperatedSite], object]
    mend: Callable[[OperatedSite], object]
    again: Callable[[OperatedSite], object] = lambda _: None


def _hang(site: OperatedSite) -> None:
    """Engine c has calls, and its gauges stand still from a moment on when it had none."""
    site.faults("c", {"stale_metrics": True})
    site.callers("hung", 10.0, model="other")


def _unhang(site: OperatedSite) -> None:
    site.no_callers("hung")
    site.faults("c", {})


def _promise_anything(site: OperatedSite) -> None:
    site.save(POLICY + "deadlines: run\n")
    site.callers("flood", OVERLOAD)


def _promise_what_holds(site: OperatedSite) -> None:
    site.no_callers("flood")
    site.save(POLICY)


def _hold_body(site: OperatedSite) -> None:
    """A caller that has sent most of a body, and pauses, where there is memory for little more."""
    before = site.gateway.total("weir_policy_version")
    site.save(POLICY + "body: {memory: 2MiB, max: 1MiB, max_media: 1MiB}\n")
    until(lambda: site.gateway.total("weir_policy_version") > before, 60.0)
    site.begin_body(900_000)


def _let_go_of_body(site: OperatedSite) -> None:
    site.end_body()
    site.save(POLICY)


def _kill_for_tenant(site: OperatedSite) -> None:
    site.callers("small", 4.0, model="other", key=site.key)
    site.engines["c"].kill()


def _mend_for_tenant(site: OperatedSite) -> None:
    site.start_engine("c")
    until(lambda: site.gateway.total("weir_tenant_requests_total", tenant="small", outcome="ok") > 0, 60.0)
    site.no_callers("small")


DRILLS = (
    Drill(
        alert="WeirPolicyBad",
        fault="the policy is saved with a field that there is not",
        strike=lambda site: site.save(POLICY + "no_such_field: 1\n"),
        mend=lambda site: site.save(POLICY),
    ),
    Drill(
        alert="WeirLogLinesLost",
        fault="the call log's disk is full",
        strike=lambda site: site.log_to("/dev/full"),
        mend=lambda site: site.log_to("/dev/null"),
    ),
    Drill(
        alert="WeirTraceSpansDropped",
        fault="a collector that refuses spans",
        strike=lambda site: site.collector.refuse(True),
        again=lambda site: site.chat("sim"),
        mend=lambda site: site.collector.refuse(False),
    ),
    Drill(
        alert="WeirBodiesFull",
        fault="bodies of 0.9 MB, and a caller that never ends his, where the policy has 1 MiB for them",
        strike=_hold_body,
        again=lambda site: site.chat("sim", "x" * 900_000),
        mend=_let_go_of_body,
    ),
    Drill(
        alert="WeirEngineDown",
        fault="SIGKILL of an engine",
        strike=lambda site: site.engines["a"].kill(),
        mend=lambda site: site.start_engine("a"),
    ),
    Drill(
        alert="WeirBreakerOpen",
        fault="an engine that is healthy and answers every call 500",
        strike=lambda site: site.faults("b", {"errors": 1.0, "status": 500}),
        mend=lambda site: site.faults("b", {}),
    ),
    Drill(
        alert="WeirLedgerAboveGauge",
        fault="an engine with calls whose gauges stand still at zero",
        strike=_hang,
        mend=_unhang,
    ),
    Drill(
        alert="WeirCallsAroundGateway",
        fault="callers who call an engine directly",
        strike=lambda site: site.callers("around", OVERLOAD, at=site.urls["a"]),
        mend=lambda site: site.no_callers("around"),
    ),
    Drill(
        alert="WeirCallsWithoutRoom",
        fault="several times more calls than the engines can carry",
        strike=lambda site: site.callers("flood", OVERLOAD),
        mend=lambda site: site.no_callers("flood"),
    ),
    Drill(
        alert="WeirFirstTokenLate",
        fault="the same, with a policy that predicts nothing and sheds nothing",
        strike=_promise_anything,
        mend=_promise_what_holds,
    ),
    Drill(
        alert="WeirTenantStarving",
        fault="SIGKILL of the one engine whose model a tenant may use",
        strike=_kill_for_tenant,
        mend=_mend_for_tenant,
    ),
    Drill(
        alert="WeirStartFailing",
        fault="a model whose engine fails at every start",
        strike=lambda site: site.model_faults("one", {"fail_start": "ValueError: no such model"}),
        again=lambda site: site.chat("one", timeout=2.0),
        mend=lambda site: site.model_faults("one", {}),
    ),
    Drill(
        alert="WeirSidecarSilent",
        fault="SIGSTOP of the sidecar",
        strike=lambda site: site.sidecar.process.send_signal(signal.SIGSTOP),
        mend=lambda site: site.sidecar.process.send_signal(signal.SIGCONT),
    ),
    Drill(
        alert="WeirGatewayDown",
        fault="SIGSTOP of the gateway",
        strike=lambda site: site.gateway.child.process.send_signal(signal.SIGSTOP),
        mend=lambda site: site.gateway.child.process.send_signal(signal.SIGCONT),
    ),
)
