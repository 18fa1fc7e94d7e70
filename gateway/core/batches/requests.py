"""Requests of the Files and Batch API: their routes, queries and bodies. A bad one raises Refused (400)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from gateway.core.batches.lines import ENDPOINTS
from gateway.core.batches.objects import WINDOW
from gateway.core.request.json_body import bad_request
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.routes import Route

MOST_BODY = 64 * 1024  # bytes of a request that creates a batch
MOST_LISTED = 1000  # also where nobody says
MOST_BATCHES = 100
MOST_UNFINISHED = 100  # batches of one tenant
MOST_FILE = 1 << 30  # bytes of an upload
BATCHES = 20

FILES = Route(path="/v1/files", kind="stored", methods=("GET", "POST"), here=True, media=False, stored=True)
FILE = Route(path="/v1/files/{id}", kind="stored", methods=("GET", "DELETE"), here=True, media=False, stored=True)
CONTENT = Route(path="/v1/files/{id}/content", kind="stored", methods=("GET",), here=True, media=False, stored=True)
BATCHES_ROUTE = Route(path="/v1/batches", kind="stored", methods=("GET", "POST"), here=True, media=False, stored=True)
BATCH = Route(path="/v1/batches/{id}", kind="stored", methods=("GET",), here=True, media=False, stored=True)
CANCEL = Route(path="/v1/batches/{id}/cancel", kind="stored", here=True, media=False, stored=True)
_WHOLE = {b"files": (FILES, FILE, b"content", CONTENT), b"batches": (BATCHES_ROUTE, BATCH, b"cancel", CANCEL)}


class Page(msgspec.Struct, frozen=True):
    """The part of a list that is asked for: `limit` objects behind the one of id `after`."""

    after: str
    limit: int
    newest: bool
    purpose: str


class NewBatch(msgspec.Struct, frozen=True):
    """The body that creates a batch."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=100)]
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    output_expires_after: object = None  # refused: results are kept as long as the policy says


_new = msgspec.json.Decoder(NewBatch)


def stored_route(path: bytes) -> tuple[Route, str] | None:
    """The route of a path and the id in it; None: it is none of files or batches."""
    empty, version, kind, *rest = (*path.split(b"/"), b"")[:-1] if path.count(b"/") >= 2 else (b"", b"", b"")
    rows = _WHOLE.get(kind) if (empty, version) == (b"", b"v1") else None
    if rows is None:
        return None
    if not rest:
        return rows[0], ""
    id = rest[0].decode("latin-1")
    if len(rest) == 1 and id:
        return rows[1], id
    return (rows[3], id) if len(rest) == 2 and id and rest[1] == rows[2] else None


def page_asked(query: bytes, most: int, default: int) -> Page:
    """The page that a query asks for."""
    try:
        found = dict(parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=20))
    except ValueError:
        raise bad_request("the query is malformed: it may have 20 fields, in ASCII") from None
    limit = found.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise bad_request(f"limit must be an integer from 1 to {most}, found {limit[:40]}", "limit")
    order = found.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, found {order[:40]}", "order")
    return Page(found.get("after", ""), int(limit), order == "desc", found.get("purpose", ""))


def new_batch(content_type: bytes, body: bytes) -> NewBatch:
    """The batch that a body asks for. Raises Refused (400)."""
    if content_type.split(b";")[0].strip().lower() != b"application/json":
        raise bad_request("content-type must be application/json", "content-type")
    try:
        asked = _new.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is no request for a batch: {error}", _field(str(error))) from None
    if asked.endpoint not in ENDPOINTS:
        raise bad_request(f"endpoint must be one of {', '.join(ENDPOINTS)}; found {asked.endpoint[:80]}", "endpoint")
    if asked.completion_window != WINDOW:
        message = f"completion_window must be {WINDOW}, found {asked.completion_window[:40]}"
        raise bad_request(message, "completion_window")
    if asked.output_expires_after is not None:
        message = "output_expires_after is not offered: files of results are kept as long as other files are"
        raise bad_request(message, "output_expires_after")
    return asked


def check_fields(fields: Mapping[str, str]) -> None:
    """The fields of an upload's form, beside its file."""
    purpose = fields.get("purpose")
    if purpose != "batch":
        found = "none" if purpose is None else purpose[:40]
        raise bad_request(f"purpose must be batch, since files are kept for batches alone; found {found}", "purpose")
    for name in fields:
        if name != "purpose":
            raise bad_request(f"the form may have the fields purpose and file, found {name}", name)


def no_file(id: str, param: str = "id") -> Refused:
    """A refusal (404) of a file that is not this tenant's, whether or not it is another's."""
    return Refused(Outcome.NOT_FOUND, f"No such File object: {id[:80]}", param=param, code="file_not_found")


def no_batch(id: str, param: str = "id") -> Refused:
    """A refusal (404) of a batch that is not this tenant's."""
    return Refused(Outcome.NOT_FOUND, f"No batch found with id '{id[:80]}'.", param=param, code="batch_not_found")


def _field(said: str) -> str | None:
    return next((name for name in NewBatch.__struct_fields__ if f"`{name}`" in said or f"$.{name}" in said), None)
