"""Advice on secrets that would cross a network in the clear, and on a token that more hold than need it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from gateway.core.engines.origin import parse_origin
from gateway.core.policy.advice_tenants import Found
from gateway.core.policy.policy import Policy
from gateway.shared.addresses import is_loopback


def in_the_clear(policy: Policy) -> Found:
    """Keys and tokens that the network between two machines would see, each with its field."""
    for index, engine in enumerate(policy.fleet.engines):
        origin = parse_origin(engine.url)
        if engine.api_key_file is not None and not (origin.tls or origin.unix or is_loopback(origin.host)):
            text = f"the key crosses the network to {engine.url} in the clear: https:// hides it"
            yield ("fleet", "engines", index, "api_key_file"), text
    sidecars = policy.fleet.sidecars
    elsewhere = [] if sidecars is None else list(_elsewhere(sidecars.allow))
    if sidecars is None or not elsewhere:
        return
    if sidecars.tls is None:
        text = f"sidecars in {elsewhere[0]} may be used at http://, where prompts and the order token are in the clear"
        yield ("fleet", "sidecars"), f"{text}: tls: {{}} or tls: {{ca_file: ...}} asks for https://"
    if sidecars.order_token_file is None:
        text = f"without an order_token_file each sidecar in {elsewhere[0]} knows the token that gives orders to all"
        yield ("fleet", "sidecars"), text


def _elsewhere(allow: tuple[str, ...]) -> Iterator[str]:
    """The networks that other machines may be in."""
    return (block for block in allow if not ipaddress.ip_network(block).is_loopback)
