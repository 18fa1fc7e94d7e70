"""Messages of Envoy's external processing (`envoy.service.ext_proc.v3`), in the terms of the picker.

The destination's header and its metadata are those of the endpoint picker protocol 1.0.0 of the Gateway API Inference
Extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

# Numbers and types are those of Envoy's `external_processor.proto` and `base.proto`. Names of messages do not go over
# the wire, so these have a package of their own and meet no other copy of Envoy's protobufs in the process. An enum
# is an int32 here, which the wire does not tell apart. No package with Envoy's protobufs is needed: `xds-protos`
# overwrites files of OpenTelemetry's.
_PACKAGE: Final = "weir.ext_proc.v3"
_STRUCT: Final = struct_pb2.DESCRIPTOR.name
# NAME=NUMBER:TYPE, a star after a repeated type, braces around the values of a map of strings. Fields in one pair of
# brackets are a oneof: its name, then they.
_MESSAGES: Final = {
    "HeaderValue": "key=1:string value=2:string raw_value=3:bytes",
    "HeaderMap": "headers=1:HeaderValue*",
    "HttpHeaders": "headers=1:HeaderMap end_of_stream=3:bool",
    "HttpBody": "body=1:bytes end_of_stream=2:bool",
    "HttpTrailers": "trailers=1:HeaderMap",
    "Metadata": "filter_metadata=1:{Struct}",
    "ProtocolConfiguration": "request_body_mode=1:int32 response_body_mode=2:int32",
    "ProcessingRequest": (
        "[request request_headers=2:HttpHeaders response_headers=3:HttpHeaders request_body=4:HttpBody "
        "response_body=5:HttpBody request_trailers=6:HttpTrailers response_trailers=7:HttpTrailers] "
        "metadata_context=8:Metadata attributes=9:{Struct} observability_mode=10:bool "
        "protocol_config=11:ProtocolConfiguration"
    ),
    "HeaderValueOption": "header=1:HeaderValue append_action=3:int32",
    "HeaderMutation": "set_headers=1:HeaderValueOption* remove_headers=2:string*",
    "StreamedBodyResponse": "body=1:bytes end_of_stream=2:bool",
    "BodyMutation": "[mutation body=1:bytes clear_body=2:bool streamed_response=3:StreamedBodyResponse]",
    "CommonResponse": "status=1:int32 header_mutation=2:HeaderMutation body_mutation=3:BodyMutation",
    "HeadersResponse": "response=1:CommonResponse",
    "BodyResponse": "response=1:CommonResponse",
    "TrailersResponse": "header_mutation=1:HeaderMutation",
    "HttpStatus": "code=1:int32",
    "ImmediateResponse": "status=1:HttpStatus headers=2:HeaderMutation body=3:bytes details=5:string",
    "ProcessingResponse": (
        "[response request_headers=1:HeadersResponse response_headers=2:HeadersResponse request_body=3:BodyResponse "
        "response_body=4:BodyResponse request_trailers=5:TrailersResponse response_trailers=6:TrailersResponse "
        "immediate_response=7:ImmediateResponse] dynamic_metadata=8:Struct"
    ),
}
# Parts of a body that the proxy sends, by number: ProcessingMode.BodySendMode.
BODY_MODES: Final = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
_SCALARS: Final = {
    name: descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("string", "bytes", "bool", "int32")
}


def _typed(field: Any, type_: str) -> None:
    """Give a field its type, and its label."""
    field.label = field.LABEL_REPEATED if type_.endswith("*") else field.LABEL_OPTIONAL
    name = type_.rstrip("*")
    if name in _SCALARS:
        field.type = _SCALARS[name]
        return
    field.type = field.TYPE_MESSAGE
    field.type_name = ".google.protobuf.Struct" if name == "Struct" else f".{_PACKAGE}.{name}"


def _add(message: Any, written: str, oneof: int | None) -> None:
    """Add a field, as it is written in the table, to a message."""
    name, _, rest = written.partition("=")
    number, _, type_ = rest.partition(":")
    field = message.field.add(name=name, number=int(number))
    if oneof is not None:
        field.oneof_index = oneof
    if not type_.startswith("{"):
        _typed(field, type_)
        return
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    _typed(entry.field.add(name="key", number=1), "string")
    _typed(entry.field.add(name="value", number=2), type_.strip("{}"))
    _typed(field, f"{message.name}.{entry.name}*")


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="weir/ext_proc.proto", package=_PACKAGE, syntax="proto3", dependency=[_STRUCT]
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        choice, _, others = fields[1:].partition("]") if fields.startswith("[") else ("", "", fields)
        if choice:
            oneof, *ones = choice.split()
            message.oneof_decl.add(name=oneof)
            for one in ones:
                _add(message, one, 0)
        for other in others.split():
            _add(message, other, None)
    return file


descriptor_pool.Default().AddSerializedFile(_file().SerializeToString())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


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
