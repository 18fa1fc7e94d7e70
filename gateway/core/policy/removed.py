"""Fields that the policy file had once, with what to write instead: a file that still has one is refused with this."""

from __future__ import annotations

from types import MappingProxyType

_FIXED = "nothing: it is fixed"
_BOUND = "nothing: the bound is fixed"

# `*`: any class, tenant or entry. The text stands behind "found a field that is gone, expected".
REMOVED = MappingProxyType({
    "batches.max_answer": f"{_BOUND} at 64MiB",
    "batches.max_requests": f"{_BOUND} at 50,000 lines",
    "body.max_messages": "nothing: body.max allows one message for each KiB",
    "body.max_values": "nothing: body.max allows one value for each 20 bytes",
    "body.share": f"{_FIXED} at half of body.memory",
    "body.strip_billing_header": "nothing: engines never get that line",
    "breaker.at_least": f"{_FIXED} at 20 calls",
    "breaker.error_rate": f"{_FIXED} at 50%",
    "breaker.open_for_at_most": "nothing: it is twelve times open_for",
    "breaker.panic": f"{_FIXED} at 50%",
    "breaker.probes": f"{_FIXED} at 3",
    "breaker.window": f"{_FIXED} at 10s",
    "classes.*.min_tokens": "nothing: the smallest max_tokens in shaping is the least",
    "classes.*.overload": "nothing: calls go by their deadlines",
    "cluster.user": "the user in cluster.url, valkey://USER@HOST:PORT",
    "console.board": "the address itself, console: https://...",
    "console.runbooks": "nothing: the console shows its own copy",
    "cors.origins": "the list itself, cors: [https://chat.example.com]",
    "fleet.engines[[]*].capacity": "budget.capacity, for engines that report none",
    "fleet.kubernetes": "the pool's name, fleet.inference_pool: NAME",
    "fleet.sidecars.copies.after": "nothing: it is 1.5 times copies",
    "fleet.sidecars.copies.margin": "the time itself, copies: 2s",
    "hedging.after": "the time itself, hedging: p95",
    "hedging.enabled": "the time itself, hedging: p95, or null for none",
    "lengths.learned": "lengths: learned, or by_model",
    "lengths.shortest_first": "nothing: learned lengths order calls",
    "limits.per_class": "an entry for each class in limits.classes",
    "limits.per_tenant.quota": "limits.quota",
    "modes.*.only": "refuse: all_but_most_important, or the list of all others",
    "retries.at_least": f"{_FIXED} at 3 in 10s, and none with retries: 0%",
    "retries.budget": "the share itself, retries: 20%",
    "retries.on": f"{_FIXED}: failures of the connection, 401, 407, 429, 502, 503, 504, redirects",
    "retries.per_call": f"{_FIXED} at 2, and none with retries: 0%",
    "routing.affinity": "nothing: calls go where their prompt costs least",
    "routing.affinity_ttl": "nothing: an engine's cache is known by its size and reports",
    "routing.imbalance": "nothing: calls go where their prompt costs least",
    "scaling.stabilization_window": f"{_FIXED} at 40s",
    "server.max_header_fields": f"{_BOUND} at 100 headers",
    "server.max_headers": f"{_BOUND} at 16KiB",
    "server.max_per_peer": f"{_FIXED} at half of max_connections; trusted_proxies may have all",
    "server.max_pipelined": f"{_BOUND} at 16 requests",
    "server.max_request_line": f"{_BOUND} at 8KiB",
    "server.write_high_water": f"{_FIXED} at 256KiB",
    "sessions": "nothing: a call waits for the full engine that has its prompt",
    "storage.folder": "the folder itself, storage: FOLDER",
    "timeouts.body": f"{_BOUND} at 30s without a byte; timeouts.body_total bounds all of a body",
    "timeouts.connect": f"{_BOUND} at 2s",
    "timeouts.half_open": f"{_FIXED} at 15s",
    "timeouts.headers": f"{_BOUND} at 10s",
    "timeouts.write_stall": f"{_BOUND} at 15s",
})  # fmt: skip
