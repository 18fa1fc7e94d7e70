"""Bodies of a call whose prompt another engine reads: the request to that engine, its answer, the request to the own.

vLLM's protocol: the first request asks for one token and says `do_remote_decode`; its answer has `kv_transfer_params`,
which the second request takes as they are. Both requests must become the same prompt, so nothing that a chat template
reads is changed.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from gateway.core.admission.shaping import FIELDS

ANSWER_AT_MOST = 1024 * 1024  # bytes: ids of blocks are some 7 bytes for each 16 tokens
ASK = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
# Fields whose answer tells of the prompt's own tokens, or that continue what one engine has: such a prompt is read by
# the engine that answers.
OWN = ("echo", "prompt_logprobs", "use_beam_search", "previous_response_id", "background")
DROPPED = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "stop", "stop_sequences",
    "stop_token_ids", "stream_options",
)  # fmt: skip
UNSAID = (b"null", b"false")
HERE = b""
# Kinds of failure of Grant.prefilled, beside a connection's and a status.
FETCH = "fetch"  # the call's own engine did not answer with the prompt that was read elsewhere
UNREADABLE = "unreadable"  # an answer without transfer parameters of the call
UNSENT = "own"  # the answer tells of the prompt's own tokens, so nothing was sent

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Params(msgspec.Struct, gc=False):
    """The fields of an answer's `kv_transfer_params` that are checked."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str | None = None


class _Answer(msgspec.Struct, gc=False):
    kv_transfer_params: Raw = Raw(b"null")


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_params = msgspec.json.Decoder(_Params).decode


class NoParams(ValueError):
    """An answer without transfer parameters of its own call; the text says what is wrong."""


def prefill_body(body: bytes, kind: str) -> bytes:
    """Return the request that has an engine read the prompt of `body`, which was parsed for a route of `kind` that
    generates. Empty: the engine that answers must read it."""
    fields = _decode(body)
    if any(bytes(fields.get(name, b"null")) not in UNSAID for name in OWN):
        return HERE
    for name in DROPPED:
        fields.pop(name, None)
    fields[FIELDS[kind][-1]] = Raw(b"1")
    fields["stream"] = Raw(b"false")
    fields["kv_transfer_params"] = ASK
    if kind == "response":
        fields["store"] = Raw(b"false")
    elif kind != "message":
        fields["ignore_eos"] = Raw(b"true")  # vLLM keeps no blocks of an answer that ended by itself
    return _encode(fields)


def params_of(answer: bytes, request_id: str) -> bytes:
    """Return the transfer parameters of an engine's answer, as they are. Raises NoParams if there are none, or if they
    are of another call; `request_id` empty: the engine names calls of this route by itself."""
    try:
        raw = bytes(_decode_answer(answer).kv_transfer_params)
        if raw == b"null":
            raise NoParams("it answered without kv_transfer_params")
        params = _decode_params(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NoParams(f"its kv_transfer_params cannot be read: {error}") from None
    if not params.do_remote_prefill or not params.remote_engine_id:
        raise NoParams("its kv_transfer_params name no blocks to fetch")
    if params.remote_request_id is not None and request_id not in params.remote_request_id:
        raise NoParams("its kv_transfer_params are of another call")
    return raw


def decode_body(body: bytes, params: bytes) -> bytes:
    """Return `body` with the transfer parameters. Of equal keys in JSON every reader takes the last."""
    return body.rstrip(b" \t\r\n")[:-1] + b',"kv_transfer_params":' + params + b"}"
