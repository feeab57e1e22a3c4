"""The server of the pages: one site on 127.0.0.1, for requests with its token.

Everything is read by GET. The few changes are POSTs that only a script of the site's own pages can send.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import webbrowser
from asyncio import to_thread
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import parse_qs

import h11
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from covey.insight.pages import lab
from covey.insight.pages.changes import Changes
from covey.insight.pages.compare import run_differences
from covey.insight.pages.drawings import lab_contents
from covey.insight.pages.records import (
    Runs,
    Tail,
    newly_logged,
    news,
    run_list,
    run_metrics,
    tails,
)
from covey.insight.pages.steps import completions_with_words, group_page, step_page
from covey.insight.pages.thinning import Record
from covey.insight.pages.tokens import token_page
from covey.runs.state import run_state
from covey.system.http import HttpServer, listen
from covey.system.opening import load_json
from covey.system.text import with_finite_numbers
from covey_verify.errors import ConfigError, CoveyError
from covey_verify.web import two_lengths

STATIC = Path(str(files("covey") / "insight" / "pages" / "static"))
ADDRESS = "127.0.0.1"
ASKED_WITH = "x-covey-token"
"""Header that carries the token."""
HEADERS_WITHIN = 10.0
"""Seconds within which a connection must send its first request."""
CHANGES = ("/api/tag", "/api/trash", "/api/restore")
"""Paths of the changes, which are POSTed."""
CHANGE_BYTES = 10_000
LOOK = 0.5
"""Seconds between checks of the files of a live run."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class TokenGate:
    """Refuses requests for other hosts, changes that its own pages did not ask for, runs without the token.

    Adds headers to every answer. The page keeps the token in storage of its own origin, which includes the
    port. A cookie would be sent to every port of the machine.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app = app
        self.token = token
        self.hosts = {f"{host}:{port}" for host in (ADDRESS, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # no websockets here

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.encode(), v.encode()) for k, v in HEADERS.items()]
            await send(message)

        return await (self._refusal(Request(scope)) or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        # Against DNS rebinding: a foreign page whose name resolves to 127.0.0.1 still sends its name here.
        if request.headers.get("host") not in self.hosts:
            return Response("this page answers to 127.0.0.1 only", 421)
        if two_lengths(request.headers):
            return Response("a message has Content-Length or Transfer-Encoding", 400, {"connection": "close"})
        token = request.headers.get(ASKED_WITH, "")
        if request.method == "POST" and request.url.path in CHANGES:
            if refusal := refusal_of_change(request):
                return refusal
        elif request.method not in ("GET", "HEAD"):
            return Response("only GET", 405, {"allow": "GET, HEAD"})
        else:  # an EventSource cannot send a header
            token = token or request.query_params.get("token", "")
        if request.url.path == "/" or request.url.path.startswith("/static/"):
            return None  # the same for everybody: nothing of any run
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return Response("open the address that covey printed: it carries the token of this page", 403)
        return None


def refusal_of_change(request: Request) -> Response | None:
    """Return why a change is refused that no script of the site's own pages can have sent, or one too long.

    Its token is a header of its own and its type is JSON: a browser sends neither to another origin without
    asking first, by OPTIONS, which is refused.
    """
    origin = f"http://{request.headers['host']}"
    expected = {"origin": origin, "sec-fetch-site": "same-origin"}
    if any(request.headers.get(name, value) != value for name, value in expected.items()):
        return Response("a change comes from a page of this site", 403)
    if request.headers.get("content-type") != "application/json":
        return Response("a change is JSON", 415)
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or len(length) > 5 or int(length) > CHANGE_BYTES:
        return Response(f"a change has {CHANGE_BYTES} bytes at most", 413, {"connection": "close"})
    return None


class PromptProtocol(H11Protocol):
    """HTTP that closes connections without a request: each half-sent one would hold a descriptor open."""

    # asyncio declares a BaseTransport and, of a server's protocol, always gives a Transport.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give a new connection its deadline."""
        super().connection_made(transport)
        self.loop.call_later(HEADERS_WITHIN, self._hang_up)

    def _hang_up(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


def json_answer(value: object, status: int = 200) -> Response:
    """Return a JSON response; numbers that are not finite become null."""
    text = json.dumps(with_finite_numbers(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def build_site(root: Path | None, read_only: bool = False, source: Path | None = None) -> Starlette:
    """Return the site without its gate; without a folder it has the lab only.

    ``source``: the path that the pages show for the folder, if the folder is a copy of it.
    """
    runs = Runs(root, source)
    runs.writable = not read_only
    changes = () if read_only else _change_routes(Changes(runs))
    routes = [Route(f"/api/{name}", _endpoint(partial(answer, runs))) for name, answer in ANSWERS.items()]
    return Starlette(
        routes=[
            Route("/", _index),
            *routes,
            *changes,
            Route("/api/live", partial(_live, runs)),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


def _index(_: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _endpoint(answer: Callable[[Request], object]) -> Callable[[Request], Response]:
    """Return an endpoint that answers in JSON."""

    # A plain function, not a coroutine: Starlette runs it in a thread, so slow reads block nobody.
    def endpoint(request: Request) -> Response:
        return _respond(partial(answer, request))

    return endpoint


def _respond(answer: Callable[[], object]) -> Response:
    """Return an answer in JSON, or the reason if there is none."""
    try:
        return json_answer(answer())
    except CoveyError as error:
        return json_answer({"error": str(error)}, 400)
    except OSError as error:  # the run's folder may go while it is looked at
        return json_answer({"error": f"{error.filename}: {error.strerror}"}, 400)


def _change_routes(changes: Changes) -> list[Route]:
    """Return the routes of the changes, in the order of ``CHANGES``."""
    acts = (changes.tag, changes.trash, changes.restore)

    def endpoint(act: Callable[[Record], Record]) -> Callable[[Request], Awaitable[Response]]:
        async def change(request: Request) -> Response:
            body = await request.body()
            return await to_thread(_respond, partial(_apply_change, act, body))

        return change

    return [Route(path, endpoint(act), methods=["POST"]) for path, act in zip(CHANGES, acts, strict=True)]


def _apply_change(act: Callable[[Record], Record], body: bytes) -> Record:
    try:
        request = load_json(body)
    except ValueError:
        request = None
    if not isinstance(request, dict):
        raise ConfigError("a change is an object of JSON")
    return act(request)


def _live(runs: Runs, request: Request) -> Response:
    """Stream the records that come after the bytes of each stream that the page has."""
    try:
        positions = {name: _number(request, name) for name in set(request.query_params) - {"run", "token"}}
        events = live_events(_folder(runs, request), positions)
    except CoveyError as error:
        return json_answer({"error": str(error)}, 400)
    return StreamingResponse(events, media_type="text/event-stream")


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{name}: {text!r} is not a number")
    return int(text)


def _folder(runs: Runs, request: Request, name: str = "run") -> Path:
    return runs.folder(request.query_params.get(name, ""))


def _runs(runs: Runs, _: Request) -> object:
    return {"root": str(runs.source or runs.root or ""), "writable": runs.writable, **run_list(runs)}


def _run_page(runs: Runs, request: Request) -> object:
    return runs.page(request.query_params.get("run", ""))


def _metrics(runs: Runs, request: Request) -> object:
    return run_metrics(request.query_params.get("run", ""), _folder(runs, request))


def _compare(runs: Runs, request: Request) -> object:
    return run_differences(_folder(runs, request, "a"), _folder(runs, request, "b"))


def _step(runs: Runs, request: Request) -> object:
    return step_page(_folder(runs, request), _number(request, "step"))


def _search(runs: Runs, request: Request) -> object:
    words = request.query_params.get("words", "")
    return completions_with_words(_folder(runs, request), _number(request, "step"), words)


def _group(runs: Runs, request: Request) -> object:
    return group_page(_folder(runs, request), _number(request, "step"), _number(request, "group"))


def _tokens(runs: Runs, request: Request) -> object:
    numbers = [_number(request, name) for name in ("step", "group", "sample")]
    return token_page(_folder(runs, request), *numbers)


def _lab(_: Runs, __: Request) -> object:
    return lab_contents()


def _tool(_: Runs, request: Request) -> object:
    return lab.answer_tool(request.path_params["tool"], parse_qs(request.url.query))


ANSWERS: Mapping[str, Callable[[Runs, Request], object]] = {
    "runs": _runs,
    "run": _run_page,
    "metrics": _metrics,
    "compare": _compare,
    "step": _step,
    "search": _search,
    "group": _group,
    "tokens": _tokens,
    "lab": _lab,
    "lab/{tool}": _tool,
}
"""Path below `/api` -> what answers there."""


async def live_events(folder: Path, positions: Mapping[str, int]) -> AsyncIterator[str]:
    """Yield new records of a run as server-sent events; `reset` if a resume has truncated its streams."""
    streams = tails(folder, positions)
    state = ""
    while True:
        try:
            records = await to_thread(_read_all, streams)
        except (EOFError, OSError, CoveyError):
            yield "event: reset\ndata: {}\n\n"
            return
        previous = state
        state = run_state(folder)
        if any(records.values()) or state != previous:
            message: Record = {
                "state": state,
                **news(records),
                "logged": newly_logged(folder, records["metrics"]),
            }
            yield f"data: {json.dumps(with_finite_numbers(message), allow_nan=False)}\n\n"
        await asyncio.sleep(LOOK)


def _read_all(streams: Mapping[str, Tail]) -> dict[str, list[Record]]:
    return {name: tail.read() for name, tail in streams.items()}


def serve_pages(
    root: Path | None,
    port: int,
    open_browser: bool,
    fragment: str,
    as_json: bool,
    read_only: bool = True,
    source: Path | None = None,
) -> None:
    """Show the pages until Ctrl-C. ``port`` 0 takes any free one. Raises ConfigError if a port is taken.

    ``source`` as in ``build_site``.
    """
    if root is not None and not root.is_dir():
        raise ConfigError(f"{root}: there is no such folder. Give a run's folder, or one with runs in it")
    with listen(ADDRESS, port) as listener, TemporaryDirectory(prefix="covey-") as private:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(16)
        url = f"http://{ADDRESS}:{port}/?token={token}{fragment}"
        site = build_site(root, read_only, source)
        server = HttpServer(TokenGate(site, token, port), "critical", PromptProtocol)
        print(json.dumps({"url": url}) if as_json else f"{url}\nCtrl-C ends it", flush=True)
        if open_browser and _has_display():
            webbrowser.open(_doorway(Path(private), url).as_uri())
        server.run(sockets=[listener])


def _doorway(folder: Path, url: str) -> Path:
    """Return a file in a private folder that redirects a browser to the address.

    Anybody on a machine can read a command's arguments, and the address holds the token.
    """
    page = folder / "covey.html"
    page.write_text(f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">')
    return page


def _has_display() -> bool:
    """Whether a browser would open a window rather than take over the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
