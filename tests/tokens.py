"""Issuer of JSON Web Tokens for tests: key pairs, JWK Sets, tokens, and a server of keys over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER, AUDIENCE = "https://login.example.com/", "weir"
Tree = dict[str, Any]
_KINDS: Mapping[str, Any] = {
    "RS256": lambda: rsa.generate_private_key(65537, 2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class KeyPair:
    """A signing key. `jwk`: its public half."""

    def __init__(self, kid: str, algorithm: str = "ES256") -> None:
        self.kid, self.algorithm = kid, algorithm
        self.private = _KINDS[algorithm]()
        writer = jwt.get_algorithm_by_name(algorithm)
        self.jwk: Tree = {**json.loads(writer.to_jwk(self.private.public_key())), "kid": kid, "use": "sig"}  # type: ignore[attr-defined] # each has it
        self.jwk.pop("key_ops", None)

    def token(self, *, headers: Tree | None = None, **claims: Any) -> str:
        """A good token of this key, for an hour; a claim that is None is left out."""
        every = {"iss": ISSUER, "aud": AUDIENCE, "tenant": "acme", "exp": time.time() + 3600, **claims}
        given = {name: value for name, value in every.items() if value is not None}
        return jwt.encode(given, self.private, self.algorithm, headers={"kid": self.kid, **(headers or {})})


def key_set(*keys: KeyPair) -> bytes:
    return json.dumps({"keys": [key.jwk for key in keys]}).encode()


class KeyServer:
    """An issuer's JWK Set over HTTP on loopback; `with` ends it. `answer`: status and body; `asked`: how often;
    `target`: what was asked for last."""

    def __init__(self, *keys: KeyPair) -> None:
        self.answer = (200, key_set(*keys))
        self.asked = 0
        self.target = ""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked += 1
                server.target = self.path
                status, body = server.answer
                self.send_response(status)
                if status == 302:
                    self.send_header("location", "/elsewhere")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_port}/keys.json"

    def __enter__(self) -> KeyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
