"""Serves the page over HTTP, on loopback or with a token. Weights are computed on request.

Only GET and HEAD are answered. With a live model, POST /ask/read reads a typed text. A client that sends half
a request, or reads nothing, is disconnected after a time.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from regard.base.errors import MissingPackage, RegardError, first_line
from regard.viewer.answers import Answers, NoAnswer
from regard.viewer.live_model import LiveModel, Stopped
from regard.viewer.live_request import BODY
from regard.viewer.page import embed, html
from regard.viewer.sheet import Sheet
from regard.viewer.story import Story

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

#: Seconds that a client has to send the head of its request, and to make room for more of an answer.
ASKING, READING = 10.0, 60.0


def server_config(app: Any, asking: float = ASKING, reading: float = READING, **options: Any) -> uvicorn.Config:
    """The configuration of uvicorn for an ASGI application, with one parser of HTTP, whatever else is installed.

    `asking` and `reading` are the time limits of a `TimedConnection`, in seconds.
    """
    import uvicorn

    from regard.viewer.timed_connection import TimedConnection

    connection = type("Connection", (TimedConnection,), {"asking": asking, "reading": reading})
    defaults = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1, "ws": "none"}
    return uvicorn.Config(app, http=connection, **defaults | options)


#: The most texts that wait for the model, and the seconds that a request may take to arrive.
WAITING, ARRIVAL = 8, 10.0
#: The status of a request whose page did not wait for the answer; nobody reads it.
GONE = 499


class TypedRequests:
    """Reads typed texts with the live model of `answers`. A page that goes away, or presses Stop, stops its text.

    `turn` lets one text at a time run. `waiting` counts the text that runs too.
    """

    def __init__(self, answers: Answers) -> None:
        import anyio

        self.answers, self.turn, self.waiting = answers, anyio.Semaphore(1), 0

    async def content(self, request: Request) -> tuple[int, bytes]:
        """The status and the answer of `Answers.read`, or the reason for none in words."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, b"The content type must be application/json."
        if (body := await _body(request)) is None:
            return 413, f"The request is longer than {BODY:,} bytes, or takes longer than {ARRIVAL:.0f} s.".encode()
        if self.waiting > WAITING:
            return 503, f"The model reads one text at a time, and {WAITING} wait. Try again in a moment.".encode()
        self.waiting += 1
        try:
            async with self.turn:
                return await self._read(request, body)
        finally:
            self.waiting -= 1

    async def _read(self, request: Request, body: bytes) -> tuple[int, bytes]:
        """Read in a thread, which looks at `stopped` again and again; a second task sets it when the page goes.

        The task ends with the thread.
        """
        import anyio
        from starlette.concurrency import run_in_threadpool

        if await request.is_disconnected():  # while it waited
            return GONE, b""
        stopped, result = threading.Event(), (GONE, b"")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_await_disconnection, request, stopped)
            result = await run_in_threadpool(_result, self.answers, body, stopped)
            tasks.cancel_scope.cancel()
        return result


def _result(answers: Answers, body: bytes, stopped: threading.Event) -> tuple[int, bytes]:
    """The status and the content of an answer. It runs in a thread of its own."""

    def check() -> None:
        """Stop the work of this thread, if the page has gone."""
        if stopped.is_set():
            raise Stopped("The reader of the page stopped this text.")

    try:
        return 200, answers.read(body, check)
    except Stopped:
        return GONE, b""
    except RegardError as reason:
        return 400, str(reason).encode()
    except Exception as error:  # models raise errors of many types; the page says which, and the server goes on
        return 500, f"The model cannot read this text: {type(error).__name__}: {first_line(error)}".encode()


async def _await_disconnection(request: Request, stopped: threading.Event) -> None:
    """Set `stopped` when the page has gone."""
    import anyio

    while not await request.is_disconnected():
        await anyio.sleep(0.05)
    stopped.set()


async def _body(request: Request) -> bytes | None:
    """The body of a request; None if it is too long, too slow or incomplete."""
    import anyio
    from starlette.requests import ClientDisconnect

    body = b""
    with anyio.move_on_after(ARRIVAL), suppress(ClientDisconnect):
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY:
                return None
        return body
    return None


#: Host names that only this machine can use.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Addresses that mean every address of this machine. Requests then come with names that nobody knows before.
EVERY = ("0.0.0.0", "::")
#: The number of tiles computed at the same time, each by one thread. Tiles are too small for several threads.
AT_ONCE = 2
#: The path to which a page posts typed texts.
READ = "/ask/read"
#: The content types of an error and of an answer.
KINDS = ("text/plain", "application/json")
#: The headers of every answer. The policy of the page itself is in its HTML, where a page cannot forbid frames.
HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


def application(
    sheets: list[Sheet],
    hosts: tuple[str, ...] | None = LOOPBACK,
    token: str = "",
    model: LiveModel | None = None,
    story: Story | None = None,
) -> Starlette:
    """The ASGI application: the page at `/`, answers below `/ask/`. `hosts` are the accepted host names; None: all.

    `sheets` are the texts. With a `model` readers can type texts, which it reads. `story` is a tour that the page
    plays. Requests must have the `token`, unless it is empty.
    """
    _need_packages()
    from starlette.applications import Starlette
    from starlette.routing import Route

    handlers = Handlers(Answers(sheets, model, story))
    routes = [Route("/", handlers.show, methods=["GET"]), Route("/ask/{path:path}", handlers.ask, methods=["GET"])]
    if model is not None:
        routes.insert(0, Route(READ, handlers.read, methods=["POST"]))
    app = Starlette(routes=routes)
    app.add_middleware(Guard, hosts=hosts, token=token, post=None if model is None else READ)
    return app


class Handlers:
    """Answers the requests of a page: the page itself, its data, and typed texts.

    `slots` limits the number of answers that are computed at the same time.
    """

    def __init__(self, answers: Answers) -> None:
        import anyio

        self.answers, self.page = answers, html(embed({"live": True}), "'self'")
        self.slots, self.typed = anyio.Semaphore(AT_ONCE), TypedRequests(answers)

    async def show(self, request: Request) -> Response:
        """The page; it asks for its data."""
        from starlette.responses import HTMLResponse

        return HTMLResponse(self.page)

    async def ask(self, request: Request) -> Response:
        """The answer of `Answers` to the path below /ask/, or 404 with the reason."""
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import PlainTextResponse, Response

        path = request.path_params["path"]
        async with self.slots:
            if await request.is_disconnected():  # the reader moved on, so the page canceled the request
                return Response(status_code=499)
            try:
                content = await run_in_threadpool(self.answers.answer, path)
            except (NoAnswer, RegardError) as reason:
                return PlainTextResponse(str(reason), 404)
        kind = "json" if path.startswith("text") else "octet-stream"
        return Response(content, media_type=f"application/{kind}")

    async def read(self, request: Request) -> Response:
        """The numbers and titles of the sheets of a typed text, or a status and the reason for none."""
        from starlette.responses import Response

        status, content = await self.typed.content(request)
        return Response(content, status, media_type=KINDS[status == 200])  # False, True: an error, an answer


def _need_packages() -> None:
    """Refuse to serve without the optional packages, by an error that names the one that is missing."""
    try:
        import anyio  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackage("view", error.name or "", "view") from None


class Guard:
    """Refuses other host names (DNS rebinding), requests of other sites or without the token, and all but GET and HEAD.

    It is ASGI middleware: it is called for every request before `app`. `hosts` are the accepted names (None: all). POST
    is allowed for the path `post`, or for none. Every answer gets `HEADERS`.
    """

    def __init__(self, app: Any, hosts: tuple[str, ...] | None, token: str, post: str | None) -> None:
        self.app, self.hosts, self.token, self.post = app, hosts, token, post

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        from starlette.datastructures import MutableHeaders
        from starlette.responses import PlainTextResponse

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        answer = self.app if refusal is None else PlainTextResponse(refusal[1], refusal[0])
        return await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        """The status and the reason why a request is refused; None if it is not."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        name = _name(headers.get("host", ""))
        if name is None or (self.hosts is not None and name not in self.hosts):
            return 400, "This is not a host name of this server."
        if _of_another_site(headers, scope["path"]):
            return 403, "This request comes from a page of another site."
        given_token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self.token and not secrets.compare_digest(given_token.encode(), self.token.encode()):
            return 403, "The token is missing or wrong."
        if scope["method"] not in ("GET", "HEAD") and (scope["method"], scope["path"]) != ("POST", self.post):
            return 405, "The supported methods are GET and HEAD."
        return None


def _of_another_site(headers: dict[str, str], path: str) -> bool:
    """Whether a browser says that another site asks. Anybody may link to the page itself, but not ask for answers."""
    if headers.get("origin", "") not in ("", f"http://{headers['host']}", f"https://{headers['host']}"):
        return True
    is_link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link


def _name(host: str) -> str | None:
    """The name in `name:port` or `[address]:port`, in lower case; None if the host has other parts."""
    try:
        return None if set(host) & set("@/?#\\") else urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def listen(host: str, port: int, token: str) -> socket.socket:
    """Open the socket of `serve`. Call it before loading the texts, so that a port in use is an error immediately.

    Other hosts than those of this machine need a `token` of at least 16 characters.
    """
    if host not in LOOPBACK and len(token) < 16:
        raise RegardError(
            f"view: --host {host} makes the page visible to other machines, so it needs --token with at least 16 "
            f"characters, for example {secrets.token_urlsafe(16)}."
        )
    _need_packages()
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)  # the text of create_server names the address a second time
        reason = os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
        remedy = "Another --port may be free; --port 0 takes one that is."
        raise RegardError(f"view: port {port} of {host} cannot be used: {reason}. {remedy}") from None


def serve(
    sheets: list[Sheet],
    listening: socket.socket,
    host: str,
    token: str,
    ready: Any,
    model: LiveModel | None = None,
    story: Story | None = None,
) -> None:
    """Serve until interrupted, at the socket `listening`. `ready` is called with the address of the page.

    The other arguments are those of `application`; `host` is the name that the user gave.
    """
    import torch
    import uvicorn

    app = application(sheets, None if host in EVERY else (*LOOPBACK, host.lower()), token, model, story)
    # tiles run in threads of the server, `AT_ONCE` of them
    torch.set_num_threads(1)
    name = socket.gethostname() if host in EVERY else f"[{host}]" if ":" in host else host
    ready(f"http://{name}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else ""))
    uvicorn.Server(server_config(app)).run(sockets=[listening])
