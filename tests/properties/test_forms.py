"""Multipart forms that gateway and Starlette both accept: read alike by both, since vLLM uses Starlette."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from gateway.core.request.multipart_form import form_fields
from gateway.core.request.outcome import Refused
from tests.examples import examples

Items = list[tuple[str, str | None]]  # a file's value is None


def ours(content_type: bytes, body: bytes) -> dict[str, str] | None:
    try:
        return form_fields(content_type, body)
    except Refused:
        return None


def theirs(content_type: bytes, body: bytes) -> Items | None:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    async def parsed() -> Items:
        parser = MultiPartParser(Headers(raw=[(b"content-type", content_type)]), stream())
        try:
            form = await parser.parse()
            return [(name, value if isinstance(value, str) else None) for name, value in form.multi_items()]
        finally:
            for file in parser._files_to_close_on_error:  # of a part that has no end it tells nobody else
                file.close()

    try:
        return asyncio.run(parsed())
    except (MultiPartException, UnicodeError, KeyError, ValueError):
        return None


def compared(content_type: bytes, body: bytes) -> bool:
    """Whether both took it; then they have read the same."""
    read, reference = ours(content_type, body), theirs(content_type, body)
    if read is None or reference is None:
        return False
    expected = {name: value or "" for name, value in reference if not name.endswith("[]")}
    assert read == expected, (content_type, body)
    assert len(expected) == len([name for name, _ in reference if not name.endswith("[]")])
    return True


NAMES = ["model", "stream", "x", "mod el", "a;name=model", 'a"; name="model', "a\\", "mod%65l", "é", "", "t[]"]
PARAMETERS = ["name", "filename", "NAME", "Name", "name*", "name*0", "filename*", "name ", " name", "charset"]
SPACES = ["", " ", "\t", "  ", "\r\n "]


def drawn(rng: random.Random) -> tuple[bytes, bytes]:
    """A form in which each thing is spelt in one of the ways that readers may differ about."""

    def odd(usual: str, others: list[str]) -> str:
        return usual if rng.random() < 0.85 else rng.choice(others)

    def parameter(name: str, value: str) -> str:
        quoted = odd(f'"{value}"', [value, f"'{value}'", f'"{value}', f'{value}"', f"utf-8''{value}"])
        return f"{odd('; ', [';', ' ; ', ',', '; ;', ''])}{odd(name, PARAMETERS)}={odd('', SPACES)}{quoted}"

    boundary = odd("B", ["B B", "b'", "-", "B" * 70, ""])
    out = b""
    for at in range(rng.randrange(4)):
        name = odd(("model", "stream", "file", "t[]")[at], NAMES)
        line = odd("form-data", ["Form-Data", "attachment", "form-data ", ""]) + parameter("name", name)
        if rng.random() < 0.3:
            line += parameter("filename", odd("a.wav", NAMES))
        lines = [odd("Content-Disposition: ", ["content-disposition:", "Content-Disposition : ", "X: "]) + line]
        if rng.random() < 0.3:
            others = ["x", " folded", lines[0], "é: x"]
            lines.insert(rng.randrange(2), odd("Content-Type: text/plain; charset=utf-7", others))
        end = odd("\r\n", ["\n"])
        value = odd("whisper", ["\r\n", "--B", "\r\n--B", "\r\n--Bx", "", "é", "+AGE-"])
        out += f"--{boundary}{odd('', [' ', 'x'])}{end}{end.join(lines)}{end}{end}{value}{end}".encode()
    out += f"--{boundary}--{odd(chr(13) + chr(10), ['', 'x', ' ', '--'])}".encode()
    kind = odd("multipart/form-data", ["Multipart/Form-Data", "multipart/form-data ", "multipart/mixed"])
    quoted = odd(f'"{boundary}"', [boundary, f"'{boundary}'", f'"{boundary}'])
    more = odd("", ["; charset=utf-8", "; charset=utf-7", "; charset=cp037", "; boundary=C", "; x=y", ";"])
    gap, name = odd("; ", [";", " ", ";\t"]), odd("boundary", ["Boundary", "boundary*", "boundary "])
    return f"{kind}{gap}{name}={quoted}{more}".encode(), out


def test_forms_with_odd_spellings_are_read_alike_or_refused() -> None:
    rng, forms = random.Random("forms"), examples(6000)
    both = sum(compared(*drawn(rng)) for _ in range(forms))
    assert both >= forms // 20, "too few forms are taken by both to say anything"


@settings(max_examples=examples(200))
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 40))
def test_forms_with_bytes_put_in_are_read_alike_or_refused(more: bytes, at: int, cut: int) -> None:
    head = b'Content-Disposition: form-data; name="%b"\r\n\r\n'
    body = b"--B\r\n" + head % b"model" + b"m\r\n--B\r\n" + head % b"stream" + b"true\r\n--B--\r\n"
    compared(b"multipart/form-data; boundary=B", body[:at] + more + body[at + cut :])


@pytest.mark.parametrize("name", ["a.wav", "ä ö.wav", "a (1).mp3", "日本.flac"])
def test_what_clients_send_is_taken(name: str) -> None:
    data = {"model": "whisper", "stream": "true", "timestamp_granularities[]": ["word", "segment"], "prompt": "é"}
    request = httpx.Request("POST", "http://x/", data=data, files={"file": (name, b"RIFF", "audio/wav")})
    assert compared(request.headers["content-type"].encode(), request.read())
