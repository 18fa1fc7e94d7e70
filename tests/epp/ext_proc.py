"""Protobufs of Envoy's external processing, as a proxy knows them: the fields that the suite writes or reads.

Numbers and types are those of Envoy's `external_processor.proto`; an enum is an int32, which the wire does not tell
apart. They are the suite's own, so that a picker with another idea of them is found out.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE: Final = "picker_suite"
BODY_MODES: Final = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
STRUCT = f".{struct_pb2.Struct.DESCRIPTOR.full_name}"
# Of each message its fields: number, name, type. A field after "|" is of the message's one oneof; "[]": repeated; "{}":
# values of a map of strings.
TABLE: Final = """
HeaderValue            1 key string, 2 value string, 3 raw_value bytes
HeaderMap              1 headers HeaderValue[]
HttpHeaders            1 headers HeaderMap, 3 end_of_stream bool
HttpBody               1 body bytes, 2 end_of_stream bool
HttpTrailers           1 trailers HeaderMap
Metadata               1 filter_metadata Struct{}
ProtocolConfiguration  1 request_body_mode int32, 2 response_body_mode int32
ProcessingRequest      2 request_headers HttpHeaders|request, 3 response_headers HttpHeaders|request, \
4 request_body HttpBody|request, 5 response_body HttpBody|request, 6 request_trailers HttpTrailers|request, \
7 response_trailers HttpTrailers|request, 8 metadata_context Metadata, 9 attributes Struct{}, \
10 observability_mode bool, 11 protocol_config ProtocolConfiguration
HeaderValueOption      1 header HeaderValue, 3 append_action int32
HeaderMutation         1 set_headers HeaderValueOption[], 2 remove_headers string[]
StreamedBodyResponse   1 body bytes, 2 end_of_stream bool
BodyMutation           1 body bytes|mutation, 2 clear_body bool|mutation, \
3 streamed_response StreamedBodyResponse|mutation
CommonResponse         1 status int32, 2 header_mutation HeaderMutation, 3 body_mutation BodyMutation
HeadersResponse        1 response CommonResponse
BodyResponse           1 response CommonResponse
TrailersResponse       1 header_mutation HeaderMutation
HttpStatus             1 code int32
ImmediateResponse      1 status HttpStatus, 2 headers HeaderMutation, 3 body bytes
ProcessingResponse     1 request_headers HeadersResponse|response, 2 response_headers HeadersResponse|response, \
3 request_body BodyResponse|response, 4 response_body BodyResponse|response, \
5 request_trailers TrailersResponse|response, 6 response_trailers TrailersResponse|response, \
7 immediate_response ImmediateResponse|response, 8 dynamic_metadata Struct
"""


def _typed(field: Any, name: str) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto.Type
    if name in ("string", "bytes", "bool", "int32"):
        field.type = kinds.Value(f"TYPE_{name.upper()}")
    else:
        field.type = kinds.Value("TYPE_MESSAGE")
        field.type_name = STRUCT if name == "Struct" else f".{PACKAGE}.{name}"


def _add(message: Any, written: str) -> None:
    number, name, kind = written.split()
    kind, _, oneof = kind.partition("|")
    field = message.field.add(name=name, number=int(number), label="LABEL_OPTIONAL")
    if oneof:
        if not message.oneof_decl:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = 0
    if kind.endswith(("[]", "{}")):
        field.label = field.LABEL_REPEATED
    if kind.endswith("{}"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry", options={"map_entry": True})
        _typed(entry.field.add(name="key", number=1, label="LABEL_OPTIONAL"), "string")
        _typed(entry.field.add(name="value", number=2, label="LABEL_OPTIONAL"), kind[:-2])
        kind = f"{message.name}.{entry.name}"
    _typed(field, kind.removesuffix("[]"))


def _classes() -> tuple[Any, Any]:
    struct = struct_pb2.DESCRIPTOR.name
    file = descriptor_pb2.FileDescriptorProto(name="suite.proto", package=PACKAGE, syntax="proto3", dependency=[struct])
    for line in TABLE.strip().splitlines():
        name, _, fields = line.partition(" ")
        message = file.message_type.add(name=name)
        for written in fields.split(","):
            _add(message, written)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    request, response = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in ("ProcessingRequest", "ProcessingResponse")
    )
    return request, response


ProcessingRequest, ProcessingResponse = _classes()
