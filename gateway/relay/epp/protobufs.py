"""Protobufs of Envoy's external processing (`envoy.service.ext_proc.v3`): the fields that a picker reads or writes.

Numbers and types are those of Envoy's `external_processor.proto` and `base.proto`. Names of messages do not go over the
wire, so these have a package of their own and meet no other copy of Envoy's protobufs in the process. An enum is an
int32 here, which the wire does not tell apart. No package with Envoy's protobufs is needed: `xds-protos` overwrites
files of OpenTelemetry's.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

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


ProcessingRequest: Final = _class("ProcessingRequest")
ProcessingResponse: Final = _class("ProcessingResponse")
