"""Sources of a model's files over HTTP: a hub (or a mirror of its API), and a plain web server's folder.

Redirects are followed a few times, never from https to http. The hub's token goes to the hub alone, and over http only
to this machine. An answer's length is bounded before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote, urljoin, urlsplit

import httpx

from gateway.shared.addresses import is_loopback
from sidecar.pull.listing import (
    MAX_FILES,
    MAX_LISTING,
    SUMS,
    BadListing,
    Listing,
    SourceFile,
    Unsized,
    checked,
    chosen,
    hub_files,
    links,
    sums,
)
from sidecar.pull.source import Pieces, SourceError

TIMEOUT = httpx.Timeout(30.0, connect=10.0)  # seconds without a byte
REDIRECTS = 5
FOLDERS = 200  # of a web server's folder
AGAIN = (408, 425, 429, 500, 502, 503, 504)
PLAIN = {"accept-encoding": "identity", "user-agent": "weir-sidecar"}


class Web:
    """Requests to servers. `token` is shown to `origin` (scheme, host and port) alone. Raises SourceError."""

    def __init__(self, origin: str, token: str | None = None) -> None:
        where = urlsplit(origin)
        if where.username is not None or where.password is not None:
            raise SourceError("a source's URL holds no user or password")
        if token is not None and where.scheme != "https" and not is_loopback(where.hostname or ""):
            raise SourceError(
                f"HF_TOKEN would cross the network in the clear to {where.netloc}: use https, or unset HF_TOKEN"
            )
        self._origin = (where.scheme, where.netloc)
        self._token = token
        self._client = httpx.Client(timeout=TIMEOUT, headers=PLAIN, follow_redirects=False)

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def ask(self, method: str, url: str, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
        """The answer after redirects, its body not read yet. Raises SourceError, also for what breaks off."""
        try:
            for _ in range(REDIRECTS):
                where = urlsplit(url)
                own = (where.scheme, where.netloc) == self._origin and self._token is not None
                shown = {"authorization": f"Bearer {self._token}"} if own else {}
                with self._client.stream(method, url, headers={**shown, **(headers or {})}) as response:
                    if response.status_code not in (301, 302, 303, 307, 308):
                        yield response
                        return
                    url = _next(url, response.headers.get("location", ""))
        except httpx.InvalidURL as error:
            raise SourceError(f"{url[:200]!r} is no URL: {error}") from error
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise SourceError(f"{urlsplit(url).netloc} cannot be asked: {said}", again=True) from error
        raise SourceError(f"{urlsplit(url).netloc} redirects more than {REDIRECTS} times")

    def get(self, url: str) -> bytes | None:
        """A small body; None where there is none (404)."""
        with self.ask("GET", url) as response:
            if response.status_code == 404:
                return None
            self.good(response, url)
            body = bytearray()
            for piece in response.iter_raw():
                body += piece
                if len(body) > MAX_LISTING:
                    raise SourceError(f"{url} has more than {MAX_LISTING} bytes: it is no list of files")
            return bytes(body)

    def head(self, url: str, name: str) -> SourceFile:
        """Size and version of a file."""
        with self.ask("HEAD", url) as response:
            self.good(response, url)
            headers = response.headers
            length = headers.get("x-linked-size") or headers.get("content-length", "")
            if not (length.isascii() and length.isdecimal() and len(length) < 16):
                raise SourceError(f"{url}: the server does not tell its size")
            version = headers.get("etag") or headers.get("last-modified", "")
        return SourceFile(name=name, size=int(length), version=version[:200])

    def content(self, url: str, file: SourceFile, start: int) -> Pieces:
        """As Source.read. A server that does not know ranges is read from the beginning."""
        headers = {"range": f"bytes={start}-"} if start else {}
        if start and file.version and not file.version.startswith("W/"):
            headers["if-range"] = file.version
        with self.ask("GET", url, headers) as response:
            if start and response.status_code == 200:
                yield None
            elif start and response.status_code == 206:
                _, _, told = response.headers.get("content-range", "").partition(" ")
                if told != f"{start}-{file.size - 1}/{file.size}":
                    raise SourceError(f"{url}: the server sends {told!r} where bytes from {start} on were asked for")
            else:
                self.good(response, url)
            yield from response.iter_raw()

    def good(self, response: httpx.Response, url: str) -> None:
        """Raises SourceError for any other status than 200."""
        status = response.status_code
        if status == 200 and response.headers.get("content-encoding", "identity") == "identity":
            return
        if status == 200:
            raise SourceError(f"{url}: the server compresses what it was asked for as it is")
        advice = ""
        if status in (401, 403):
            advice = ": the model wants a token (HF_TOKEN) of an account that accepted its terms, or is not there"
        raise SourceError(f"{url}: the server answers {status}{advice}", again=status in AGAIN)


class HubSource:
    """A model on a hub that speaks the API of huggingface.co. `endpoint`: its base URL. `only`, `everything`: see
    `listing.chosen`."""

    def __init__(
        self,
        endpoint: str,
        model: str,
        revision: str,
        token: str | None,
        only: Sequence[str] = (),
        *,
        everything: bool = False,
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._model = model
        self._revision = revision
        self._only = only
        self._everything = everything
        self._commit = ""
        self._web = Web(self._endpoint, token)

    def close(self) -> None:
        self._web.close()

    def listing(self) -> Listing:
        """List the model's files at one commit, with checksums. Raises BadListing, SourceError."""
        url = f"{self._endpoint}/api/models/{self._model}/revision/{quote(self._revision, safe='')}?blobs=true"
        body = self._web.get(url)
        if body is None:
            raise SourceError(f"{self._endpoint} has no model {self._model!r} with the revision {self._revision!r}")
        self._commit, found = hub_files(body)
        wanted = set(chosen([file.name for file in found], self._only, everything=self._everything))
        files = checked(self._sized(file) for file in found if file.name in wanted)
        return Listing(source=f"{self._endpoint}/{self._model}", files=files, commit=self._commit)

    def _sized(self, file: Unsized) -> SourceFile:
        if file.size is None:
            told = self._web.head(self._url(file.name), file.name)
            return SourceFile(name=file.name, size=told.size, digest=file.digest)
        return SourceFile(name=file.name, size=file.size, digest=file.digest)

    def _url(self, name: str) -> str:
        return f"{self._endpoint}/{self._model}/resolve/{self._commit}/{quote(name)}"

    def read(self, file: SourceFile, start: int) -> Pieces:
        """As Source."""
        return self._web.content(self._url(file.name), file, start)


class WebFolderSource:
    """A folder of a plain web server: its SHA256SUMS lists the files, or else the links of its pages."""

    def __init__(self, url: str, only: Sequence[str] = (), *, everything: bool = False) -> None:
        self._url = f"{url.rstrip('/')}/"
        self._only = only
        self._everything = everything
        self._web = Web(self._url)

    def close(self) -> None:
        self._web.close()

    def listing(self) -> Listing:
        """List the folder's files, with checksums if it has a SHA256SUMS. Raises BadListing, SourceError."""
        told = self._web.get(self._url + SUMS)
        known = sums(told.decode(errors="replace")) if told is not None else {}
        names = list(known) or sorted(self._names("", [0]))
        files = []
        for name in chosen(names, self._only, everything=self._everything):
            found = self._web.head(self._url + quote(name), name)
            files.append(SourceFile(name=name, size=found.size, digest=known.get(name), version=found.version))
        return Listing(source=self._url, files=checked(files))

    def _names(self, below: str, asked: list[int]) -> Iterator[str]:
        """Names of files, by the links of the page of the folder `below` and of those in it."""
        asked[0] += 1
        if asked[0] > FOLDERS or below.count("/") > 4:
            raise BadListing(f"{self._url} has too many folders: it is no model's")
        url = self._url + quote(below)
        page = self._web.get(url)
        if page is None:
            raise SourceError(f"there is no {url}")
        for count, name in enumerate(links(page.decode(errors="replace"), url)):
            if count >= MAX_FILES:
                raise BadListing(f"{url} links to more than {MAX_FILES} files")
            if not name.endswith("/"):
                yield below + name
            elif not name.startswith("."):
                yield from self._names(below + name, asked)

    def read(self, file: SourceFile, start: int) -> Pieces:
        """As Source."""
        return self._web.content(self._url + quote(file.name), file, start)


def _next(url: str, location: str) -> str:
    """Raises SourceError for a redirect that is not followed."""
    try:
        found = urljoin(url, location)
        where = urlsplit(found)
    except ValueError as error:
        raise SourceError(f"{urlsplit(url).netloc} redirects to {location[:200]!r}, which is no URL") from error
    if where.scheme not in ("http", "https") or (urlsplit(url).scheme, where.scheme) == ("https", "http"):
        raise SourceError(f"{urlsplit(url).netloc} redirects to {found[:200]!r}, which is not followed")
    return found
