"""The relay's side of its interface to a decider: it needs nothing else of one, and no answer in the same turn."""

from __future__ import annotations

import ast
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

import gateway.relay
from gateway.core.request.record import Record
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, request, settled

# Modules with a decider's state: a relay that reads them could not run in another process.
STATE = (
    *(f"gateway.core.admission.{name}" for name in ("admission", "limits", "queues", "model_traffic", "retries")),
    *(f"gateway.core.engines.{name}" for name in ("fleet", "choice")),
    *("gateway.core.request.cost", "gateway.core.sidecars", "gateway.decider"),
)
FILES = sorted(Path(gateway.relay.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_relay_reads_no_state_of_a_decider(file: Path) -> None:
    imported = [node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name.startswith(STATE)]


class Late:
    """A decider, an admission or a grant whose questions are answered some turns later, as by another process."""

    QUESTIONS = frozenset({"judge", "ask", "again", "move", "second", "models"})

    def __init__(self, whole: Any) -> None:
        vars(self)["whole"] = whole

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.whole, name)
        if name == "at_once":
            return lambda _: None
        if name == "arrive":
            return lambda *given: Late(found(*given))
        return self._later(name, found) if name in self.QUESTIONS else found

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.whole, name, value)

    def _later(self, name: str, question: Any) -> Any:
        async def answered(*given: Any) -> Any:
            await asyncio.sleep(0.002)
            if name == "ask":
                return Late(self.whole.at_once(*given) or await question(*given))
            answer = question(*given)
            return answer if answer is None else await answer

        return answered

    def __enter__(self) -> Late:
        self.whole.__enter__()
        return self

    def __exit__(self, *given: object) -> None:
        self.whole.__exit__(*given)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behaviours", "status", "attempts"),
    [(["good"], 200, 1), (["die_before_headers", "good"], 200, 2), (["503", "503"], 502, 3), (["429", "good"], 200, 2)],
)
def test_answers_that_come_later_change_nothing(
    behaviours: list[str], status: int, attempts: int, stream: bool
) -> None:
    async def main() -> None:
        engines = [ScriptedEngine(behaviour) for behaviour in behaviours]
        async with AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.running())
            whole = await stack.enter_async_context(gateway_over(engines))
            for number, each in enumerate(whole.fleet):
                each.speed.prefill_rate = 10_000.0 / (number + 1)  # else they are equals
            records: list[Record] = []
            whole.pipeline.endings.observe = records.append
            whole.pipeline.decider = Late(whole.decider)  # type: ignore[assignment]  # it has all of the interface
            answer = await ask(port_of(whole), request(stream))
            await settled(whole)
            assert answer.status == status
            assert [record.attempts for record in records] == [attempts]
            assert [engine.ledger.held for engine in whole.fleet] == [0] * len(engines)

    uvloop.run(main())
