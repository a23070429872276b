"""Requests of an open page to read a typed text: one at a time, few that wait, and one that its page can stop."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from regard.base.errors import RegardError
from regard.viewer.answers import Answers
from regard.viewer.live_model import Stopped
from regard.viewer.live_request import BODY

if TYPE_CHECKING:
    from starlette.requests import Request

#: The most texts that wait for the model, and the seconds that a request may take to arrive.
WAITING, ARRIVAL = 8, 10.0
#: The status of a request whose page did not wait for the answer; nobody reads it.
GONE = 499


class TypedRequests:
    """Reads typed texts with the live model of `answers`. A page that goes away, or presses Stop, stops its text."""

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
        """Read in a thread, which looks at `stopped` again and again; a second task sets it when the page goes."""
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
        if stopped.is_set():
            raise Stopped("The reader of the page stopped this text.")

    try:
        return 200, answers.read(body, check)
    except Stopped:
        return GONE, b""
    except RegardError as reason:
        return 400, str(reason).encode()
    except Exception as error:  # models raise errors of many types; the page says which, and the server goes on
        lines = str(error).strip().splitlines() or [""]
        return 500, f"The model cannot read this text: {type(error).__name__}: {lines[0][:200]}".encode()


async def _await_disconnection(request: Request, stopped: threading.Event) -> None:
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
