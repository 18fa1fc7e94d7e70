"""Forms of uploads: the file's bytes come through whole wherever the form is cut; odd forms are refused."""

from __future__ import annotations

import random

import httpx
import pytest

from gateway.core.batches.upload import UploadForm
from gateway.core.request.outcome import Refused

TYPE = b"multipart/form-data; boundary=B"
FILE = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\ncontent-type: text/plain\r\n\r\n'
PURPOSE = b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


def read(
    body: bytes, content_type: bytes = TYPE, cut: int = 0, rng: random.Random | None = None
) -> tuple[bytes, UploadForm]:
    form, found = UploadForm(content_type), []
    while body:
        size = len(body) if rng is None else rng.randrange(1, cut + 1)
        found.append(form.feed(body[:size]))
        body = body[size:]
    form.finish()
    return b"".join(found), form


@pytest.mark.parametrize("data", [b"", b"x", b"\r\n--B", b"\r\n--", b"\r\n--C\r\n--A--", bytes(range(256)) * 300])
def test_the_file_comes_through_whole_wherever_the_form_is_cut(data: bytes) -> None:
    if data == b"\r\n--B":
        data = b"\r\n-B--B\r\n"  # nearly a boundary
    rng = random.Random(1)
    for body in (PURPOSE + FILE + data + b"\r\n--B--\r\n", FILE + data + b"\r\n" + PURPOSE + b"--B--"):
        assert read(body)[0] == data
        for cut in (1, 3, 50, 5000):
            found, form = read(body, cut=cut, rng=rng)
            assert found == data
            assert (form.fields, form.filename) == ({"purpose": "batch"}, "a.jsonl")


def test_it_reads_what_a_real_client_sends() -> None:
    made = httpx.Request("POST", "http://a", data={"purpose": "batch"}, files={"file": ("é.jsonl", b"one\ntwo\n")})
    found, form = read(made.read(), made.headers["content-type"].encode())
    assert (found, form.fields, form.filename) == (b"one\ntwo\n", {"purpose": "batch"}, "é.jsonl")


def test_a_file_without_a_name_has_one() -> None:
    assert read(FILE.replace(b"a.jsonl", b"") + b"x\r\n--B--")[1].filename == "upload"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"x" + PURPOSE + FILE + b"\r\n--B--", "does not begin"),
        (PURPOSE + FILE + b"data", "does not end"),
        (PURPOSE + b"--B--", "file is required"),
        (PURPOSE + PURPOSE + FILE + b"\r\n--B--", "more than once"),
        (FILE + b"\r\n" + FILE + b"\r\n--B--", "more than once"),
        (FILE.replace(b'"file"', b'"other"') + b"\r\n--B--", "one file"),
        (PURPOSE.replace(b"purpose", b"file") + b"--B--", "one file"),
        (FILE + b"\r\n--Bxy", "not at the end of its line"),
        (FILE + b"\r\n--B--\r\nmore", "goes on"),
        (PURPOSE.replace(b"batch", b"x" * 5000) + FILE + b"\r\n--B--", "longer than 4096"),
        (PURPOSE.replace(b"batch", b"\xff") + FILE + b"\r\n--B--", "not UTF-8"),
        (b"--B\r\nx: " + b"y" * 20_000, "header block"),
        (b"--B\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", "header block"),
        (b"--B\r\nx: y\r\n\r\n", "content-disposition"),
        (b"".join(PURPOSE.replace(b"purpose", b"p%d" % number) for number in range(65)), "more than 64 parts"),
    ],
)
def test_odd_forms_are_refused(body: bytes, said: str) -> None:
    for cut, rng in ((0, None), (9, random.Random(2))):
        with pytest.raises(Refused, match=said) as refused:
            read(body, cut=cut, rng=rng)
        assert refused.value.status == 400


def test_a_body_that_is_no_form_is_refused_at_once() -> None:
    with pytest.raises(Refused, match="multipart/form-data"):
        UploadForm(b"application/json")
