"""The Unix server: replicas on this node send one message per request; values go through shared memory.

A client that breaks the rules is told so once and then ignored, but not hung up on: as long as it lives it may still be
writing into what it reserved. That is free again when its connection ends.
"""

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from hotspan.core.errors import MALFORMED, ConfigError
from hotspan.daemon.log import NodeLog
from hotspan.daemon.operations import BadRequest, Client, Operations
from hotspan.daemon.pool import Pool
from hotspan.l2.daemon_protocol import (
    BUFFER_BYTES,
    GREETING,
    HELLO_MESSAGE,
    VERSION,
    Status,
)

logger = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 1.0


class UnixServer:
    """Serves the socket at `path` on the running loop, until `close`.

    open_segment: a descriptor of the segment, for a client to keep. mode: who may connect, and so read and write all.
    is_durable:   of a daemon with a disk: whether what was said until now stays so after a crash.
    Raises:       ConfigError if the socket can't be made.
    """

    def __init__(
        self,
        path: Path,
        pool: Pool,
        log: NodeLog,
        open_segment: Callable[[], int],
        mode: int = 0o600,
        is_durable: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.path = path
        self.clients: set[Client] = set()
        self._pool = pool
        self._open_segment = open_segment
        self._operations = Operations(pool, log, is_durable)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(path, mode)
        self._is_closed = False
        self._open()

    def close(self) -> None:
        """Let nobody in any more, and hang up."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        for client in list(self.clients):
            self._gone(client)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many files are open: who knocks waits
            logger.warning("unix_accept_failed error=%s", error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._open)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        client = Client(sock)
        self.clients.add(client)
        self._loop.add_reader(sock, self._receive, client)

    def _receive(self, client: Client) -> None:
        try:
            size = client.socket.recv_into(self._buffer, 0, socket.MSG_TRUNC)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._gone(client)
        elif not client.is_ignored:
            try:
                if size > len(self._buffer):
                    raise BadRequest("a message is too long")
                self._take(client, self._buffer[:size])
            except (BadRequest, struct.error, *MALFORMED) as error:
                logger.warning("unix_client_ignored reason=%s", error)
                client.is_ignored = True
                self._send(client, bytes([Status.BAD_REQUEST]))

    def _take(self, client: Client, message: memoryview) -> None:
        if not client.is_greeted:
            self._greet(client, message)
            return
        answer = self._operations.run(client, message)
        if isinstance(answer, bytes):
            self._send(client, answer)
        else:
            self._loop.remove_reader(client.socket)  # one request is in work on a connection
            client.answering = asyncio.ensure_future(self._answer_later(client, answer))

    async def _answer_later(self, client: Client, coming: Awaitable[bytes]) -> None:
        try:
            answer = await coming
        except Exception:  # the task's boundary: the client is told nothing wrong, and nothing more
            logger.exception("unix_client_ignored")
            client.is_ignored = True
        else:
            self._send(client, answer)
        client.answering = None
        self._loop.add_reader(client.socket, self._receive, client)

    def _greet(self, client: Client, message: memoryview) -> None:
        is_known = message == HELLO_MESSAGE
        status = Status.OK if is_known else Status.BAD_REQUEST
        greeting = GREETING.pack(status, VERSION, len(self._pool.memory))
        fd = self._open_segment()
        try:
            socket.send_fds(client.socket, [greeting], [fd] if is_known else [])
        except OSError:
            return  # it is gone, as will be seen
        finally:
            os.close(fd)
        client.is_greeted = is_known
        client.is_ignored = not is_known

    def _send(self, client: Client, answer: bytes) -> None:
        """One answer is in flight at most, so there is room for it; a client that does not read is not waited for."""
        try:
            client.socket.send(answer)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                logger.warning("unix_client_ignored reason=%s", error.strerror)
            client.is_ignored = True

    def _gone(self, client: Client) -> None:
        """Its connection has ended: nobody writes what it reserved, or reads what it leased."""
        self._loop.remove_reader(client.socket)
        if client.answering is not None:
            client.answering.cancel()
        client.socket.close()
        self.clients.discard(client)
        if client.writing is not None:
            self._pool.abort(client.writing)
        self._pool.release_all(client)


def _listen(path: Path, mode: int) -> socket.socket:
    """A socket in the place of whatever a daemon left there that is gone: who has the segment has this name, too."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)
        old = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.setblocking(False)
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} can't be made ({reason}): give another --shared-memory-name") from error
    return listener
