"""TLS context of clients that call plain HTTP: httpx would read the system's authorities for each of them."""

from __future__ import annotations

import ssl

NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # is trusted
