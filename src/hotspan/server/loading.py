"""Answers while the model loads: the port is open from the start, and says that it is too early."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.types import Receive, Scope, Send

from hotspan.server.errors import HttpError

RETRY_S = 5

_STOP_S = 5.0


async def loading(scope: Scope, receive: Receive, send: Send) -> None:
    """The app until there is another: 503 to everything; /ping says that the server is loading."""
    error = HttpError(503, "the model is loading: try again")
    body = {"status": "Loading"} if scope["path"].endswith("/ping") else error.body(503)
    content = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"retry-after", str(RETRY_S).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@contextlib.contextmanager
def answering_while_loading(listener: socket.socket) -> Iterator[None]:
    """Inside, whoever connects to `listener` is told to wait; who connects at the very end waits for the next server.

    A thread of its own, since loading blocks the event loop. The listener stays open, and listens from then on.
    """
    listener.listen()
    server = uvicorn.Server(
        uvicorn.Config(loading, lifespan="off", ws="none", log_config=None, access_log=False, timeout_keep_alive=1)
    )
    # Another descriptor of the same socket: uvicorn closes it at its end, and connections that wait stay in its queue.
    thread = threading.Thread(target=server.run, args=([listener.dup()],), name="hotspan-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join(_STOP_S)
