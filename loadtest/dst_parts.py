"""What a case is made of, as the things that a simulation runs: engines, faults, requests."""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.dst_case import Call, Machine
from loadtest.engine.engine import EngineConfig
from loadtest.engine.latency import Profile
from loadtest.memory_engine import MemoryEngine
from loadtest.simulation import Fault
from loadtest.workload import Planned


def strike(memory: MemoryEngine, fault: Fault) -> None:
    """A fault befalls an engine."""
    if fault.what in ("die", "stop", "recover"):
        getattr(memory, fault.what)()
    elif fault.what == "slow":
        memory.slow = fault.value
    else:
        memory.errors, memory.status = fault.value, fault.status


def planned(number: int, call: Call) -> Planned:
    """What a client sends."""
    text = f"group {call.group} " * 8 + f"call {number} "
    text = (text + "and so on " * (call.prompt // 2))[: 4 * call.prompt]
    body: dict[str, Any] = {
        "model": call.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": call.asked,
        "stream": call.stream,
    }
    fields = {b"content-type": b"application/json", b"x-weir-class": call.class_name.encode()}
    if call.key:
        fields[b"authorization"] = b"Bearer " + call.key.encode()
    if call.within:
        fields[b"x-weir-deadline-ms"] = b"%d" % (call.within * 1000.0)
    return Planned(call.at, call.class_name, msgspec.json.encode(body), fields)


def engine_of(machine: Machine, seed: int) -> MemoryEngine:
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
    config = EngineConfig(
        profile=profile,
        num_gpu_blocks=machine.blocks,
        max_num_seqs=machine.sequences,
        max_num_batched_tokens=256,
        max_model_len=(machine.blocks - 1) * 16,
    )
    return MemoryEngine(config, model=machine.model, seed=seed)
