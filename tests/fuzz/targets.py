"""Fuzz targets: the parsers that outside bytes reach, each as a function of pieces, with its expected behaviour.

A target's `read` takes the input in pieces and gives what was understood, or raises an error of the parser's own.
Whatever the input: no other exception, the same result however it is cut, and work in proportion to its length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gateway.core.answer.json_usage import BLOCK, JSONUsage
from gateway.core.answer.sse_usage import SSEUsage, UsageError
from gateway.core.batches.lines import Judged
from gateway.core.batches.requests import new_batch
from gateway.core.batches.upload import UploadForm
from gateway.core.kv_transfer import NoParams, params_of
from gateway.core.policy.auth import AuthPolicy
from gateway.core.policy.file import decode
from gateway.core.policy.signed_token import KeySet, TokenFault
from gateway.core.request.allowed_fields import READS
from gateway.core.request.call import CallSettings
from gateway.core.request.multipart_form import form_fields
from gateway.core.request.outcome import Refused
from gateway.core.request.parser import parse
from gateway.core.request.routes import ROUTES
from gateway.core.request.tenants import keys_from
from gateway.decider.kubernetes.pool import BadObject, Gone, Pods
from gateway.frames.codec import FrameError, from_relay
from gateway.relay.wire.body import ChunkedBody
from gateway.relay.wire.http1 import HeadReader, KnownHeads
from gateway.relay.wire.messages import ServerSettings, WireError
from gateway.shared.files.checked import InvalidFile
from gateway.shared.protocol import ProtocolError as ReportError
from gateway.shared.protocol import capacity_report
from gateway.shared.vllm.answers import AnswerError, models_from, sample_from
from gateway.shared.vllm.kv_events import EventsError, events_from
from sidecar.sizing.model_config import shape_from
from sidecar.sizing.model_fields import ModelError
from sidecar.sizing.weights import index_from, stored_from

Pieces = Sequence[bytes]
SETTINGS = ServerSettings()
AUTH = AuthPolicy(issuer="i", audience="a", jwks="k", class_claim="class")
JSON_ROUTES = [route for route in ROUTES.values() if route.kind in READS]


class ScanError(Exception):
    """A long answer is read otherwise than a parser reads it."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One parser. `errors`: its own. `cut`: it takes pieces, and the cuts must not matter. `words`: what to put into
    inputs. `per_byte`: lines of Python that a byte of a long input may cost, at most, beside `once` for the input."""

    read: Callable[[Pieces], Any]
    errors: tuple[type[Exception], ...]
    words: tuple[bytes, ...]
    per_byte: float = 10.0
    once: int = 2000
    cut: bool = False


def _head(pieces: Pieces) -> Any:
    data = b"".join(pieces)
    head, end, _ = data.partition(b"\r\n\r\n")
    head += end
    if not end:
        HeadReader(SETTINGS, KnownHeads()).check_part(data, 0) if data else None
        return None
    reader = HeadReader(SETTINGS, KnownHeads())
    request = reader.read(head)
    like = reader.read(head)  # now it may be known
    assert (like.method, like.path, like.fields) == (request.method, request.path, request.fields)
    for seen in range(1, len(head), max(1, len(head) // 8)):  # what is taken whole is refused in no part
        reader.check_part(head[:seen], max(0, seen - 3))
    return request.method, request.path, request.fields, request.length, request.keep_alive


def _chunked(pieces: Pieces) -> Any:
    body = ChunkedBody(SETTINGS, 64 * 1024)
    after: bytes | None = None
    for piece in pieces:
        if after is not None:
            after += piece
        else:
            after = body.feed(piece)
    return bytes(body.data), after


def _json(pieces: Pieces) -> Any:
    data = b"".join(pieces)
    route = JSON_ROUTES[data[0] % len(JSON_ROUTES)] if data else JSON_ROUTES[0]
    headers = {b"content-type": b"application/json"}
    call = parse(
        route,
        headers,
        data[1:],
        settings=CallSettings(),
        request_id="r",
        tenant="t",
        now=0.0,
        cache_salt=b',"cache_salt":"s"',
    )
    msgspec.json.decode(call.body)  # what is sent on is JSON
    return call.model, call.n, call.max_tokens


def _form(pieces: Pieces) -> Any:
    return form_fields(b"multipart/form-data; boundary=B", b"".join(pieces))


def _upload(pieces: Pieces) -> Any:
    form = UploadForm(b"multipart/form-data; boundary=B")
    file = b"".join([form.feed(piece) for piece in pieces])
    form.finish()
    return file, form.filename, form.fields


def _lines(pieces: Pieces) -> Any:
    judged = Judged("/v1/chat/completions", 64 * 1024, 1000)
    for piece in pieces:
        judged.feed(piece)
    judged.end()
    return judged.faults, list(judged.taken())


def _batch(pieces: Pieces) -> Any:
    return new_batch(b"application/json", b"".join(pieces))


def _stream(pieces: Pieces) -> Any:
    usage = SSEUsage(hide=True)
    relayed = b"".join([usage.feed(piece) for piece in pieces]) + usage.finish()
    return relayed, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.done, usage.error


def _frames(pieces: Pieces) -> Any:
    reader = from_relay()
    return repr([messages for piece in pieces for messages in reader.feed(piece)])


LONG = b'{"pad":"' + b"x" * BLOCK + b'",'  # before what follows an answer's first brace: it is scanned, not kept


def _long_answer(pieces: Pieces) -> Any:
    told = _answer([LONG, *pieces])
    data = b"".join([LONG, *pieces])
    objects: list[list[tuple[str, Any]]] = []  # the outermost is last
    with suppress(ValueError, RecursionError, msgspec.DecodeError):
        msgspec.json.decode(data)  # stricter than the next in some things
        json.loads(data, object_pairs_hook=objects.append)
        # Engines write the name once and plainly; of two, or of one that is escaped, another may be taken.
        if [name for name, _ in objects[-1]].count("usage") <= 1 and b"\\u" not in data:
            reference = JSONUsage()
            reference.whole(data)
            expected = reference.prompt_tokens, reference.completion_tokens, reference.cached_tokens
            if told != expected:
                raise ScanError(f"{told}, expected {expected}")
    return told


def _answer(pieces: Pieces) -> Any:
    usage = JSONUsage()
    relayed = b"".join([usage.feed(piece) for piece in pieces])
    usage.finish()
    assert relayed == b"".join(pieces)
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens


def _report(pieces: Pieces) -> Any:
    return capacity_report(b"".join(pieces))


def _policy(pieces: Pieces) -> Any:
    return decode(b"".join(pieces), "p")


def _keys(pieces: Pieces) -> Any:
    return keys_from(b"".join(pieces), "k")


def _token(pieces: Pieces) -> Any:
    """An issuer's key set, and in the next line a token."""
    keys, _, token = b"".join(pieces).partition(b"\n")
    return KeySet(keys).verified(token, AUTH, 0.0)


def _pods(pieces: Pieces) -> Any:
    """A list of pods, and in the next lines what a watch tells of them."""
    listed, *lines = b"".join(pieces).split(b"\n")
    pods = Pods(listed)
    for line in lines:
        pods.take(line)
    return dict(pods.urls((8000, 8001))), pods.version


def _metrics(pieces: Pieces) -> Any:
    return sample_from(b"".join(pieces))


def _models(pieces: Pieces) -> Any:
    return models_from(b"".join(pieces))


def _events(pieces: Pieces) -> Any:
    return events_from(b"".join(pieces))


def _config(pieces: Pieces) -> Any:
    return shape_from(b"".join(pieces))


def _index(pieces: Pieces) -> Any:
    return index_from(b"".join(pieces))


def _header(pieces: Pieces) -> Any:
    data = b"".join(pieces)
    return stored_from(len(data).to_bytes(8, "little") + data)


_HTTP = (
    *(b"\r\n", b"GET / HTTP/1.1", b"Host: a", b"content-length: 1", b"transfer-encoding: chunked", b"\n", b"\0"),
    b": ",
)
_CHUNKS = (b"1\r\nx\r\n", b"0\r\n\r\n", b";a=b", b"\r\n", b"f")
_FORM = (
    *(b"--B", b"\r\n", b"--", b"\r\n\r\n", b";", b'; filename="f"'),
    b'Content-Disposition: form-data; name="a"',
)
_OBJECTS = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"\\u0041",
        b"null",
        b"1",
        b"1e9",
        b'"a"',
        b'"usage":',
        b"\xc3\xa9",
    ),
    *(b"\xff", b"{}", b"[]", b'"\\""'),
)
_BODY = (
    *(*_OBJECTS, b'"model":"m"', b'"messages":[{"role":"user","content":"x"}]', b'"prompt":"x"', b'"input":'),
    *(
        b'"content":[',
        b'"image_url":',
        b'"stream":true',
        b'"stream_options":{}',
        b'"n":2',
        b'"tools":[]',
        b'"query":"x"',
    ),
    *(b'"documents":["y"]', b'"max_tokens":1', b'"vllm_xargs":{}', b'"type":"tool_use"', b'"uuid":"x"'),
    *(b'{"type":"text","text":"x"},', b'{"role":"user","content":"x"},', b'"text_1":"x"', b'"text_2":"y"'),
)
_EVENTS = (
    *(b"data: ", b"\n\n", b"\r\n\r\n", b"data: [DONE]", b"event: x\n", b": ping\n", b'"error":{}', *_OBJECTS),
    b'{"choices":[],"usage":{"prompt_tokens":1}}',
)
_REPORT = (*_OBJECTS, b'"sidecar":"s"', b'"boot":"b"', b'"sequence":1', b'"models":[', b'"gpus":[', b'"profile":"p"')
_YAML = (
    *(b"\n", b"  ", b": ", b"- ", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"!!x ", b"|", b">", b"'", b'"', b"#", b"? "),
    *(b"1m", b"80%", b"classes:", b"tenants:", b"limits:", b"routing:", b"shaping:", b"default: {}", b"acme: {}"),
    *(b"fleet:", b"---"),
)
_KEYS = (b"\n", b" ", b"#", b"0" * 64, b"acme", b"\r", b"\x85")
_LINE = (b'"custom_id":"a"', b'"method":"POST"', b'"url":"/v1/chat/completions"', b'"body":{"model":"m"}')
_METRICS = (
    *(b"vllm:num_requests_running", b"{", b"}", b'engine="0"', b",", b"=", b'"', b"\\", b" 1\n", b" NaN\n"),
    b"# HELP x\n",
)
_MODELS = (*_OBJECTS, b'"data":[', b'"id":"m"', b'"max_model_len":1')
_TRANSFER = (b'"kv_transfer_params":{', b'"do_remote_prefill":true', b'"remote_engine_id":"e"', b'"remote_request_id":')
_PACKED = (
    b"\x93",
    b"\x81",
    b"\x90",
    b"\xa1x",
    b"\xdc\x00\x01",
    b"\xc0",
    b"\xcf" + bytes(8),
    b"\xcb" + bytes(8),
    b"\xd9\x01\xff",
)
_POD = (
    *(*_OBJECTS, b"\n", b'"metadata":{"name":"a","resourceVersion":"7"}', b'"podIP":"10.0.0.1"', b'"type":"DELETED"'),
    *(b'"conditions":[{"type":"Ready","status":"True"}]', b'"phase":"Running"', b'"type":"ERROR"', b'"items":[]'),
)
_KEY_SET = (
    *(*_OBJECTS, b"\n", b".", b"..", b'"keys":[{', b'"kty":"RSA"', b'"kty":"OKP"', b'"crv":"P-256"', b'"n":"AQAB"'),
    *(b'"alg":["ES256"]', b'"alg":"RS256"', b'"kid":', b'"use":"sig"', b"eyJhbGciOlsiRVMyNTYiXX0", b"e30", b'"d":"x"'),
)
_FRAMES = (b"\x00\x00\x00\x05\xdc\x00\x01", b"\x91\x0d", b"\x93\x02\x01", b"\xcf", b"\xcb", b"\xa7default", b"\xc3")
_FILES = (
    b"{",
    b"}",
    b"[",
    b",",
    b"-1",
    b"1e9",
    b"NaN",
    b'"num_hidden_layers"',
    b'"layer_types"',
    b'"text_config":',
    b"null",
)
TARGETS = {
    "config": Target(read=_config, errors=(ModelError,), words=_FILES, once=200_000),
    "index": Target(read=_index, errors=(ModelError,), words=(*_FILES, b'"weight_map"', b"a.safetensors")),
    "header": Target(read=_header, errors=(ModelError,), words=(*_FILES, b'"data_offsets"', b'"dtype"', b'"F32"')),
    "frames": Target(read=_frames, errors=(FrameError,), words=_FRAMES, cut=True),
    "head": Target(read=_head, errors=(WireError,), words=_HTTP),
    "chunked": Target(read=_chunked, errors=(WireError,), words=_CHUNKS, cut=True),
    "json": Target(read=_json, errors=(Refused,), words=_BODY),
    "form": Target(read=_form, errors=(Refused,), words=_FORM),
    "upload": Target(read=_upload, errors=(Refused,), words=(*_FORM, b'name="file"'), cut=True),
    "lines": Target(read=_lines, errors=(), words=(*_OBJECTS, *_LINE, b"\n"), per_byte=20.0, cut=True),
    "batch": Target(read=_batch, errors=(Refused,), words=(*_OBJECTS, b'"input_file_id":"f"', b'"metadata":{')),
    "stream": Target(read=_stream, errors=(UsageError,), words=_EVENTS, cut=True),
    "answer": Target(read=_answer, errors=(), words=_OBJECTS, cut=True),
    "long_answer": Target(read=_long_answer, errors=(), words=_OBJECTS, cut=True),
    "report": Target(read=_report, errors=(ReportError,), words=_REPORT),
    "events": Target(read=_events, errors=(EventsError,), words=_PACKED),
    "metrics": Target(read=_metrics, errors=(AnswerError,), words=_METRICS, per_byte=20.0),
    "models": Target(read=_models, errors=(AnswerError,), words=_MODELS),
    "transfer": Target(
        read=lambda pieces: params_of(b"".join(pieces), "r1"), errors=(NoParams,), words=(*_OBJECTS, *_TRANSFER)
    ),
    "policy": Target(read=_policy, errors=(InvalidFile,), words=_YAML, per_byte=100.0, once=10_000),
    "pods": Target(read=_pods, errors=(BadObject, Gone), words=_POD),
    "token": Target(read=_token, errors=(ValueError, TokenFault), words=_KEY_SET, once=20_000),
    "keys": Target(read=_keys, errors=(InvalidFile,), words=_KEYS, per_byte=20.0),
}
