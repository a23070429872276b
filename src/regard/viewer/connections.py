"""Connections of the server: a client that sends half a request, or reads nothing, is disconnected after a time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

#: Seconds that a client has to send the head of its request, and to make room for more of an answer.
ASKING, READING = 10.0, 60.0


def server_config(app: Any, asking: float = ASKING, reading: float = READING, **options: Any) -> uvicorn.Config:
    """The configuration of uvicorn, with one parser of HTTP, whatever else is installed."""
    import uvicorn

    defaults = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1, "ws": "none"}
    return uvicorn.Config(app, http=_connection_class(asking, reading), **defaults | options)


@cache
def _connection_class(asking: float, reading: float) -> type[Any]:
    """uvicorn's class of connections, with limits for a request or an answer that makes no progress."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        limit: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._close_after(asking)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._close_after(None)
            elif self.limit is None:  # a request that comes byte by byte has no more time
                self._close_after(asking)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._close_after(reading)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._close_after(None)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._close_after(None)

        def _close_after(self, seconds: float | None) -> None:
            if self.limit is not None:
                self.limit.cancel()
            self.limit = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    return Connection
