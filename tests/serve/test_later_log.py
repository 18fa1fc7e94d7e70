"""Log and storage of a process that is started again while they cannot be opened: a folder has gone, or the disk is
read-only."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.policy.batches import BatchesPolicy
from gateway.core.policy.policy import Policy
from gateway.relay.remote import link
from gateway.serve import run
from gateway.serve.processes import relaying
from gateway.serve.processes.place import Place
from gateway.serve.starting import Options, ProcessSignals, StartError, call_log
from gateway.shared.lines import LineWriter
from gateway.shared.storage import Storage
from tests.cluster.test_port import place_in


def test_a_relay_that_is_started_again_serves_without_its_log_until_it_can_be_opened(tmp_path: Path) -> None:
    path, said = tmp_path / "gone" / "weir.jsonl", list[str]()
    options, errors = Options(announce=lambda _: None, log=str(path)), LineWriter(2)
    with pytest.raises(StartError):  # at the gateway's start it is the operator's mistake
        call_log(options, errors)
    log = call_log(options, errors, lambda line: said.append(str(line)), later=True)
    assert log is not None
    log.lines.write(b"one\n")
    log.lines.drain()
    assert log.lines.lost == 1
    assert f"{path}: cannot be written" in "".join(said)
    path.parent.mkdir()
    log.lines.write(b"two\n")
    log.lines.drain()
    assert path.read_bytes().endswith(b"two\n")


def test_so_does_a_decider_which_logs_the_calls_that_a_proxy_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        """End of that part of a start which is tested."""

    def asked(*_: object, later: bool = False) -> None:
        raise Asked(later)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            place = place_in(tmp_path, stack)
            options = Options(announce=lambda _: None, log=str(tmp_path / "gone" / "weir.jsonl"), epp="127.0.0.1:0")
            await run.serve(options, 1000, LineWriter(2), place.inherited, place)

    monkeypatch.setattr(run, "call_log", asked)
    with pytest.raises(Asked, match="True"):
        asyncio.run(main())


@pytest.mark.parametrize("first", [True, False])
def test_a_relay_that_is_started_again_takes_calls_until_the_storage_of_batches_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: bool
) -> None:
    class Side(relaying.RelaySide):
        """Relay whose decider has told it all, and orders its end once the storage is back."""

        def __init__(self, place: Place, *more: Any, **others: Any) -> None:
            super().__init__(place, *more, **others)
            self.link.ready.set()

        async def until_drained(self, signals: ProcessSignals) -> None:
            assert not self.pipeline.others.stored
            storage = Storage(tmp_path / "kept")
            await storage.open()
            async with asyncio.timeout(10):
                while not self.pipeline.others.stored:
                    await asyncio.sleep(0.01)
            self._drain_order.set()
            await super().until_drained(signals)
            await storage.aclose()

    async def main() -> None:
        async with AsyncExitStack() as stack:
            place = msgspec.structs.replace(place_in(tmp_path, stack), role="relay", number=1, first=first)
            options = Options(announce=lambda _: None, log="none", policy=tmp_path / "policy.yaml")
            policy = Policy(storage="kept", batches=BatchesPolicy())
            await relaying.relay(options, policy, 1000, LineWriter(2), place)

    monkeypatch.setattr(relaying, "RelaySide", Side)
    monkeypatch.setattr(link, "TOLD_WITHIN", 0.0)  # nobody would hear it
    if first:
        with pytest.raises(StartError, match="kept"):
            asyncio.run(main())
    else:
        asyncio.run(main())
        assert "it takes calls, and files and batches once that is over" in capsys.readouterr().err
