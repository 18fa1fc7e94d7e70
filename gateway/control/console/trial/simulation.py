"""Trial of an edited policy: `gateway simulate` on the calls just recorded, under it and under the policy in force.

It runs in a process of its own (`child.py`), bounded in time and memory, of the lowest priority, one at a time. It ends
with whoever watches it: a page that is closed, or a cancel, kills the process. Of the gateway's loop it takes the
making of the files, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.control.console.stream import stream_answer
from gateway.control.guard import error
from gateway.control.parts import ControlParts
from gateway.core.policy.file import explain
from gateway.core.policy.policy import Policy
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.request.tenants import ANONYMOUS
from gateway.shared.control.body import TooLarge, body_of
from gateway.shared.tasks import telling

MOST_POLICY = 256 * 1024  # bytes
WITHIN = 180.0  # seconds
BEAT = 2.0  # seconds without a word after which the watcher is told that it goes on
WORDS = 4000  # characters of what it says of a mistake
REPORT = 16 << 20  # bytes
NOW, NEXT = "now", "edited"
HOUR = 3600.0  # seconds
BODY = 2 * MOST_POLICY  # bytes: JSON writes a newline as two
BODY_WITHIN = 10.0  # seconds


class PolicyTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`policy`: the edited text. `engines` of `profile`: simulated, as `gateway simulate` has them."""

    policy: Annotated[str, Meta(max_length=MOST_POLICY)]
    engines: Annotated[int, Meta(ge=1, le=64)] = 4
    profile: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = "h100-8b"


class Trials:
    """`busy` while one runs."""

    def __init__(self) -> None:
        self.busy = False
        self._ending: asyncio.Task[None] | None = None

    async def run(self, trial: PolicyTrial, policy: str, load: Recorded) -> AsyncGenerator[bytes, None]:
        """The events of a trial against `policy`: `begun`, `progress`, then `result` or `failed`."""
        if self.busy:
            yield _event("failed", {"text": "Another policy is tried just now."})
            return
        try:
            folder = Path(tempfile.mkdtemp(prefix="weir-trial-"))
        except OSError as error:
            yield _event("failed", {"text": f"There is no folder for its files, by TMPDIR: {error.strerror}."})
            return
        self.busy = True
        files = {f"{NOW}.yaml": policy.encode(), f"{NEXT}.yaml": trial.policy.encode()}
        files |= {"calls.csv": load.trace, "scenario.yaml": load.scenario}
        start = asyncio.create_task(_start(trial, folder, files))
        try:
            child = await asyncio.shield(start)
            yield _event("begun", {"calls": load.calls, "seconds": round(load.seconds)})
            try:
                async with asyncio.timeout(WITHIN), contextlib.aclosing(_simulated(child, folder)) as events:
                    async for event in events:
                        yield event
            except TimeoutError:
                _kill(child)
                yield _event("failed", {"text": f"It took more than {WITHIN:g} s, and was ended."})
        except OSError as error:
            yield _event("failed", {"text": f"It could not be run: {error.strerror}."})
        finally:  # starlette cancels this again at every turn of the loop: the end is a task of its own
            self._ending = asyncio.create_task(self._end(start, folder))
            self._ending.add_done_callback(telling("the end of a policy's trial"))
            await asyncio.shield(self._ending)

    async def _end(self, start: asyncio.Task[Process], folder: Path) -> None:
        """End the process, and then remove its folder."""
        try:
            with contextlib.suppress(OSError):  # it could not start
                child = await start
                _kill(child)
                await child.wait()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self.busy = False


async def _start(trial: PolicyTrial, folder: Path, files: dict[str, bytes]) -> Process:
    await asyncio.to_thread(_write, folder, files)
    argv = ["-P", "-m", "gateway.control.console.trial.child", "simulate", "--scenario", "scenario.yaml"]
    argv += ["--policy", f"{NOW}.yaml", "--policy", f"{NEXT}.yaml", "--engines", str(trial.engines)]
    argv += ["--profile", trial.profile, "--jobs", "1", "--out", "report"]
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
    return await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=folder, env=kept,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _simulated(child: Process, folder: Path) -> AsyncGenerator[bytes, None]:
    assert child.stderr is not None  # noqa: S101 # it is a pipe
    said = ""
    while True:
        try:
            part = await asyncio.wait_for(child.stderr.read(WORDS), BEAT)
        except TimeoutError:
            yield b":\n\n"
            continue
        if not part:
            break
        said = (said + part.decode("utf-8", "replace"))[-WORDS:]
        yield _event("progress", {"text": said.strip().rpartition("\n")[2]})
    status = await child.wait()
    if status in (0, 1):  # 1: an SLO was missed
        yield _event("result", await asyncio.to_thread(_result, folder / "report" / "report.json"))
    else:
        why = said.strip() or f"It ended with status {status}: it may have wanted more memory or time than it gets."
        yield _event("failed", {"text": why})


def _kill(child: Process) -> None:
    if child.returncode is None:
        child.kill()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _result(file: Path) -> object:
    """Rows of all calls and of each class: both policies' figures, as `gateway simulate` has reported them."""
    with file.open("rb") as opened:
        before, after = msgspec.json.decode(opened.read(REPORT))["runs"]
    rows = [["all calls", _told(before["total"]), _told(after["total"])]]
    for name in before["classes"] | after["classes"]:
        rows.append([name, _told(before["classes"].get(name)), _told(after["classes"].get(name))])
    return {"rows": rows}


def _told(figures: Mapping[str, Any] | None) -> object:
    if figures is None:
        return None
    ttft = figures["ttft"] or {}
    return {
        "offered": figures["offered"],
        "ok": figures["ok"],
        "tokens": figures["completion_token_rate"],
        "ttft_p50": ttft.get("p50"),
        "ttft_p99": ttft.get("p99"),
        "endings": [[each["outcome"], each["count"]] for each in figures["endings"] if each["outcome"] != "ok"],
    }


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


class TrialRoutes:
    """Routes of a policy's trial, only where there is an admin token (`allowed`).

    GET  /policy/try    the policy in force as text to edit, without keys
    POST /policy/try    {"policy": TEXT, "engines": N, "profile": NAME}: both policies on the calls just recorded
    """

    def __init__(self, parts: ControlParts, *, allowed: bool) -> None:
        self._dispatch = parts.dispatch
        self._ended = parts.ended
        self._allowed = allowed
        self._trials = Trials()

    def routes(self) -> list[Route]:
        return [Route("/policy/try", self.text), Route("/policy/try", self.run, methods=["POST"])]

    async def text(self, _: Request) -> Response:
        return Response(_text(self._dispatch.policy), media_type="application/yaml")

    async def run(self, request: Request) -> Response:
        """The events of the trial, see simulation.py; it ends with its watcher."""
        if not self._allowed:
            return error(404, "no_trial", "A policy is tried here only where there is an admin token.")
        try:
            trial = msgspec.json.decode(await body_of(request, BODY, BODY_WITHIN), type=PolicyTrial)
        except (msgspec.MsgspecError, UnicodeDecodeError) as mistake:
            return error(400, "bad_body", f"The body is no trial: {mistake}")
        except (ClientDisconnect, TimeoutError, TooLarge):
            return error(400, "bad_body", f"The body is at most {BODY} bytes, sent within {BODY_WITHIN:g} s.")
        load = recorded(self._ended.callers(asyncio.get_running_loop().time() - HOUR))
        if load is None:
            return error(409, "no_calls", "No call of the last hour was judged: there is nothing to try it on.")
        if self._trials.busy:
            return error(503, "busy", "Another policy is tried just now.", {"retry-after": "10"})
        return stream_answer(self._trials.run(trial, _text(self._dispatch.policy), load))


def _text(policy: Policy) -> str:
    """The policy as a file, without its keys: a simulation has its own."""
    tenants = {name: msgspec.structs.replace(tenant, keys=()) for name, tenant in policy.tenants.items()}
    return explain(msgspec.structs.replace(policy, tenants=tenants))


# -- the recorded load ------------------------------------------------------------------------------------------------

# The trace has each call that was judged: answered, refused for want of room, time or a limit, or failed. What
# the caller alone could mend is left out. A call without a counted answer gets the median of its class. Classes with
# models, and tenants, are drawn by their shares of the recorded calls: a trace has no column for them.
MODEL = re.compile(r"[!-~]{1,200}")  # as a scenario names it
KINDS = 50  # (class, model) and tenants that are told apart: those with most calls
UNKNOWN = 128  # tokens of an answer where none of any class was counted
TAKEN = frozenset({
    Outcome.OK, Outcome.RATE_LIMITED, Outcome.QUEUE_FULL, Outcome.SHED, Outcome.NO_ENGINE, Outcome.DEADLINE_UNREACHABLE,
    Outcome.EXPIRED, Outcome.UPSTREAM, Outcome.TRUNCATED, Outcome.MODEL_UNAVAILABLE, Outcome.DRAINING,
    Outcome.CLIENT_GONE,
})  # fmt: skip


class Recorded(msgspec.Struct, frozen=True):
    """`calls` of the last `seconds`, with the files' contents."""

    calls: int
    seconds: float
    trace: bytes
    scenario: bytes


def recorded(ended: Iterable[tuple[float, Record]]) -> Recorded | None:
    """The load of these calls, each with the moment that it ended; None: none of them was judged."""
    taken = [
        (at - record.total, record)
        for at, record in ended
        if record.outcome in TAKEN and record.class_name and record.prompt_tokens and MODEL.fullmatch(record.model)
    ]
    if not taken:
        return None
    taken.sort(key=lambda each: each[0])
    answers: dict[str, list[int]] = {}
    for _, record in taken:
        if record.settled:
            answers.setdefault(record.class_name, []).append(max(1, record.completion_tokens))
    usual = {name: median_low(tokens) for name, tokens in answers.items()}
    any_ = median_low([tokens for each in answers.values() for tokens in each]) if answers else UNKNOWN
    first = taken[0][0]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for arrived, record in taken:
        when = datetime.fromtimestamp(arrived - first, UTC).replace(tzinfo=None)
        answer = max(1, record.completion_tokens) if record.settled else usual.get(record.class_name, any_)
        lines.append(f"{when.isoformat(sep=' ', timespec='microseconds')},{record.prompt_tokens},{answer}")
    scenario = msgspec.json.encode(_scenario([record for _, record in taken]))  # JSON is YAML
    return Recorded(len(taken), taken[-1][0] - first, "\n".join([*lines, ""]).encode(), scenario)


def _scenario(records: list[Record]) -> object:
    kinds = Counter((record.class_name, record.model) for record in records).most_common(KINDS)
    tenants = Counter(record.tenant for record in records).most_common(KINDS)
    sent = {"prompt": "trace", "output": "trace", "ignore_eos": True}
    workload: dict[str, object] = {
        "mix": [{"class": name, "model": model, "share": float(calls), **sent} for (name, model), calls in kinds]
    }
    if [name for name, _ in tenants] != [ANONYMOUS]:
        all_ = sum([calls for _, calls in tenants])
        workload["tenants"] = {
            name: {"weight": max(0.01, round(1000.0 * calls / all_, 2))} for name, calls in tenants if name
        }
    return {"arrivals": "trace", "trace": {"file": "calls.csv"}, "retries": 0, "workload": workload}
