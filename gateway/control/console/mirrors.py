"""Comparison of each mirror's sides for the console: the members' answers to copied calls, and those to the copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.core.policy.routes import ModelRoute
from gateway.core.request.record import COPY, MEMBER
from gateway.core.routes.canary import Answers


def mirror_entries(
    routes: Mapping[str, ModelRoute], mirrored: Mapping[tuple[str, str], Answers]
) -> Iterator[tuple[str, object]]:
    """Yield the entry of each route with a mirror: the mirror's model, and what each side's answers were like since the
    start. `mirrored`: by route and side."""
    for name, route in routes.items():
        if route.mirror is not None:
            sides = [(side, mirrored.get((name, side), Answers())) for side in (MEMBER, COPY)]
            yield f"mirror/{name}", {"model": route.mirror.model, "sides": {side: _side(each) for side, each in sides}}


def _side(answers: Answers) -> dict[str, object]:
    """Numbers of calls by how they ended, and means over those that are ok: tokens of an answer, and seconds to the
    first one."""
    ok = answers.results["ok"]
    return {
        **{result: answers.results[result] for result in ("ok", "error", "dropped")},
        "tokens": round(answers.tokens / ok, 1) if ok else None,
        "ttft": round(answers.ttft / ok, 3) if ok else None,
        "finishes": dict(answers.finishes.most_common()),
    }
