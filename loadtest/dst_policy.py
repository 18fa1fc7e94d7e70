"""Random policies for simulations: everything that decides about calls is drawn, and a reload draws it anew."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec

# A limit that binds nobody and drains nothing: what it holds was settled.
DAYS = {"rate": "1/day", "burst": 100_000_000}
PER_CALL = 2  # retries that any policy allows one call


class Traits:
    """Draws one case's policies. They share what a check at the end of a simulation needs."""

    def __init__(self, rng: random.Random, extra: int, *, sidecars: bool, cancels: bool) -> None:
        self._rng = rng
        self._extra = extra
        self._sidecars = sidecars
        self._cancels = cancels

    def policy(self, *, twice: bool = False) -> str:
        """A policy in YAML (as JSON, which is YAML). `twice`: it names an engine of the command line's."""
        rng = self._rng
        urls = [f"http://extra-{number}:8000" for number in range(self._extra) if rng.random() < 0.5]
        if twice:
            urls.append("http://engine-0:8000")
        tree: dict[str, Any] = {
            "version": 1,
            "classes": self._classes(),
            "service_tiers": {},
            "tenants": {
                "anonymous": {},
                "acme": {"keys": [_digest("key-of-acme")], "weight": rng.choice((1, 4))},
                "zeta": {"keys": [_digest("key-of-zeta")], "limits": rng.choice(({}, {"requests": "2/s"}))},
            },
            "limits": {"global": {"requests": DAYS, "tokens": DAYS}, "per_class": rng.choice(({}, {"tokens": "2k/s"}))},
            "budget": {"kv_target": rng.choice(("50%", "80%", "100%")), "max_concurrency": rng.choice((2, 8, 256))},
            "deadlines": {
                "predict": rng.random() < 0.5,
                "shed_late": rng.random() < 0.7,
                "on_deadline": "cancel" if self._cancels else rng.choice(("cancel", "finish")),
            },
            "routing": {
                "affinity": rng.choice(("prefix", "session", "none")),
                "block": 64,
                "slow_start": rng.choice(("0s", "5s")),
                "gateways": rng.choice((1, 1, 2)),
            },
            "retries": {"per_call": rng.choice((0, 1, PER_CALL)), "at_least": rng.choice((0, 3)), "budget": "20%"},
            "hedging": {"enabled": rng.random() < 0.3, "after": rng.choice(("250ms", "p90"))},
            "breaker": {"failures": rng.choice((2, 5)), "open_for": rng.choice(("1s", "5s")), "at_least": 10},
            "timeouts": {"first_byte": rng.choice(("1s", "60s")), "stall": "3s"},
            "shaping": rng.choice(([], [{"kv_above": "60%", "max_tokens": 16}])),
            # Rarely asked engines give no second chance to a wake-up that was lost.
            "fleet": {
                "poll": rng.choice(("500ms", "5s", "20s")),
                "health": rng.choice(("500ms", "2s")),
                "engines": [{"url": url} for url in urls],
            },
        }
        if self._sidecars and rng.random() < 0.9:
            tree["fleet"]["sidecars"] = {}
        if rng.random() < 0.5:
            tree["modes"] = {mode: {"enter": {}, "leave": {}} for mode in ("tight", "brownout", "closed")}
        return msgspec.json.encode(tree).decode()

    def _classes(self) -> dict[str, Any]:
        rng = self._rng
        classes: dict[str, Any] = {
            "interactive": {"weight": 8, "ttft": rng.choice((None, "2s")), "deadline": rng.choice(("4s", "20s"))},
            "default": {"weight": 4, "deadline": rng.choice(("8s", "30s")), "max_wait": rng.choice((None, "2s"))},
            "batch": {"weight": 1, "deadline": "60s", "max_concurrency": rng.choice((None, 1, 3))},
            "offline": {"weight": 1, "deadline": "60s", "reserve": rng.choice(("0%", "20%"))},
        }
        for name in ("interactive", "batch", "offline"):
            if rng.random() < 0.1:
                del classes[name]  # a reload may do away with a class, and bring it back
        for each in classes.values():
            each["max_queue"] = rng.choice((2, 8, 200))
            each["overload"] = rng.choice(("edf", "edf", "edf", "lifo"))
            each["strict"] = rng.random() < 0.1
        return classes


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
