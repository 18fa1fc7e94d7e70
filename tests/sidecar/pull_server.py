"""Server of a hub's API on a real socket, with the routes that a pull uses.

Answers can be cut short, know no ranges, redirect, wait, and lie.
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
    """A hub with one model, `org/m`."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, str, str | None, str | None]] = []  # method, path, Range, Authorization
        self.cut: list[int] = []  # bytes of an answer after which the connection is closed, once for each entry
        self.statuses: list[int] = []  # answered first, one for each GET of a file
        self.ranges = True  # whether Range is obeyed
        self.tree: Any = None  # the list of files, where it is not made from them
        self.redirect: str | None = None
        self.gate: threading.Event | None = None  # the answer for a large file waits for it after its first half
        self.half = threading.Event()  # an answer waits
        self.origin = ""

    def listed(self) -> list[dict[str, Any]]:
        """The hub's list of files."""
        return [
            {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": git(data),
                **({"lfs": {"oid": sha(data), "size": len(data), "pointerSize": 1}} if large(name) else {}),
            }
            for name, data in self.files.items()
        ]


def large(name: str) -> bool:
    """Whether a hub keeps a file in LFS."""
    return name.endswith((".safetensors", ".gguf"))


def git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Serve it, and give its origin."""

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
        server.origin = f"http://127.0.0.1:{listening.server_address[1]}"
        try:
            yield server.origin
        finally:
            if server.gate is not None:
                server.gate.set()
            listening.shutdown()
            thread.join(10)


def _answer(request: BaseHTTPRequestHandler, server: Server) -> None:
    headers = request.headers
    server.asked.append((request.command, request.path, headers["range"], headers["authorization"]))
    path = request.path.partition("?")[0]
    name = path.removeprefix(f"/org/m/resolve/{COMMIT}/").removeprefix("/files/")
    if path.startswith("/api/models/org/m/revision/"):
        if path.endswith(("/main", COMMIT)):
            _send(request, 200, json.dumps({"id": "org/m", "sha": COMMIT}).encode())
        else:
            _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
    elif path.startswith(f"/api/models/org/m/tree/{COMMIT}"):
        tree = server.listed() if server.tree is None else server.tree
        _send(request, 200, tree if isinstance(tree, bytes) else json.dumps(tree).encode())
    elif path.startswith("/api/"):
        _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
    elif name not in server.files:
        _send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
    elif server.redirect is not None and path.startswith("/org/m/"):
        data = server.files[name]
        more = {"location": server.redirect.format(name=name), "X-Linked-Size": str(len(data))}
        _send(request, 302, b"", {**_described(name, data), **more})
    elif server.statuses and request.command == "GET":
        _send(request, server.statuses.pop(0), b"", {"X-Error-Code": "GatedRepo"})
    else:
        _content(request, server, name)


def _described(name: str, data: bytes) -> dict[str, str]:
    etag = sha(data) if large(name) else git(data)
    return {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{etag}"', "ETag": f'"{etag}"'}


def _content(request: BaseHTTPRequestHandler, server: Server, name: str) -> None:
    data = server.files[name]
    given, start = request.headers["range"], 0
    if given is not None and server.ranges:
        start = int(given.removeprefix("bytes=").removesuffix("-"))
    body = data[start:]
    request.send_response(206 if start else 200)
    if start:
        request.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
    request.send_header("content-length", str(len(body)))
    for key, value in _described(name, data).items():
        request.send_header(key, value)
    request.end_headers()
    if request.command == "HEAD":
        return
    if server.gate is not None and large(name):
        request.wfile.write(body[: len(body) // 2])
        request.wfile.flush()
        server.half.set()
        server.gate.wait(60)
        body = body[len(body) // 2 :]
    if server.cut and large(name):
        body = body[: server.cut.pop(0)]
        request.close_connection = True
    request.wfile.write(body)


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    request.send_response(status)
    for key, value in (headers or {}).items():
        request.send_header(key, value)
    request.send_header("content-length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
