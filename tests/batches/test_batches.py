"""OpenAI's own client, its files and batches: from upload to results, with what may go wrong between."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from loadtest.processes import Gateway, until
from tests.e2e.children import SimEngine
from tests.e2e.traffic import body

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
OVER = {"completed", "failed", "expired", "cancelled"}


def line(id: str, url: str = CHAT, **fields: Any) -> str:
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body(**fields)})


def uploaded(client: openai.OpenAI, lines: list[str]) -> str:
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def begun(client: openai.OpenAI, file: str, endpoint: Any = CHAT) -> str:
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h").id


def done(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    return counts.completed if counts else 0


def over(client: openai.OpenAI, id: str) -> Any:
    assert until(lambda: client.batches.retrieve(id).status in OVER, 60.0, every=0.1) is not None
    return client.batches.retrieve(id)


def lines_of(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    found = [json.loads(each) for each in client.files.content(file).text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_a_batch_from_upload_to_results(acme: openai.OpenAI, gateway: Gateway) -> None:
    file = acme.files.create(file=("in.jsonl", "\n".join([line("a"), line("b", model="none"), line("c")]).encode()),
                             purpose="batch")  # fmt: skip
    assert (file.filename, file.purpose, file.object, file.status) == ("in.jsonl", "batch", "file", "processed")
    assert acme.files.retrieve(file.id) == file
    assert acme.files.content(file.id).text.splitlines()[0] == line("a")
    batch = acme.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "a test"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"for": "a test"})
    ended = over(acme, batch.id)
    assert (ended.status, ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (
        "completed", 3, 2, 1,
    )  # fmt: skip
    assert ended.created_at <= ended.in_progress_at <= ended.finalizing_at <= ended.completed_at < ended.expires_at
    good, bad = lines_of(acme, ended.output_file_id), lines_of(acme, ended.error_file_id)
    assert (set(good), set(bad)) == ({"a", "c"}, {"b"})
    assert good["a"]["response"]["status_code"] == 200
    assert good["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (bad["b"]["response"]["status_code"], bad["b"]["response"]["body"]["error"]["code"]) == (
        404, "model_not_found",
    )  # fmt: skip
    assert gateway.total("weir_requests_total", **{"class": "batch"}) >= 2
    assert gateway.total("weir_batch_lines_total", result="completed") >= 2
    assert acme.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        acme.files.retrieve(file.id)


def test_lists_are_read_page_by_page(acme: openai.OpenAI) -> None:
    files = [uploaded(acme, [line(str(number))]) for number in range(3)]
    assert [file.id for file in acme.files.list(limit=2, purpose="batch")][:3] == files[::-1]
    batches = [begun(acme, file) for file in files]
    for id in batches:
        over(acme, id)
    assert [batch.id for batch in acme.batches.list(limit=2)][:3] == batches[::-1]
    oldest_first = [each["id"] for each in acme.get("/batches?order=asc", cast_to=dict[str, Any])["data"]]
    assert oldest_first == [batch.id for batch in acme.batches.list()][::-1]
    for ask in (acme.files.list, acme.batches.list):  # no place: to begin anew would page for ever
        with pytest.raises(openai.NotFoundError) as told:
            ask(after="unknown")
        assert told.value.param == "after"
    for file in acme.files.list(limit=2, purpose="batch"):  # each page's last is gone before the next is asked for
        acme.files.delete(file.id)
    assert not acme.files.list(purpose="batch").data
    with pytest.raises(openai.NotFoundError):
        acme.batches.list(after=files[0])


def test_a_tenant_sees_nothing_of_another(acme: openai.OpenAI, globex: openai.OpenAI) -> None:
    file = uploaded(acme, [line("a")])
    batch = begun(acme, file)
    over(acme, batch)
    foreign = (
        lambda: globex.files.retrieve(file),
        lambda: globex.files.content(file),
        lambda: globex.files.delete(file),
        lambda: globex.batches.retrieve(batch),
        lambda: globex.batches.cancel(batch),
        lambda: begun(globex, file),
        lambda: globex.files.list(after=file),
        lambda: globex.batches.list(after=batch),
    )
    for ask in foreign:
        with pytest.raises(openai.NotFoundError):
            ask()
    assert file not in [each.id for each in globex.files.list()]
    assert batch not in [each.id for each in globex.batches.list()]
    acme.files.delete(file)
    with pytest.raises(openai.NotFoundError):
        globex.files.list(after=file)


def test_one_bad_line_fails_the_batch_before_any_is_sent(acme: openai.OpenAI, gateway: Gateway) -> None:
    sent = gateway.total("weir_requests_total", **{"class": "batch"})
    good = [line(str(number)) for number in range(40)]
    for bad, code in (("{", "invalid_json_line"), (line("7"), "duplicate_custom_id"),
                      (line("x", "/v1/embeddings"), "mismatched_endpoint")):  # fmt: skip
        ended = over(acme, begun(acme, uploaded(acme, [*good, bad])))
        (error,) = ended.errors.data
        assert (ended.status, error.line, error.code) == ("failed", 41, code)
        assert ended.output_file_id is None
        assert ended.failed_at
    assert gateway.total("weir_requests_total", **{"class": "batch"}) == sent


def test_requests_that_are_wrong(acme: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        acme.files.create(file=("a", b"x"), purpose="fine-tune")
    file = uploaded(acme, [line("a")])
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        begun(acme, file, "/v1/models")
    with pytest.raises(openai.BadRequestError, match="completion_window must be 24h"):
        acme.batches.create(input_file_id=file, endpoint=CHAT, completion_window="1h")  # type: ignore[arg-type]
    nested = line("a")[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert over(acme, begun(acme, uploaded(acme, [nested]))).errors.data[0].code == "invalid_json_line"
    ended = over(acme, begun(acme, file))
    with pytest.raises(openai.BadRequestError, match="can no longer be cancelled"):
        acme.batches.cancel(ended.id)
    with pytest.raises(openai.BadRequestError, match="batch's own file"):
        begun(acme, ended.output_file_id)


def test_a_batch_is_cancelled_with_the_results_it_has(acme: openai.OpenAI, engine: SimEngine) -> None:
    engine.faults(slow=20.0)
    file = uploaded(acme, [line("a", max_tokens=1), line("b", max_tokens=4000)])
    batch = begun(acme, file)
    assert until(lambda: done(acme, batch) == 1, 60.0) is not None
    with pytest.raises(openai.BadRequestError, match="which is not over"):
        acme.files.delete(file)
    assert acme.batches.cancel(batch).status in {"cancelling", "cancelled"}
    ended = over(acme, batch)
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("cancelled", 1, 1)
    assert set(lines_of(acme, ended.output_file_id)) == {"a"}
    assert ended.error_file_id is None  # what has no answer has no line
    assert until(lambda: engine.running() == 0, 60.0) is not None, "line b is left: it would take minutes"
    engine.faults()
    assert acme.batches.cancel(batch).status == "cancelled"


def test_a_tenant_has_so_many_unfinished_batches_and_bytes(
    acme: openai.OpenAI, globex: openai.OpenAI, engine: SimEngine
) -> None:
    engine.faults(slow=20.0)  # none of them is over before all are there
    file = uploaded(acme, [line("a", max_tokens=4000)])
    batches = [begun(acme, file) for _ in range(100)]
    with pytest.raises(openai.RateLimitError, match="100 batches that are not over"):
        begun(acme, file)
    another = begun(globex, uploaded(globex, [line("a")]))
    for batch in batches:
        acme.batches.cancel(batch)
    for batch in batches:
        over(acme, batch)
    engine.faults()
    over(globex, another)  # its files come and go until then: the next tests compare what the folder has
    kept = [globex.files.create(file=("a", bytes(950_000)), purpose="batch").id for _ in range(2)]
    with pytest.raises(openai.APIStatusError, match="per_tenant") as refused:
        globex.files.create(file=("a", bytes(950_000)), purpose="batch")
    assert refused.value.status_code == 413
    for id in kept:
        globex.files.delete(id)


def ask(gateway: Gateway, head: str, data: bytes) -> tuple[int, Any]:
    parts = urlsplit(gateway.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), 60.0) as connection:
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer acme\r\n{head}\r\n\r\n".encode()
        )
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, json.loads(answer.read())


def test_an_upload_may_take_longer_than_its_sdk_waits_for_an_answer(
    acme: openai.OpenAI, gateway: Gateway, folder: Path
) -> None:
    """An SDK's read timeout begins once the body is sent."""
    kept = {path.name for path in (folder / "kept/files").iterdir()}
    purpose = b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--B--' % bytes(300_000)
    parts, data = urlsplit(gateway.url), purpose + file
    with socket.create_connection((parts.hostname or "", parts.port or 0), 60.0) as connection:
        head = "POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer acme\r\nx-stainless-read-timeout: 0.001\r\n"
        form = f"content-type: multipart/form-data; boundary=B\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall((head + form).encode() + data[:-1000])
        assert until(lambda: {path.name for path in (folder / "kept/files").iterdir()} > kept, 60.0) is not None
        connection.sendall(data[-1000:])
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        told = json.loads(answer.read())
        assert (answer.status, told.get("bytes")) == (200, 300_000), told
    acme.files.delete(told["id"])


def test_an_upload_is_never_in_memory_and_nothing_is_left_of_a_bad_one(
    acme: openai.OpenAI, gateway: Gateway, folder: Path
) -> None:
    kept = {path.name for path in (folder / "kept/files").iterdir()}
    form = "content-type: multipart/form-data; boundary=B"
    part = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    for _ in range(10):  # more than one tenant may have at once: none of them has a seat
        status, answer = ask(gateway, f"{form}\r\ncontent-length: {2**30}", b"")
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
    for data, said in (
        (part + bytes(2_060_000), "over the limit of 2048000 bytes"),
        (part + b"x\r\n--B--more" + bytes(100_000), "goes on"),
    ):
        status, answer = ask(gateway, f"{form}\r\ncontent-length: 2080000", data)
        assert said in answer["error"]["message"]
        assert status in {400, 413}
    cut = part + bytes(500_000)  # a form without its end
    status, answer = ask(gateway, f"{form}\r\ncontent-length: {len(cut)}", cut)
    assert (status, "does not end" in answer["error"]["message"]) == (400, True)
    chunk = part + b"x" * 300_000 + b"\r\n" + part.replace(b"file", b"purpose", 1).replace(b'; filename="a"', b"")
    chunk += b"batch\r\n--B--"
    status, answer = ask(
        gateway, f"{form}\r\ntransfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk)
    )
    assert (status, answer["bytes"]) == (200, 300_000)
    acme.files.delete(answer["id"])
    for cut in (10, 100, 400_000) * 3:  # clients that leave
        parts = urlsplit(gateway.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), 60.0) as left:
            head = f"POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer acme\r\n{form}\r\n"
            left.sendall(f"{head}content-length: 900000\r\n\r\n".encode() + (part + bytes(400_000))[:cut])
    assert until(lambda: {path.name for path in (folder / "kept/files").iterdir()} == kept, 60.0) is not None
