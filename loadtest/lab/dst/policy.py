"""Random policies for simulations: everything that decides about calls is drawn, and a reload draws it anew."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.core.policy.file import judged
from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import Mark, Reader, Reading, Value
from loadtest.lab.dst.parts import scheduling_of

# A limit that binds nobody and drains nothing: what it holds was settled.
DAYS = {"rate": "1/day", "burst": 100_000_000}
MODES = ("tight", "brownout", "closed")
ROUTE = "route"  # the model route's name


def read_json(text: bytes) -> Policy:
    """The policy that a case has as JSON. Raises InvalidFile. A file's reader finds the same, but parsing YAML takes a
    quarter of a case."""
    reader, root = Reader("policy"), _value(msgspec.json.decode(text))
    return judged(Reading(reader.read(root, Policy, ""), root, reader)).good()


def _value(tree: Any) -> Value:
    if isinstance(tree, dict):
        return Value(mark=Mark(), fields={name: (Mark(), _value(value)) for name, value in tree.items()})
    if isinstance(tree, list):
        return Value(mark=Mark(), items=tuple(map(_value, tree)))
    if tree is None or isinstance(tree, str):
        return Value(mark=Mark(), text=tree, quoted=True)
    return Value(mark=Mark(), text=msgspec.json.encode(tree).decode())


class Traits:
    """Draws one case's policies. They share what a check at the end of a simulation needs."""

    def __init__(
        self, rng: random.Random, extra: int, *, sidecars: bool, cancels: bool, models: Sequence[str] = ()
    ) -> None:
        """`models`: those that a model route may have; empty: the policies have no route."""
        self._rng = rng
        self._extra = extra
        self._sidecars = sidecars
        self._cancels = cancels
        self._retries = rng.choice((False, True, True))
        self._models = models

    def policy(self, *, twice: bool = False) -> str:
        """A policy in YAML (as JSON, which is YAML). `twice`: it names an engine of the command line's."""
        rng = self._rng
        engines = [
            {"url": f"http://extra-{number}:8000", "scheduling_policy": scheduling_of(number)}
            for number in range(self._extra)
            if rng.random() < 0.5
        ]
        if twice:
            engines.append({"url": "http://engine-0:8000"})
        tree: dict[str, Any] = {
            "version": 1,
            "classes": self._classes(),
            "service_tiers": {},
            "tenants": {
                "anonymous": {},
                "acme": {"keys": [_digest("key-of-acme")], "weight": rng.choice((1, 4))},
                "zeta": {"keys": [_digest("key-of-zeta")], "limits": rng.choice(({}, {"requests": "2/s"}))},
            },
            "storage": "counted-and-kept-nowhere",
            "engines_price": "2.10/hour",
            "limits": self._limits(),
            "budget": {"kv_target": rng.choice(("50%", "80%", "100%")), "max_concurrency": rng.choice((2, 8, 256))},
            "deadlines": rng.choice(("refuse", "drop") if self._cancels else ("refuse", "drop", "run")),
            "routing": {"slow_start": rng.choice(("0s", "5s")), "gateways": rng.choice((1, 1, 2))},
            "retries": rng.choice(("0%", "20%", "100%") if self._retries else ("0%",) * 3),
            "hedging": rng.choice((None, None, None, None, "250ms", "p90")),
            "breaker": {"failures": rng.choice((2, 5)), "open_for": rng.choice(("1s", "5s"))},
            "timeouts": {"first_byte": rng.choice(("1s", "60s")), "stall": "3s"},
            "shaping": rng.choice(([], [{"kv_above": "60%", "max_tokens": 16}])),
            "fleet": self._fleet(engines),
        }
        if self._sidecars and rng.random() < 0.9:
            tree["fleet"]["sidecars"] = {}
        if rng.random() < 0.5:
            tree["modes"] = {mode: {"enter": {}, "leave": {}} for mode in MODES}
        elif rng.random() < 0.4:
            tree["modes"] = self._modes()
        tree["batching"] = {k: rng.choice(("20ms", "250ms")) for k in ("embeddings", "rerank") if rng.random() < 0.5}
        tree["routing"]["hold_unserved"] = rng.choice(("0s", "1s", "60s"))
        if self._models:
            headroom = tree["classes"].get("batch", {}).get("headroom", "0%")
            tree["models"] = {ROUTE: self._route(mirrored=headroom != "0%")}
        tree["lengths"] = rng.choice(("by_model", "50%"))
        return msgspec.json.encode(tree).decode()

    def _route(self, *, mirrored: bool) -> dict[str, Any]:
        """A route over some models, with a mirror where a class has headroom for that."""
        rng = self._beside(ROUTE)
        models = rng.sample(self._models, len(self._models))
        members: list[dict[str, Any]] = [{"model": model} for model in models[: rng.choice((1, 1, 2))]]
        if len(members) > 1:
            members[1] |= {"weight": rng.choice((0.5, 1)), "until": rng.choice((None, {"errors": "2%"}))}
        route = {"members": members, "fallback": models[len(members) : rng.choice((2, 3))]}
        if mirrored and len(members) < len(models):
            route["mirror"] = {"model": models[-1], "share": "50%"}
        return route

    def _fleet(self, engines: list[dict[str, Any]]) -> dict[str, Any]:
        """Engines that are rarely asked: these give no second chance to a wake-up that was lost."""
        poll, health = self._rng.choice(("500ms", "5s", "20s")), self._rng.choice(("500ms", "2s"))
        return {"poll": poll, "health": health, "engines": engines}

    def _limits(self) -> dict[str, Any]:
        """The one that binds nobody, and others."""
        rng = self._rng
        return {
            "global": {"requests": DAYS, "tokens": DAYS},
            "classes": rng.choice(({}, {}, {"default": {"tokens": "2k/s"}})),
            "per_tenant": rng.choice(({}, {}, {"requests": "4/s"})),
            "quota": self._quota(),
            "models": rng.choice(({}, {}, {"sim": {"tokens": {"rate": "1k/s", "burst": 3000}}})),
        }

    def _quota(self) -> dict[str, Any]:
        """A tenant's quota."""
        rng = self._beside()
        return {"day": rng.choice(("2k", "20k"))} if rng.random() < 0.3 else {}

    def _beside(self, what: str = "") -> random.Random:
        """Draws beside the rest: with and without them a seed is the same case."""
        return random.Random(f"{what}{self._rng.getstate()[1][:4]}")  # noqa: S311 # a test's draw

    def _modes(self) -> dict[str, Any]:
        """Modes that come and go all the time."""
        rng = self._rng
        by = rng.choice(("kv", "waiting"))
        steps = ("30%", "50%", "70%") if by == "kv" else (1, 2, 4)
        least = "10%" if by == "kv" else 0
        modes = {}
        for mode, step in zip(MODES, steps, strict=True):
            modes[mode] = {"enter": {by: step}, "leave": {by: least}, "dwell": rng.choice(("0s", "250ms", "2s"))}
        modes["brownout"]["refuse"] = rng.choice(("least_important", ["default"]))
        modes["closed"]["refuse"] = rng.choice(("all_but_most_important", ["default"]))
        return modes

    def _classes(self) -> dict[str, Any]:
        rng = self._rng
        classes: dict[str, Any] = {
            "interactive": {"weight": 8, "ttft": rng.choice((None, "2s")), "deadline": rng.choice(("4s", "20s"))},
            "default": {"weight": 4, "deadline": rng.choice(("8s", "30s"))},
            "batch": {"weight": 1, "deadline": "60s", "max_concurrency": rng.choice((None, 1, 3))},
            "offline": {"weight": 1, "deadline": "60s", "reserve": rng.choice(("0%", "20%"))},
        }
        for name in ("interactive", "batch", "offline"):
            if rng.random() < 0.1:
                del classes[name]  # a reload may do away with a class, and bring it back
        for each in classes.values():
            each["max_queue"] = rng.choice((2, 8, 200))
            each["strict"] = rng.random() < 0.1
        classes["default"]["tpot"] = self._beside("tpot").choice((None, "5ms"))
        if "batch" in classes:
            classes["batch"]["headroom"] = self._beside("headroom").choice(("0%", "0%", "40%"))
        return classes


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
