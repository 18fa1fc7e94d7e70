"""multipart/form-data parser: the values of a form's small fields; files are skipped.

The scan is strict (RFC 7578, with RFC 2046's delimiters). Whatever a lenient parser could read in two ways is refused,
since the engine reads the same bytes. Part headers are accepted in their plainest form only: parameters in lower case,
each once, each a token or a quoted string without escapes. Of the body nothing is changed but by `with_field`. Two
things that nobody can read in another way are taken too: UTF-8 as the form's charset, which it has in any case, and a
file's name that is given a second time, encoded.
"""

from __future__ import annotations

import re

from gateway.core.request.json_body import bad_request

MAX_PARTS = 64
MAX_HEAD = 16 * 1024  # bytes of a part's header block
MAX_VALUE = 4096  # bytes of a field that is not a file

_CHARSET = rb"(?:[ \t]*;[ \t]*charset=(?:[Uu][Tt][Ff]-8|\"[Uu][Tt][Ff]-8\"))?"
_TYPE = re.compile(
    rb"[Mm]ultipart/[Ff]orm-[Dd]ata%b[ \t]*;[ \t]*boundary=(?:\"([\w'()+,./:=? -]*[\w'()+,./:=?-])\"|([\w'+.-]+))%b"
    % (_CHARSET, _CHARSET)
)
# A file's name may hold any character but those that end or escape a quoted string, or a parameter.
_DISPOSITION = re.compile(
    rb"[Ff]orm-[Dd]ata[ \t]*;[ \t]*name=(?:\"([\w.\[\]-]{1,64})\"|([\w.-]{1,64}))"
    rb"(?:[ \t]*;[ \t]*filename=(?:\"([^\"\\;\x00-\x1f\x7f]*)\"|([\w.-]+))"
    rb"(?:[ \t]*;[ \t]*filename\*=[Uu][Tt][Ff]-8''[\w.%~!#$&+^`|-]*)?)?"
)
_HEADER = re.compile(rb"([A-Za-z-]{1,64}):([^\x00-\x08\x0a-\x1f\x7f]*)")


def form_fields(content_type: bytes, body: bytes) -> dict[str, str]:
    """The form's fields by name. A file's value is empty.

    A name that ends in `[]` is a list's. It may occur more than once, and is left out. Raises Refused (400) where the
    form is malformed or names another field twice.
    """
    delimiter = b"\r\n--" + boundary_of(content_type)
    preamble, *parts = (b"\r\n" + body).split(delimiter, MAX_PARTS + 1)
    if preamble or not parts or parts[-1] not in (b"--", b"--\r\n"):
        raise bad_request(f"the form does not begin and end with its boundary, or has more than {MAX_PARTS} parts")
    fields: dict[str, str] = {}
    for part in parts[:-1]:
        head, blank, value = part.partition(b"\r\n\r\n")
        if not blank or not head.startswith(b"\r\n") or len(head) > MAX_HEAD:
            raise bad_request(f"a part of the form has no header block of at most {MAX_HEAD} bytes")
        name, filename = disposition(head[2:])
        if name.endswith("[]"):
            continue
        if name in fields:
            raise bad_request(f"the form has the field {name} more than once", name)
        if filename is not None:
            fields[name] = ""
            continue
        if len(value) > MAX_VALUE:
            raise bad_request(f"{name} is longer than {MAX_VALUE} bytes", name)
        try:
            fields[name] = value.decode()
        except UnicodeDecodeError:
            raise bad_request(f"{name} is not UTF-8", name) from None
    return fields


def with_field(content_type: bytes, body: bytes, name: str, value: str) -> bytes:
    """A form that was parsed, with another value of one of its fields."""
    delimiter = b"\r\n--" + boundary_of(content_type)
    preamble, *parts = (b"\r\n" + body).split(delimiter)
    for number, part in enumerate(parts[:-1]):
        head, blank, _ = part.partition(b"\r\n\r\n")
        if disposition(head[2:]) == (name, None):
            parts[number] = head + blank + value.encode()
    return delimiter.join([preamble, *parts])[2:]


def boundary_of(content_type: bytes) -> bytes:
    """The boundary that a header `content-type` names. Raises Refused (400)."""
    found = _TYPE.fullmatch(content_type)
    boundary = (found[1] or found[2]) if found else b""
    if not 1 <= len(boundary) <= 70:
        raise bad_request(
            "content-type must be multipart/form-data with one boundary of 1 to 70 characters and no other parameter "
            f"but charset=utf-8, found {content_type[:80].decode('latin-1')}",
            "content-type",
        )
    return boundary


def disposition(head: bytes) -> tuple[str, bytes | None]:
    """The field's name, and the file's where it is one. Raises Refused (400)."""
    headers = [_HEADER.fullmatch(line) for line in head.split(b"\r\n")]
    values = [header[2].strip(b" \t") for header in headers if header and header[1].lower() == b"content-disposition"]
    found = _DISPOSITION.fullmatch(values[0]) if len(values) == 1 and all(headers) else None
    if found is None:
        raise bad_request(
            'a part of the form has no plain `content-disposition: form-data; name="FIELD"`, nor one with '
            '`; filename="FILE"` after it: in this order and in lower case, without `;`, quotes or backslashes in them'
        )
    name = found[1] or found[2]
    return name.decode(), found[4] if found[3] is None else found[3]
