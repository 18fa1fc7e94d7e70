"""Help text of `gateway simulate`."""

from __future__ import annotations

from loadtest.load.scenario_flags import Flags
from loadtest.report.capacity import RULE
from loadtest.simulate.rivals.rules import RULES, SPILL_ON_LOAD

DESCRIPTION = """\
What would this policy have done to last week's traffic? The gateway itself, its whole pipeline and every decision,
over simulated engines and in virtual time: hours of traffic in minutes, without a socket or a GPU.

The same seed gives the same figures to the last digit, so that what differs between two policies is the policies."""

EXAMPLES = """\
examples:
  gateway simulate --policy next.yaml --trace weir.jsonl --engines 8         a gateway's own log under another policy
  gateway simulate --policy now.yaml --policy next.yaml --trace last-week.csv --engines 8 --out report
  gateway simulate --scenario overload --engines 1 --compare round_robin     what the gateway is worth at twice the load
  gateway simulate --scenario chat --rate 100/s --engines 2,4,8,16 --slo 'ttft.p99<2s'    how many engines do I need?
  gateway simulate --scenario chat --engines 4,8 --slo 'ttft.p99<2s' --find-capacity      how much can they take?
  gateway simulate --policy now.yaml --trace weir.jsonl --engines 4 --prefill 2           do split engines pay?
  gateway simulate --trace azure.csv --speed 10 --engines 4,8 --compare direct,round_robin --seed 7
  gateway simulate --scenario multi-turn --compare cache_aware,llm_d        beside the rules of vllm-router and of llm-d

Last week's traffic: a CSV with TIMESTAMP, ContextTokens, GeneratedTokens for each request (as Azure publishes its
traces), BurstGPT's CSV, or Mooncake's JSONL, whose hash_ids say which prompts begin alike. A scenario file can give a
trace classes and tenants of its own (arrivals: trace). Tenants of a scenario that the policy has too are told apart;
all others call without a key, as the tenant anonymous.

Policies and numbers of engines are compared in one table and one page, each simulated in a process of its own. The
simulated clients try again as OpenAI's does (--retries) and give up after --timeout. Engines are profiles of real ones
(--profile); how near these come to yours is what `bench` of both will show.

Ctrl-C ends it and reports what there is, marked partial.
Exit status: 0; 1: no number of engines kept the SLO under one of the policies; 2: a mistake; 130: Ctrl-C."""

GROUPS: dict[str, Flags] = {
    "what is simulated": (
        ("policy", "FILE", "the gateway's policy; repeatable; left out: the defaults"),
        ("engines", "N[,N...]", "how many engines, 1 to 1024; several numbers are compared (default: 4)"),
        ("profile", "NAME|FILE", "what an engine is (default: h100-8b), or a file of `gateway calibrate`"),
        ("max-model-len", "N", "tokens of a prompt and its answer together, at most (default: the profile's)"),
        ("prefill", "N", "the same with N of the engines that read prompts for the others too (docs/prefill.md)"),
        ("compare", "NAMES", "the same engines behind the rules of others too: " + ", ".join((*RULES, SPILL_ON_LOAD))),
        ("jobs", "N", "simulations at the same time (default: a core each)"),
    ),
    "what is expected": (
        ("slo", "SLO", "e.g. 'interactive.ttft.p99<2s, goodput>=95%%', instead of the scenario's"),
        ("find-capacity", "", "search the highest rate that keeps the SLO: " + RULE.replace("%", "%%")),
    ),
    "report": (
        ("out", "FOLDER", "write report.html, report.json and requests.csv there"),
        ("requests", "", "every request in them too, which takes memory: 1 GB a million"),
        ("force", "", "write over reports in it"),
    ),
}  # fmt: skip
