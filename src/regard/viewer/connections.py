"""Connections of the server: a client that sends half a request, or reads nothing, is disconnected after a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

#: Seconds that a client has to send the head of its request, and to make room for more of an answer.
ASKING, READING = 10.0, 60.0


def server_config(app: Any, asking: float = ASKING, reading: float = READING, **options: Any) -> uvicorn.Config:
    """The configuration of uvicorn, with one parser of HTTP, whatever else is installed."""
    import uvicorn

    from regard.viewer.timed_connection import TimedConnection

    connection = type("Connection", (TimedConnection,), {"asking": asking, "reading": reading})
    defaults = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1, "ws": "none"}
    return uvicorn.Config(app, http=connection, **defaults | options)


@contextmanager
def in_thread(app: Any, asking: float = ASKING) -> Iterator[str]:
    """The address of a server in a thread, which ends with the block: for tests and measurements."""
    import uvicorn

    server = uvicorn.Server(server_config(app, asking, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)
