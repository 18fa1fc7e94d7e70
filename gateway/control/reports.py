"""Route of sidecars' reports: POST /sidecars/report, answered with the demand for the sidecar's models.

Who sends is judged by the head alone; only then is the body read, of at most MAX_BYTES. The sidecar's own token takes
the place of the admin token here (see guard.py), and gives nothing else. With an admin token the Host may be any: a
page whose name was made to point here (DNS rebinding) has no token of a sidecar.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.control.guard import JSON, error
from gateway.core.sidecars.addresses import is_loopback
from gateway.core.sidecars.sidecars import NameConflict, RegistryFull, UntrustedSidecar
from gateway.decider.report_intake import ReportIntake
from gateway.shared.control.body import TooLarge, body_of
from gateway.shared.protocol import MAX_BYTES, ProtocolError, encode

BODY_WITHIN = 5.0  # seconds for all of it
CLOSE = {"connection": "close"}
REFUSALS: dict[type[Exception], tuple[int, str, str]] = {
    TooLarge: (413, "too_large", f"A report is at most {MAX_BYTES} bytes."),
    TimeoutError: (408, "too_slow", f"The report was not here after {BODY_WITHIN:g} s."),
    ClientDisconnect: (400, "cut_off", "The report ended early."),
    ProtocolError: (400, "bad_report", "The report cannot be read: {}"),
    NameConflict: (409, "id_taken", "The report is not taken: {}."),
    RegistryFull: (503, "too_many_sidecars", "The report is not taken: {}."),
}


async def take_report(request: Request, sidecars: ReportIntake) -> Response:
    """The answer to one report."""
    try:
        sidecars.admit(_token(request))
        answer = sidecars.report(await body_of(request, MAX_BYTES, BODY_WITHIN), local=is_local(request.scope))
    except UntrustedSidecar as refused:
        return error(401, "invalid_token", str(refused), {"www-authenticate": "Bearer"} | CLOSE)
    except tuple(REFUSALS) as refused:
        status, code, message = REFUSALS[type(refused)]
        return error(status, code, message.format(refused), CLOSE if status in (408, 413) else None)
    return Response(encode(answer), media_type=JSON)


def is_local(scope: Scope) -> bool:
    """Whether the sender is on this machine: it comes from loopback, or from the very address it has come to."""
    client, server = scope.get("client"), scope.get("server")
    if client is None:
        return False
    return is_loopback(client[0]) or (server is not None and client[0] == server[0])


def _token(request: Request) -> bytes | None:
    """The bearer's token, None where there is none or more than one."""
    lines = request.headers.getlist("authorization")
    scheme, _, token = lines[0].partition(" ") if len(lines) == 1 else ("", "", "")
    return token.encode("latin-1") if scheme.lower() == "bearer" and token else None
