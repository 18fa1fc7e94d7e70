"""Tokens of a sidecar: who holds the one may report, who holds the other may give orders."""

from __future__ import annotations

import msgspec


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """`report`: what a sidecar shows gateways. `order`: what its control API and its relay want to be shown; the same
    where the file names one token alone. None: no token."""

    report: str | None = None
    order: str | None = None
