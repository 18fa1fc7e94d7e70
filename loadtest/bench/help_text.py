"""Help text of `gateway bench`, and its advice where a target cannot be measured."""

from __future__ import annotations

from loadtest.clients.targets import Address
from loadtest.load.scenario_flags import Flags
from loadtest.report.capacity import RULE

DESCRIPTION = """\
Measure servers of OpenAI's API honestly: any of them, several side by side, or simulated engines behind the gateway.

When each request is sent was fixed before the run, and latencies count from then: a slow server does not slow down the
load, and what was refused, failed or late counts against goodput. How late the bench itself was is in the report;
above 5 ms at p99 a run is invalid."""

EXAMPLES = """\
examples:
  gateway bench --engines sim:4 --compare direct,round_robin     the gateway on four simulated engines, with and without
  gateway bench --scenario agents --engines sim:4 --compare vllm-router       coding agents, and a real rival beside it
  gateway bench --target http://10.0.0.5:8000 --rate 10/s --duration 5m --slo 'ttft.p99<2s,tpot.p99<100ms'
  gateway bench --target old=http://10.0.0.5:8000 --target new=http://10.0.0.6:8000 --repeat 5 --out report
  gateway bench --scenario overload --engines sim:4:a100-8b --policy now.yaml --policy next.yaml --out report
  gateway bench --target https://gpu.example.com --key-env API_KEY --trace azure.csv --speed 2
  gateway bench --engines sim:2 --slo 'e2e.p95<20s' --find-capacity
  gateway bench --target http://10.0.0.5:8000 --clients 200      a closed loop: what it can do, not what users feel

Several targets are measured one after the other, each alone with the whole load, and the order turns round with each
repeat: what drifts with time falls on all alike. Repeats have seeds of their own, the same for every target. With
--engines every run gets fresh engines, since caches would favour who comes second.

Answers end as: ok; a gateway's reason; engine_refused (4xx) or upstream (5xx, or an error in a stream); truncated, cut
(broken off, with or without an error); timed_out; garbled (no stream, no JSON); empty (no token); unanswered (no
connection, TLS, nothing came); unfinished (still open when --drain was over); interrupted (Ctrl-C); not_sent (still due
at the end: the bench itself was too slow).

Ctrl-C ends the run and reports what there is, marked partial.
Exit status: 0; 1: an SLO, --slo or the scenario's, was missed or a run is invalid (not asked of --compare's baselines,
nor of a search); 2: a mistake; 130: Ctrl-C."""

GROUPS: dict[str, Flags] = {
    "where to": (
        ("target", "[NAME=]URL", "http://, https:// or unix:///PATH; repeatable"),
        ("engines", "sim[:N[:PROFILE]]", "start so many simulated engines and a gateway before them"),
        ("policy", "FILE", "the policy of that gateway; repeatable, each is a target by the name of its file"),
        ("max-model-len", "N", "the longest prompt with its answer that those engines take, in tokens"),
        ("compare", "NAMES", "measure the same engines without it too: round_robin (each request at the next "
                             "engine), direct (each conversation, or lone request, at one that chance has given it), "
                             "vllm-router or vllm-router:POLICY (where it is installed: on the PATH, or named by "
                             "VLLM_ROUTER)"),
        ("metrics", "NAME=URL", "whose /metrics tell of target NAME (default: its own); repeatable: its engines', or "
                                "a gateway's control port"),
        ("key-env", "VAR", "the environment variable with the API key for every --target"),
        ("ca", "FILE", "trust these certificates (PEM)"),
        ("insecure", "", "check no certificates"),
    ),
    "how, and what is expected": (
        ("repeat", "N", "how often everything is measured (default: 1); from 2 on with confidence intervals"),
        ("slo", "SLO", "e.g. 'interactive.ttft.p99<2s, goodput>=95%%', instead of the scenario's"),
        ("find-capacity", "", "search the highest rate that keeps the SLO: " + RULE.replace("%", "%%")),
        ("drain", "TIME", "how long answers are waited for after the load's end (default: 60s, or as long as an SLO "
                          "allows)"),
    ),
    "report": (
        ("out", "FOLDER", "write report.html, report.json and requests.csv there"),
        ("force", "", "write over reports in it"),
    ),
}  # fmt: skip


def unreachable(address: Address, why: str) -> str:
    """Message that a target is not there, and what may be meant instead."""
    advice = ""
    if address.tls and "not valid for" in why:
        advice = " (write the name in the certificate; --insecure checks none)"
    elif address.tls and "certificate" in why:
        advice = " (--ca FILE trusts it; --insecure checks none)"
    elif address.tls and ("TLS" in why or "no connection" in why):
        advice = " (if it speaks plain HTTP, write http://)"
    elif not (address.tls or address.unix) and "closed" in why:
        advice = " (if it wants TLS, write https://)"
    return f"nothing can be measured at {address.unix or address.name}: {why}{advice}"


def refused(why: str, *, by_key: bool) -> str:
    """Message that a target does not tell a stranger its models."""
    return f"asked for its models: {why}; {'the API key is refused' if by_key else '--key-env VAR names its API key'}"
