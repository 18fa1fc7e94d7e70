"""KV cache of a prompt on its way from one simulated engine to another, in the form of vLLM's NixlConnector.

A prompt read for another engine keeps its blocks until they are fetched, or for KEPT seconds. Fetching takes the time
of its bytes. Pure: drivers bring clock and network.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadtest.engine.scheduler import Scheduler
from loadtest.engine.sequence import Sequence

KV_BYTES = 131_072.0  # of one token: Llama 3 8B in bfloat16
BANDWIDTH = 10e9  # bytes/s
LATENCY = 0.002  # seconds of each fetch
KEPT = 30.0  # seconds
FIELD = b'"kv_transfer_params"'  # in every body that is of a transfer
OnFailure = Literal["fail", "recompute"]
Wrong = Literal["", "none", "another", "stale", "garbage"]  # faults of an answer's parameters
FAILED = "KV load failed"


class TransferParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`kv_transfer_params` of a request or of an answer."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_host: str | None = None
    remote_port: int | None = None


class _Body(msgspec.Struct):
    kv_transfer_params: TransferParams | None = None


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


def transfer_of(body: bytes) -> TransferParams | None:
    """Return the parameters of a request; None: it is of no transfer."""
    return _decode(body).kv_transfer_params if FIELD in body else None


def transfer_seconds(tokens: int) -> float:
    """Seconds that fetching the KV cache of so many tokens takes."""
    return LATENCY + tokens * KV_BYTES / BANDWIDTH


class KeptPrompts:
    """Prompts of one engine, by request id, whose blocks wait to be fetched. `engine_id`: of one life of it. `fetched`,
    `expired`: how many of them were."""

    def __init__(self, scheduler: Scheduler, engine_id: str) -> None:
        self.engine_id = engine_id
        self.fetched = self.expired = 0
        self._scheduler = scheduler
        self._kept: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, sequence: Sequence, host: str = "", port: int = 0) -> TransferParams:
        """Keep the blocks of a prompt that was read. Return what its reader's answer says."""
        self._kept[request_id] = sequence
        return TransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_id,
            remote_request_id=request_id,
            remote_block_ids=[list(range(sequence.owns))],
            remote_host=host,
            remote_port=port,
        )

    def fetch(self, engine_id: str | None, request_id: str | None) -> Sequence | None:
        """Hand a prompt over, once; None: it is not kept here, or no longer."""
        sequence = self._kept.pop(request_id or "", None) if engine_id == self.engine_id else None
        if sequence is None:
            return None
        self.fetched += 1
        self._scheduler.release(sequence)
        return sequence

    def expire(self, request_id: str) -> None:
        """Free the blocks of a prompt that nobody has fetched."""
        sequence = self._kept.pop(request_id, None)
        if sequence is not None:
            self.expired += 1
            self._scheduler.release(sequence)

    def drop(self) -> None:
        """Free all of them: the cache is about to go."""
        for request_id in list(self._kept):
            self.expire(request_id)


def with_params(answer: bytes, params: TransferParams, wrong: Wrong = "") -> bytes:
    """Return a whole answer with transfer parameters, or with what a faulty engine says in their place."""
    if wrong == "none":
        return answer
    if wrong == "another":
        params = msgspec.structs.replace(params, remote_request_id="chatcmpl-another")
    elif wrong == "stale":
        params = msgspec.structs.replace(params, remote_engine_id="gone")
    said = b'{"do_remote_prefill":"yes"}' if wrong == "garbage" else _encode(params)
    return answer[:-1] + b"," + FIELD + b":" + said + b"}"
