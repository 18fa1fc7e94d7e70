"""How the gateway asks sidecars of its own accord: straight, with nothing of its surroundings.

No proxy from the environment, no redirects, no compression, and no cookies: one with bytes beyond ASCII would make
every later request raise. There is no time-out either: httpx's are per read, so each request is bounded as a whole by
whoever makes it.
"""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx


def client(
    transport: httpx.AsyncBaseTransport | None, *, limits: httpx.Limits | None = None, base_url: str = ""
) -> httpx.AsyncClient:
    """A client over `transport`; None: over sockets, so many as `limits` say."""
    return httpx.AsyncClient(
        transport=transport,
        limits=limits or httpx.Limits(),
        base_url=base_url,
        headers={"accept-encoding": "identity", "user-agent": "weir"},
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        timeout=None,  # noqa: S113 # see above
        trust_env=False,
    )
