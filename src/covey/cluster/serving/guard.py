"""Who may ask a server of ours, and how much a request may hold."""

from __future__ import annotations

import asyncio
import hmac
from http import HTTPStatus

from starlette.requests import Request

from covey_verify.errors import CoveyError
from covey_verify.web import LOOPBACK, two_lengths

MAX_BODY = 16 << 20
"""Most bytes of a request's body."""
BODY_SECONDS = 30.0
"""Seconds for a body to arrive."""


class Refusal(CoveyError):
    """Raised for a request that cannot be answered, with the HTTP status of the reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def admit(request: Request, token: str, presented: str) -> None:
    """Check that a caller may ask at all; it has ``presented`` the ``token``, if any. Raises Refusal."""
    # A proxy and this server could disagree about where the message ends (request smuggling).
    if two_lengths(request.headers):
        raise Refusal(400, "Content-Length and Transfer-Encoding: a message has one of them")
    if token:
        # In constant time, so that the reply's delay does not reveal how much of the token is correct.
        if not hmac.compare_digest(presented.encode(), token.encode()):
            raise Refusal(401, "the token is missing or wrong: Authorization: Bearer ...")
    elif request.url.hostname not in LOOPBACK:
        # A page of another site can make a browser ask here under its own name (DNS rebinding).
        raise Refusal(403, "without a token only 127.0.0.1 and localhost are answered")
    elif _foreign(request):
        raise Refusal(403, "without a token pages of other sites are not answered (Origin, Sec-Fetch-Site)")


def _foreign(request: Request) -> bool:
    """Whether a browser sent the request for a page of another server."""
    origin = request.headers.get("origin")
    allowed = (None, f"{request.url.scheme}://{request.headers.get('host', '')}")
    site = request.headers.get("sec-fetch-site", "none")
    return origin not in allowed or site not in ("none", "same-origin")


async def body(request: Request, kind: str = "application/json") -> bytes:
    """Return the body of a request, which has to be of this media type. Raises Refusal."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        # No form of another site can send these types.
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        name = "JSON" if kind == "application/json" else "a message"
        raise Refusal(status, f"send {name}, and say so: Content-Type: {kind}")
    # Counted while it arrives: Content-Length may be missing or false.
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                received += part
                if len(received) > MAX_BODY:
                    raise Refusal(413, f"a body of more than {MAX_BODY} bytes")
    except TimeoutError:
        raise Refusal(408, f"the body took more than {BODY_SECONDS:g} s") from None
    return bytes(received)
