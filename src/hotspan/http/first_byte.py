"""Listening sockets before anything is made of them: their connections, until one has sent a byte.

A connection that sends nothing, such as a probe's, costs its file alone.
"""

import contextlib
import selectors
import socket
from collections.abc import Iterable, Mapping


def await_byte(
    listeners: Iterable[socket.socket], ends: socket.socket, most: int
) -> Mapping[socket.socket, socket.socket] | None:
    """All connections with their listeners, once one of them has sent a byte, which is left to be read.

    most:    connections of each listener; the oldest makes room for a new one.
    Returns: None if something can be read from `ends` before.
    Mutates: the listeners no longer block. Raises: OSError if one can't accept; no connection is left open then.
    """
    heard, waiting = {*listeners}, dict[socket.socket, socket.socket]()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as failed:

        @failed.callback
        def let_go() -> None:
            for each in waiting:
                each.close()

        def drop(connection: socket.socket) -> None:
            del waiting[connection]
            selector.unregister(connection)
            connection.close()

        selector.register(ends, selectors.EVENT_READ)
        for listener in heard:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, data=listener)
        while True:
            ready = [key for key, _ in selector.select()]
            if any(key.fileobj is ends for key in ready):
                return None
            for key in ready:
                at: socket.socket = key.data
                if at in waiting:
                    if _has_sent(at):
                        failed.pop_all()
                        return waiting
                    drop(at)
                elif at in heard and (connection := _accepted(at)) is not None:
                    waiting[connection] = at
                    selector.register(connection, selectors.EVENT_READ, data=connection)
                    beside = [each for each, listener in waiting.items() if listener is at]
                    if len(beside) > most:
                        drop(beside[0])


def _accepted(listener: socket.socket) -> socket.socket | None:
    """The next connection, which does not block; None if it is gone again."""
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    connection.setblocking(False)
    return connection


def _has_sent(connection: socket.socket) -> bool:
    """Whether there is a byte to read; not if it was closed instead."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False
