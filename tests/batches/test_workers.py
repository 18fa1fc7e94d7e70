"""Batches of a gateway of several processes: any relay is asked, one works them, and another when that one ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import openai
import pytest

from loadtest.processes import Gateway, get, until
from tests.batches.conftest import client
from tests.batches.relays import RelayConnection, relays, until_working, working
from tests.batches.test_batches import begun, done, line, lines_of, over, uploaded
from tests.e2e.children import SimEngine
from tests.e2e.traffic import CHAT
from tests.serve.test_processes import runs
from tests.serve.test_upgrades import world

pytestmark = pytest.mark.slow

POLICY = """
storage: kept
batches: {in_flight: 8}
fleet: {poll: 100ms, health: 200ms}
"""
LINES = 300
LARGE = 32 << 20  # bytes
SIZE = 500_000  # bytes of an upload that comes in two parts
FORM = "multipart/form-data; boundary=B"
BODY = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--B--\r\n' % bytes(SIZE)
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SimEngine]:
    started = SimEngine(tmp_path / "engine.log", "--model", "sim")
    with started.child:
        yield started


@pytest.fixture
def gateway(tmp_path: Path, engine: SimEngine) -> Iterator[Gateway]:
    (tmp_path / "policy.yaml").write_text(POLICY)
    arguments = ("--engine", engine.url, "--policy", str(tmp_path / "policy.yaml"), "--workers", "2")
    with Gateway(tmp_path / "log", *arguments) as running:
        yield running
        assert running.child.alive, running.child.output()
        assert "Traceback" not in running.child.output(), running.child.output()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "kept/files"


def other(gateway: Gateway, files: Path) -> int:
    """A relay that does not work the batches."""
    worker = until_working(files)
    return next(pid for pid in relays(gateway) if pid != worker)


def asked(lines: int) -> list[str]:
    return [line(f"c{number}", max_tokens=8) for number in range(lines)]


def whole(openai: openai.OpenAI, id: str, lines: int) -> None:
    """Every line has one result, which is its own."""
    batch = over(openai, id)
    assert batch.status == "completed", batch
    found = lines_of(openai, batch.output_file_id)
    assert set(found) == {f"c{number}" for number in range(lines)}
    for number in range(lines):
        assert found[f"c{number}"]["response"]["body"]["id"].endswith(f"_{number + 1}")


def test_a_batch_is_worked_whichever_relay_has_its_file_and_itself(gateway: Gateway, files: Path) -> None:
    idle = other(gateway, files)
    with client(gateway, "none") as sends, client(gateway, "none") as begins:
        file = uploaded(sends, asked(LINES))
        with RelayConnection(gateway, idle) as through:
            id = through.ask("POST", "/v1/batches", {
                "input_file_id": file, "endpoint": CHAT, "completion_window": "24h"})["id"]  # fmt: skip
            assert until(lambda: done(begins, id) > 0, 20.0) is not None, (
                "the relay that works it is told: else it looks in 30 s"
            )
            whole(begins, id, LINES)
            assert through.ask("GET", f"/v1/batches/{id}")["request_counts"]["completed"] == LINES
        with RelayConnection(gateway, working(files)) as through:
            assert through.ask("GET", f"/v1/files/{file}")["filename"] == "in.jsonl"
    assert until(lambda: gateway.total("weir_batch_lines_total", result="completed") == LINES, 60.0) is not None
    assert until(lambda: gateway.total("weir_batch_calls") == 0, 60.0) is not None
    assert until(lambda: gateway.total("weir_batch_jobs", status="completed") == 1, 60.0) is not None


def test_another_relay_works_on_when_the_one_that_does_is_killed(
    gateway: Gateway, files: Path, engine: SimEngine
) -> None:
    engine.faults(slow=5.0)  # else the last lines may be done before the last kill
    with client(gateway, "none") as caller:
        id = begun(caller, uploaded(caller, asked(LINES)))
    for least in (50, 120, 190):
        assert until(lambda least=least: _done(gateway, id) >= least, 60.0) is not None
        worker = until_working(files)
        engine.faults(hang=True)  # no line ends before it is looked at, however long that takes
        os.kill(worker, signal.SIGKILL)
        assert until_working(files, beside=worker) != worker
        assert _done(gateway, id) < LINES, "it was under way"
        engine.faults(slow=5.0)
    engine.faults()
    with client(gateway, "none") as caller:
        whole(caller, id, LINES)
    kept = partial(gateway.total, "weir_batch_lines_total", result="completed")
    assert until(lambda: kept() > 0, 60.0) is not None
    assert kept() <= LINES, "a relay that is killed takes the counts of its last second with it"
    assert until(lambda: gateway.total("weir_batch_jobs", status="completed") == 1, 60.0) is not None
    assert until(lambda: gateway.total("weir_batch_calls") == 0, 60.0) is not None
    assert until(lambda: len(relays(gateway)) == 2, 60.0) is not None


def _done(gateway: Gateway, id: str) -> int:
    """Lines with a result, asked for on a new connection."""
    try:
        counts = json.loads(get(f"{gateway.url}/v1/batches/{id}")[1])["request_counts"]
    except (OSError, http.client.HTTPException):  # its relay was killed
        return 0
    return int(counts["completed"]) if counts else 0


def test_a_batch_is_cancelled_through_a_relay_that_does_not_work_it(
    gateway: Gateway, files: Path, engine: SimEngine
) -> None:
    with client(gateway, "none") as caller, RelayConnection(gateway, other(gateway, files)) as through:
        engine.faults(slow=20.0)
        file = uploaded(caller, [line("a", max_tokens=1), line("b", max_tokens=4000)])
        id = begun(caller, file)
        assert until(lambda: done(caller, id) == 1, 60.0) is not None
        assert through.ask("POST", f"/v1/batches/{id}/cancel")["status"] in {"cancelling", "cancelled"}
        assert until(lambda: caller.batches.retrieve(id).status == "cancelled", 60.0) is not None, (
            "the line would take minutes"
        )
        ended = caller.batches.retrieve(id)
        assert set(lines_of(caller, ended.output_file_id)) == {"a"}
        assert ended.error_file_id is None
        assert until(lambda: engine.running() == 0, 60.0) is not None


def test_bounds_of_a_tenant_are_of_all_relays_together(gateway: Gateway, engine: SimEngine) -> None:
    engine.faults(slow=20.0)  # none of them is over before all are there
    one, two = relays(gateway)
    with (
        RelayConnection(gateway, one) as first,
        RelayConnection(gateway, two) as second,
        client(gateway, "none") as caller,
    ):
        new = {"endpoint": CHAT, "completion_window": "24h"}
        new["input_file_id"] = uploaded(caller, [line("a", max_tokens=4000)])
        ids = [each.ask("POST", "/v1/batches", new)["id"] for each in (first, second) * 50]
        error = second.ask("POST", "/v1/batches", new, status=429)["error"]
        assert "100 batches that are not over" in error["message"]
        for id in ids:
            caller.batches.cancel(id)
        for id in ids:
            over(caller, id)


def test_what_a_killed_relay_was_sent_is_deleted_and_what_another_is_sent_is_not(gateway: Gateway, files: Path) -> None:
    idle = other(gateway, files)
    lives = RelayConnection(gateway, idle)
    dies = RelayConnection(gateway, until_working(files))
    for each in (lives, dies):
        each.begin("/v1/files", FORM, len(BODY), BODY[:-1000])
    assert until(lambda: len(list(files.glob("*.part"))) == 2, 60.0) is not None
    worker = working(files)
    os.kill(worker, signal.SIGKILL)
    assert until_working(files, beside=worker)
    assert until(lambda: len(list(files.iterdir())) == 1, 60.0) is not None
    file = lives.end(BODY[-1000:])
    assert file["bytes"] == SIZE
    assert [path.name for path in files.iterdir()] == [file["id"]]
    lives.close()
    dies.close()


def test_a_file_that_another_relay_deletes_ends_the_answer_that_sends_it(gateway: Gateway, files: Path) -> None:
    one, two = relays(gateway)
    with RelayConnection(gateway, one) as sends, RelayConnection(gateway, two) as deletes:
        with client(gateway, "none") as caller:
            id = caller.files.create(file=("zeros", bytes(LARGE)), purpose="batch").id
        answer = sends.started(f"/v1/files/{id}/content")  # more than the connection takes while nobody reads
        assert deletes.ask("DELETE", f"/v1/files/{id}")["deleted"]
        assert not list(files.iterdir())
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
        assert deletes.ask("GET", f"/v1/files/{id}", status=404)["error"]["param"] == "id"


def test_an_upgrade_passes_the_batches_on_before_the_old_uploads_have_ended(tmp_path: Path, files: Path) -> None:
    with world(tmp_path, "--workers", "2", policy=POLICY + "timeouts: {drain: 20s}\n") as made:
        old = until_working(files)
        with RelayConnection(made.gateway, old) as upload:
            upload.begin("/v1/files", FORM, len(BODY), BODY[:-1000])
            assert until(lambda: len(list(files.glob("*.part"))) == 1, 60.0) is not None
            assert made.signalled() is not None, made.output()
            # For a moment it may be the other relay of before, which has not been told yet.
            assert until(lambda: working(files) in relays(made.gateway), 60.0) is not None
            assert runs(old), "its upload goes on"
            file = upload.end(BODY[-1000:])["id"]
        with client(made.gateway, "none") as caller:
            assert caller.files.retrieve(file).bytes == SIZE


def test_relays_go_by_the_start_and_not_by_a_policy_that_came_later(
    tmp_path: Path, engine: SimEngine, files: Path
) -> None:
    """All relays offer batches or none does, also one that is started after a reload."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("{}\n")
    with Gateway(tmp_path / "log", "--engine", engine.url, "--policy", str(policy), "--workers", "2") as started:
        policy.write_text(POLICY)
        started.child.says("version 2 is active")
        before = relays(started)
        os.kill(before[0], signal.SIGKILL)
        assert until(lambda: len(set(relays(started)) - {before[0]}) == 2, 60.0) is not None
        for pid in relays(started):
            with RelayConnection(started, pid) as through:
                error = through.ask("GET", "/v1/batches", status=404)["error"]
            assert error["code"] == "route_not_found"
        assert not files.exists()


def test_a_batch_goes_on_from_one_process_to_several_and_back(tmp_path: Path, engine: SimEngine) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    engine.faults(slow=15.0)  # so that gateways start while it is under way
    common = ("--engine", engine.url, "--policy", str(tmp_path / "policy.yaml"))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Gateway(tmp_path / "log1", *common))
        again = ("--control", first.control.removeprefix("http://"), "--take-over")
        with client(first, "none") as caller:
            id = begun(caller, uploaded(caller, asked(2 * LINES)))
        for number, words in enumerate((("--workers", "2"), ()), 2):
            before = _done(first, id)
            assert until(lambda before=before: _done(first, id) > before + 20, 60.0) is not None
            stack.enter_context(Gateway(tmp_path / f"log{number}", *common, *again, *words))
        assert _done(first, id) < 2 * LINES, "it was under way"
        engine.faults()
        with client(first, "none") as caller:
            whole(caller, id, 2 * LINES)
        kept = partial(first.total, "weir_batch_lines_total", result="completed")
        assert until(lambda: kept() == 2 * LINES, 60.0) is not None, "those before tell their counts to the next"
