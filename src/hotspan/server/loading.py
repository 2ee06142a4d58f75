"""Responses while the model loads: the port is open from the start and answers 503."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from starlette.types import Receive, Scope, Send

from hotspan.core.threads import start
from hotspan.http.errors import HttpError
from hotspan.http.exchange import Exchange

_STOP_S = 5.0
_AGAIN_S = 0.5


async def loading(scope: Scope, receive: Receive, send: Send) -> None:
    """The app until there is another: 503 to everything; /ping says that the server is loading."""
    error = HttpError(503, "the model is loading: try again")
    content = b'{"status": "Loading"}' if scope["path"].endswith("/ping") else error.content()
    await Exchange(scope, receive, send).respond(503, content, headers={**error.headers, "connection": "close"})


@contextlib.contextmanager
def answering_while_loading(listener: socket.socket, tls: Mapping[str, Any] | None = None) -> Iterator[None]:
    """In the block, requests to `listener` get 503. Connections at its very end wait for the next server.

    tls: uvicorn's options for it.

    A thread of its own, since loading blocks the event loop. The listener stays open, and listens from then on.
    """
    listener.listen()
    quiet: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False}
    server = uvicorn.Server(uvicorn.Config(loading, timeout_keep_alive=1, **quiet, **(tls or {})))
    # Another descriptor of the same socket: uvicorn closes it at its end, and connections that wait stay in its queue.
    mine = listener.dup()
    thread = start("loading", lambda: server.run([mine]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join(_STOP_S)


@contextlib.contextmanager
def loading_within(seconds: float, error_file: Path) -> Iterator[None]:
    """In the block, loading has a time limit. After it the engine's processes are ended; `error_file` has the reason.

    A thread of its own, since loading blocks the event loop and can't be interrupted.
    """
    loaded = threading.Event()

    def watch() -> None:
        if loaded.wait(seconds):
            return
        error_file.write_text(
            f"the model was not loaded within {seconds:g} s: give it longer (--startup-timeout-s, "
            "option.model_loading_timeout or SAGEMAKER_STARTUP_TIMEOUT)"
        )
        while not loaded.wait(_AGAIN_S):  # the next may only just begin
            for process in psutil.Process().children():
                process.terminate()

    thread = start("loading-limit", watch)
    try:
        yield
    finally:
        loaded.set()
        thread.join()
