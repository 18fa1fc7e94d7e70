"""Form of an upload, parsed as it comes: the file's bytes pass through, and nothing but a part's head is held.

As strict as `multipart_form.py`, whose grammar it uses.
"""

from __future__ import annotations

from gateway.core.request.json_body import bad_request
from gateway.core.request.multipart_form import MAX_HEAD, MAX_PARTS, MAX_VALUE, boundary_of, disposition

LONGEST_NAME = 255  # characters of a file's name

_BODY, _AFTER, _HEAD, _END = range(4)


class UploadForm:
    """Fields and one file, `feed` by `feed`. `fields` are whole once `finish` has returned."""

    def __init__(self, content_type: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: the file has not come
        self._delimiter = b"\r\n--" + boundary_of(content_type)
        self._held = b"\r\n"  # so that the first delimiter is found like any other
        self._state = _BODY
        self._name = ""  # of the part; empty: before the first
        self._is_file = False
        self._value = bytearray()
        self._parts = 0

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file among these. Raises Refused (400)."""
        self._held += data
        found: list[bytes] = []
        steps = (self._body, self._behind_boundary, self._head, self._over)
        while steps[self._state](found):
            pass
        return b"".join(found)

    def _body(self, found: list[bytes]) -> bool:
        """Take what cannot be the beginning of a boundary. Whether a boundary has ended the part."""
        held, delimiter = self._held, self._delimiter
        end = held.find(delimiter)
        piece = held[:end] if end >= 0 else held[: max(0, len(held) - len(delimiter) + 1)]
        found.append(self._take(piece))
        if end < 0:
            self._held = held[len(piece) :]
            return False
        self._held = held[end + len(delimiter) :]
        self._part_ends()
        self._state = _AFTER
        return True

    def _behind_boundary(self, _: list[bytes]) -> bool:
        mark = self._held[:2]
        if len(mark) < 2:
            return False
        if mark == b"--":
            self._state, self._held = _END, self._held[2:]
        elif mark == b"\r\n":
            self._state = _HEAD
        else:
            raise bad_request("the form has a boundary that is not at the end of its line")
        return True

    def _head(self, _: list[bytes]) -> bool:
        held = self._held
        end = held.find(b"\r\n\r\n", 2)
        if end > MAX_HEAD or (end < 0 and len(held) > MAX_HEAD):
            raise bad_request(f"a part of the form has no header block of at most {MAX_HEAD} bytes")
        if end < 0:
            return False
        self._part_begins(held[2:end])
        self._state, self._held = _BODY, held[end + 4 :]
        return True

    def _over(self, _: list[bytes]) -> bool:
        if not b"\r\n".startswith(self._held):
            raise bad_request("the form goes on after its last boundary")
        return False

    def finish(self) -> None:
        """The body is over. Raises Refused (400) for a form that is not."""
        if self._state != _END:
            raise bad_request("the form does not end with its boundary")
        if self.filename is None:
            raise bad_request("file is required: the file to upload, as a part of the form", "file")

    def _take(self, piece: bytes) -> bytes:
        """Bytes of the part; what of them is the file's."""
        if self._is_file:
            return piece
        if piece and not self._name:
            raise bad_request("the form does not begin with its boundary")
        self._value += piece
        if len(self._value) > MAX_VALUE:
            raise bad_request(f"{self._name} is longer than {MAX_VALUE} bytes", self._name)
        return b""

    def _part_begins(self, head: bytes) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise bad_request(f"the form has more than {MAX_PARTS} parts")
        name, filename = disposition(head)
        if name in self.fields or (name == "file" and self.filename is not None):
            raise bad_request(f"the form has the field {name} more than once", name)
        if (name == "file") != (filename is not None):
            raise bad_request("the form's one file must be its field `file`", name)
        self._name, self._is_file = name, filename is not None
        if filename is not None:
            self.filename = filename.decode("utf-8", "replace")[:LONGEST_NAME] or "upload"

    def _part_ends(self) -> None:
        if self._name and not self._is_file:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise bad_request(f"{self._name} is not UTF-8", self._name) from None
        self._value.clear()
        self._is_file = False
