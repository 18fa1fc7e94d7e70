"""Price of a checkpoint of a decider's soft state: bytes, and milliseconds of one core, each second it is taken in.

    python -m loadtest.lab.cost.checkpoint

Every engine has read more than its share of a checkpoint. Beside it the bytes of the prefix indexes' digests, and of
whole indexes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable

import msgspec

from gateway.core.admission.bookings import Bookings
from gateway.core.checkpoint import BLOCK, MOST_PREFIXES, decoded
from gateway.core.engines.fleet import Engine
from gateway.core.engines.prefix_cache import BLOCKS_AT_MOST
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.traffic import Limits, RateLimit, TenantLimit
from gateway.core.policy.types import Rate
from gateway.core.request.call import Call
from gateway.core.request.routes import ROUTES
from gateway.serve.assembly import Gateway

ROUNDS = 7
SIZES = ((10, 4, 2), (100, 16, 8), (1000, 64, 16), (8000, 256, 64))  # tenants, engines, models
PROMPT = 32  # blocks
PLACES = 16  # booked in each class of each model


def a_call(model: str, number: int) -> Call:
    return Call(
        request_id="r", route=ROUTES[b"/v1/chat/completions"], model=model, tenant="t", class_name="default",
        arrived=0.0, deadline=60.0, stream=False, wants_usage=False, max_tokens=100, n=1, ascii_bytes=4000, cjk_bytes=0,
        other_bytes=0, media=0, messages=1, prefix=(), session=0, body=b"%d" % number, prompt_tokens=1000, asked=100,
    )  # fmt: skip


def filled(tenants: int, engines: int, models: int) -> Gateway:
    """A gateway that has learned something of each of so many."""
    per_tenant = TenantLimit(
        requests=RateLimit(rate=Rate(1000, 86_400.0)), tokens=RateLimit(rate=Rate(10_000_000, 86_400.0))
    )
    entries = [EngineEntry(url=f"http://10.0.{number // 250}.{number % 250 + 1}:8000") for number in range(engines)]
    gateway = Gateway(Policy(limits=Limits(per_tenant=per_tenant)), entries, None, random.Random(1))  # noqa: S311 # no secrets
    now = gateway.clock()
    for number in range(tenants):
        gateway.limits.charge(f"tenant-{number}", "default", "m", 1000, now).keep()
    for number in range(models):
        _, traffic = gateway.dispatch.control.open(f"organisation/model-{number}", now)
        traffic.drain.returned("default", 1000, 1.0, now)
        call = a_call(f"organisation/model-{number}", 0)
        gateway.decider.cost.learn(call, 1000, 50)
        for bookings in traffic.bookings.values():
            book(bookings, call.model, now)
    for engine in gateway.fleet:
        read(engine, MOST_PREFIXES // engines, now)
    return gateway


def book(bookings: Bookings, model: str, now: float) -> None:
    for number in range(PLACES):
        bookings.book(a_call(model, number), 5.0, now)


def milliseconds(work: Callable[[], object]) -> float:
    """CPU of one run: the median of ROUNDS."""
    took = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return statistics.median(took) * 1000


def read(engine: Engine, blocks: int, now: float) -> None:
    """Fill its prefix index as far as a checkpoint has it, with a prompt every few milliseconds."""
    for number in range(0, blocks, PROMPT):
        at = now - (blocks - number) * 1e-4
        engine.remember(tuple([hash((engine.id, number + block)) for block in range(PROMPT)]), PROMPT * 128, at)


async def main() -> None:
    print("tenants  engines  models      bytes   take, ms  restore, ms  digests, bytes  indexes, bytes")
    for size in SIZES:
        gateway = filled(*size)
        state = gateway.checkpoints.take()
        took = milliseconds(gateway.checkpoints.take)
        restored = milliseconds(lambda: gateway.checkpoints.restore(state, 1.0))  # noqa: B023 # called at once
        digests = sum([len(msgspec.msgpack.encode(engine.prefixes)) for engine in decoded(state).engines])
        whole = size[1] * BLOCKS_AT_MOST * BLOCK
        row = f"{len(state):10,} {took:10.2f} {restored:12.2f} {digests:15,} {whole:15,}"
        print("{:7}  {:7}  {:6}".format(*size), row)
        await gateway.aclose()


if __name__ == "__main__":
    asyncio.run(main())
