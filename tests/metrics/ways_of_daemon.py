"""Ways to move the node daemon's metrics: a real daemon with a disk, and its pool over a disk that fails."""

import errno
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from hotspan.core.terms import Scope
from hotspan.core.types import PAGE_BYTES
from hotspan.daemon.disk import DiskCounts
from hotspan.daemon.metrics import GAUGES, DaemonFigures
from hotspan.daemon.server import Daemon
from hotspan.daemon.stored import PoolCounts, Writing
from hotspan.l2.daemon_protocol import Operation, Status
from hotspan.testing.chunks import content, key_of
from kit.simulated.faults import BadPlace, BadPlaces, FaultyFiles
from kit.waiting import until
from tests.daemon.rig import DaemonProcess, patient_store
from tests.daemon.test_disk import DISK_PAGES, KEYS, MEMORY_PAGES, Node
from tests.daemon.test_unix_server import RawClient, connected

from .pages import Pages


def declared() -> Iterable[Metric]:
    """What a daemon's page shows."""
    return DaemonFigures(PoolCounts(), DiskCounts(), lambda: dict.fromkeys(GAUGES, 0), lambda: 0).collect()


def read(pages: Pages, daemon: DaemonProcess) -> None:
    """Read the page of a daemon that runs."""
    status, body = daemon.request("GET", "/metrics")
    assert status == 200
    pages.note(text_string_to_metric_families(body.decode()))


def a_daemon(pages: Pages, path: Path) -> None:
    """A daemon with a disk: objects that are stored, found, leased, deleted, refused, and that give way."""
    daemon = DaemonProcess(size_gib=1 / 64, options=("--disk", str(path / "kv"), "--disk-gib", "0.0625"))
    try:
        daemon.start()
        with connected(daemon) as client:
            what_a_client_does(pages, daemon, client)
            store = patient_store(daemon.unix_socket)
            assert store.log is not None
            store.log.append([Scope(tenant=1)], "a")
            store.log.report("a", 1, 60.0)
            read(pages, daemon)
            store.close()
        daemon.segment.unlink()
        until(daemon.segment.exists, "the name")
        until(lambda: daemon.stats()["segment_names_restored"] > 0, "the count")
        read(pages, daemon)
    finally:
        daemon.close()


def what_a_client_does(pages: Pages, daemon: DaemonProcess, client: RawClient) -> None:
    """All that one connection can do, and what it may not."""
    for n in range(40):  # more than memory has room for
        client.put(f"object {n}", 1 << 20)
        read(pages, daemon)
    client.find("object 39", "nothing")
    read(pages, daemon)
    client.reserve("object 39", 10)
    client.reserve("large", 1 << 40)
    client.reserve("pinned", 1 << 20)
    with connected(daemon) as other:
        other.reserve("aborted", 1 << 20)
        read(pages, daemon)
    with connected(daemon) as other:
        other.find(*(f"object {n}" for n in range(40)))
        assert other.reserve("no room", 15 << 20)[0] != Status.OK
    client.ask(Operation.COMMIT)
    client.ask(Operation.DELETE, key_of("object 39"))
    daemon.request("POST", "/v1/kv/bucket/x/leases?ttl_s=1e9")
    read(pages, daemon)


def figures(node: Node, **facts: bool) -> DaemonFigures:
    """Those of a pool and its disk, without sockets. facts: of how a daemon was started."""
    daemon: Any = SimpleNamespace(
        _pool=node.pool,
        _disk=node.disk,
        _unix_server=SimpleNamespace(clients=()),
        _http=SimpleNamespace(connections=()),
        _log=node.log,
        _shared_log=node.shared,
        _is_exposed=True,
        _segment=SimpleNamespace(is_named=True),
        _clock=node.clock,
        _started_s=0.0,
    )
    return DaemonFigures(node.pool.counts, node.disk.counts, lambda: Daemon._gauges(daemon), lambda: 0)


def a_disk_that_fails(pages: Pages, path: Path) -> None:
    """Copies that are read, give way, are corrupt, or come too late; calls that fail; a port that others can reach."""
    shutil.rmtree(path / "disk", ignore_errors=True)
    files = FaultyFiles()
    node = Node(path / "disk", files)
    for key in KEYS[:6]:
        node.put(key, content(key, 7 * PAGE_BYTES))
        node.queues.run()
    node.evict()
    assert DISK_PAGES < 6 * 7 and node.read(KEYS[5]) is not None
    node.evict()
    pages.note(figures(node).collect())
    with (path / "disk" / "slab").open("r+b") as slab:
        for page in range(DISK_PAGES):
            slab.seek(page * PAGE_BYTES + 100)
            slab.write(b"damage")
    for key in KEYS[:6]:
        node.read(key)
    (lease_of,) = node.pool.peek([KEYS[6]]) if node.put(KEYS[6], b"leased") else (None,)
    assert lease_of is not None
    node.pool.lease([lease_of], 1.0)
    node.clock.advance(10.0)
    node.pool.sweep()
    node.queues.run()
    node.queues.hang()
    for n in range(2 * MEMORY_PAGES):
        writing = node.pool.reserve(key_of(f"late {n}"), PAGE_BYTES, is_own=False)
        if isinstance(writing, Writing):
            node.pool.commit(writing)
    pages.note(figures(node).collect())
    files.arm(1, errno.EIO, kinds=["pwritev", "preadv"], lasting=True)
    node.queues.hang(False)
    node.queues.run()
    node.pool.sweep()
    node.queues.run()
    pages.note(figures(node).collect())
    files.disarm()
    node.kill()


def a_disk_with_a_bad_slot(pages: Pages, path: Path) -> None:
    """A slot of the disk that can't be written is set aside."""
    node = Node(path / "bad", BadPlaces([BadPlace("write", PAGE_BYTES, 2 * PAGE_BYTES)]))
    for number in range(60):
        node.put(key_of(f"object {number}"), content(key_of(f"object {number}"), 2 * PAGE_BYTES))
        node.queues.run()
    pages.note(figures(node).collect())
    node.disk.close(1.0)


WAYS = (a_daemon, a_disk_that_fails, a_disk_with_a_bad_slot)
