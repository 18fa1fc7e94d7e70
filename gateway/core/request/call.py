"""From path, headers and body to a `Call`: the one place that reads what a client asks for.

Bad input raises `Refused` naming the field at fault and changes nothing. Unknown JSON fields pass through untouched:
a body is edited by splicing, never by re-encoding what we did not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.request.fields import DECODERS, check_unread
from gateway.core.request.form import form_fields
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.prompt import BY_GATEWAY, Body, Prompt, StreamOptions, bad, body_of, chain, reserved, scripts
from gateway.core.request.routes import Route


class Call(msgspec.Struct, kw_only=True, gc=False):
    """One client request, parsed. Times are monotonic seconds, sizes are tokens unless they say bytes.

    `max_tokens` is what the client asked for, None where it asked for nothing (then the engine uses the context left).
    `prefix` holds the chained hashes of the prompt's fixed-size blocks, model and tenant salt first. `ascii_bytes`,
    `cjk_bytes`, `other_bytes` are the prompt's UTF-8 bytes by script, `media` counts its images and audio parts;
    `token_ids` counts prompt tokens the client sent as numbers. `messages` counts messages, prompts, inputs or
    documents; `n` is the number of sequences to generate, over all prompts.

    `asked_class` is what the client asked for by name or tier, empty where it left that to the policy: `classify` in
    classes.py decides. `within` is the deadline it gave, `patience` how long its SDK will wait, both in seconds from
    `arrived`, 0 where it said nothing.
    """

    request_id: str
    route: Route
    model: str
    tenant: str
    class_name: str
    arrived: float
    deadline: float
    stream: bool
    wants_usage: bool  # the client itself asked for stream_options.include_usage
    max_tokens: int | None
    n: int
    ascii_bytes: int
    cjk_bytes: int
    other_bytes: int
    media: int
    messages: int
    prefix: tuple[int, ...]
    session: int  # 0: none
    body: bytes  # as it is sent to the engine (usage injected where we need it)
    token_ids: int = 0
    asked_class: str = ""
    within: float = 0.0
    patience: float = 0.0
    ttft_by: float = math.inf  # when its first token should be there at the latest
    asked: int = 0  # tokens each sequence may generate, filled in by cost.py
    prompt_tokens: int = 0  # estimate, filled in by cost.py
    output_tokens: int = 0  # estimate, filled in by cost.py
    expected_tokens: int = 0  # what each sequence will probably write, 0 where nothing is known; filled in by cost.py
    shaped: int = 0  # what `asked` was cut to, 0: as asked
    predicted_wait: float = 0.0  # seconds, where it had to wait
    usage_cut: bool = False  # its engine tells usage in every event, and the client did not ask for that
    merged: bool = False  # made by the batcher of several clients' calls: nobody can send it again
    sent_at: float | None = None  # when an engine was given it; None: no engine has it, or the one that had it failed

    @property
    def cost(self) -> int:
        """KV tokens it may take: what is held for it, and what it counts in the queues."""
        return self.prompt_tokens + self.output_tokens


class CallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Policy of what a client may ask. Deadlines are seconds; `class_deadlines` names the classes there are.

    `media`: `data_urls_only` (default), `none`, or `any`, which lets engines fetch what a client names; with
    `data_urls_only` they may still fetch from `media_hosts`.
    """

    class_deadlines: dict[str, float] = msgspec.field(
        default_factory=lambda: {"interactive": 60.0, "default": 300.0, "long_context": 600.0, "batch": 3600.0}
    )
    default_class: str = "default"
    service_tiers: dict[str, str] = msgspec.field(
        default_factory=lambda: {"priority": "interactive", "default": "default", "flex": "batch"}
    )
    max_deadline: float = 86_400.0
    max_messages: int = 2000
    max_n: int = 8
    max_output: int = 2**20  # tokens
    max_depth: int = 64
    max_values: int = 100_000  # JSON values and names of fields in a body
    max_text: int = 2 * 1024**2  # bytes of a body, without its media
    block: int = 512  # bytes
    max_blocks: int = 512
    media: Literal["data_urls_only", "any", "none"] = "data_urls_only"
    media_hosts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = {self.default_class, *self.service_tiers.values()}.difference(self.class_deadlines)
        if unknown:
            raise ValueError(f"no deadline for the classes {', '.join(sorted(unknown))}")


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_options = msgspec.json.Decoder(dict[str, Raw] | None).decode
_INCLUDE_USAGE = b',"stream_options":{"include_usage":true}'
_USAGE_IN_EVERY_EVENT = b',"stream_options":{"include_usage":true,"continuous_usage_stats":true}'
_UNCACHED = ("audio", "tokenize")


def parse(
    route: Route,
    headers: Mapping[bytes, bytes],
    body: bytes,
    *,
    settings: CallSettings,
    request_id: str,
    tenant: str,
    now: float,
    salt: str | None = None,
    cache_salt: bytes = b"",
    metered: bool = False,
) -> Call:
    """The call a client made on a forwarded route, or Refused (400) naming the header or field at fault.

    `headers` maps lower-cased names to their value. `salt` separates prefix hashes and sessions; None: the
    tenant. `cache_salt` is a field for the body of a call that an engine keeps blocks of, with a comma before it.
    `metered`: a limit counts its tokens, so its engine is to tell them in every event of a stream. The routes answered
    here have no body to parse and are not accepted.
    """
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        raise bad("content-encoding: this gateway reads uncompressed bodies only", "content-encoding")
    content_type = headers.get(b"content-type", b"none")
    salt = tenant if salt is None else salt

    prompt = Prompt(settings.media, settings.max_messages, [], [], media_hosts=settings.media_hosts)
    if route.kind == "audio":
        fields = _audio(content_type, body, prompt)
    else:
        if content_type != b"application/json" and content_type.split(b";")[0].strip().lower() != b"application/json":
            found = content_type[:80].decode("latin-1")
            raise bad(f"content-type must be application/json, found {found}", "content-type")
        decode = DECODERS[route.kind]
        fields = body_of(decode, body, max_depth=settings.max_depth, max_values=settings.max_values)
        if settings.media != "any":
            check_unread(body)
        _READERS[route.kind](fields, prompt)
        if len(body) - prompt.media_bytes > settings.max_text:
            raise _too_much_text(len(body) - prompt.media_bytes, settings)
    model = fields.model
    if model is None:
        raise bad("model is required: the name of a model this gateway serves, see /v1/models", "model")

    n = 1
    max_tokens = None
    prefix: tuple[int, ...] = ()
    data = "\0".join(prompt.parts).encode()
    stream = fields.stream is True
    wants_usage = usage_cut = False
    added = b"" if route.kind in _UNCACHED else cache_salt
    if route.generates:
        n, max_tokens = _output(route.kind, fields, prompt, settings)
        hashed = data + msgspec.json.encode(prompt.ids) if prompt.ids else data
        prefix = chain(hashed, hash((model, salt)), settings.block, settings.max_blocks)
        if stream and route.kind in {"chat", "completion"}:
            body, asking, wants_usage, usage_cut = _asking_usage(body, fields.stream_options, metered)
            added += asking
    if added:
        # A body that was parsed is an object with at least a model: the comma is always right.
        body = body.rstrip(b" \t\r\n")[:-1] + added + b"}"
    ascii_bytes, cjk_bytes, other_bytes = scripts(data)

    asked_class = _class_asked(headers.get(b"x-weir-class"), fields.service_tier, settings)
    class_name = asked_class or settings.default_class
    within = _deadline_asked(headers.get(b"x-weir-deadline-ms"), settings.max_deadline)
    patience = _patience(headers)
    session = headers.get(b"x-weir-session") or fields.prompt_cache_key or fields.user or fields.safety_identifier
    if session is None and route.kind == "message":
        session = _user_id(fields.metadata)
    return Call(
        request_id=request_id,
        route=route,
        model=model,
        tenant=tenant,
        class_name=class_name,
        arrived=now,
        deadline=now + time_allowed(within, patience, settings.class_deadlines[class_name]),
        stream=stream,
        wants_usage=wants_usage,
        usage_cut=usage_cut,
        max_tokens=max_tokens,
        n=n,
        ascii_bytes=ascii_bytes,
        cjk_bytes=cjk_bytes,
        other_bytes=other_bytes,
        media=prompt.media,
        messages=prompt.items,
        prefix=prefix,
        session=(hash((salt, session)) or 1) if session else 0,
        body=body,
        token_ids=len(prompt.ids),
        asked_class=asked_class,
        within=within,
        patience=patience,
    )


def _conversation(fields: Body, prompt: Prompt) -> None:
    """The messages, and what a chat template prints beside them."""
    if fields.tools is not UNSET:
        prompt.raw(fields.tools)
    if fields.chat_template is not None:
        prompt.parts.append(fields.chat_template)
    prompt.messages(fields.messages)
    if fields.chat_template_kwargs is not UNSET:
        prompt.raw(fields.chat_template_kwargs)


def _too_much_text(size: int, settings: CallSettings) -> Refused:
    message = (
        f"the body has {size} bytes beside its images, audio and files; this gateway takes at most "
        f"{settings.max_text} (body.max of its policy): send less text, or fewer inputs at once"
    )
    return Refused(Outcome.TOO_LARGE, message)


def _chat(fields: Body, prompt: Prompt) -> None:
    if fields.documents is not None:
        prompt.documents(fields.documents, "documents")
    _conversation(fields, prompt)


def _completion(fields: Body, prompt: Prompt) -> None:
    prompt.texts(fields.prompt, "prompt")


def _response(fields: Body, prompt: Prompt) -> None:
    if fields.background:
        raise bad("background responses are not supported: this gateway keeps no answers to be fetched", "background")
    if fields.tools is not UNSET:
        prompt.raw(fields.tools)
    prompt.gather(fields.instructions, "instructions")
    if fields.previous_input_messages is not None:
        prompt.documents(fields.previous_input_messages, "previous_input_messages")
    prompt.documents(fields.input, "input")


def _message(fields: Body, prompt: Prompt) -> None:
    prompt.gather(fields.system, "system")
    _conversation(fields, prompt)


def _embedding(fields: Body, prompt: Prompt) -> None:
    if _one_of(fields, ("input", "messages")) == "messages":
        _conversation(fields, prompt)
    else:
        prompt.texts(fields.input, "input")


def _rerank(fields: Body, prompt: Prompt) -> None:
    prompt.gather(fields.instruction, "instruction")
    prompt.documents(fields.query, "query")
    prompt.documents(fields.documents, "documents")


def _score(fields: Body, prompt: Prompt) -> None:
    """vLLM has renamed the two sides more than once; each side under any of its names."""
    prompt.gather(fields.instruction, "instruction")
    for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")):
        name = _one_of(fields, names)
        prompt.documents(getattr(fields, name), name)


def _tokenize(fields: Body, prompt: Prompt) -> None:
    name = _one_of(fields, ("prompt", "messages", "tokens"))
    if name == "messages":
        _conversation(fields, prompt)
    else:
        prompt.texts(getattr(fields, name), name)


def _one_of(fields: Body, names: tuple[str, ...]) -> str:
    """The one of these fields that is given. Two would leave it to the engine which it reads."""
    given = [name for name in names if getattr(fields, name) is not None]
    if len(given) != 1:
        raise bad(f"exactly one of {', '.join(names)} is required", names[0])
    return given[0]


_READERS: dict[str, Callable[[Body, Prompt], None]] = {
    "chat": _chat,
    "completion": _completion,
    "response": _response,
    "message": _message,
    "embedding": _embedding,
    "pooling": _embedding,
    "classify": _embedding,
    "rerank": _rerank,
    "score": _score,
    "tokenize": _tokenize,
}


def _audio(content_type: bytes, body: bytes, prompt: Prompt) -> Body:
    """One recording, whose tokens depend on its length in seconds: it is costed as a constant."""
    form = form_fields(content_type, body)
    for name in BY_GATEWAY:
        if name in form:
            raise reserved(name)
    model = form.get("model") or None
    if model is not None and len(model) > 256:
        raise bad("model: expected `str` of length <= 256", "model")
    stream = form.get("stream", "false")
    if stream not in ("true", "false"):  # of the many words for true that engines know, one is enough
        raise bad(f"stream must be true or false, found {stream[:40]}", "stream")
    prompt.media = prompt.items = 1
    return Body(model=model, stream=stream == "true", user=form.get("user"))


def _output(kind: str, fields: Body, prompt: Prompt, settings: CallSettings) -> tuple[int, int | None]:
    """Sequences to generate, and the tokens asked for each."""
    if kind == "response":
        return 1, _tokens_asked(fields.max_output_tokens, "max_output_tokens", settings)
    max_tokens = _tokens_asked(fields.max_tokens, "max_tokens", settings)
    if kind == "message":
        if max_tokens is None:
            raise bad("max_tokens is required: a positive integer", "max_tokens")
        return 1, max_tokens
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= settings.max_n:
        raise bad(f"n must be an integer from 1 to {settings.max_n}, found {_shown(n)}", "n")
    if kind == "completion":
        return n * prompt.items, max_tokens
    asked = _tokens_asked(fields.max_completion_tokens, "max_completion_tokens", settings)
    return n, max_tokens if asked is None else asked


def _tokens_asked(value: int | None, param: str, settings: CallSettings) -> int | None:
    if value is not None and not 1 <= value <= settings.max_output:
        raise bad(f"{param} must be an integer from 1 to {settings.max_output}, found {_shown(value)}", param)
    return value


def _shown(value: int) -> str:
    return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"


def _asking_usage(
    body: bytes, options: StreamOptions | UnsetType | None, metered: bool
) -> tuple[bytes, bytes, bool, bool]:
    """The body and a field to add to it that ask the engine for usage; whether the client asked for it; and whether it
    is to be taken out of the events that the client sees."""
    if options is UNSET:
        return body, _USAGE_IN_EVERY_EVENT if metered else _INCLUDE_USAGE, False, metered
    wants = each = False
    if isinstance(options, StreamOptions):
        wants, each = options.include_usage is True, options.continuous_usage_stats is True
    if not wants or (metered and not each):
        body = _with_usage(body, every_event=metered)
    return body, b"", wants, metered and not (wants and each)


def _with_usage(body: bytes, *, every_event: bool) -> bytes:
    """`body` with stream_options.include_usage true, where the client wrote stream_options without it; and with
    vLLM's continuous_usage_stats, if it is to be told in every event."""
    fields = _decode_fields(body)
    options = _decode_options(fields["stream_options"]) or {}
    options["include_usage"] = Raw(b"true")
    if every_event:
        options["continuous_usage_stats"] = Raw(b"true")
    fields["stream_options"] = Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)


def _user_id(metadata: Any) -> str | None:
    """Where Anthropic's clients say whose conversation it is."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return user if isinstance(user, str) else None


def _class_asked(asked: bytes | None, tier: str | None, settings: CallSettings) -> str:
    """The class a client asks for: by the header, else by OpenAI's tier where the policy maps it; empty: none."""
    if asked is not None:
        name = asked.decode("latin-1")
        if name not in settings.class_deadlines:
            classes = ", ".join(settings.class_deadlines)
            raise bad(f"x-weir-class must be one of {classes}, found {name[:80]}", "x-weir-class")
        return name
    return "" if tier is None else settings.service_tiers.get(tier, "")


def _deadline_asked(asked: bytes | None, at_most: float) -> float:
    """Seconds, 0 where none is given. A header of ours that makes no sense is refused; the SDK's is ignored."""
    if asked is None:
        return 0.0
    milliseconds = _decimal(asked)
    if not 0.0 < milliseconds <= at_most * 1000.0:
        found = asked[:80].decode("latin-1")
        raise bad(
            f"x-weir-deadline-ms must be a number above 0 and up to {at_most * 1000.0:.0f}, found {found}",
            "x-weir-deadline-ms",
        )
    return milliseconds / 1000.0


def time_given(headers: Mapping[bytes, bytes], settings: CallSettings) -> float:
    """Seconds after which nobody waits for an answer, as far as the head tells; infinite where it does not."""
    try:
        within = _deadline_asked(headers.get(b"x-weir-deadline-ms"), settings.max_deadline)
    except Refused:
        within = 0.0  # it is told when the body is here
    return time_allowed(within, _patience(headers), math.inf)


def _patience(headers: Mapping[bytes, bytes]) -> float:
    """Seconds that the caller's SDK waits, 0 where it does not say."""
    given = headers.get(b"x-stainless-read-timeout")
    return max(0.0, _decimal(given)) if given else 0.0


def time_allowed(within: float, patience: float, otherwise: float) -> float:
    """Seconds until the deadline: what the client gave, else its class's; never after its SDK has hung up."""
    allowed = within or otherwise
    return min(allowed, patience) if patience > 0.0 else allowed


def _decimal(value: bytes) -> float:
    """A plain decimal number; -1.0 for anything else, also for what float() would take (inf, nan, 1e9, 1_0)."""
    return float(value) if len(value) <= 16 and value.replace(b".", b"", 1).isdigit() else -1.0
