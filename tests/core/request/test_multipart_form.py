"""Multipart parser: the fields it finds, and its refusal of every form that could be read in two ways."""

from __future__ import annotations

import pytest

from gateway.core.request.multipart_form import MAX_PARTS, MAX_VALUE, form_fields, with_field
from gateway.core.request.outcome import Refused

TYPE = b"multipart/form-data; boundary=B"


def form(*parts: bytes) -> bytes:
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + b"--B--\r\n"


def field(name: bytes, value: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"\r\n\r\n' + value


def test_fields_and_files() -> None:
    body = form(
        field(b"model", "wé".encode()),
        b'content-type: audio/wav\r\nCONTENT-DISPOSITION: form-data; name=file; filename="x, y"\r\n\r\n\x00\xff\r\n',
        field(b"empty", b""),
    )
    assert form_fields(TYPE, body) == {"model": "wé", "file": "", "empty": ""}
    assert form_fields(b'Multipart/Form-Data;boundary="B"', body)["model"] == "wé"
    assert form_fields(TYPE, form()) == {}


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data; charset=UTF-8; boundary=B",  # Apache's HttpClient
        b'multipart/form-data; boundary="B"; charset=utf-8',
        b'multipart/form-data; boundary=B;charset="utf-8"',
    ],
)
def test_the_one_charset_may_be_named(content_type: bytes) -> None:
    assert form_fields(content_type, form(field(b"model", "wé".encode()))) == {"model": "wé"}


@pytest.mark.parametrize(
    "star", [b"utf-8''a%20b.wav", b"UTF-8''%E2%82%AC%3Bname%3Dmodel.wav", b"utf-8''", b"utf-8''a+b&c#1.wav"]
)
def test_a_files_name_may_be_given_again_as_dotnet_does(star: bytes) -> None:
    line = b'Content-Disposition: form-data; name=file; filename="a b.wav"; filename*=' + star
    body = form(field(b"model", b"m"), line + b"\r\n\r\nRIFF")
    assert form_fields(TYPE, body) == {"model": "m", "file": ""}
    assert with_field(TYPE, body, "model", "other") == body.replace(b"\r\n\r\nm\r\n", b"\r\n\r\nother\r\n")


@pytest.mark.parametrize(
    ("content_type", "says"),
    [
        (b"application/json", "must be multipart/form-data .* found application/json"),
        (b"multipart/form-data; boundary=B; charset=utf-7", "no other parameter"),
        (b"multipart/form-data; charset=cp037; boundary=B", "no other parameter"),
        (b"multipart/form-data; charset=utf-8x; boundary=B", "no other parameter"),
        (b"multipart/form-data; boundary=B; charset=utf-8; x=y", "no other parameter"),
        (b"multipart/form-data; Boundary=B", "one boundary"),
        (b"multipart/form-data; boundary*=utf-8''B", "one boundary"),
        (b'multipart/form-data; boundary="B ', "one boundary"),
        (b"multipart/form-data", "one boundary"),
        (b"multipart/form-data; boundary=", "one boundary"),
        (b"multipart/form-data; boundary=A; boundary=B", "one boundary"),
        (b"multipart/form-data; boundary=" + b"x" * 71, "one boundary"),
        (b"multipart/form-data; boundary=C", "does not begin and end"),
    ],
)
def test_bad_content_types(content_type: bytes, says: str) -> None:
    with pytest.raises(Refused, match=says):
        form_fields(content_type, form(field(b"a", b"1")))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "does not begin and end"),
        (b"--B", "does not begin and end"),
        (b"x" + form(field(b"a", b"1")), "does not begin and end"),
        (form(field(b"a", b"1"))[:-4], "does not begin and end"),
        (form(field(b"a", b"1")) + b"--B--", "does not begin and end|no header block"),
        (form(*[field(b"%d" % i, b"1") for i in range(MAX_PARTS + 1)]), "more than 64 parts"),
        (form(b"no blank line"), "no header block"),
        (b"--Bx" + form(field(b"a", b"1"))[3:], "no header block"),
        (form(field(b"a", b"1"), field(b"a", b"2")), "field a more than once"),
        (form(b"X: y\r\n" * 4000 + field(b"a", b"1")), "no header block of at most 16384 bytes"),
        (form(b"X: y\r\n\r\n1"), "no plain `content-disposition"),
        (form(b"Content-Disposition: form-data\r\n\r\n1"), "no plain `content-disposition"),
        (form(b'Content-Disposition: form-data; name=""\r\n\r\n1'), "no plain `content-disposition"),
        (form(b"Content-Disposition: attachment; name=a\r\n\r\n1"), "no plain `content-disposition"),
        (form(b"Content-Disposition: form-data; name=a; name=b\r\n\r\n1"), "no plain `content-disposition"),
        (
            form(b"Content-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=b\r\n\r\n1"),
            "no plain `content-disposition",
        ),
        (form(field(b"a", b"1" * (MAX_VALUE + 1))), "a is longer than 4096 bytes"),
        (form(field(b"a", b"\xff")), "a is not UTF-8"),
    ],
)
def test_bad_forms(body: bytes, says: str) -> None:
    with pytest.raises(Refused, match=says):
        form_fields(TYPE, body)


@pytest.mark.parametrize(
    "disposition",
    [
        b'form-data; name="x"; NAME="model"',
        b'form-data; name ="model"',
        b'form-data; name= "model"',
        b'form-data; Name="model"',
        b'form-data; name="x;name=model"',
        b'form-data; name="x\\"; name="model"',
        b"form-data; name='model'",
        b'form-data; name="mo" "del"',
        b"form-data; name*=utf-8''model",
        b'form-data; name*0="mo"; name*1="del"',
        b"form-data; name=\"x\"; filename*=utf-8''y",
        b'form-data; filename="y"; name="x"',
        b'form-data; name="x"; filename="y"; filename*=utf-7\'\'y',
        b'form-data; name="x"; filename="y"; filename*=utf-8\'\'y"; name="model',
        b'form-data; name="x"; filename*=utf-8\'\'y; filename="y"',
        b'form-data; name="x"; filename="y"; filename*=utf-8\'\'y; name="model"',
        b'form-data; name="x"; filename="y"; filename="z"',
        b'form-data; name="x"; filename="y;name=model"',
        b'form-data; name="x"; other="y"',
        b'form-data; name="x";',
        b'form-data; name=" model"',
        b'form-data; name="mod\xe9l"',
        b'form-data, name="model"',
    ],
)
def test_a_disposition_that_could_be_read_otherwise(disposition: bytes) -> None:
    with pytest.raises(Refused, match="no plain `content-disposition"):
        form_fields(TYPE, form(b"Content-Disposition: " + disposition + b"\r\n\r\n1"))


@pytest.mark.parametrize(
    "head",
    [
        b"content-disposition : form-data; name=a",
        b" content-disposition: form-data; name=a",
        b"content-disposition: form-data;\r\n name=a",
        b"content-disposition: form-data; name=a\r\nx\x00: y",
        b"content-disposition: form-data; name=a\nx: y",
        b"content-disposition: form-data; name=a\r\nno colon",
    ],
)
def test_headers_of_a_part_are_plain(head: bytes) -> None:
    with pytest.raises(Refused, match="no plain `content-disposition"):
        form_fields(TYPE, form(head + b"\r\n\r\n1"))


def test_a_list_may_have_several_values() -> None:
    name = b"timestamp_granularities[]"
    body = form(field(name, b"word"), field(name, b"segment"), field(b"model", b"m"))
    assert form_fields(TYPE, body) == {"model": "m"}


def test_as_many_parts_as_allowed() -> None:
    assert len(form_fields(TYPE, form(*[field(b"%d" % i, b"1") for i in range(MAX_PARTS)]))) == MAX_PARTS
