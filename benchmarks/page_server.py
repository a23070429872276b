"""A server of the page in a thread, for measurements and for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from regard.viewer.server import ASKING, server_config


@contextmanager
def in_thread(app: Any, asking: float = ASKING) -> Iterator[str]:
    """The address of a server in a thread, which ends with the block."""
    import uvicorn

    server = uvicorn.Server(server_config(app, asking, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)
