"""The client of JSON over HTTP, with limits on bytes and seconds and without redirects."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from httpx2 import Client, Response

MOST_MESSAGE = 400
"""Number of bytes kept of a server's error message."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which are reached without a proxy."""
IDLE = 2.0
"""Seconds that an idle connection is kept: fewer than servers do, so that none is closed as it is reused."""


class StatusError(OSError):
    """An answer with a status other than 2xx."""

    def __init__(self, status: int, message: str = "", location: str = "") -> None:
        """``message``: what the server says; ``location``: where a redirect leads, which is not followed."""
        self.status = status
        phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
        redirect = f", to {without_password(location)}: redirects are not followed" if location else ""
        sentence = " ".join(message.split())[:200]
        super().__init__(f"{f'HTTP {status} {phrase}'.strip()}{redirect} {sentence}".strip())


class TooLong(ValueError):
    """A reply with more bytes than its caller takes."""


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


@cache
def _client(direct: bool) -> Client:
    """Return this process's client, whose connections all threads share; ``direct``: without a proxy."""
    # These take a tenth of a second, which only those pay who ask a server.
    from http.cookiejar import CookieJar, DefaultCookiePolicy

    import httpx2

    # No limit: every thread that asks has a connection of its own.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE)
    # No cookie is kept: a request does not depend on the one before.
    cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    try:
        return httpx2.Client(limits=limits, cookies=cookies, trust_env=not direct, follow_redirects=False)
    # A proxy of another kind, such as ALL_PROXY=socks5://..., or no address.
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        raise OSError(f"a proxy that the environment names cannot be used: {error}") from None


# A forked child must not answer on its parent's connections.
os.register_at_fork(after_in_child=_client.cache_clear)


def ask(
    url: str, body: object = None, token: str = "", timeout: float = 60.0, largest: int = 1 << 20
) -> object:
    """Return the JSON reply to a GET, or to a POST of ``body``.

    ``timeout`` in seconds and ``largest`` in bytes limit the whole reply, however slowly it arrives. Raises
    StatusError for a status other than 2xx, TimeoutError or ConnectionError if there is no answer (all three
    are OSErrors), TooLong for a reply that exceeds ``largest``, and ValueError for one that is no JSON.
    """
    plain_address(url)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is not an http address")
    # Not compressed: a small reply could become a large one before its size is known.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    if token:
        if not (token.isascii() and token.isprintable()):  # said here, because httpx would show the key
            raise ValueError("the key has characters that a header cannot have, such as a line break")
        headers["Authorization"] = f"Bearer {token}"
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    received = _send(url, data, headers, timeout, largest)
    return json.loads(received) if received.strip() else None


def _send(url: str, data: bytes | None, headers: Mapping[str, str], timeout: float, largest: int) -> bytes:
    """Send a request and return the bytes of its reply. Raises as ``ask`` does."""
    client = _client(urlsplit(url).hostname in LOOPBACK)
    import httpx2

    ends = time.monotonic() + timeout
    try:
        with closing(_reply(client, url, data, headers, timeout)) as reply:
            if not reply.is_success:
                raise StatusError(reply.status_code, _message(reply), reply.headers.get("location", ""))
            if reply.headers.get("content-encoding", "identity") != "identity":
                raise ValueError("the reply is compressed, which was not asked for")
            received = bytearray()
            # httpx limits the time of each read only, so the total is checked here.
            for part in reply.iter_raw():
                received += part
                if len(received) > largest:
                    raise TooLong(f"the reply has more than {largest} bytes")
                if time.monotonic() > ends:
                    raise TimeoutError(f"no whole reply within {timeout:g} s")
            return bytes(received)
    except httpx2.TimeoutException:
        raise TimeoutError(f"no whole reply within {timeout:g} s") from None
    except httpx2.TransportError as error:
        raise ConnectionError(str(error).strip() or type(error).__name__) from None
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url} is not an http address: {error}") from None


def _reply(
    client: Client, url: str, data: bytes | None, headers: Mapping[str, str], timeout: float
) -> Response:
    """Send a request and return its reply, whose body is still to be read.

    A server may close an idle connection just as a request is sent on it. The request is then sent again, on
    a new connection: all requests of ours may be repeated.
    """
    import httpx2

    method = "GET" if data is None else "POST"
    while True:
        events = list[str]()
        trace = {"trace": lambda event, _, events=events: events.append(event)}
        request = client.build_request(
            method, url, content=data, headers=headers, timeout=timeout, extensions=trace
        )
        try:
            return client.send(request, stream=True)
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            if any("connect_tcp" in event for event in events):
                raise  # it was a new connection


def _message(reply: Response) -> str:
    """Return the beginning of what a server says about an error, as far as it arrives."""
    import httpx2

    message = b""
    try:
        for part in reply.iter_raw():
            message += part
            if len(message) >= MOST_MESSAGE:
                break
    except httpx2.TransportError:
        pass  # the status alone says what is wrong
    return message[:MOST_MESSAGE].decode(errors="replace")


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
    """Return why a request failed, in words: an exception may have none."""
    return str(error).strip() or type(error).__name__
