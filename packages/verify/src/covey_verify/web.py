"""The client of JSON over HTTP, with limits on bytes and seconds and without redirects."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakSet

if TYPE_CHECKING:
    import httpx2

MOST_MESSAGE = 400
"""Number of characters kept of a server's error message."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which are reached without a proxy."""
IDLE_SECONDS = 3.0
"""Seconds for which an unused connection is kept: fewer than uvicorn's 5, so that we close it first."""
KEPT = 64
"""Most unused connections that are kept."""
PHRASES = {status.value: status.phrase for status in HTTPStatus}


class StatusError(OSError):
    """An answer with a status other than 2xx. Its text has status and message in one line."""

    def __init__(self, status: int, message: str, location: str = "") -> None:
        """``message``: the body or its beginning; ``location``: the address of a redirect."""
        elsewhere = f"to {without_password(location)}: redirects are not followed" if location else ""
        words = f"HTTP {status} {PHRASES.get(status, '')} {elsewhere}".split()
        super().__init__(" ".join([*words, " ".join(message.split())[:200]]).strip())
        self.status = status
        self.message = message[:MOST_MESSAGE]


class TooLong(ValueError):
    """A reply with more bytes than the caller admits."""


def plain_address(url: str) -> str:
    """Return an address. Raises ValueError, without the address, if it has a user name or password."""
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ValueError(
            "an address must not contain a user name or password, which would be logged; keys are read from "
            "environment variables"
        )
    return url


def without_password(text: str) -> str:
    """Return a text without the user names and passwords of addresses.

    >>> without_password("see http://me:secret@there:80/v1")
    'see http://***@there:80/v1'
    """
    return re.sub(r"(://)[^/\s'\"]*@", r"\1***@", text)


def two_lengths(headers: Mapping[str, str]) -> bool:
    """Return whether a message gives its length in two ways, which a proxy may read differently."""
    return "content-length" in headers and "transfer-encoding" in headers


class _Connections:
    """The connections of this process, which its threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clients = dict[bool, "httpx2.Client"]()
        """The client that uses the environment's proxies (True), and the one that uses none."""
        self.sockets = WeakSet[socket.socket]()

    def client(self, proxies: bool) -> httpx2.Client:
        """Return the client that uses the environment's proxies, or the one that uses none."""
        with self.lock:
            if proxies not in self.clients:
                self.clients[proxies] = _new_client(proxies)
            return self.clients[proxies]

    def close_in_child(self) -> None:
        """Close a forked child's copies of the parent's sockets, which stay open in the parent."""
        for copy in list(self.sockets):
            copy.close()
        # A new lock, since a thread that exists in the parent only may have held the old one.
        self.lock = threading.Lock()
        self.clients = {}
        self.sockets = WeakSet()


_CONNECTIONS = _Connections()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CONNECTIONS.close_in_child)


class _Watch:
    """Notes whether a request opens a connection, and its socket."""

    def __init__(self) -> None:
        self.opened = False

    def __call__(self, event: str, details: Mapping[str, object]) -> None:
        """Read an event of httpx2's extension ``trace``."""
        if event.endswith("connect_tcp.started"):
            self.opened = True
        elif event.endswith(("connect_tcp.complete", "start_tls.complete")):
            stream: Any = details["return_value"]
            _CONNECTIONS.sockets.add(stream.get_extra_info("socket"))


def http_library() -> ModuleType:
    """Return httpx2, which is imported at first use: it takes longer than all of covey_verify."""
    try:
        import httpx2
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "requests over HTTP need httpx2: pip install 'covey-verify[http]'", name="httpx2"
        ) from None
    return httpx2


def _new_client(proxies: bool) -> httpx2.Client:
    from http.cookiejar import CookieJar, DefaultCookiePolicy  # takes long as well

    library = http_library()
    try:
        client: httpx2.Client = library.Client(
            trust_env=proxies,
            limits=library.Limits(
                max_connections=None, max_keepalive_connections=KEPT, keepalive_expiry=IDLE_SECONDS
            ),
            # A client shared by all callers must not carry a server's cookies from one to another.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
    except (ImportError, ValueError, library.InvalidURL) as error:
        raise OSError(f"a proxy that the environment names cannot be used: {error}") from None
    return client


def ask(
    url: str, body: object = None, token: str = "", timeout: float = 60.0, largest: int = 1 << 20
) -> object:
    """Return the JSON reply to a GET, or to a POST of ``body``.

    ``timeout`` in seconds and ``largest`` in bytes limit the whole reply, however slowly it arrives. Raises
    StatusError for a status other than 2xx, TimeoutError or another OSError if there is no answer, and
    ValueError for a reply that is no JSON or exceeds a limit.
    """
    data = None if body is None else json.dumps(body).encode()
    received = fetch(url, data, token, timeout, largest)
    return json.loads(received) if received.strip() else None


def fetch(url: str, data: bytes | None, token: str, timeout: float, largest: int) -> bytes:
    """Return the reply to a GET, or to a POST of JSON, as ``ask`` does. Raises TooLong beyond ``largest``."""
    host = urlsplit(plain_address(url)).hostname
    if urlsplit(url).scheme not in ("http", "https") or not host:
        raise ValueError(f"{url} is not an http address")
    headers = _headers(token, data)
    ends = time.monotonic() + timeout
    with _plain_errors(url, timeout):
        client = _CONNECTIONS.client(proxies=host not in LOOPBACK)
        reply = _begun(client, ("GET" if data is None else "POST", url), data, headers, ends)
        with closing(reply):
            if not reply.is_success:
                raise _refusal(reply, ends)
            if not _plain(reply):
                raise ValueError("the reply is compressed, which was not asked for")
            received = _body(reply, largest, ends)
    if len(received) > largest:
        raise TooLong(f"the reply has more than {largest} bytes")
    return received


def _headers(token: str, data: bytes | None) -> dict[str, str]:
    # No compression, so that a few bytes cannot become very many.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    if token:
        # Refused here, because the library's message would show the key.
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the key has characters that a header cannot have, such as a line break")
        headers["Authorization"] = f"Bearer {token}"
    if data is not None:
        headers["Content-Type"] = "application/json"
    return headers


@contextmanager
def _plain_errors(url: str, timeout: float) -> Iterator[None]:
    """Replace the library's exceptions by Python's, so that callers need not import it."""
    library = http_library()
    try:
        yield
    except library.TimeoutException:
        raise TimeoutError(f"no whole reply within {timeout:g} s") from None
    except (library.InvalidURL, library.LocalProtocolError) as error:
        raise ValueError(f"{url} is not an http address: {error}") from None
    except library.HTTPError as error:
        raise ConnectionError(str(error).strip() or type(error).__name__) from None


def _begun(
    client: httpx2.Client,
    target: tuple[str, str],
    data: bytes | None,
    headers: Mapping[str, str],
    ends: float,
) -> httpx2.Response:
    """Send a request, and return the reply with its body still to be read.

    A server may close an unused connection just when a request is sent on it. The request is then sent again,
    as it would have been sent on a new connection: all requests of ours may be repeated.
    """
    library = http_library()
    while True:
        watch = _Watch()
        rest = max(0.001, ends - time.monotonic())
        request = client.build_request(
            *target, content=data, headers=headers, timeout=rest, extensions={"trace": watch}
        )
        try:
            return client.send(request, stream=True)
        except (library.NetworkError, library.RemoteProtocolError):
            if watch.opened:
                raise


def _plain(reply: httpx2.Response) -> bool:
    """Return whether the body is as it was sent, not compressed."""
    return reply.headers.get("Content-Encoding", "identity").strip().lower() == "identity"


def _refusal(reply: httpx2.Response, ends: float) -> StatusError:
    """Return the error for a status other than 2xx, with the beginning of the server's message."""
    message = b""
    if _plain(reply):
        with suppress(http_library().HTTPError):  # without a message the status still says something
            message = _body(reply, MOST_MESSAGE, ends)
    return StatusError(reply.status_code, message.decode(errors="replace"), reply.headers.get("Location", ""))


def _body(reply: httpx2.Response, most: int, ends: float) -> bytes:
    """Return the body of a reply, or its beginning if it has more than ``most`` bytes."""
    received = bytearray()
    # The library's time-out is for each read only, so the total is checked here.
    for part in reply.iter_raw():
        received += part
        if len(received) > most:
            break
        if time.monotonic() > ends:
            raise http_library().ReadTimeout("the time is over")
    return bytes(received)


def pauses(first: float, longest: float) -> Iterator[float]:
    """Yield the seconds to wait before each further try: twice as long every time, up to ``longest``.

    >>> import itertools
    >>> list(itertools.islice(pauses(1.0, 5.0), 4))
    [1.0, 2.0, 4.0, 5.0]
    """
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, longest)


def may_pass(error: Exception) -> bool:
    """Return whether a request that failed may succeed if it is repeated.

    A server's error status may pass. A client's does not, but for 429: too many requests.
    """
    if not isinstance(error, StatusError):
        return True
    return error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.status == HTTPStatus.TOO_MANY_REQUESTS


def reason_of(error: BaseException) -> str:
    """Return the text of an error, or its kind if it has none."""
    return str(error).strip() or type(error).__name__
