"""The life of a node's daemon: take the port, make the memory, listen, serve until a signal, leave nothing."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from uvicorn.server import ServerState

from hotspan.core.addresses import is_loopback
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.core.types import GIB
from hotspan.daemon.disk import LAYOUT, DiskCopies, DiskCounts, disk_options
from hotspan.daemon.log import MAX_ENTRIES, NodeLog
from hotspan.daemon.metadata import AbsentMetadata
from hotspan.daemon.metrics import DaemonFigures
from hotspan.daemon.options import DaemonOptions
from hotspan.daemon.pool import Pool
from hotspan.daemon.routes import Routes
from hotspan.daemon.segment import HEADER_BYTES, NameWatch, SharedSegment
from hotspan.daemon.unix_server import UnixServer
from hotspan.http.connections import HttpLimits, raise_file_limit
from hotspan.http.hosts import Hosts
from hotspan.http.serving import BACKLOG, address_errors, bind, listen
from hotspan.l2.log import SharedInvalidationLog
from hotspan.tiers.files import Files
from hotspan.tiers.owned import explained

logger = logging.getLogger(__name__)

_SWEEP_S = 0.25
_MAX_END_S = 1.0  # at the end, for requests
_MAX_SAVE_S, _MAX_NOTE_S = 3.0, 1.0  # at the end, for objects, and for table and log
_LIMITS = HttpLimits(least_rate=1e6, idle_s=300.0, head_bytes=16384)
"""A value may be as large as the pool lets it be: it is stored as it comes."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_daemon(options: DaemonOptions, clock: Clock | None = None, files: Files | None = None) -> None:
    """Serve until SIGTERM or SIGINT; the shared memory and the Unix socket are gone then.

    files:  how the disk is reached.
    Raises: ConfigError before anything is served.
    """
    started_s = time.monotonic()
    with (
        _signals() as stopping,
        contextlib.closing(bind(options.host, options.port)) as listener,
        contextlib.ExitStack() as monitored,
        contextlib.ExitStack() as opened,
    ):
        monitors = None
        if options.metrics_port is not None:
            monitors = monitored.enter_context(contextlib.closing(bind(options.host, options.metrics_port, "metrics-")))
        host, port = listener.getsockname()[:2]
        if _is_exposed(listener):
            logger.warning(
                "daemon_exposed host=%s: whoever reaches port %d can read, replace and delete what is cached; the "
                "protocol has no authentication",
                host,
                port,
            )
        clock, disk = clock or SystemClock(), None
        if options.disk is not None:
            slab = replace(disk_options(options.disk, int(options.disk_gib * GIB)), files=files or Files())
            disk = DiskCopies(slab, clock)
            opened.callback(disk.close, 0.0)
        try:
            segment = SharedSegment(
                options.shared_memory_name,
                int(options.size_gib * GIB),
                mode=options.mode,
                directory=SHARED_MEMORY,
                is_stopping=stopping.is_set,
            )
        except InterruptedError:
            return
        with segment:
            address = f"[{options.host}]" if ":" in options.host else options.host
            ready_line = (
                f"hotspan daemon is ready on http://{address}:{port} after {{:.1f}} s: "
                f"{segment.bytes / GIB:g} GiB in {segment.path}, Unix socket {segment.path}.sock"
            )
            if disk is not None:
                ready_line += f", {disk.capacity_bytes / GIB:g} GiB in {options.disk}"

            def ready() -> None:
                print(ready_line.format(time.monotonic() - started_s), flush=True)

            with address_errors(options.host, port):  # another daemon may have begun at the same time
                listener.listen(BACKLOG)
            if monitors is not None:
                monitors.listen(BACKLOG)
            raise_file_limit()
            opened.pop_all()  # the daemon closes the directory, or leaves it to the process's end
            asyncio.run(_serve(options, listener, monitors, segment, disk, clock, ready))


class Daemon:
    """Both servers of one segment, and the disk below it; made and used on the running loop."""

    def __init__(
        self,
        options: DaemonOptions,
        segment: SharedSegment,
        disk: DiskCopies | None,
        clock: Clock,
        *,
        is_exposed: bool,
    ) -> None:
        self._options = options
        self._segment = segment
        self._clock = clock
        self._is_exposed = is_exposed
        self._started_s = clock.monotonic()
        self._http = ServerState()
        self._disk = disk
        if disk is not None:
            disk.post = partial(_post, asyncio.get_running_loop())
        self._pool = Pool(segment.view, HEADER_BYTES, clock, options.max_lease_s, disk=disk)
        self._log = _read_log(disk, clock, self._pool.metadata)
        if self._log.oldest is None:
            self._pool.forget_own()
        self._shared_log = SharedInvalidationLog(self._log, MAX_ENTRIES, clock)
        if disk is not None:
            disk.settles = self._log.write
        path = segment.path.with_name(segment.path.name + ".sock")
        is_durable = disk.settled if disk is not None else None
        self._unix_server = UnixServer(path, self._pool, self._log, segment.open_again, options.mode, is_durable)
        disk_counts = self._disk.counts if self._disk is not None else DiskCounts()
        figures = DaemonFigures(self._pool.counts, disk_counts, self._gauges, lambda: segment.restored)
        epoch = secrets.token_bytes(8)
        hosts = Hosts((options.host, *options.allowed_hosts))
        self._routes = Routes(self._pool, epoch, str(path), figures.stats, figures.page, is_durable, _LIMITS, hosts)

    async def listen(self, listener: socket.socket, monitors: socket.socket | None) -> list[asyncio.Server]:
        """Answer clients from now on; `monitors` only gets figures and health."""
        servers = [await listen(self._routes, _LIMITS, listener, self._http)]
        if monitors is not None:
            servers.append(await listen(self._routes.monitor, _LIMITS, monitors, self._http))
        return servers

    async def serve(self, ending: asyncio.Event) -> None:
        """Let time pass: leases expire, a disk that hangs is left alone."""
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), _SWEEP_S)
            self._segment.keep_names()  # the watch sees what is removed, not what was in its place
            self._pool.sweep()

    async def close(self) -> None:
        """Hang up on everybody, and write to disk what waits for that, unless it takes too long."""
        for connection in list(self._http.connections):
            connection.transport.abort()
        self._unix_server.close()
        if self._http.tasks:  # they see that their clients are gone
            await asyncio.wait(self._http.tasks, timeout=_MAX_END_S)
        if self._disk is None:
            return
        ends_s = self._clock.monotonic() + _MAX_SAVE_S
        while (self._pool.unsaved or not self._disk.is_idle) and self._clock.monotonic() < ends_s and self._disk.is_up:
            await asyncio.sleep(_SWEEP_S / 10)
            self._pool.sweep()
        self._disk.settle(lambda is_durable: None)
        self._disk.close(_MAX_NOTE_S)

    def _gauges(self) -> dict[str, float]:
        pool, disk = self._pool, self._disk
        return {
            "objects": len(pool),
            "used_bytes": pool.used_bytes,
            "pinned_bytes": pool.pinned_bytes,
            "free_bytes": pool.free_bytes,
            "capacity_bytes": pool.capacity_bytes,
            "leases": pool.leases,
            "disk_objects": 0 if disk is None else len(disk),
            "disk_used_bytes": 0 if disk is None else disk.used_bytes,
            "disk_capacity_bytes": 0 if disk is None else disk.capacity_bytes,
            "disk_bad_slots": 0 if disk is None else disk.bad_slots,
            "disk_unsaved": pool.unsaved,
            "disk_is_up": int(disk is not None and disk.is_up),
            "unix_clients": len(self._unix_server.clients),
            "http_connections": len(self._http.connections),
            "log_entries": len(self._log),
            "replicas": len(self._shared_log.replicas()),
            "is_exposed": int(self._is_exposed),
            "segment_named": int(self._segment.is_named),
            "uptime_s": self._clock.monotonic() - self._started_s,
        }


def _read_log(disk: DiskCopies | None, clock: Clock, metadata: AbsentMetadata) -> NodeLog:
    """The log as an earlier daemon left it. Raises: DirectoryError if it can't be read."""
    if disk is None:
        return NodeLog(clock)
    try:
        return NodeLog(clock, file=disk.log, metadata=metadata)
    except OSError as error:
        raise explained(disk.slab.directory.path, error, LAYOUT.whose) from error


async def _serve(
    options: DaemonOptions,
    listener: socket.socket,
    monitors: socket.socket | None,
    segment: SharedSegment,
    disk: DiskCopies | None,
    clock: Clock,
    ready: Callable[[], None],
) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, ending.set)
    daemon = Daemon(options, segment, disk, clock, is_exposed=_is_exposed(listener))
    try:
        servers = await daemon.listen(listener, monitors)
        ready()
        with _watched(segment, loop):
            await daemon.serve(ending)
        for server in servers:
            server.close()
    finally:
        await daemon.close()


@contextlib.contextmanager
def _watched(segment: SharedSegment, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Inside, a name of the segment that somebody removes is put back at once."""
    try:
        watch = NameWatch(segment.kept)
    except OSError as error:
        logger.warning(
            "segment_unwatched error=%s: a name that a client removes is put back within %g s; raise "
            "fs.inotify.max_user_instances",
            error.strerror,
            _SWEEP_S,
        )
        yield
        return

    def changed() -> None:
        watch.clear()
        segment.keep_names()

    loop.add_reader(watch.fd, changed)
    try:
        yield
    finally:
        loop.remove_reader(watch.fd)
        watch.close()


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Until the loop runs, a signal to stop is only noted: the memory is being made, on other threads, too."""
    stopping = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopping.set()) for number in _SIGNALS}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have the loop call it, from another thread; nothing if the loop is over."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _is_exposed(listener: socket.socket) -> bool:
    """Whether other machines can reach it."""
    return not is_loopback(listener.getsockname()[0])
