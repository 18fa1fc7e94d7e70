"""Messages of Envoy's external processing (`envoy.service.ext_proc.v3`), in the terms of the picker.

The destination's header and its metadata are those of the endpoint picker protocol 1.0.0 of the Gateway API Inference
Extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, text_format

# Parts of a body that the proxy sends, by number: ProcessingMode.BodySendMode.
BODY_MODES: Final = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
_FILE: Final = text_format.Parse(
    Path(__file__).with_name("ext_proc.textproto").read_text(encoding="utf-8"),
    descriptor_pb2.FileDescriptorProto(dependency=[struct_pb2.DESCRIPTOR.name]),
)
descriptor_pool.Default().AddSerializedFile(_FILE.SerializeToString())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(f"{_FILE.package}.{name}"))


Incoming: Final = _class("ProcessingRequest")
Outgoing: Final = _class("ProcessingResponse")
SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"  # of the destination's metadata
HINTS, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"  # namespace and key of the subset
DETAILS: Final = "response.code_details"  # Envoy's attribute: why it answers with this status
PIECE: Final = 62_000  # bytes of a body in one message: Envoy takes 64 KiB
_OVERWRITE: Final = 2  # of a header: append_action OVERWRITE_IF_EXISTS_OR_ADD

NONE, STREAMED, BUFFERED, DUPLEX = map(BODY_MODES.index, ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"))
Headers = Sequence[tuple[bytes, bytes]]


def kind_of(message: Any) -> str:
    """Name of the HTTP part that the message carries, such as `request_body`; empty: none."""
    return message.WhichOneof("request") or ""


def modes_of(first: Any) -> tuple[int, int]:
    """Body modes of request and response. A proxy that names none uses the protocol's streaming mode."""
    if not first.HasField("protocol_config"):
        return DUPLEX, DUPLEX
    return first.protocol_config.request_body_mode, first.protocol_config.response_body_mode


def mode_name(mode: int) -> str:
    """Name of a body mode, also of one that this version of the protocol does not have."""
    return BODY_MODES[mode] if 0 <= mode < len(BODY_MODES) else str(mode)


def fields_of(part: Any) -> dict[bytes, bytes]:
    """Read the headers of a request or a response by name, pseudo headers such as `:path` among them. Names are in
    lower case; the values of a repeated one are joined by commas."""
    fields: dict[bytes, bytes] = {}
    for each in part.headers.headers:
        name, value = each.key.lower().encode(), each.raw_value or each.value.encode()
        fields[name] = b"%b,%b" % (fields[name], value) if name in fields else value
    return fields


def subset_of(message: Any) -> frozenset[str] | None:
    """Endpoints that the proxy allows, as `ADDRESS:PORT`; None: it does not say."""
    hints = message.metadata_context.filter_metadata
    if HINTS not in hints or SUBSET not in hints[HINTS].fields:
        return None
    value = hints[HINTS].fields[SUBSET]
    if value.WhichOneof("kind") == "string_value":
        return frozenset(each.strip() for each in value.string_value.split(",") if each.strip())
    return frozenset(each.string_value for each in value.list_value.values)


def details_of(message: Any) -> str:
    """Envoy's reason for the status of a response; empty: the filter's `response_attributes` do not ask for it."""
    for attributes in message.attributes.values():
        if DETAILS in attributes.fields:
            return str(attributes.fields[DETAILS].string_value)
    return ""


def immediate(status: int, headers: Headers, body: bytes) -> Any:
    """Answer of the picker to the client: no endpoint gets the request."""
    message = Outgoing()
    answer = message.immediate_response
    answer.status.code = status
    answer.body = body
    _set(answer.headers, headers)
    return message


def go_on(kind: str) -> Any:
    """Let a part pass as it is, as an answer to a message of this kind."""
    message = Outgoing()
    getattr(message, kind).SetInParent()
    return message


def destined(kind: str, endpoints: str, set_: Headers, remove: Iterable[bytes]) -> Any:
    """Send the request to an endpoint, with other headers, as an answer to a message of this kind."""
    message = Outgoing()
    common = getattr(message, kind).response
    _set(common.header_mutation, [(DESTINATION.encode(), endpoints.encode()), *set_])
    common.header_mutation.remove_headers.extend(name.decode("latin-1") for name in remove)
    message.dynamic_metadata.update({NAMESPACE: {DESTINATION: endpoints}})
    return message


def with_headers(set_: Headers) -> Any:
    """Pass a response's head on with more headers."""
    message = go_on("response_headers")
    _set(message.response_headers.response.header_mutation, set_)
    return message


def pieces(kind: str, body: bytes, ended: bool) -> Iterator[Any]:
    """Messages that pass a body on in FULL_DUPLEX_STREAMED mode. `ended`: nothing follows."""
    for start in range(0, max(1, len(body)), PIECE):
        message = Outgoing()
        piece = getattr(message, kind).response.body_mutation.streamed_response
        piece.body = body[start : start + PIECE]
        piece.end_of_stream = ended and start + PIECE >= len(body)
        yield message


def replace(message: Any, kind: str, body: bytes) -> None:
    """Have the message replace the body that it answers, in a mode other than FULL_DUPLEX_STREAMED."""
    mutation = getattr(message, kind).response.body_mutation
    if body:
        mutation.body = body
    else:
        mutation.clear_body = True


def _set(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
        option.append_action = _OVERWRITE
