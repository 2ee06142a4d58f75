"""A small server of the managed-tiered-storage protocol over a real segment, written from its description only.

It is what the protocol's tests are tried on, and the peer of the store's tests: each operation can be answered by
something else (`instead`), and what a lease says can be changed (`twist`).
"""

import contextlib
import json
import mmap
import os
import random
import socket
import ssl
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 16 << 10
_EARLY_S = 0.1
_DELETED = "(deleted)"


@dataclass
class Stored:
    """An object: the pages it has, in order, and until when which lease pins it."""

    size: int
    pages: list[int]
    is_whole: bool = False
    leases: dict[str, float] = field(default_factory=dict)

    def is_pinned(self) -> bool:
        """Whether a lease holds that has not run out."""
        return not self.is_whole or any(until > time.monotonic() for until in self.leases.values())

    def offsets(self) -> list[dict[str, int]]:
        """Where it is, as a lease says it."""
        sizes = [min(PAGE, self.size - at) for at in range(0, self.size, PAGE)]
        return [{"offset": page * PAGE, "len": size} for page, size in zip(self.pages, sizes, strict=True)]


class Peer:
    """A server on 127.0.0.1, running from the constructor to `close`.

    is_hotspan: answers DELETE and GET /health, as hotspan's own daemon does.
    """

    def __init__(
        self,
        size: int = 64 << 20,
        name: str | None = None,
        *,
        is_hotspan: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name or f"hotspan-test-{uuid.uuid4().hex}"
        self.path = Path("/dev/shm") / self.name
        self.is_hotspan = is_hotspan
        self.tls = tls
        self.instead: dict[str, Callable[[Handler], None]] = {}
        self.twist: Callable[[dict[str, Any]], Any] | None = None
        self.asked: Counter[str] = Counter()
        self.agents: set[str] = set()
        self.holds_ms: list[int] = []
        self.connections = 0
        self._size = size
        self._port = 0
        self._start()

    @property
    def port(self) -> int:
        """Where it listens, also after a restart."""
        return self._port

    def leases(self) -> int:
        """How many leases hold."""
        with self._changed:
            now = time.monotonic()
            return sum(until > now for stored in self._objects.values() for until in stored.leases.values())

    def names(self) -> list[str]:
        """The keys of the whole objects."""
        with self._changed:
            return [key for (bucket, key), one in self._objects.items() if one.is_whole and bucket != _DELETED]

    def evict(self, key: str) -> None:
        """Forget an object, as for want of room."""
        with self._changed:
            for name in [name for name in self._objects if name[1] == key]:
                self._free += self._objects.pop(name).pages

    def restart(self) -> None:
        """Stop, and start on the same port with another, empty segment of the same name."""
        self.close()
        self._start()

    def close(self) -> None:
        """Stop; open connections are cut."""
        self._server.shutdown()
        self._server.server_close()
        self.cut()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def cut(self) -> None:
        """Cut all connections."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin_put(self, name: tuple[str, str], size: int) -> Stored | None:
        """Pages for an object; None if it exists. Raises: MemoryError if there is no room."""
        with self._changed:
            if name in self._objects:
                return None
            need = -(-size // PAGE)
            for old in list(self._objects):
                if len(self._free) >= need:
                    break
                if not self._objects[old].is_pinned():
                    self._free += self._objects.pop(old).pages
            if len(self._free) < need:
                raise MemoryError
            stored = Stored(size, [self._page() for _ in range(need)])
            self._objects[name] = stored
            return stored

    def write(self, stored: Stored, at: int, data: bytes) -> None:
        """Write bytes of an object, not over a page's end."""
        offset = stored.pages[at // PAGE] * PAGE + at % PAGE
        self._memory[offset : offset + len(data)] = data

    def end_put(self, name: tuple[str, str], stored: Stored, is_whole: bool) -> None:
        """Show an object to all, or forget it."""
        with self._changed:
            if is_whole:
                stored.is_whole = True
            else:
                self._free += self._objects.pop(name).pages
            self._changed.notify_all()

    def lease(self, name: tuple[str, str], hold_s: float, ttl_s: float) -> tuple[int, dict[str, Any]]:
        """Status and body; waits while the object is being written."""
        until = time.monotonic() + max(0.0, hold_s - _EARLY_S)

        def is_settled() -> bool:
            return name not in self._objects or self._objects[name].is_whole

        with self._changed:
            while not is_settled() and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())
            stored = self._objects.get(name)
            if stored is None or not stored.is_whole:
                return (404 if stored is None else 504), {"error": "not here"}
            self._objects.move_to_end(name)
            lease = f"lease/{uuid.uuid4().hex}"
            stored.leases[lease] = time.monotonic() + ttl_s
            return 200, {"id": lease, "offsets": stored.offsets()}

    def release(self, lease: str) -> None:
        """Forget a lease, whether there is one or not."""
        with self._changed:
            for stored in self._objects.values():
                stored.leases.pop(lease, None)

    def delete(self, name: tuple[str, str]) -> bool:
        """Whether there was such an object. What is leased stays in its place."""
        with self._changed:
            stored = self._objects.pop(name, None)
            if stored is None:
                return False
            if stored.is_pinned():
                self._objects[(_DELETED, uuid.uuid4().hex)] = stored
            else:
                self._free += stored.pages
            return True

    # -- inside ----------------------------------------------------------------------------------------------------

    def _page(self) -> int:
        """Any free page, so that every object lies in pieces."""
        at = random.randrange(len(self._free))
        self._free[at], self._free[-1] = self._free[-1], self._free[at]
        return self._free.pop()

    def _start(self) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, self._size)
        self._memory = mmap.mmap(fd, self._size)
        os.close(fd)
        self._free = list(range(self._size // PAGE))
        self._objects: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", self._port), self)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.005})
        self._thread.start()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: "_Server"

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()
        self.peer = self.server.peer
        self.peer.connections += 1
        self.peer._sockets.add(self.connection)

    def finish(self) -> None:
        self.peer._sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def answer(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        """Answer, and keep the connection unless it was said otherwise."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        parts = self._parts()
        size = self._size()
        if size is None:
            self.close_connection = True
            self.answer(411 if "Content-Length" not in self.headers else 400)
        elif len(parts) != 4 or parts[:2] != ["v1", "kv"]:
            self._drained(size)
            self.answer(404)
        elif not self._is_taken_over("put"):
            self._put((unquote(parts[2]), unquote(parts[3])), size)

    def do_POST(self) -> None:
        parts = self._parts()
        self._drained(self._size() or 0)
        if len(parts) == 5 and parts[:2] == ["v1", "kv"] and parts[4] == "leases":
            if not self._is_taken_over("lease"):
                self._lease((unquote(parts[2]), unquote(parts[3])))
        elif len(parts) == 4 and parts[:2] == ["v1", "leases"] and parts[3] == "release":
            if not self._is_taken_over("release"):
                self.peer.release(unquote(parts[2]))
                self.answer(200, b"{}")
        else:
            self.answer(404)

    def do_GET(self) -> None:
        if self.path != "/health":
            self.answer(404)
        elif not self._is_taken_over("health"):
            said = json.dumps({"service": "hotspan-daemon"}).encode()
            self.answer(*((200, said) if self.peer.is_hotspan else (404,)))

    def do_DELETE(self) -> None:
        parts = self._parts()
        if not self.peer.is_hotspan or len(parts) != 4 or parts[:2] != ["v1", "kv"]:
            self.answer(405)
        elif not self._is_taken_over("delete"):
            self.answer(200 if self.peer.delete((unquote(parts[2]), unquote(parts[3]))) else 404)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _parts(self) -> list[str]:
        return urlsplit(self.path).path.split("/")[1:]

    def _size(self) -> int | None:
        said = set(self.headers.get_all("Content-Length", []))
        return int(said.pop()) if len(said) == 1 and all(one.isascii() and one.isdigit() for one in said) else None

    def _drained(self, size: int) -> None:
        while size > 0:
            got = len(self.rfile.read(min(size, 1 << 16)))
            if not got:
                raise ConnectionError
            size -= got

    def _is_taken_over(self, operation: str) -> bool:
        self.peer.asked[operation] += 1
        self.peer.agents.add(self.headers.get("User-Agent", ""))
        instead = self.peer.instead.get(operation)
        if instead is not None:
            instead(self)
        return instead is not None

    def _put(self, name: tuple[str, str], size: int) -> None:
        try:
            stored = self.peer.begin_put(name, size)
        except MemoryError:
            self._drained(size)
            self.answer(507)
            return
        if stored is None:
            self._drained(size)
            self.answer(409)
            return
        at = 0
        try:
            while at < size:
                data = self.rfile.read(min(PAGE, size - at))
                if not data:
                    break
                self.peer.write(stored, at, data)
                at += len(data)
        finally:
            self.peer.end_put(name, stored, at == size)
        self.answer(200)

    def _lease(self, name: tuple[str, str]) -> None:
        query = parse_qs(urlsplit(self.path).query)
        try:
            hold_ms, ttl_s = int(query.get("timeout_ms", ["0"])[0]), float(query.get("ttl_s", ["30"])[0])
            hold_ms = min(hold_ms, 60_000)
        except ValueError:
            self.answer(400)
            return
        self.peer.holds_ms.append(hold_ms)
        status, said = self.peer.lease(name, hold_ms / 1000, ttl_s)
        twisted = self.peer.twist(said) if status == 200 and self.peer.twist is not None else said
        self.answer(status, twisted if isinstance(twisted, bytes) else json.dumps(twisted).encode())


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], peer: Peer) -> None:
        self.peer = peer
        super().__init__(address, Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        if self.peer.tls is not None:
            sock = self.peer.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, address

    def handle_error(self, request: object, client_address: object) -> None:
        """What a test does to a connection is no error here."""
