"""Batches whose model's machine is away for longer than a sidecar's report is believed; real processes."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import APIStatusError, OpenAI

from loadtest.processes import Gateway, free_port, until
from sidecar.process import process_family
from tests.batches.conftest import client
from tests.e2e.children import SimEngine
from tests.e2e.traffic import CHAT, body
from tests.sidecar.served import MODELS, Box, box

pytestmark = pytest.mark.slow

LINES = [("1", "org/A"), ("2", "b"), ("3", "org/A"), ("4", "sim")]
POLICY = "storage: kept\nbatches: {}\nfleet: {engines: [{url: 'ENGINE'}], sidecars: {token_file: s.token}}\n"


def outcome(openai: OpenAI) -> str | None:
    """The reason for which a call for a model of the sidecar is refused; None: it is answered."""
    try:
        openai.chat.completions.create(model="org/A", messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    except APIStatusError as error:
        return error.response.headers.get("x-weir-reason")
    return None


def refused(openai: OpenAI, model: str) -> bool:
    try:
        openai.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    except APIStatusError as error:
        return error.response.headers.get("x-weir-reason") == "no_engine"
    return False


def lost(machine: Box) -> None:
    """End the engines as the machine's power does."""
    for _, pid, started in machine.engines():
        process_family.send(pid, started, signal.SIGKILL)
    assert until(lambda: not machine.engines(), 60.0) is not None


@contextlib.contextmanager
def batch_beside_a_lost_engine(
    tmp_path: Path, models: Sequence[str], tokens: int
) -> Iterator[tuple[Gateway, OpenAI, str, Callable[[], None]]]:
    """A batch of lines for `sim` and `other`, whose engine has ended; what is called last starts it again."""
    sim, other = [SimEngine(tmp_path / f"{model}.log", "--model", model) for model in ("sim", "other")]
    file = tmp_path / "policy.yaml"
    file.write_text(
        "storage: kept\nbatches: {in_flight: 2}\nrouting: {hold_unserved: 0s}\n"
        f"fleet: {{poll: 200ms, health: 500ms, engines: [{{url: '{sim.url}'}}, {{url: '{other.url}'}}]}}\n"
    )
    lines = [
        {"custom_id": f"{number} {model}", "method": "POST", "url": CHAT, "body": body(model=model, max_tokens=tokens)}
        for number, model in enumerate(models)
    ]
    with sim.child, other.child, contextlib.ExitStack() as later:
        gateway = later.enter_context(Gateway(tmp_path / "log", "--policy", str(file)))
        openai = later.enter_context(client(gateway, "none"))
        assert until(lambda: {model.id for model in openai.models.list()} == {"sim", "other"}, 60.0) is not None
        other.child.kill()
        assert until(lambda: refused(openai, "other"), 60.0) is not None
        stored = openai.files.create(file=("in", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        id = openai.batches.create(input_file_id=stored.id, endpoint=CHAT, completion_window="24h").id

        def again() -> None:
            port = str(urlsplit(other.url).port)
            later.enter_context(SimEngine(tmp_path / "again.log", "--model", "other", "--port", port).child)

        yield gateway, openai, id, again
        assert "Traceback" not in gateway.child.output()


def test_lines_without_an_engine_keep_no_other_model_from_being_served(tmp_path: Path) -> None:
    """More of them than lines may be under way."""
    models = [*("other",) * 5, *("sim",) * 5]
    with batch_beside_a_lost_engine(tmp_path, models, 3) as (gateway, openai, id, again):
        counts = lambda: str(openai.batches.retrieve(id).request_counts)  # noqa: E731
        assert until(lambda: "completed=5, failed=0" in counts(), 60.0) is not None, counts()
        assert gateway.total("weir_batch_lines_total", result="again") <= 60.0, "each line is not tried each time"
        again()
        assert until(lambda: openai.batches.retrieve(id).status == "completed", 90.0, every=0.2) is not None, counts()
        assert "completed=10, failed=0" in counts()


def test_lines_whose_engine_is_back_are_sent_before_all_others_have_been(tmp_path: Path) -> None:
    models = [*("other",) * 3, *("sim",) * 20]
    with batch_beside_a_lost_engine(tmp_path, models, 200) as (_, openai, id, again):
        counts = lambda: str(openai.batches.retrieve(id).request_counts)  # noqa: E731
        assert until(lambda: "completed=" in counts() and "completed=0," not in counts(), 60.0) is not None, counts()
        again()
        assert until(lambda: openai.batches.retrieve(id).status == "completed", 200.0, every=0.2) is not None
        results = openai.files.content(openai.batches.retrieve(id).output_file_id or "").text.splitlines()
        places = [place for place, result in enumerate(results) if "other" in json.loads(result)["custom_id"]]
        assert len(places) == 3
        assert max(places) < 20, "the last of them would be at 22"


@pytest.mark.parametrize(("restarts", "reason"), [(False, "no_engine"), (True, "model_away")])
def test_no_line_fails_because_the_machine_of_its_model_is_away(tmp_path: Path, restarts: bool, reason: str) -> None:
    """`restarts`: the gateway is started again meanwhile, and has never seen the sidecar."""
    control = free_port()
    (tmp_path / "s.token").write_text("of-sixteen-characters")
    (tmp_path / "s.token").chmod(0o600)
    more = f"gateways: ['http://127.0.0.1:{control}']\ntoken_file: {tmp_path}/s.token\n{MODELS}"
    engine = SimEngine(tmp_path / "engine.log", "--model", "sim")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.replace("ENGINE", engine.url))
    (tmp_path / "box").mkdir()
    with engine.child, box(tmp_path / "box", more) as machine, contextlib.ExitStack() as gateways:
        (machine.folder / "e").chmod(0o700)

        def gateway(log: str) -> tuple[Gateway, OpenAI]:
            running = Gateway(tmp_path / log, "--policy", str(file), "--control", f"127.0.0.1:{control}")
            gateways.enter_context(running)
            return running, gateways.enter_context(client(running, "none"))

        running, openai = gateway("log")
        with machine.served() as sidecar:
            assert until(lambda: "org/A" in str(openai.models.list()), 60.0) is not None
            assert until(lambda: outcome(openai) is None, 60.0) is not None  # its engine is awake
            sidecar.kill()
        lost(machine)
        lines = [{"custom_id": id, "method": "POST", "url": CHAT, "body": body(model=model)} for id, model in LINES]
        stored = openai.files.create(file=("in", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        id = openai.batches.create(input_file_id=stored.id, endpoint=CHAT, completion_window="24h").id
        if restarts:
            running.child.kill()
            running, openai = gateway("log2")
        assert until(lambda: outcome(openai) == reason, 60.0, every=0.5) is not None, running.child.output()
        again = running.total("weir_batch_lines_total", result="again")
        assert until(lambda: running.total("weir_batch_lines_total", result="again") >= again + 3, 60.0) is not None
        with machine.served():
            assert until(lambda: openai.batches.retrieve(id).status == "completed", 60.0, every=0.2) is not None
        batch = openai.batches.retrieve(id)
        assert batch.error_file_id is None
        good = [json.loads(each) for each in openai.files.content(str(batch.output_file_id)).text.splitlines()]
        assert sorted((each["custom_id"], each["response"]["status_code"]) for each in good) == [
            (id, 200) for id, _ in LINES
        ]
        assert "Traceback" not in running.child.output()
