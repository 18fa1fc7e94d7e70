"""Link to one gateway: one report at a time, its answer, and a log line when the gateway stops taking them.

A report goes EVERY second, and at once where something has changed, but not sooner than GAP after the one before. A
gateway that does not take reports is tried again after FIRST_PAUSE, then ever more rarely, up to LAST_PAUSE. Changes do
not hurry these tries, as each carries the state of its moment. The log has a line at each change between the two, not
one for every try.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import msgspec

from gateway.shared import protocol
from gateway.shared.addresses import EVERY_INTERFACE
from gateway.shared.control.http_client import AnswerTooLarge, exchange, request_headers, transport_to
from gateway.shared.formatting import seconds, shown
from gateway.shared.protocol import CapacityReport, ClusterMember, DemandReport, ProtocolError
from gateway.shared.tasks import done_within
from sidecar.core.addresses import Address
from sidecar.core.config import RelaySettings, is_local
from sidecar.core.status import GatewayStatus

EVERY = 1.0  # seconds
GAP = 0.05  # seconds, the least between two reports
WITHIN = 3.0  # seconds for a whole answer
LAST_WITHIN = 1.0  # seconds for the answer to the last report, when the sidecar ends
FIRST_PAUSE, LAST_PAUSE = 0.25, 5.0  # seconds between tries that fail
NO_ANSWER = "All connection attempts failed"  # in httpcore's words
_QUOTE = re.compile("['\"]")
STATUS = {
    401: "it refuses the token: both sides must be given the same",
    403: "it refuses the token: both sides must be given the same",
    404: "it takes no reports there: is it the control port of a gateway that knows sidecars?",
    409: "it hears another sidecar by this `id`: give each its own (one whose state was lost is heard in 10 s)",
    413: "it finds the report too large",
    421: "it refuses its name in this URL: it has no admin token, or is older and lacks it in `fleet.sidecars.hosts`",
}


class ReportFailed(Exception):
    """A report was not taken; the message says why."""


class Reporting(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a sidecar's reports. Where it listens everywhere, each gateway is told the address it can be reached
    at."""

    sidecar: str  # its id
    boot: str  # another one after each start
    listen: Address  # of the control API, for gateways of this machine
    relay: RelaySettings | None = None  # for gateways of other machines
    token: str | None = None
    ca: str | None = None  # authorities of gateways' certificates, in PEM; None: the system's
    say: Callable[[str], None]


MakeReport = Callable[[bool, str], CapacityReport]  # the next report: whether by the relay, and the sidecar's URL


class GatewayLink:
    """The way to the gateway whose control port has this `url`, and how it goes. `member`: its name in its cluster, if
    it is one that another gateway has told of; else the file names it (`configured`). `heard` takes its answers."""

    def __init__(
        self, url: str, shared: Reporting, report: MakeReport, heard: Callable[[DemandReport], None], member: str = ""
    ) -> None:
        self.url = url.rstrip("/")
        self.member = member
        self.configured = not member
        self.members: tuple[ClusterMember, ...] = ()  # of its cluster, while it takes reports
        self.changed = asyncio.Event()
        self.answered = 0  # the last report that it has answered
        relay = None if is_local(url) else shared.relay
        self._relayed = relay is not None
        self._listen = shared.listen if relay is None else relay.listen
        self._scheme = "http" if relay is None or relay.certificate_file is None else "https"
        self._report, self._heard, self._say = report, heard, shared.say
        self._control: str | None = None
        self._error: str | None = None  # None: not tried yet, empty: it takes reports
        self._since = _now()
        self._failures = 0
        self._ca: str | None = None
        self._transports: list[httpx.AsyncBaseTransport] = []  # the last one is used
        self.go_by(shared.token, shared.ca)

    def go_by(self, token: str | None, ca: str | None) -> None:
        """Show this token from the next report on, and trust these authorities."""
        self._headers = request_headers("weir-sidecar", token) | {"content-type": "application/json"}
        if not self._transports or ca != self._ca:
            self._ca = ca
            self._transports.append(transport_to(self.url, ca=ca))

    @property
    def taken(self) -> bool:
        """Whether it took the last report."""
        return self._error == ""

    def status(self) -> GatewayStatus:
        """Whether the gateway takes reports, why not, and for how many seconds."""
        return GatewayStatus(
            url=self.url,
            taken=None if self._error is None else not self._error,
            error=self._error or "",
            for_s=_now() - self._since,
            failures=self._failures,
        )

    async def run(self) -> None:
        """Report, again and again."""
        pause = FIRST_PAUSE
        while True:
            self.changed.clear()
            began = _now()
            if await self._tell(WITHIN):
                pause = FIRST_PAUSE
                await done_within(self.changed.wait(), began + EVERY - _now())
                await asyncio.sleep(began + GAP - _now())
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)

    async def last(self) -> None:
        """Report once more where that was taken, and close."""
        if self.taken:
            await self._tell(LAST_WITHIN)
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection."""
        for transport in self._transports:
            await transport.aclose()

    async def _tell(self, within: float) -> bool:
        """Send one report; whether it was taken."""
        while len(self._transports) > 1:  # by authorities of before, and no report is under way there
            await self._transports.pop(0).aclose()
        try:
            await self._post(within)
        except ReportFailed as failed:
            self._failures += 1
            self._control = None  # perhaps the way there has changed
            self.members = ()
            error = shown(str(failed))
        else:
            error = ""
        was, self._error = self._error, error
        if was is None or _QUOTE.split(was)[0] != _QUOTE.split(error)[0]:  # what an error quotes may differ each time
            self._turned(was, error)
        return not error

    def _turned(self, was: str | None, error: str) -> None:
        lasted = _now() - self._since
        if bool(was) != bool(error) or was is None:
            self._since = _now()
        if error:
            self._say(f"gateway {self.url} does not take reports: {error}")
        else:
            self._say(f"gateway {self.url} takes reports{f' again, after {seconds(lasted)}' if was else ''}")

    async def _post(self, within: float) -> None:
        """Send one report and hand on its answer. Raises Failed."""
        try:
            async with asyncio.timeout(within):
                if self._control is None:
                    self._control = await self._reached_at()
                report = self._report(self._relayed, self._control)
                content = protocol.encode(report)
                request = httpx.Request("POST", self.url + protocol.REPORT_PATH, headers=self._headers, content=content)
                status, answer = await exchange(self._transports[-1], request, protocol.MAX_BYTES)
        except AnswerTooLarge:
            raise ReportFailed(f"its answer has more than {protocol.MAX_BYTES} bytes") from None
        except TimeoutError:
            raise ReportFailed(f"no whole answer within {within:g} s") from None
        except httpx.ConnectError as error:
            why = "nobody listens there" if str(error) == NO_ANSWER else f"it cannot be reached: {error}"
            raise ReportFailed(why) from error
        except (httpx.HTTPError, OSError) as error:
            raise ReportFailed(f"the connection failed: {error or type(error).__name__}") from error
        if status != httpx.codes.OK:
            raise ReportFailed(STATUS.get(status, f"it answered {status}: {answer[:200].decode(errors='replace')!r}"))
        try:
            demand = protocol.demand_report(answer)
        except ProtocolError as error:
            raise ReportFailed(f"its answer cannot be read: {error}") from error
        self.member, self.members = demand.member or self.member, demand.members
        self._heard(demand)
        self.answered = report.sequence

    async def _reached_at(self) -> str:
        """Return the URL at which this gateway reaches the sidecar. If the sidecar listens on all addresses, the URL
        has the address from which packets to the gateway come; no packet is sent to find that out. Raises OSError."""
        host = self._listen.host
        if host in EVERY_INTERFACE:
            to = urlsplit(self.url)
            port = to.port or (443 if to.scheme == "https" else 80)
            source, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                asyncio.DatagramProtocol,
                local_addr=(host.strip("[]"), 0),
                remote_addr=(to.hostname or "", port),
            )
            found = source.get_extra_info("sockname")[0]
            source.close()
            host = f"[{found}]" if ":" in found else found
        return f"{self._scheme}://{host}:{self._listen.port}"


def _now() -> float:
    return asyncio.get_running_loop().time()
