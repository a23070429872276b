"""uvicorn's connections, with limits for a request or an answer that makes no progress. This file imports uvicorn."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """A client has `asking` seconds for the head of its request, and `reading` to make room for more of an answer.

    The methods are called by asyncio. `limit` is the timer that runs, if one does; when it ends, the connection is
    closed.
    """

    asking: float
    reading: float
    limit: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._close_after(self.asking)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn's `cycle` is the request that is answered: its head is complete
        if self.cycle is not None and not self.cycle.response_complete:
            self._close_after(None)
        elif self.limit is None:  # a request that comes byte by byte has no more time
            self._close_after(self.asking)

    def pause_writing(self) -> None:
        """The client does not read, so the buffer of answers is full."""
        super().pause_writing()
        self._close_after(self.reading)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._close_after(None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._close_after(None)

    def _close_after(self, seconds: float | None) -> None:
        """Close the connection after so many seconds, in place of the timer that ran; None: stop it."""
        if self.limit is not None:
            self.limit.cancel()
        self.limit = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
