"""The client of JSON over HTTP, with limits on bytes and seconds and without redirects."""

from __future__ import annotations

import http.client
import io
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from urllib.parse import urlsplit


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the key is meant for the address in the config only."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
MOST_MESSAGE = 400
"""Number of bytes kept of a server's error message."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which are reached without a proxy."""


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


def _detached(error: urllib.error.HTTPError) -> urllib.error.HTTPError:
    """Return the error without its connection, with the beginning of the server's message."""
    try:
        message = error.read(MOST_MESSAGE)
    except (OSError, http.client.HTTPException, ValueError):
        message = b""
    return urllib.error.HTTPError(error.url, error.code, error.msg, error.headers, io.BytesIO(message))


def ask(
    url: str, body: object = None, token: str = "", timeout: float = 60.0, largest: int = 1 << 20
) -> object:
    """Return the JSON reply to a GET, or to a POST of ``body``.

    ``timeout`` in seconds and ``largest`` in bytes limit the whole reply, however slowly it arrives. Raises
    urllib.error.HTTPError for a status other than 2xx, OSError or http.client.HTTPException if there is no
    answer, and ValueError for a reply that is no JSON or exceeds a limit.
    """
    plain_address(url)
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url} is not an http address")
    headers = {"Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    ends = time.monotonic() + timeout
    received = bytearray()
    opener = _DIRECT if urlsplit(url).hostname in LOOPBACK else _OPENER
    request = urllib.request.Request(url, data, headers)  # noqa: S310  the scheme is checked above
    try:
        with opener.open(request, timeout=timeout) as reply:
            # urllib's timeout is for each read only, so the total is checked here.
            while part := reply.read1(1 << 16):
                received += part
                if len(received) > largest:
                    raise ValueError(f"the reply has more than {largest} bytes")
                if time.monotonic() > ends:
                    raise TimeoutError(f"no whole reply within {timeout:g} s")
    except urllib.error.HTTPError as error:
        with error:  # closed here, because a caller may forget to close it
            raise _detached(error) from None
    return json.loads(received) if received.strip() else None


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
    if not isinstance(error, urllib.error.HTTPError):
        return True
    return error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code == HTTPStatus.TOO_MANY_REQUESTS


def reason_of(error: BaseException) -> str:
    """Return a server's error message, or the reason of a failed connection, in one line."""
    if isinstance(error, urllib.error.HTTPError):
        message = error.read().decode(errors="replace")
        return f"HTTP {error.code} {error.reason} {' '.join(message.split())[:200]}".strip()
    return str(error).strip() or type(error).__name__
