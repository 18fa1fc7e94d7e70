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
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta

from gateway.frames.codec import FrameError, FrameReader, FrameWriter
from gateway.frames.messages import VERSION, Number, Word
from gateway.frames.visitors import Visitors
from gateway.shared.half_open import find_half_open
from gateway.shared.tokens import Tokens

WITHIN = 2.0  # seconds for all of it
VANISHED = 5.0  # seconds after which a machine that is gone, or the way to it, is found to be
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
T = TypeVar("T", Challenge, Accepted)
_GREETING = msgspec.msgpack.Decoder(list[Greeting])
# Gives the protocol of a visitor's connection from now on; None: it has what it came for. Raises Unwanted.
Enter: TypeAlias = Callable[[Proof], tuple[asyncio.Protocol | None, bool]]


class Unwanted(Exception):
    """A visitor that is not let in, or a member that does not let one in; the message says why."""


class ClusterToken:
    """The cluster's tokens, and what is made of each. The first is shown, and all are accepted."""

    def __init__(self, cluster: str, tokens: Tokens) -> None:
        self.cluster = cluster
        self.renew(tokens)

    def renew(self, tokens: Tokens) -> None:
        """Show and accept these from now on."""
        self._keys = [hashlib.blake2b(token.encode(), person=b"weir cluster").digest() for token in tokens]

    def secret(self, what: str) -> str:
        """A secret of all members, for one purpose."""
        return self._macs(b"secret", what.encode())[0].hex()

    @property
    def fingerprints(self) -> list[str]:
        """Equal for members with the same tokens. They say nothing of the tokens."""
        return [mac.hex()[:16] for mac in self._macs(b"fingerprint", b"")]

    def proofs(self, challenge: Challenge, proof: Proof) -> list[bytes]:
        """Proofs of a visitor that it has a token, by each."""
        said = msgspec.structs.replace(proof, proof=b"")
        return self._macs(b"visitor", challenge.nonce + msgspec.msgpack.encode(said))

    def acceptances(self, challenge: Challenge, proof: Proof, *, vote: bool) -> list[bytes]:
        """Proofs of a member that it has a token, with its vote, by each."""
        return self._macs(b"member", challenge.nonce + proof.nonce + bytes([vote]))

    def _macs(self, who: bytes, what: bytes) -> list[bytes]:
        said = who + b"\0" + self.cluster.encode() + b"\0" + what
        return [hmac.digest(key, said, "sha256") for key in self._keys]


class Entrance(asyncio.Protocol):
    """Connection from another machine, until the visitor has shown the token."""

    def __init__(self, token: ClusterToken, enter: Enter, visitors: Visitors) -> None:
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
        find_half_open(transport.get_extra_info("socket"), VANISHED)
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
            proofs = self._token.proofs(self._challenge, proof)
            place = next((at for at, each in enumerate(proofs) if hmac.compare_digest(proof.proof, each)), None)
            if place is None:
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
        accepted = Accepted(vote, self._token.acceptances(self._challenge, proof, vote=vote)[place])
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


async def visit(
    address: tuple[str, int],
    token: ClusterToken,
    proof: Proof,
    trust: ssl.SSLContext | None,
    name: str | None,
    stays: Callable[[], asyncio.Protocol] | None = None,
) -> bool:
    """Be let in by the member at `address`; return whether it has voted. The connection is then that of `stays`;
    None: it is closed. `trust`: TLS, with a certificate for `name` or the host. Raises OSError, and Unwanted."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    host, port = address
    shown = (name or host) if trust else None
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(WITHIN):
            transport, _ = await loop.create_connection(
                lambda: asyncio.StreamReaderProtocol(reader), host, port, ssl=trust, server_hostname=shown
            )
            find_half_open(transport.get_extra_info("socket"), VANISHED)
            vote = await _let_in(reader, transport, token, proof)
        if stays is not None and (transport.is_closing() or reader.at_eof()):  # `stays` would not hear of that
            raise Unwanted("it has closed the connection")
    except BaseException as error:
        if transport is not None:
            transport.abort()
        if isinstance(error, TimeoutError):
            raise Unwanted(f"no answer within {WITHIN:g} s") from None
        raise
    if stays is None:
        transport.close()
    else:
        staying = stays()
        transport.set_protocol(staying)
        staying.connection_made(transport)
    return vote


async def _let_in(
    reader: asyncio.StreamReader, transport: asyncio.Transport, token: ClusterToken, proof: Proof
) -> bool:
    """Show a member the token, and see that the member has it. Return its vote. Raises OSError, and Unwanted."""
    challenge = await _heard(reader, Challenge)
    if challenge.version != VERSION:
        raise Unwanted(f"it speaks version {challenge.version} of the frames, this member version {VERSION}")
    if challenge.cluster != token.cluster:
        raise Unwanted(f"it is of the cluster {challenge.cluster!r}")
    proof.proof = token.proofs(challenge, proof)[0]
    _write(transport, proof)
    accepted = await _heard(reader, Accepted)
    acceptances = token.acceptances(challenge, proof, vote=accepted.vote)
    if not any(hmac.compare_digest(accepted.proof, each) for each in acceptances):
        raise Unwanted("it has not shown that it has the token")
    return accepted.vote


async def _heard(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Return a member's next message. Raises OSError, and Unwanted."""
    try:
        head = await reader.readexactly(4)
        size = int.from_bytes(head, "big")
        frame = head + await reader.readexactly(size if size <= MOST else 0)
        ((message,),) = FrameReader(_GREETING, MOST).feed(frame)
    except asyncio.IncompleteReadError:
        raise Unwanted("it has closed the connection") from None
    except (FrameError, ValueError) as error:
        raise Unwanted(f"it is no member: {error}") from error
    if isinstance(message, Rejected):
        raise Unwanted(f"it lets nobody in: {message.why}")
    if not isinstance(message, kind):
        raise Unwanted("it is no member: not what a visitor is told")
    return message


def _write(transport: asyncio.Transport, message: Any) -> None:
    writer = FrameWriter()
    writer.add(message)
    transport.write(writer.take())
