"""Parts of a case, as the objects that a simulation runs: engines, faults, requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from gateway.serve.assembly import Gateway
from gateway.shared.protocol import Role
from loadtest.engine.engine_config import EngineConfig
from loadtest.engine.latency import Profile
from loadtest.engine.scheduler import Policy
from loadtest.lab.dst.case import Call, Case, EngineSpec
from loadtest.load.prompts import PATHS
from loadtest.load.workload import Planned
from loadtest.simulate.memory_engine import MemoryEngine


def planned(number: int, call: Call) -> Planned:
    """Body and headers that a client sends."""
    text = (f"group {call.group} " * (8 + call.history))[: 4 * call.history or 64] + f"call {number} "
    text = (text + "and so on " * (call.prompt // 2))[: 4 * call.prompt]
    body: dict[str, Any] = {"model": call.model}
    if call.kind == "embeddings":
        body["input"] = text if call.items == 1 else [f"{item} {text}" for item in range(call.items)]
    elif call.kind == "rerank":
        body |= {"query": f"group {call.group % 2}", "documents": [f"{item} {text}" for item in range(call.items)]}
        body |= {"top_n": call.top} if call.top else {}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": call.asked, "stream": call.stream}
        body |= {"stream_options": {"include_usage": True}} if call.stream and call.usage else {}
    fields = {b"content-type": b"application/json", b"x-weir-class": call.class_name.encode()}
    if call.key:
        fields[b"authorization"] = b"Bearer " + call.key.encode()
    if call.within:
        fields[b"x-weir-deadline-ms"] = b"%d" % (call.within * 1000.0)
    if call.session:
        fields[b"x-weir-session"] = b"%d" % call.session
    return Planned(call.at, call.class_name, msgspec.json.encode(body), fields, path=PATHS[call.kind])


def scheduling_of(number: int) -> Policy:
    """Scheduling of the extra engine of this number, which the policy that names it says."""
    return "priority" if number % 2 else "fcfs"


def engine_of(machine: EngineSpec, seed: int, scheduling: Policy = "fcfs") -> MemoryEngine:
    """The simulated engine that a machine is."""
    profile = Profile(
        base=machine.step,
        prefill=machine.prefill,
        decode=0.0,
        context=0.0,
        jitter=machine.jitter,
        num_gpu_blocks=machine.blocks,
        max_num_seqs=machine.sequences,
        max_num_batched_tokens=256,
        max_model_len=(machine.blocks - 1) * 16,
    )
    config = EngineConfig(profile=profile, policy=scheduling)
    return MemoryEngine(config, model=machine.model, seed=seed, more=machine.more)


def roles_of(case: Case) -> tuple[Role, ...]:
    """Return the roles of the command line's engines; empty: they exchange nothing. Each model has one that answers."""
    if not case.exchanges:
        return ()
    rng = random.Random(f"roles{case.seed}")  # noqa: S311 # a test's draw
    roles: list[Role] = []
    for number, machine in enumerate(case.fixed):
        first = machine.model not in {each.model for each in case.fixed[:number]}
        roles.append(rng.choice(("decode", "both") if first else get_args(Role)))
    return tuple(roles)


def faults_of_transfers(case: Case, number: int, engines: Sequence[MemoryEngine]) -> None:
    """Let one engine exchange with all, in some cases by answers that are wrong or without reading what it lacks."""
    rng = random.Random(f"transfers{case.seed}{number}")  # noqa: S311 # a test's draw
    engine = engines[number]
    engine.peers = list(engines)
    engine.on_kv_failure = rng.choice(("fail", "recompute"))
    engine.transfer = rng.choice(("", "", "", "none", "another", "stale", "garbage"))


def believe_rates(case: Case, gateway: Gateway) -> None:
    """Draw the prompt tokens a second that the gateway takes each engine for that exchanges KV caches."""
    for number, _ in enumerate(roles_of(case)):
        rate = random.Random(f"rate{case.seed}{number}").choice((100.0, 1000.0, 20_000.0))  # noqa: S311 # a test's draw
        engine = gateway.fleet.engines[f"engine-{number}:8000"]
        engine.speed.restore(msgspec.structs.replace(engine.checkpoint(0.0, 0), prefill_rate=rate))
