"""Client of an endpoint picker that speaks as Envoy's external processing filter does."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc
import msgspec

from tests.epp.ext_proc import BODY_MODES, ProcessingRequest, ProcessingResponse

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
WITHIN = 60.0  # seconds for a whole stream
NONE, STREAMED, BUFFERED, DUPLEX = map(BODY_MODES.index, ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"))
Message = Any


class Picked(msgspec.Struct):
    """Decision of a picker about one request: `status` and `body` of an immediate response, or a destination."""

    status: int = 0
    headers: dict[str, str] = msgspec.field(default_factory=dict)  # set on the request, or of the immediate response
    removed: list[str] = msgspec.field(default_factory=list)
    destination: str = ""  # by the header
    metadata: str = ""  # by the dynamic metadata
    body: bytes = b""
    ended: bool = False  # the body was passed on to its end

    @property
    def endpoints(self) -> list[str]:
        return self.destination.split(",")


class Stream:
    """One stream of messages. Leaving it cancels the stream."""

    def __init__(self, channel: grpc.Channel, *, within: float = WITHIN) -> None:
        self._outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        process = channel.stream_stream(
            METHOD,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        self.call = process(iter(self._outgoing.get, None), timeout=within)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()
        self.call.cancel()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self._outgoing.put(message)

    def receive(self) -> Message:
        """The next message. Raises StopIteration at the end, grpc.RpcError for an error."""
        return next(self.call)

    def end(self) -> None:
        """Half-close, as a proxy does whose client has left."""
        self._outgoing.put(None)

    # -- phases

    def request(
        self,
        body: bytes,
        *,
        size: int = 1 << 20,
        mode: int = DUPLEX,
        answer_mode: int = DUPLEX,
        trailers: bool = False,
        **head: Any,
    ) -> Picked:
        """Send a whole request, in pieces of a size, and read the decision about it."""
        self.send(request_headers(mode=mode, answer_mode=answer_mode, **head))
        first = None
        if mode == BUFFERED:
            first = self.receive()
            if first.WhichOneof("response") == "immediate_response":
                return picked(iter([first]))
            assert first.WhichOneof("response") == "request_headers", first
            size = max(1, len(body))
        self.send(*request_bodies(body, size, ended=not trailers))
        if trailers:
            self.send(ProcessingRequest(request_trailers={}))
        return picked(self._until_decided(mode, trailers))

    def _until_decided(self, mode: int, trailers: bool) -> Iterator[Message]:
        while True:
            message = self.receive()
            yield message
            kind = message.WhichOneof("response")
            if kind in ("immediate_response", "request_trailers") or (kind == "request_body" and mode == BUFFERED):
                return
            streamed = message.request_body.response.body_mutation.streamed_response
            if kind == "request_body" and not trailers and streamed.end_of_stream:
                return

    def response(self, status: int, chunks: Sequence[bytes], *, mode: int = DUPLEX, **headers: str) -> list[bytes]:
        """Send a whole response and return the chunks that the picker has the proxy pass on."""
        self.send(response_headers(status, **headers))
        head = self.receive()
        assert head.WhichOneof("response") == "response_headers", head
        passed: list[bytes] = []
        for number, chunk in enumerate(chunks):
            last = number == len(chunks) - 1
            self.send(response_body(chunk, last))
            if mode == DUPLEX:
                continue
            common = self.receive().response_body.response
            kept = common.body_mutation
            passed.append(kept.body if kept.HasField("body") else b"" if kept.clear_body else chunk)
        while mode == DUPLEX:
            piece = self.receive().response_body.response.body_mutation.streamed_response
            passed.append(piece.body)
            if piece.end_of_stream:
                break
        return passed


def picked(messages: Iterator[Message]) -> Picked:
    """Read the decision about one request from the messages of the picker."""
    decision = Picked()
    for message in messages:
        kind = message.WhichOneof("response")
        if kind == "immediate_response":
            answer = message.immediate_response
            return Picked(answer.status.code, _headers(answer.headers), body=answer.body)
        part = getattr(message, kind)
        if kind == "request_trailers":
            decision.ended = True
            continue
        common = part.response
        decision.headers |= _headers(common.header_mutation)
        decision.removed += common.header_mutation.remove_headers
        if "envoy.lb" in message.dynamic_metadata:
            decision.metadata = message.dynamic_metadata["envoy.lb"][DESTINATION]
        if kind == "request_body":
            mutation = common.body_mutation
            decision.body += mutation.streamed_response.body or mutation.body
            decision.ended = decision.ended or mutation.streamed_response.end_of_stream
    decision.destination = decision.headers.get(DESTINATION, "")
    return decision


def request_headers(
    *,
    mode: int = DUPLEX,
    answer_mode: int = DUPLEX,
    subset: Sequence[str] | None = None,
    ended: bool = False,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    configured: bool = True,
    headers: Sequence[tuple[str, str]] = (),
    request_id: str = "a-request",
) -> Message:
    message = ProcessingRequest()
    fields = [
        (":method", method),
        (":path", path),
        (":scheme", "http"),
        (":authority", "models.example"),
        ("content-type", "application/json"),
        ("x-request-id", request_id),
        *headers,
    ]
    for name, value in fields:
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    message.request_headers.end_of_stream = ended
    if configured:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = answer_mode
    if subset is not None:
        hints = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hints.update({f"{DESTINATION}-subset": list(subset)})
    return message


def request_bodies(body: bytes, size: int, *, ended: bool = True) -> Iterator[Message]:
    for start in range(0, max(1, len(body)), size):
        message = ProcessingRequest()
        message.request_body.body = body[start : start + size]
        message.request_body.end_of_stream = ended and start + size >= len(body)
        yield message


def response_headers(status: int, *, details: str = "", ended: bool = False, **headers: str) -> Message:
    message = ProcessingRequest()
    for name, value in {":status": str(status), "content_type": "application/json", **headers}.items():
        header = message.response_headers.headers.headers.add()
        header.key, header.raw_value = name.replace("_", "-"), value.encode()
    message.response_headers.end_of_stream = ended
    if details:
        message.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": details})
    return message


def response_body(chunk: bytes, ended: bool) -> Message:
    message = ProcessingRequest()
    message.response_body.body = chunk
    message.response_body.end_of_stream = ended
    return message


def _headers(mutation: Message) -> dict[str, str]:
    options = [option.header for option in mutation.set_headers]
    return {header.key: header.raw_value.decode() or header.value for header in options}
