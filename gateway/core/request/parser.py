"""Parser of client requests: from route, headers and body to a `Call`.

A bad request raises `Refused`, which names the header or field at fault. It changes nothing. Unknown JSON fields pass
through untouched: the gateway splices its own fields into the body, and does not encode the rest again. The exception
is a client's own `stream_options` that has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.billing_header import without_billing_line
from gateway.core.request.allowed_fields import DECODERS, check_unread
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.headers import accepts_fallback, asked_class, asked_deadline, sdk_timeout, time_limit
from gateway.core.request.json_body import BY_GATEWAY, LONG, Body, StreamOptions, bad_request, body_of, reserved
from gateway.core.request.multipart_form import form_fields
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.prompt import READERS, Prompt, beginning, chain, scripts
from gateway.core.request.routes import Route

SESSION_HEADERS = (  # in order; what clients send of their own accord: none needs to be set up
    b"x-weir-session",
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"session-id",  # Codex
    b"x-session-id",  # opencode, as the next one
    b"x-session-affinity",
)
BLOCK = 512  # bytes of the prompt in each hash of `Call.prefix`: about a hundred tokens, some blocks of an engine
BLOCKS = 512  # hashes of a prompt at most
_names_no_session = frozenset(SESSION_HEADERS).isdisjoint


def parse(
    route: Route,
    headers: Mapping[bytes, bytes],
    body: bytes,
    *,
    settings: CallSettings,
    request_id: str,
    tenant: str,
    now: float,
    cache_salt: bytes = b"",
    metered: bool = False,
) -> Call:
    """Read a request on a route that is forwarded; the gateway answers others itself.

    `headers` maps lower-cased names to values. `cache_salt`: comma and JSON field that separate tenants in an engine's
    prefix cache. `metered`: a token limit counts this call, so a stream reports usage in every event. `now`:
    monotonic seconds. Raises Refused for a header or field: 413 (too much text) or 400.
    """
    prompt = Prompt(settings.media, settings.max_messages, [], [], media_hosts=settings.media_hosts)
    fields, model = _fields(route, headers, body, prompt, settings)
    data = "\0".join(prompt.parts).encode()
    n, max_tokens = _output(route.kind, fields, prompt, settings) if route.generates else (1, None)
    call = Call(  # at most fifteen fields by name: for more, CPython makes a dict of them first
        request_id=request_id,
        route=route,
        model=model,
        tenant=tenant,
        class_name=settings.default_class,
        arrived=now,
        deadline=now,
        stream=fields.stream is True and (route.generates or route.form),  # others answer whole, whatever is asked
        body=body,
        max_tokens=max_tokens,
        messages=prompt.items,
    )
    if route.generates:
        call.n, call.prefix = n, _prefix(prompt, data, hash((model, tenant)))
    _edit_body(call, fields, prompt, settings, cache_salt if route.cached else b"", metered)
    call.ascii_bytes, call.cjk_bytes, call.other_bytes = scripts(data)
    if prompt.media or prompt.ids:
        call.media, call.token_ids = prompt.media, len(prompt.ids)
    _set_class_and_deadline(call, headers, fields.service_tier, settings)
    if model in settings.model_routes:
        _name_route(call, headers, fields, prompt)
    return call


def _name_route(call: Call, headers: Mapping[bytes, bytes], fields: Body, prompt: Prompt) -> None:
    """Note that the call names a model route, and by what it is known there."""
    call.asked_model, call.no_fallback = call.model, not accepts_fallback(headers.get(b"x-weir-fallback"))
    session = _session(headers, fields, call.route)
    call.conversation = hash((call.tenant, session) if session else (call.tenant, *beginning(prompt)))


def _fields(
    route: Route, headers: Mapping[bytes, bytes], body: bytes, prompt: Prompt, settings: CallSettings
) -> tuple[Body, str]:
    """Read a body's fields, its prompt into `prompt`, and the model that it names."""
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        raise bad_request("content-encoding: this gateway reads uncompressed bodies only", "content-encoding")
    content_type = headers.get(b"content-type", b"none")
    fields = (
        _audio(content_type, body, prompt) if route.form else _json(route.kind, content_type, body, prompt, settings)
    )
    if fields.model is None:
        raise bad_request("model is required: the name of a model this gateway serves, see /v1/models", "model")
    return fields, fields.model


def _prefix(prompt: Prompt, data: bytes, seed: int) -> tuple[int, ...]:
    """Hashes of the prompt's blocks. A billing line, which differs from call to call, is left out."""
    hashed = data + msgspec.json.encode(prompt.ids) if prompt.ids else data
    if prompt.billing:
        hashed = hashed.replace(prompt.billing.encode(), b"", 1)
    return chain(hashed, seed, BLOCK, BLOCKS)


def _edit_body(call: Call, fields: Body, prompt: Prompt, settings: CallSettings, added: bytes, metered: bool) -> None:
    """Make the body what an engine is sent. `added`: fields before its last bracket."""
    route = call.route
    if route.generates:
        if prompt.billing:
            call.body = without_billing_line(call.body, route.kind)
        if call.stream and route.usage_option:
            call.body, option, call.wants_usage, call.usage_cut = request_usage(
                call.body, fields.stream_options, metered
            )
            added += option
    if added:
        # The parsed body is an object with at least a model, so the comma is always right.
        call.body = _with(call.body.rstrip(b" \t\r\n"), added)


def _set_class_and_deadline(
    call: Call, headers: Mapping[bytes, bytes], service_tier: str | None, settings: CallSettings
) -> None:
    asked = asked_class(headers.get(b"x-weir-class"), service_tier, settings)
    if asked:
        call.asked_class = call.class_name = asked
    deadline = asked_deadline(headers.get(b"x-weir-deadline-ms"), settings.max_deadline)
    timeout = 0.0 if call.stream else sdk_timeout(headers)
    if deadline or timeout:
        call.asked_deadline, call.sdk_timeout = deadline, timeout
    call.deadline = call.arrived + time_limit(deadline, timeout, settings.class_deadlines[call.class_name])


def _with(body: bytes, added: bytes) -> bytes:
    """A body that ends in a bracket, with fields before it. Of half a megabyte each copy less is 0.1 ms and more; of an
    ordinary body a view costs more than the copy."""
    return b"".join((memoryview(body)[:-1] if len(body) > LONG else body[:-1], added, b"}"))


def _too_much_text(size: int, settings: CallSettings) -> Refused:
    message = (
        f"the body has {size} bytes beside its images, audio and files; this gateway takes at most "
        f"{settings.max_text} (body.max of its policy): send less text, or fewer inputs at once"
    )
    return Refused(Outcome.TOO_LARGE, message)


def _json(kind: str, content_type: bytes, body: bytes, prompt: Prompt, settings: CallSettings) -> Body:
    """The fields of a JSON body; its prompt is gathered in `prompt`."""
    if content_type != b"application/json" and content_type.split(b";")[0].strip().lower() != b"application/json":
        found = content_type[:80].decode("latin-1")
        raise bad_request(f"content-type must be application/json, found {found}", "content-type")
    fields = body_of(DECODERS[kind], body, max_depth=settings.max_depth, max_values=settings.max_values)
    if settings.media != "any":
        check_unread(body)
    READERS[kind](fields, prompt)
    if len(body) - prompt.media_bytes > settings.max_text:
        raise _too_much_text(len(body) - prompt.media_bytes, settings)
    return fields


def _audio(content_type: bytes, body: bytes, prompt: Prompt) -> Body:
    """The form of a recording. Its tokens depend on its length in seconds, so its cost is a constant."""
    form = form_fields(content_type, body)
    for name in BY_GATEWAY:
        if name in form:
            raise reserved(name)
    model = form.get("model") or None
    if model is not None and len(model) > 256:
        raise bad_request("model: expected `str` of length <= 256", "model")
    stream = form.get("stream", "false")
    if stream not in ("true", "false"):  # engines take more words for true; one is enough
        raise bad_request(f"stream must be true or false, found {stream[:40]}", "stream")
    prompt.media = prompt.items = 1
    return Body(model=model, stream=stream == "true", user=form.get("user"))


def _output(kind: str, fields: Body, prompt: Prompt, settings: CallSettings) -> tuple[int, int | None]:
    """The number of sequences to generate, and the limit of tokens of each (None: not given)."""
    if kind == "response":
        return 1, _tokens_asked(fields.max_output_tokens, "max_output_tokens", settings)
    if kind == "completion" and fields.echo is True and fields.max_tokens == 0:
        max_tokens: int | None = 1  # vLLM generates one token for a prompt that is only echoed, and drops it
    else:
        max_tokens = _tokens_asked(fields.max_tokens, "max_tokens", settings)
    if kind == "message":
        if max_tokens is None:
            raise bad_request("max_tokens is required: a positive integer", "max_tokens")
        return 1, max_tokens
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= settings.max_n:
        raise bad_request(f"n must be an integer from 1 to {settings.max_n}, found {_shown(n)}", "n")
    if kind == "completion":
        return n * prompt.items, max_tokens
    asked = _tokens_asked(fields.max_completion_tokens, "max_completion_tokens", settings)
    return n, max_tokens if asked is None else asked


def _tokens_asked(value: int | None, param: str, settings: CallSettings) -> int | None:
    if value is not None and not 1 <= value <= settings.max_output:
        raise bad_request(f"{param} must be an integer from 1 to {settings.max_output}, found {_shown(value)}", param)
    return value


def _shown(value: int) -> str:
    return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"


def _session(headers: Mapping[bytes, bytes], fields: Body, route: Route) -> bytes | str | None:
    """The first name of the call's session or, where it has none, of its user."""
    named: bytes | str | None = None
    if not _names_no_session(headers):
        named = next(filter(None, map(headers.get, SESSION_HEADERS)), None)
    named = named or fields.prompt_cache_key or fields.user or fields.safety_identifier
    return _user_id(fields.metadata) if named is None and route.kind == "message" else named


def _user_id(metadata: Any) -> str | None:
    """The field by which Anthropic's clients name their user."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return user if isinstance(user, str) else None


# -- usage of a stream ------------------------------------------------------------------------------------------------

# An engine sends the usage of a stream only where `stream_options.include_usage` asks for it. The gateway needs it
# for every call, so it adds the option where the client left it out. For a call with a token limit it also asks for
# vLLM's `continuous_usage_stats`, the usage so far in every event.
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_options = msgspec.json.Decoder(dict[str, Raw] | None).decode
_INCLUDE_USAGE = b',"stream_options":{"include_usage":true}'
_USAGE_IN_EVERY_EVENT = b',"stream_options":{"include_usage":true,"continuous_usage_stats":true}'


def request_usage(
    body: bytes, options: StreamOptions | UnsetType | None, metered: bool
) -> tuple[bytes, bytes, bool, bool]:
    """Make a streaming body ask the engine for usage. `metered`: in every event, for a token limit counts this call.

    Returns the body; the JSON field to add to it, with a comma before it, or nothing; whether the client itself asked
    for usage; and whether usage must be cut from the events that the client receives.
    """
    if options is UNSET:
        return body, _USAGE_IN_EVERY_EVENT if metered else _INCLUDE_USAGE, False, metered
    wanted = in_every_event = False
    if isinstance(options, StreamOptions):
        wanted, in_every_event = options.include_usage is True, options.continuous_usage_stats is True
    if not wanted or (metered and not in_every_event):
        body = _with_usage(body, every_event=metered)
    return body, b"", wanted, metered and not (wanted and in_every_event)


def _with_usage(body: bytes, *, every_event: bool) -> bytes:
    """`body` with usage requested in the `stream_options` that the client wrote itself."""
    fields = _decode_fields(body)
    options = _decode_options(fields["stream_options"]) or {}
    options["include_usage"] = Raw(b"true")
    if every_event:
        options["continuous_usage_stats"] = Raw(b"true")
    fields["stream_options"] = Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)
