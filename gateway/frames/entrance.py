"""Entrance of a member of a cluster: who comes by TCP from another machine proves that it has the token.

The member proves the same. The token itself never crosses the network; nor does it keep anybody from reading what
follows, as TLS does.

    member  -> visitor  Challenge: version, cluster, a nonce
    visitor -> member   Proof: who it is, a nonce of its own, and an HMAC of both nonces and of all that it says
    member  -> visitor  Accepted, with an HMAC of its own; or Rejected, with the reason, and the end

A visitor that asks for the member's vote for a leader has it in Accepted, and goes. Else frames of a relay follow.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import ssl
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import Meta

from gateway.frames.codec import FrameError, FrameReader, FrameWriter
from gateway.frames.messages import VERSION, Number, Word
from gateway.frames.visitors import Visitors

WITHIN = 2.0  # seconds for all of it
MOST = 4096  # bytes of a frame
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class VoteRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """The store answers nobody here: may that leader go on?"""

    leader: Word
    epoch: Number


class Challenge(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=64):
    """The member's first message."""

    version: Number
    cluster: Word
    nonce: Digest


class Proof(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=65):
    """Answer of the visitor. `member`: its name; `life`: its machine's gateway's; `vote`: it asks for that alone."""

    version: Number
    cluster: Word
    member: Word
    life: Word
    nonce: Digest
    vote: VoteRequest | None
    proof: bytes = b""


class Accepted(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=66):
    """The visitor is known. `vote`: the member gives its vote."""

    vote: bool
    proof: bytes = b""


class Rejected(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, tag=67):
    """The visitor is not wanted."""

    why: Word


Greeting: TypeAlias = Challenge | Proof | Accepted | Rejected
_GREETING = msgspec.msgpack.Decoder(list[Greeting])
# Gives the protocol of a visitor's connection from now on; None: it has what it came for. Raises Unwanted.
Enter: TypeAlias = Callable[[Proof], tuple[asyncio.Protocol | None, bool]]


class Unwanted(Exception):
    """A visitor that is not let in, or a member that does not let one in; the message says why."""


class Token:
    """The cluster's token, and what is made of it."""

    def __init__(self, cluster: str, token: str) -> None:
        self.cluster = cluster
        self._key = hashlib.blake2b(token.encode(), person=b"weir cluster").digest()

    def secret(self, what: str) -> str:
        """A secret of all members, for one purpose."""
        return self._mac(b"secret", what.encode()).hex()

    @property
    def fingerprint(self) -> str:
        """Equal for members with the same token. It says nothing of the token."""
        return self._mac(b"fingerprint", b"").hex()[:16]

    def proof(self, challenge: Challenge, proof: Proof) -> bytes:
        """Proof of a visitor that it has the token."""
        said = msgspec.structs.replace(proof, proof=b"")
        return self._mac(b"visitor", challenge.nonce + msgspec.msgpack.encode(said))

    def acceptance(self, challenge: Challenge, proof: Proof, *, vote: bool) -> bytes:
        """Proof of a member that it has the token, with its vote."""
        return self._mac(b"member", challenge.nonce + proof.nonce + bytes([vote]))

    def _mac(self, who: bytes, what: bytes) -> bytes:
        return hmac.digest(self._key, who + b"\0" + self.cluster.encode() + b"\0" + what, "sha256")


class Entrance(asyncio.Protocol):
    """Connection from another machine, until the visitor has shown the token."""

    def __init__(self, token: Token, enter: Enter, visitors: Visitors) -> None:
        self._token = token
        self._enter = enter
        self._visitors = visitors
        self._reader = FrameReader(_GREETING, MOST)
        self._challenge = Challenge(VERSION, token.cluster, secrets.token_bytes(32))
        self._peer = ""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else "?"
        self._visitors.add(self, self._peer)
        self._timer = asyncio.get_running_loop().call_later(WITHIN, self._cut, "it has not said who it is")
        _write(self._transport, self._challenge)

    def data_received(self, data: bytes) -> None:
        try:
            for messages in self._reader.feed(data):
                if len(messages) != 1 or not isinstance(messages[0], Proof):
                    raise FrameError("not what an entrance is told")
                self._judge(messages[0])
                return
        except FrameError as error:
            self._cut(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._visitors.remove(self)

    def expel(self) -> None:
        """Cut off a visitor, because too many have not said who they are."""
        self._cut("too many have not said who they are")

    def _judge(self, proof: Proof) -> None:
        try:
            if proof.version != VERSION:
                raise Unwanted(f"it speaks version {proof.version} of the frames, and this member version {VERSION}")
            if proof.cluster != self._token.cluster:
                raise Unwanted(f"it is of the cluster {proof.cluster!r}, and this member of {self._token.cluster!r}")
            if not hmac.compare_digest(proof.proof, self._token.proof(self._challenge, proof)):
                raise Unwanted("it has another token: are both members' token_file the same?")
        except Unwanted as unwanted:
            _write(self._transport, Rejected(str(unwanted)))
            self._cut(str(unwanted), abort=False)
            return
        self._timer.cancel()
        self._visitors.remove(self)
        try:
            protocol, vote = self._enter(proof)
        except Unwanted as unwanted:  # it is a member, which says so itself, and asks again many times a second
            _write(self._transport, Rejected(str(unwanted)))
            self._transport.close()
            return
        accepted = Accepted(vote, self._token.acceptance(self._challenge, proof, vote=vote))
        if protocol is None:
            _write(self._transport, accepted)
            self._transport.close()
            return
        self._transport.set_protocol(protocol)
        _write(self._transport, accepted)
        protocol.connection_made(self._transport)

    def _cut(self, why: str, *, abort: bool = True) -> None:
        self._timer.cancel()
        self._visitors.remove(self)
        self._visitors.refused(self._peer, why)
        if abort:
            self._transport.abort()
        else:
            self._transport.close()


class _Visit(asyncio.Protocol):
    """Connection to another member, until the member has let this one in."""

    def __init__(self, token: Token, proof: Proof) -> None:
        self._token = token
        self._proof = proof
        self._reader = FrameReader(_GREETING, MOST)
        self._challenge: Challenge | None = None
        self._transport: asyncio.Transport
        self.accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for messages in self._reader.feed(data):
                for message in messages:
                    self._take(message)
        except (FrameError, Unwanted) as error:
            self._end(str(error))

    def _take(self, message: Greeting) -> None:
        proof, token = self._proof, self._token
        match message:
            case Challenge() if self._challenge is None:
                self._challenge = message
                if message.version != VERSION:
                    raise Unwanted(f"it speaks version {message.version} of the frames, this member version {VERSION}")
                if message.cluster != token.cluster:
                    raise Unwanted(f"it is of the cluster {message.cluster!r}")
                proof.proof = token.proof(message, proof)
                _write(self._transport, proof)
            case Accepted() if self._challenge is not None:
                wanted = token.acceptance(self._challenge, proof, vote=message.vote)
                if not hmac.compare_digest(message.proof, wanted):
                    raise Unwanted("it has not shown that it has the token")
                if not self.accepted.done():
                    self.accepted.set_result(message.vote)
            case Rejected():
                raise Unwanted(f"it lets nobody in: {message.why}")
            case _:
                raise FrameError("not what a visitor is told")

    def _end(self, why: str) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(Unwanted(why))
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(Unwanted(f"it has closed the connection{f': {error}' if error else ''}"))


async def visit(
    address: tuple[str, int],
    token: Token,
    proof: Proof,
    trust: ssl.SSLContext | None,
    name: str | None,
    stays: Callable[[], asyncio.Protocol] | None = None,
) -> bool:
    """Be let in by the member at `address`; return whether it has voted. The connection is then that of `stays`;
    None: it is closed. `trust`: TLS, with a certificate for `name` or the host. Raises OSError, and Unwanted."""
    loop = asyncio.get_running_loop()
    host, port = address
    transport: Any = None
    try:
        async with asyncio.timeout(WITHIN):
            transport, protocol = await loop.create_connection(
                lambda: _Visit(token, proof), host, port, ssl=trust, server_hostname=(name or host) if trust else None
            )
            vote = await protocol.accepted
    except TimeoutError:
        if transport is not None:
            transport.abort()
        raise Unwanted(f"no answer within {WITHIN:g} s") from None
    except BaseException:
        if transport is not None:
            transport.abort()
        raise
    if stays is None:
        transport.close()
        return vote
    if transport.is_closing():  # meanwhile: `stays` would not hear of that
        raise Unwanted("it has closed the connection")
    staying = stays()
    transport.set_protocol(staying)
    staying.connection_made(transport)
    return vote


def _write(transport: asyncio.Transport, message: Any) -> None:
    writer = FrameWriter()
    writer.add(message)
    transport.write(writer.take())
