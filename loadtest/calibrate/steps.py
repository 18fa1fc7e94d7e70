"""Step times of an engine, derived from the token times of several streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median

from loadtest.calibrate.fit import NORMAL
from loadtest.calibrate.observations import ObservedRequest, WorkRow

SLICE = 8  # steps of one observation: a server that writes two tokens at once is as fast as one that does not
LEAST_STEP = 128  # tokens; what looks smaller is noise
NEAR = 0.2  # of a power of two, which such limits mostly are


def ran_at_once(seen: Sequence[ObservedRequest]) -> int:
    """Most of them that were decoding at the same time."""
    events = sorted([(one.tokens[0], 1) for one in seen] + [(one.tokens[-1], -1) for one in seen])
    return max(accumulate(change for _, change in events))


def decoding(seen: Sequence[ObservedRequest]) -> tuple[list[WorkRow], float]:
    """The steps in which all of them decoded and nothing else was done, SLICE by SLICE, and the deviation of a single
    one, as a share; nothing where they were too few."""
    begin, end = max(one.tokens[0] for one in seen), min(one.tokens[-1] for one in seen)
    times = [[at for at in one.tokens if begin < at <= end] for one in seen]
    steps = min(map(len, times)) - 1
    if steps < SLICE:
        return [], 0.0
    context = sum(one.prompt + sum(at <= begin for at in one.tokens) for one in seen)
    rows = []
    for at in range(0, steps - SLICE + 1, SLICE):
        taken = fmean((own[at + SLICE] - own[at]) / SLICE / of.together for own, of in zip(times, seen, strict=True))
        read = context + len(seen) * (at + SLICE / 2)
        rows.append(WorkRow(max(taken, 1e-6), 1.0, decoded=len(seen), context=read))
    each = [fmean(own[at + 1] - own[at] for own in times) for at in range(steps)]
    middle = median(each)
    return rows, NORMAL * median(abs(one - middle) for one in each) / middle


def between(beside: ObservedRequest, others: Sequence[ObservedRequest]) -> list[WorkRow]:
    """The steps while one decoded and others came and went, SLICE by SLICE of its tokens: which prompts were read
    meanwhile, and how many tokens were written, with what before them."""
    firsts = sorted((one.tokens[0], one.computed, one.pairs) for one in others)
    written = sorted(
        (at, one.together, one.prompt + number)
        for one in (beside, *others)
        for number, at in enumerate(one.tokens[1:], 1)
    )
    rows, prompt, token = [], 0, 0
    for begin, end in pairwise(beside.tokens[::SLICE]):
        read = pairs = decoded = context = 0.0
        while prompt < len(firsts) and firsts[prompt][0] <= end:
            at, computed, paired = firsts[prompt]
            read += computed if at > begin else 0
            pairs += paired if at > begin else 0
            prompt += 1
        while token < len(written) and written[token][0] <= end:
            at, count, before = written[token]
            decoded += count if at > begin else 0.0
            context += count * before if at > begin else 0.0
            token += 1
        steps = SLICE * beside.together
        rows.append(WorkRow(max(end - begin, 1e-6), steps, read, decoded, context, pairs))
    return rows


def largest(beside: ObservedRequest, seen: Sequence[ObservedRequest], alone: float) -> int:
    """The tokens of a full step, of prompts that were read while another decoded, whose steps take `alone` seconds
    without them: by how long it stood still each time. 0: that cannot be told."""
    begin, end = seen[0].sent, max(one.tokens[0] for one in seen)
    extra = [max(0.0, after - at - alone) for at, after in pairwise(beside.tokens) if begin < after and at < end]
    tokens = sum(one.computed for one in seen)
    sizes = [tokens * one / (sum(extra) or 1.0) for one in extra]
    large = [size for size in sizes if size > 0.5 * max(sizes)]
    full = [size for size in large if abs(size / median(large) - 1.0) < 2.0 * NEAR]
    if len(full) < 2 or median(full) < LEAST_STEP:
        return 0
    found = round(median(full)) + 1
    even = 1 << round(math.log2(found))
    return even if abs(found / even - 1.0) < NEAR else found
