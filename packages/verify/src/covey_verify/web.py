"""The client of JSON over HTTP, with limits on bytes and seconds and without redirects."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from httpx2 import Client, Response

MAX_MESSAGE = 400
"""Number of bytes kept of a server's error message."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which are reached without a proxy."""
IDLE = 2.0
"""Seconds that an idle connection is kept: fewer than servers do, which then close few as we reuse them."""


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
    # The environment names a proxy of another kind, such as ALL_PROXY=socks5://..., or no address.
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        raise OSError(f"a proxy that the environment names cannot be used: {error}") from None


# A forked child makes clients of its own: it must not ask on its parent's connections.
os.register_at_fork(after_in_child=_client.cache_clear)


def ask(
    url: str, body: object = None, token: str = "", timeout: float = 60.0, largest: int = 1 << 20
) -> object:
    """Return the JSON reply to a GET, or to a POST of ``body``.

    ``timeout`` in seconds and ``largest`` in bytes limit the whole reply, however slowly it arrives. Raises
    StatusError for a status other than 2xx, TimeoutError or ConnectionError if there is no answer (all three
    are OSErrors), TooLong for a reply that exceeds ``largest``, and ValueError for one that is no JSON.
    """
    parts = urlsplit(plain_address(url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is not an http address")
    # Not compressed: a small reply could become a large one before its size is known.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    if token:
        # httpx would refuse it too, but show it.
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the key has characters that no header can have, such as a line break")
        headers["Authorization"] = f"Bearer {token}"
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    received = _send(url, data, headers, Deadline(timeout), largest)
    try:
        return json.loads(received) if received.strip() else None
    except RecursionError:
        raise ValueError("the reply is JSON that nests too deeply") from None


class Deadline:
    """The time that a whole reply has."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends = time.monotonic() + seconds

    def seconds_left(self) -> float:
        """Return the seconds that are left. Raises TimeoutError if there are none."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole reply within {self.seconds:g} s")
        return left


def _send(
    url: str, data: bytes | None, headers: Mapping[str, str], deadline: Deadline, largest: int
) -> bytes:
    """Send a request and return the bytes of its reply. Raises as ``ask`` does."""
    with _plain_errors(url, deadline), _reply(url, data, headers, deadline) as reply:
        plain = reply.headers.get("content-encoding", "identity") == "identity"
        if not reply.is_success:
            message = b""
            # Without a message the status alone says what is wrong.
            with suppress(OSError), _plain_errors(url, deadline):
                message = _receive_body(reply, MAX_MESSAGE, deadline) if plain else b""
            words = message[:MAX_MESSAGE].decode(errors="replace")
            raise StatusError(reply.status_code, words, reply.headers.get("location", ""))
        if not plain:
            raise ValueError("the reply is compressed, which was not asked for")
        received = _receive_body(reply, largest, deadline)
    if len(received) > largest:
        raise TooLong(f"the reply has more than {largest} bytes")
    return received


@contextmanager
def _plain_errors(url: str, deadline: Deadline) -> Iterator[None]:
    """Raise Python's own exceptions for those of httpx."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException:
        raise TimeoutError(f"no whole reply within {deadline.seconds:g} s") from None
    except httpx2.TransportError as error:
        raise ConnectionError(str(error).strip() or type(error).__name__) from None
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url} is not an http address: {error}") from None


@contextmanager
def _reply(
    url: str, data: bytes | None, headers: Mapping[str, str], deadline: Deadline
) -> Iterator[Response]:
    """Send a request; the body of the reply is still to be read.

    A server may close a kept connection while a request is on its way to it. The request is then sent again,
    as if it had been sent on a new connection at once: each of ours may be repeated.
    """
    import httpx2

    client = _client(urlsplit(url).hostname in LOOPBACK)
    reply = None
    while reply is None:
        events = list[str]()
        request = client.build_request(
            "GET" if data is None else "POST",
            url,
            content=data,
            headers=headers,
            timeout=deadline.seconds_left(),
            extensions={"trace": lambda event, _, events=events: events.append(event)},
        )
        try:
            reply = client.send(request, stream=True)
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            if any("connect_tcp" in event for event in events):
                raise  # the connection was new
    try:
        yield reply
    finally:
        reply.close()


def _receive_body(reply: Response, most: int, deadline: Deadline) -> bytes:
    """Return the body of a reply, or its beginning if it has more than ``most`` bytes."""
    received = bytearray()
    # httpx limits the time of each read only, so the total is checked here.
    for part in reply.iter_raw():
        received += part
        if len(received) > most:
            break
        deadline.seconds_left()
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
    """Return why a request failed, in words: an exception may have none."""
    return str(error).strip() or type(error).__name__
