"""Warnings of `gateway check`: each row is a policy and all its warnings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gateway.core.policy.advice import advise
from gateway.core.policy.file import read_policy
from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import Mark
from gateway.shared.files.findings import placed

ROOT = Path(__file__).parents[3]
TOP = "classes: {top: {}, default: {}, low: {}}\nservice_tiers: {}\n"


def told(text: str) -> list[str]:
    """Lines, as `gateway check` has them, without their columns."""
    reading = read_policy(text.encode(), "p")
    found = placed("p", reading.root, advise(reading.good()), warning=True)
    return [f"{f'p:{each.at.line}' if each.at.line else 'p'}: warning: {each.path}: {each.found}" for each in found]


def test_the_defaults_need_no_advice() -> None:
    assert list(advise(Policy())) == []


def test_a_class_that_throttles_the_first_calls_of_coding_agents() -> None:
    when = "when: {prompt_tokens: '> 8000'}"
    long = (
        f"classes: {{top: {{}}, default: {{}}, long: {{deadline: 10m, max_queue: 9, {when}, max_concurrency: %d}}}}\n"
    )
    tiers = "service_tiers: {}\nfleet: {engines: [{url: 'http://a:1'}, {url: 'http://b:1'}]}\n"
    (warning,) = told(long % 7 + tiers)
    assert warning.startswith(
        "p:1: warning: classes.long.max_concurrency: a coding agent's first call, of 20k tokens, is"
    )
    assert "all engines together run 7 of its calls" in warning
    assert told(long % 8 + tiers) == []
    assert told(long.replace("8000", "32000") % 1 + tiers) == [], "they are of the class default"
    assert len(told("classes: {top: {}, default: {max_concurrency: 1}}\nservice_tiers: {}\n")) == 1


def exchanging(*engines: str, tpot: str = "") -> list[str]:
    """The warnings of engines `a`, `b`, ... with these fields, without their common beginning."""
    found = told(
        f"classes: {{default: {{{tpot}}}}}\nservice_tiers: {{}}\nfleet:\n  engines:\n"
        + "".join(f"    - {{url: 'http://{name}:1', {fields}}}\n" for name, fields in zip("abc", engines, strict=False))
    )
    return [each.partition("fleet.engines")[2] for each in found]


def test_engines_that_exchange_and_never_read_for_each_other() -> None:
    nobody = "serve a model so that one reads (role prefill or both) and another answers: prompts are always read where"
    reads, answers, both = "transfer: p, role: prefill", "transfer: p, role: decode", "transfer: p"
    for good in ((both, both), (reads, answers), (reads, both), (answers, both)):
        assert exchanging(*good, tpot="tpot: 50ms") == []
    (warning,) = exchanging(answers, answers)
    assert warning == f"[0].transfer: no two engines of group p {nobody} they are answered", "told once"
    assert len(exchanging(both, "transfer: q")) == 2
    assert len(exchanging(both + ", models: [m]", both + ", models: [n]")) == 1
    (warning,) = exchanging(reads, both, "transfer: q, role: decode", tpot="tpot: 1s")[:1]
    outside = "http://c:1 may answer the same models and is not of group p: its prompts are never read here"
    assert warning == f"[0].role: {outside}"
    assert exchanging(reads + ", models: [m]", both, "models: [n]", tpot="tpot: 1s") == []
    assert exchanging(reads, both) == [
        "[0].role: no class has a tpot, so prompts are read here only if that brings the first token sooner; "
        "meanwhile this engine answers only what others have no room for"
    ]


def test_sidecars_that_may_do_too_much_or_too_little() -> None:
    waits = "classes: {default: {}}\nservice_tiers: {}\n"
    assert told(f"{waits}fleet: {{sidecars: {{}}}}") == []
    assert told(f"{waits}fleet: {{sidecars: {{token_file: t, allow: [127.0.0.0/8, '::1']}}}}") == []
    elsewhere = "token_file: t, order_token_file: o, tls: {}, allow"
    assert told(f"{waits}fleet: {{sidecars: {{{elsewhere}: [10.0.0.0/8, '::1']}}}}") == []

    def told_of_doors(text: str) -> list[str]:
        return [each.replace("p:3", "p:1") for each in told(waits + text)]

    assert told_of_doors("fleet: {sidecars: {allow: []}}") == [
        "p:1: warning: fleet.sidecars.allow: it is empty: no engine of a sidecar is ever used"
    ]
    assert told_of_doors("fleet: {sidecars: {order_token_file: o, tls: {}, allow: [0.0.0.0/0]}}") == [
        "p:1: warning: fleet.sidecars.allow[0]: 0.0.0.0/0 is everywhere: who knows the token has prompts sent to any "
        "address"
    ]


def test_batches_that_people_wait_for() -> None:
    batches = "storage: s\nbatches: {}\n"
    assert told(batches) == [
        "p:2: warning: batches.class: lines of batches fill engines, and first tokens of interactive come late: "
        "give batch headroom"
    ]
    assert told(f"{batches}classes: {{default: {{ttft: 20s}}, batch: {{headroom: 15%}}}}\nservice_tiers: {{}}\n") == []
    assert told(f"{batches}classes: {{default: {{}}, batch: {{}}}}\nservice_tiers: {{}}\n") == []


def test_keys_and_tokens_that_cross_a_network_in_the_clear() -> None:
    waits = "classes: {default: {}}\nservice_tiers: {}\n"
    assert told(f"{waits}fleet: {{sidecars: {{allow: ['::1', 10.0.0.0/8]}}}}") == [
        "p:3: warning: fleet.sidecars: sidecars in 10.0.0.0/8 may be used at http://, where prompts and the order "
        "token are in the clear: tls: {} or tls: {ca_file: ...} asks for https://",
        "p:3: warning: fleet.sidecars: without an order_token_file each sidecar in 10.0.0.0/8 knows the token that "
        "gives orders to all",
    ]
    keys = "http://h:1", "https://h:2", "unix:///s", "http://127.0.0.1:3", "http://localhost:4"
    engines = ", ".join(f"{{url: '{url}', api_key_file: k}}" for url in keys)
    assert told(f"fleet: {{engines: [{engines}, {{url: 'http://h:5'}}]}}") == [
        "p:1: warning: fleet.engines[0].api_key_file: the key crosses the network to http://h:1 in the clear: https:// "
        "hides it"
    ]


def test_an_engine_without_a_port() -> None:
    assert told("fleet: {engines: [{url: 'http://vllm'}, {url: 'https://tls'}, {url: 'http://v:80'}]}\n") == [
        "p:1: warning: fleet.engines[0].url: no port, so 80; vLLM listens on 8000 where it is not told otherwise"
    ]


def test_warnings_come_in_the_order_of_lines_and_those_of_defaults_first() -> None:
    lines = told("body: {media: any}\ntrusted_proxies: [0.0.0.0/0]\nbudget: {kv_target: 97%}\n")
    assert [line.split(": ")[0] for line in lines] == ["p"] * 4 + ["p:1", "p:2"]
    assert [line.split(": ")[2] for line in lines[:4]] == [
        "shaping[0].kv_above",
        "shaping[1].kv_above",
        "modes.tight.enter.kv",
        "modes.brownout.enter.kv",
    ]


def test_without_the_file_the_advice_is_the_same() -> None:
    reading = read_policy(b"body: {media: any}\n")
    found = list(advise(reading.good()))
    (with_line,), (without,) = placed("p", reading.root, found), placed("p", None, found)
    assert (with_line.at, without.at) == (Mark(1, 8, 5), Mark())
    assert msgspec.structs.replace(with_line, at=Mark()) == without


CLASSES = [
    ("classes: {default: {weight: 98}, batch: {weight: 2}}", []),
    (
        "classes: {default: {weight: 98}, batch: {weight: 1}}",
        ["p:1: warning: classes.batch.weight: 1.0% of the tokens while all classes have work; below 2% it starves"],
    ),
    # What a strict class leaves is shared by the rest alone.
    ("classes: {top: {weight: 1000, strict: true, max_concurrency: 9}, default: {}, low: {}}", []),
    ("classes: {default: {}, low: {strict: true}}", []),
    (
        "classes:\n  top: {strict: true}\n  default: {}\n  low: {}",
        [
            "p:2: warning: classes.top.strict: its calls go before all of default, low, and nothing bounds how many of "
            "them run: without max_concurrency a flood of them starves the others"
        ],
    ),
]

TENANTS = [
    ("tenants: {}", ["p:1: warning: tenants: there are none, so every call is refused with 401"]),
    (
        "tenants: {acme: {}}",
        ["p:1: warning: tenants.acme: nobody can be this tenant: no keys, no keys_file, no auth, no trusted proxy"],
    ),
    ("tenants: {acme: {}}\nkeys_file: k", []),
    ("tenants: {acme: {}}\ntrusted_proxies: [10.0.0.1]", []),
    (f"tenants: {{acme: {{keys: [{'0' * 64}]}}}}", []),
    ("tenants: {anonymous: {class: batch, best_class: batch}}", []),
    ("tenants: {anonymous: {best_class: default}}", []),
    (
        "tenants:\n  anonymous:\n    best_class: batch",
        [
            "p:3: warning: tenants.anonymous.best_class: calls that ask for no class are of class default, which is "
            "above it: add class: batch"
        ],
    ),
    (
        "keys_file: k\ntenants: {acme: {}, anonymous: {}}",
        [
            "p:2: warning: tenants.anonymous: callers without a key may ask for any class and have no limit: "
            "give it best_class and limits"
        ],
    ),
    (
        "keys_file: k\ntenants: {acme: {}, anonymous: {best_class: interactive}}",
        [
            "p:2: warning: tenants.anonymous: callers without a key may ask for any class and have no limit: "
            "give it best_class and limits"
        ],
    ),
    ("keys_file: k\ntenants: {acme: {}, anonymous: {best_class: default}}", []),
    ("keys_file: k\ntenants: {acme: {}, anonymous: {limits: {requests: 1/s}}}", []),
    ("keys_file: k\ntenants: {acme: {}, anonymous: {}}\nlimits: {per_tenant: {tokens: 10k/s}}", []),
    ("tenants: {anonymous: {refusal: {body: {a: '{tenant} {class} {model} {limit} {retry_after} {request_id}'}}}}", []),
    ("tenants: {anonymous: {refusal: {body: {a: '{} {a b}'}}}}", []),
    (
        "tenants: {anonymous: {refusal: {body: {a: ['{retry_afer} {retry_afer}', {b: '{x}'}]}}}}",
        [
            "p:1: warning: tenants.anonymous.refusal.body: {retry_afer} stands for nothing and is sent as it is "
            "(did you mean retry_after?)",
            "p:1: warning: tenants.anonymous.refusal.body: {x} stands for nothing and is sent as it is",
        ],
    ),
]

MODELS = [
    ("tenants: {anonymous: {models: [x]}}\nfleet: {engines: [{url: 'http://a:1'}]}", []),
    (
        "tenants: {anonymous: {models: [x]}}\nfleet: {engines: [{url: 'http://a:1', models: [y]}, {url: 'http://b:1'}]}",
        [],
    ),
    (
        "fleet: {engines: [{url: 'http://a:1', models: [llama-3-8b]}]}\n"
        "tenants: {anonymous: {models: [llama-3-8b, llama-3-80b], limits: {models: {x: {}}}}}\n"
        "limits: {models: {qwen: {}}}\n"
        "classes: {default: {}, fast: {when: {models: [llama-3-8b, phi]}}}",
        [
            "p:2: warning: tenants.anonymous.limits.models.x: no engine of fleet.engines serves x",
            "p:2: warning: tenants.anonymous.models[1]: no engine of fleet.engines serves llama-3-80b "
            "(did you mean llama-3-8b?)",
            "p:3: warning: limits.models.qwen: no engine of fleet.engines serves qwen",
            "p:4: warning: classes.fast.when.models[1]: no engine of fleet.engines serves phi",
        ],
    ),
]

SHAPING = [
    (TOP + "shaping: [{kv_above: 85%, max_tokens: 100}, {kv_above: 90%, max_tokens: 50}]", []),
    (TOP + "budget: {kv_target: 80%}\nshaping: [{kv_above: 80%, max_tokens: 9}]", []),
    (
        TOP + "shaping: [{kv_above: 75%, max_tokens: 9}]",
        [
            "p:3: warning: shaping[0].kv_above: 75% is below budget.kv_target, to which engines are filled on purpose "
            "(80%): answers are cut whenever the fleet is busy"
        ],
    ),
]

MODES = [
    ("modes: {tight: {enter: {}, leave: {}}, brownout: {enter: {}, leave: {}}, closed: {enter: {}, leave: {}}}", []),
    ("modes: {tight: {enter: {}, leave: {}, refuse: [batch]}}", []),
    ("modes: {tight: {enter: {kv: 81%}, leave: {kv: 70%}}}", []),
    (
        "modes: {tight: {enter: {kv: 80%}, leave: {kv: 70%}}}",
        [
            "p:1: warning: modes.tight.enter.kv: 80% is not above budget.kv_target, to which engines are filled on "
            "purpose (80%): a busy fleet is always in this mode"
        ],
    ),
    (
        "modes: {tight: {enter: {kv: 85%, waiting: 8}, leave: {kv: 75%}}}",
        [
            "p:1: warning: modes.tight.leave: no waiting in it: the mode may end as soon as waiting is below the 8 of "
            "enter, and begin again at once"
        ],
    ),
    (
        "classes: {top: {}, default: {}}\nservice_tiers: {}\n"
        "modes: {closed: {enter: {kv: 97%}, leave: {kv: 90%}, refuse: [top, default]}}",
        ["p:3: warning: modes.closed: it refuses every class"],
    ),
    (
        "classes: {default: {}}\nshaping: []\n"
        "modes: {tight: {enter: {kv: 85%}, leave: {kv: 80%}, refuse: least_important}}",
        [],
    ),
]

REST = [
    ("hedging: p95", []),
    (
        "body: {media: any}",
        [
            "p:1: warning: body.media: engines fetch whatever URL a client names, also from hosts that only "
            "they can reach",
        ],
    ),
    (
        "keys_file: k.txt\ntenants: {acme: {}, globex: {}}\nrouting: {gateways: 2}",
        [
            "p:3: warning: routing.cache_secret_file: each of 2 gateways draws its own: none finds what another has "
            "had cached",
        ],
    ),
    (
        "keys_file: k.txt\ntenants: {acme: {}, globex: {}}\nrouting: {gateways: 2, cache_secret_file: s.txt}",
        [],
    ),
    ("keys_file: k.txt\ntenants: {acme: {}, globex: {}}\nrouting: {gateways: 2, cache_isolation: none}", []),
    ("routing: {gateways: 2}", []),
    ("body: {media: none}\ntrusted_proxies: [10.0.0.0/8, unix]", []),
    (
        'trusted_proxies: [unix, 0.0.0.0/0, "::/0"]',
        [
            f"p:1: warning: trusted_proxies[{index}]: {address} is everybody: whoever reaches the data port "
            "is whatever tenant they say they are"
            for index, address in ((1, "0.0.0.0/0"), (2, "::/0"))
        ],
    ),
]


PROVIDER = (
    "keys_file: k.txt\ntenants: {acme: {}}\nstorage: kept\nproviders: {cloud: {url: https://a.example/v1, key_file: k, "
    "models: {mini: m}, prices: 1/2, budget: [1/day], tenants: [acme]"
)


def test_a_provider_that_nobody_may_use() -> None:
    assert told(f"{PROVIDER}, classes: [default]}}}}") == []
    assert told(f"{PROVIDER}}}}}") == [
        "p:4: warning: providers.cloud: no call may leave the house: it names no classes"
    ]


@pytest.mark.parametrize(("text", "expected"), [*CLASSES, *TENANTS, *MODELS, *SHAPING, *MODES, *REST])
def test_what_is_said(text: str, expected: list[str]) -> None:
    assert told(text) == expected
