"""Client of the control API of the sidecar on this machine, for the commands beside `sidecar serve`; tokens."""

from __future__ import annotations

import http.client
import socket
from typing import Literal, TypeVar

import msgspec

from gateway.shared.addresses import EVERY_INTERFACE
from gateway.shared.tokens import Tokens
from sidecar.core.config import SidecarConfig

T = TypeVar("T")
WITHIN = 10.0  # seconds without a byte
MOST = 16 * 1024 * 1024  # bytes of an answer


class NoSidecar(Exception):
    """No sidecar answers at the address; the message names the address."""


class Rejected(Exception):
    """The sidecar refuses, or what answers is none; the message is for the person who asked. `code`: the word of the
    error, empty where it gives none."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class SidecarTokens(msgspec.Struct, frozen=True, kw_only=True):
    """`report`: of which a sidecar shows gateways the first. `order`: of which its control API and its relay want to be
    shown one; the same where the file names one file alone. Empty: no token."""

    report: Tokens = ()
    order: Tokens = ()


class _Error(msgspec.Struct):
    message: str
    code: str = ""


class _Body(msgspec.Struct):
    error: _Error


class ControlClient:
    """The control API of the sidecar that `config` is of, asked with the first of `tokens`."""

    def __init__(self, config: SidecarConfig, tokens: Tokens) -> None:
        host = EVERY_INTERFACE.get(config.listen.host, config.listen.host)
        self.address = f"{host}:{config.listen.port}"
        self._host = host.strip("[]")
        self._port = config.listen.port
        self.show(tokens)

    def show(self, tokens: Tokens) -> None:
        """Show the first of these tokens from now on."""
        self._headers = {"authorization": f"Bearer {tokens[0]}"} if tokens else {}

    def ask(self, method: Literal["GET", "POST"], path: str, body: object = None) -> bytes:
        """The body of a 200. Raises NoSidecar, Rejected."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=WITHIN)
        try:
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, content, self._headers)
            response = connection.getresponse()
            answer = response.read(MOST + 1)
        except ConnectionRefusedError:
            raise NoSidecar(f"no sidecar answers at {self.address}") from None
        except socket.gaierror as error:
            raise Rejected(f"listen {self.address}: {error.strerror}") from None
        except (OSError, http.client.HTTPException) as error:
            what = "it does not answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise Rejected(f"the sidecar at {self.address} cannot be asked: {what}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise self._refusal(response.status, answer)
        if len(answer) > MOST:
            raise Rejected(f"what answers at {self.address} has more than {MOST} bytes to say: it is no sidecar")
        return answer

    def read(self, kind: type[T], method: Literal["GET", "POST"], path: str) -> T:
        """The body of a 200, as JSON of this kind. Raises NoSidecar, Rejected."""
        try:
            return msgspec.json.decode(self.ask(method, path), type=kind)
        except msgspec.MsgspecError as error:
            raise Rejected(f"what answers at {self.address} is another version's: {error}") from error

    def _refusal(self, status: int, answer: bytes) -> Rejected:
        try:
            error = msgspec.json.decode(answer, type=_Body).error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Rejected(f"what answers at {self.address} is no sidecar: it says {status} {answer[:80]!r}")
        if status == 401:
            return Rejected(f"the sidecar at {self.address} has another token than token_file: its log says why")
        return Rejected(error.message, error.code)
