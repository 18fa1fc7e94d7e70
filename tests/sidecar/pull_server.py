"""Servers of models' files on real sockets: a hub with the routes of its API that a pull uses, and a plain web folder.

Both can be made to cut answers short, to know no ranges, to redirect, and to lie.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server:
    """`files` by name. `asked`: (method, path, Range, Authorization) of each request. `cut`: bytes of an answer after
    which the connection is closed, once for each entry. `statuses`: answered first, one for each request of a file.
    `ranges`: whether Range is obeyed. `api`: the hub's answer where it is not made from the files. `gate`: an answer
    waits for it after its first half."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, str, str | None, str | None]] = []
        self.cut: list[int] = []
        self.statuses: list[int] = []
        self.ranges = True
        self.api: Any = None
        self.redirect: str | None = None
        self.page: str | None = None
        self.gate: threading.Event | None = None
        self.half = threading.Event()
        self.lfs = True

    def hub_answer(self) -> bytes:
        if self.api is not None:
            return self.api if isinstance(self.api, bytes) else json.dumps(self.api).encode()
        siblings = []
        for name, data in self.files.items():
            each: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git(data)}
            if self.lfs and name.endswith(".safetensors"):
                each["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
            siblings.append(each)
        return json.dumps({"id": "org/m", "sha": COMMIT, "siblings": siblings}).encode()


def git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Its origin; `/api/models/org/m/` and `/org/m/resolve/COMMIT/NAME` are the hub's, `/files/NAME` the folder's."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(self, server)

        do_HEAD = do_GET  # noqa: N815 # the base class's own name

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            if server.gate is not None:
                server.gate.set()
            listening.shutdown()
            thread.join(10)


def _answer(request: BaseHTTPRequestHandler, server: Server) -> None:
    headers = request.headers
    server.asked.append((request.command, request.path, headers["range"], headers["authorization"]))
    path = request.path.partition("?")[0]
    if path.startswith("/api/models/"):
        good = path == "/api/models/org/m/revision/main"
        _send(request, 200 if good else 404, server.hub_answer() if good else b"{}")
    elif path.endswith("/") and path.startswith("/files/"):
        _send(request, 200, (server.page or _page(server, path)).encode())
    else:
        hub = f"/org/m/resolve/{COMMIT}/"
        name = path.removeprefix(hub).removeprefix("/files/")
        if server.redirect is not None and path.startswith(hub):
            request.send_response(302)
            request.send_header("location", server.redirect.format(name=name))
            request.send_header("content-length", "0")
            request.end_headers()
        elif server.statuses and request.command == "GET":
            _send(request, server.statuses.pop(0), b"")
        elif name in server.files:
            _content(request, server, server.files[name])
        else:
            _send(request, 404, b"")


def _page(server: Server, path: str) -> str:
    """As Apache's: links to sort by, to the parent, and to what is here."""
    below = path.removeprefix("/files/")
    here = {name.removeprefix(below) for name in server.files if name.startswith(below)}
    names = sorted({name.partition("/")[0] + ("/" if "/" in name else "") for name in here})
    rows = "".join(f'<tr><td><A class="x" HREF="{name}">{name}</A></td></tr>' for name in names)
    return f'<html><a href="?C=N;O=D">Name</a><a href="/">up</a><a href="../">up</a><a href="http://x/y">y</a>{rows}'


def _content(request: BaseHTTPRequestHandler, server: Server, data: bytes) -> None:
    given, start = request.headers["range"], 0
    etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    fresh = request.headers.get("if-range", etag) == etag
    if given is not None and server.ranges and fresh:
        start = int(given.removeprefix("bytes=").removesuffix("-"))
    body = data[start:]
    request.send_response(206 if start else 200)
    if start:
        request.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
    request.send_header("content-length", str(len(body)))
    request.send_header("etag", etag)
    request.end_headers()
    if request.command == "HEAD":
        return
    if server.gate is not None:
        request.wfile.write(body[: len(body) // 2])
        request.wfile.flush()
        server.half.set()
        server.gate.wait(30)
        body = body[len(body) // 2 :]
    if server.cut:
        body = body[: server.cut.pop(0)]
        request.close_connection = True
    request.wfile.write(body)


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    request.send_response(status)
    request.send_header("content-length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
