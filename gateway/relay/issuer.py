"""Issuer of callers' tokens: its keys, read again as they change, and the tokens that they have verified.

Keys of an address are read at the start, then every EVERY seconds while tokens come, and at once for a token of an
unknown key, at most every AGAIN seconds. While the address does not answer, the keys that are known are valid for KEPT
seconds. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from gateway.core.policy.auth import AuthPolicy, key_address
from gateway.core.policy.signed_token import MOST_BYTES, KeySet, TokenFault, UnknownKey, Verified
from gateway.core.request.outcome import ISSUER_KEYS, AwaitsKeys, Outcome, Refused
from gateway.upstream.client import Client, ClientSettings, EngineError
from gateway.upstream.unread import limited

EVERY = 300.0  # seconds
AGAIN = 10.0  # seconds
KEPT = 86_400.0  # seconds
WITHIN = 5.0  # seconds for one reading
MOST_TOKENS = 10_000  # verified ones that are remembered
HEADERS = b"accept: application/json\r\naccept-encoding: identity\r\n"


class Issuer:
    """Keys and verified tokens of one policy's `auth`. `jwks`: the content of its file, empty where it has an address.
    `wall`: Unix time."""

    def __init__(
        self,
        auth: AuthPolicy,
        jwks: bytes,
        say: Callable[[str], None],
        *,
        before: Issuer | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Take the keys of the issuer `before`, if its address is the same. Raises ValueError where the file has no
        key."""
        self.auth = auth
        self.jwks = jwks
        self._say = say
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._keys = KeySet(jwks) if auth.jwks_url is None else None
        self._data = jwks
        self._read_at = self._asked_at = -math.inf
        self._failed = ""  # the reason of the last reading, where it failed
        self._reading: asyncio.Task[None] | None = None
        self._verified: dict[bytes, Verified] = {}
        if before is not None and before.auth.jwks_url == auth.jwks_url is not None:
            self._keys, self._data, self._failed = before._keys, before._data, before._failed
            self._read_at = before._read_at
        self._read_again()

    def holder(self, token: bytes, digest: bytes) -> Verified:
        """Return the claims of a token, whose SHA-256 is `digest`. Raises Refused."""
        keys, now = self._known_keys(), self._wall()
        found = self._verified.get(digest)
        if found is not None and now < found.until:
            return found
        try:
            found = keys.verified(token, self.auth, now)
        except UnknownKey as fault:
            kind = AwaitsKeys if self._read_again() else Refused
            raise kind(Outcome.UNAUTHORIZED, f"The token was refused: {fault}.") from None
        except TokenFault as fault:
            self._verified.pop(digest, None)
            raise Refused(Outcome.UNAUTHORIZED, f"The token was refused: {fault}.") from None
        if len(self._verified) >= MOST_TOKENS:
            self._verified.pop(next(iter(self._verified)))
        self._verified[digest] = found
        return found

    async def keys_read(self) -> None:
        """Wait until the reading under way has ended."""
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    async def aclose(self) -> None:
        """End the reading under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def _known_keys(self) -> KeySet:
        if self.auth.jwks_url is not None:
            age = self._loop.time() - self._read_at
            if age > EVERY:
                self._read_again()
            if age > KEPT:
                self._keys = None
                self._verified.clear()
        if self._keys is None:
            kind = AwaitsKeys if self._reading is not None else Refused
            message = (
                "The token cannot be checked: this gateway cannot read the keys of its issuer. Ask whoever runs it."
            )
            raise kind(Outcome.UPSTREAM, message, reason=ISSUER_KEYS, detail=f"{self.auth.jwks_url}: {self._failed}")
        return self._keys

    def _read_again(self) -> bool:
        """Begin to read the keys, unless they were read a moment ago. Return whether a reading is under way."""
        now = self._loop.time()
        if self._reading is None and self.auth.jwks_url is not None and now - self._asked_at >= AGAIN:
            self._asked_at = now
            self._reading = self._loop.create_task(self._read(self.auth.jwks_url))
        return self._reading is not None

    async def _read(self, url: str) -> None:
        try:
            data = await _fetched(url)
            keys = KeySet(data)
        except (EngineError, ValueError) as error:
            self._fails(str(error))
        else:
            if data != self._data:
                self._verified.clear()  # a key may be gone
            if self._failed:
                self._say(f"auth: the issuer's keys are read again from {url}")
            self._keys, self._data, self._failed = keys, data, ""
            self._read_at = self._loop.time()
        finally:
            self._reading = None

    def _fails(self, why: str) -> None:
        if why != self._failed:
            left = KEPT - (self._loop.time() - self._read_at)
            known = f"those that are known are valid for {left / 3600:.0f} h" if left > 0 else "no token is accepted"
            self._say(f"auth: the issuer's keys cannot be read from {self.auth.jwks_url}: {why}; {known}")
        self._failed = why


async def _fetched(url: str) -> bytes:
    """The body of an answer of status 200. Raises EngineError, ValueError."""
    origin, target = key_address(url)
    client = Client(origin, ClientSettings(stall_timeout=WITHIN))
    try:
        async with limited(WITHIN):
            reply = await client.send(b"GET", target, HEADERS, b"", timeout=WITHIN)
            with contextlib.closing(reply):
                if reply.status != 200:
                    raise ValueError(f"it answers with status {reply.status}")
                return await reply.read(MOST_BYTES)
    except TimeoutError:
        raise ValueError(f"no answer within {WITHIN:.0f} s") from None
    finally:
        client.close()
