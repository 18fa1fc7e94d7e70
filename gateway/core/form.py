"""multipart/form-data, read only as far as needed: the small fields' values and the size of the rest.

A strict scan (RFC 7578 with RFC 2046's delimiters): what a lenient parser could read in two ways is refused, since the
engine behind us reads the same bytes. The body is never changed.
"""

from __future__ import annotations

from gateway.core.prompt import bad

MAX_PARTS = 64
MAX_VALUE = 4096  # bytes of a field that is not a file
MAX_HEAD = 16 * 1024  # bytes of a part's header block


def form_fields(content_type: bytes, body: bytes) -> dict[str, str]:
    """Fields that are not files, by name; Refused where the form is malformed or names a field twice."""
    media, *parameters = content_type.split(b";")
    if media.strip().lower() != b"multipart/form-data":
        raise bad(f"content-type must be multipart/form-data, found {content_type[:80].decode('latin-1')}")
    boundaries = [p.strip()[9:].strip(b'"') for p in parameters if p.strip()[:9].lower() == b"boundary="]
    if len(boundaries) != 1 or not 1 <= len(boundaries[0]) <= 70:
        raise bad("content-type must give one boundary of 1 to 70 characters")
    delimiter = b"\r\n--" + boundaries[0]
    preamble, *parts = (b"\r\n" + body).split(delimiter, MAX_PARTS + 1)
    if preamble or not parts or parts[-1].rstrip(b"\r\n") != b"--":
        raise bad(f"the form does not begin and end with its boundary, or has more than {MAX_PARTS} parts")
    fields: dict[str, str] = {}
    for part in parts[:-1]:
        head, blank, value = part.partition(b"\r\n\r\n")
        if not blank or not head.startswith(b"\r\n") or len(head) > MAX_HEAD:
            raise bad(f"a part of the form has no header block of at most {MAX_HEAD} bytes")
        name, is_file = _disposition(head)
        if name in fields:
            raise bad(f"the form has the field {name} more than once", name)
        if is_file:
            fields[name] = ""
            continue
        if len(value) > MAX_VALUE:
            raise bad(f"{name} is longer than {MAX_VALUE} bytes", name)
        try:
            fields[name] = value.decode()
        except UnicodeDecodeError:
            raise bad(f"{name} is not UTF-8", name) from None
    return fields


def _disposition(head: bytes) -> tuple[str, bool]:
    """The field's name and whether it is a file."""
    lines = [line for line in head.split(b"\r\n") if line[:20].lower() == b"content-disposition:"]
    if len(lines) == 1:
        kind, *parameters = lines[0][20:].split(b";")
        values = dict(parameter.strip().partition(b"=")[::2] for parameter in parameters)
        name = values.get(b"name", b"").strip(b'"')
        if kind.strip().lower() == b"form-data" and name and len(values) == len(parameters):
            return name.decode(errors="replace"), b"filename" in values or b"filename*" in values
    raise bad("a part of the form has no content-disposition with one name")
