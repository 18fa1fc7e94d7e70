"""Routes of API keys: one is made or revoked, only where there is an admin token.

    POST   /tenants/{tenant}/keys           201, with the key, this once
    DELETE /tenants/{tenant}/keys/{hash}    the key whose SHA-256 begins with these 8 digits or more

Calls under way go on, with whatever key they came.
"""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.control.guard import JSON, error
from gateway.decider.api_keys import ApiKeys
from gateway.decider.key_file import KeysError
from gateway.shared.files.checked import InvalidFile

HASH = re.compile(r"[0-9a-f]{8,64}")
NO_KEYS = "Keys are made here only where there is an admin token and a policy file: use `gateway key`."


class KeyRoutes:
    """`keys` None: none can be made."""

    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys

    def routes(self) -> list[Route]:
        return [
            Route("/tenants/{tenant}/keys", self.answer, methods=["POST"]),
            Route("/tenants/{tenant}/keys/{hash}", self.answer, methods=["DELETE"]),
        ]

    async def answer(self, request: Request) -> Response:
        """404 for a tenant or key that is not there, 409 for a file that cannot be changed."""
        tenant, digest = request.path_params["tenant"], request.path_params.get("hash")
        if self._keys is None:
            return error(404, "no_keys", NO_KEYS)
        if digest is not None and not HASH.fullmatch(digest):
            return error(400, "bad_hash", "A key is named by 8 digits or more of its SHA-256, never by itself.")
        try:
            change = await (self._keys.make(tenant) if digest is None else self._keys.revoke(tenant, digest))
        except LookupError as unknown:
            return error(404, "not_known", str(unknown.args[0]))
        except (KeysError, InvalidFile) as unusable:
            return error(409, "keys_file", str(unusable))
        return Response(msgspec.json.encode(change), 201 if digest is None else 200, media_type=JSON)
