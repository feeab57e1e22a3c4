"""JSON over HTTP, with a bound on everything: bytes, seconds, redirects."""

from __future__ import annotations

import http.client
import io
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for the address in the config; another one is not followed to."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
MOST_SAID = 400
"""Bytes that are kept of what a server says beside a status."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""This machine, which no proxy stands in front of."""


def plain_address(url: str) -> str:
    """The same. Raises ValueError, without the address, for one that holds a user name or password."""
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ValueError(
            "an address with a user name or password would be printed and written down; keys "
            "are read from environment variables"
        )
    return url


def without_password(text: str) -> str:
    """A text in which addresses have no user names and passwords.

    >>> without_password("see http://me:secret@there:80/v1")
    'see http://***@there:80/v1'
    """
    return re.sub(r"(://)[^/\s'\"]*@", r"\1***@", text)


def two_lengths(headers: Mapping[str, str]) -> bool:
    """Whether a message says in two ways how long it is; a proxy may read it differently."""
    return "content-length" in headers and "transfer-encoding" in headers


def _kept(error: urllib.error.HTTPError) -> urllib.error.HTTPError:
    """The same without a connection, with the beginning of what was said."""
    try:
        said = error.read(MOST_SAID)
    except (OSError, http.client.HTTPException, ValueError):
        said = b""
    return urllib.error.HTTPError(error.url, error.code, error.msg, error.headers, io.BytesIO(said))


def ask(
    url: str, body: object = None, token: str = "", timeout: float = 60.0, largest: int = 1 << 20
) -> object:
    """The JSON that a GET, or a POST of ``body``, is answered with.

    ``timeout`` in seconds and ``largest`` in bytes bound the whole reply, however it trickles. Raises
    urllib.error.HTTPError for a status that is not 2xx, OSError or http.client.HTTPException where nobody
    answers, and ValueError for a reply that is no JSON or over a bound.
    """
    plain_address(url)
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url} is no http address")
    headers = {"Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    ends, received = time.monotonic() + timeout, bytearray()
    opener = _DIRECT if urlsplit(url).hostname in LOOPBACK else _OPENER
    request = urllib.request.Request(url, data, headers)  # noqa: S310  the scheme is checked above
    try:
        with opener.open(request, timeout=timeout) as reply:
            while part := reply.read1(1 << 16):
                received += part
                if len(received) > largest:
                    raise ValueError(f"a reply of more than {largest} bytes")
                if time.monotonic() > ends:
                    raise TimeoutError(f"no whole reply within {timeout:g} s")
    except urllib.error.HTTPError as error:
        with error:  # here, because whoever catches it may forget to close its connection
            raise _kept(error) from None
    return json.loads(received) if received.strip() else None


def reason_of(error: BaseException) -> str:
    """What a server said or what went wrong on the way, in a line."""
    if isinstance(error, urllib.error.HTTPError):
        said = error.read().decode(errors="replace")
        return f"HTTP {error.code} {error.reason} {' '.join(said.split())[:200]}".strip()
    return str(error).strip() or type(error).__name__
