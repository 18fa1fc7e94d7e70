"""Random machine of a seed: its GPUs, models, estimates that are wrong, and what NVML tells there.

Nothing is as the sidecar assumes: GPUs are unequal, engines take 0.8 to 1.8 times what was estimated, keep more asleep
on several GPUs and with every sleep, and say what they lack in the words of several versions of vLLM. Some were made
for a context that is too long for the GPUs there, and their profiles give no shorter one.
"""

from __future__ import annotations

import random

import msgspec

from loadtest.engine.memory_stages import GIB
from loadtest.engine.true_memory import CONTEXT, TrueMemory
from loadtest.lab.residency.machine import Listing
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import file
from sidecar.sizing.claim import LEAST

TOTALS = (16, 24, 40, 48, 80)  # GiB
LISTINGS: tuple[Listing, ...] = ("own", "own", "own", "host", "none")
LONG = 0.3  # of the models have a long context
OWN_CONTEXT = 131_072  # tokens
MARGIN = 0.05  # of a GPU: as much as the sidecar may leave unused


class RandomMachine(msgspec.Struct, frozen=True):
    """`text`: the sidecar's file; `host_memory`: bytes for models asleep at level 1; `tensor_parallel` and `gpus`: by
    model, as in the file."""

    seed: int
    text: str
    models: dict[str, Model]
    totals: tuple[int, ...]
    listing: Listing
    host_memory: int
    gateways: int
    tensor_parallel: dict[str, int]
    gpus: dict[str, tuple[int, ...]]

    def too_large(self, name: str) -> bool:
        """Whether a model may be refused for its size: what it really takes leaves no margin on its GPUs; nor may what
        is estimated of one with a long context, which no GPU need have room for."""
        model, several = self.models[name], self.tensor_parallel[name]
        true, given = model.true, model.own_context
        if true is None:
            return False
        sizes = sorted((self.totals[gpu] for gpu in self.gpus[name]), reverse=True)
        if len(sizes) < several:
            return True
        context = true.context * LEAST // given if given else true.context
        needs = true.rest + context + max(0, true.beyond) + CONTEXT
        if given:
            needs = max(needs, model.claim - model.context + model.context * LEAST // given)
        return needs > (1 - 2 * MARGIN) * (sizes[several - 1] - true.hidden) - GIB


def drawn(seed: int) -> RandomMachine:
    """The machine of this seed."""
    rng = random.Random(seed)  # noqa: S311 # repeatable, not secret
    totals = tuple(int(rng.choice(TOTALS) * rng.uniform(0.98, 1.0) * GIB) for _ in range(rng.randint(1, 4)))
    names = "abcde"[: rng.randint(1, 5)]
    models, fields, several, allowed = {}, {}, {}, {}
    for name in names:
        several[name] = rng.choice([count for count in (1, 1, 1, 2, 4) if count <= len(totals)])
        everywhere = range(len(totals))
        bound = rng.random() < 0.2
        allowed[name] = tuple(sorted(rng.sample(everywhere, several[name]))) if bound else tuple(everywhere)
        models[name] = _model(rng, rng.choice(totals), several[name])
        fields[name] = _fields(rng, several[name], allowed[name] if bound else None)
    contexts = random.Random(f"contexts of {seed}")  # noqa: S311 # beside the other, which draws what it always has
    models = {name: _long(contexts, model) if contexts.random() < LONG else model for name, model in models.items()}
    host = sum(models[name].weights * several[name] for name in names)
    return RandomMachine(
        seed=seed,
        text=file(names, len(totals), **fields),
        models=models,
        totals=totals,
        listing=rng.choice(LISTINGS),
        host_memory=int(host * rng.choice((0.4, 2.0, 2.0))),
        gateways=rng.randint(1, 2),
        tensor_parallel=several,
        gpus=allowed,
    )


def _model(rng: random.Random, total: int, several: int) -> Model:
    claim = int(rng.uniform(0.2, 0.85) * total)
    weights, context = int(claim * rng.uniform(0.3, 0.7)), claim // 8
    true = TrueMemory(
        rest=int((claim - context) * rng.choice((0.8, 1.0, 1.0, 1.1, 1.3, 1.8))),
        context=int(context * rng.choice((0.5, 1.0, 1.0, 2.0))),
        beyond=rng.choice((-GIB // 2, 0, 0, GIB // 2, 2 * GIB)),
        blocks=rng.choice((None, None, None, 64)),
        hidden=rng.choice((0, GIB // 4, GIB // 2)),
        residue=int(rng.uniform(0.5, 1.5) * GIB if several == 1 else rng.uniform(2.0, 7.0) * GIB),
        grows=int(rng.choice((0.0, 0.0, 0.1, 0.5)) * GIB),
        wording=rng.randrange(6),
    )
    return Model(
        weights=weights, claim=claim, true=true, pinned=rng.choice((1.0, 1.2, 1.5)), keeps_pinned=rng.random() < 0.5
    )


def _long(rng: random.Random, model: Model) -> Model:
    """Give a model a context of so many tokens that their KV cache may be larger than its GPU."""
    times, usual = rng.choice((1, 4, 16)), model.claim // 8
    true = model.true and msgspec.structs.replace(model.true, context=model.true.context * times, tokens=OWN_CONTEXT)
    claim = model.claim + (times - 1) * usual
    return msgspec.structs.replace(model, claim=claim, context=times * usual, own_context=OWN_CONTEXT, true=true)


def _fields(rng: random.Random, several: int, bound: tuple[int, ...] | None) -> str:
    found = [f"max_starvation: {rng.choice((1, 20, 60))}s", f"tensor_parallel: {several}"]
    sleep = rng.choice(("", "", "sleep: null", "sleep: {level: 2}", "sleep: {after: 40s}"))
    stop = rng.choice(("", "", "stop_after: 2m"))
    gpus = "" if bound is None else f"gpus: [{', '.join(map(str, bound))}]"
    return ", ".join(each for each in (*found, sleep, stop, gpus) if each)
