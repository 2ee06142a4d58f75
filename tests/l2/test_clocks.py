"""Replicas whose clocks are wrong share each kind of store: times to live go by the store's clock."""

import itertools
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.clock import SystemClock
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk
from hotspan.l2.base import ObjectStore
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.daemon import DaemonStore
from hotspan.l2.file import FileStore
from hotspan.l2.follower import LogFollower
from hotspan.l2.log import SharedInvalidationLog, VolatileLog
from hotspan.l2.objects import BlobStore
from hotspan.l2.options import FileOptions, RedisOptions
from hotspan.l2.redis import RedisLog, RedisStore
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, chain, content
from kit.redis_server import redis_server
from kit.s3_server import S3Server
from kit.simulated.inline import InlineQueues
from kit.simulated.memory_store import MemoryServer
from kit.waiting import PATIENCE_S
from tests.daemon.rig import DaemonProcess
from tests.l2.s3_rig import BUCKET, Place

SIZE, NAMESPACE = 2 * 4096, bytes(range(32))
HOUR_S, TTL_S, SLACK_S = 3600, 1200, 300


class WrongClock(SystemClock):
    """The machine's clock, set wrong; no time passes but that of day."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def monotonic(self) -> float:
        return 1000.0

    def unix(self) -> float:
        return super().unix() + self._ahead_s


Opens = Callable[[WrongClock], ObjectStore]


@contextmanager
def memory(path: Path) -> Iterator[Opens]:
    server = MemoryServer()
    yield lambda clock: BlobStore(server, _listed(server, clock), evicts=True)


@contextmanager
def files(path: Path) -> Iterator[Opens]:
    def opened(clock: WrongClock) -> ObjectStore:
        store = FileStore(path / "l2", FileOptions(timeout_s=PATIENCE_S), clock)
        store.log = _listed(store.blobs, clock)
        return store

    yield opened


@contextmanager
def bucket(path: Path) -> Iterator[Opens]:
    with S3Server(BUCKET) as server:
        place = Place(server.url, uuid.uuid4().hex)

        def opened(clock: WrongClock) -> ObjectStore:
            store = place.store(clock)
            store.log = _listed(store.blobs, clock)
            return store

        yield opened


@contextmanager
def redis(path: Path) -> Iterator[Opens]:
    with redis_server(path) as server:

        def opened(clock: WrongClock) -> ObjectStore:
            store = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))
            store.log = SharedInvalidationLog(RedisLog(store.servers, "hotspan:2"), 100, clock)
            return store

        yield opened


@contextmanager
def daemon(path: Path) -> Iterator[Opens]:
    process = DaemonProcess()
    process.start()
    try:
        yield lambda clock: DaemonStore(process.unix_socket, deadline_s=PATIENCE_S, clock=clock)
    finally:
        process.close()


def _listed(blobs: Any, clock: WrongClock) -> SharedInvalidationLog:
    return SharedInvalidationLog(BlobLog(blobs, clock, machine=clock), 100, clock)


STORES = [memory, files, bucket, redis, daemon]


class Replica:
    """A tier of one host, whose clock is so many seconds ahead."""

    def __init__(self, store: ObjectStore, clock: WrongClock) -> None:
        assert store.log is not None
        self.clock, self.queues = clock, InlineQueues()
        self.follower = LogFollower(store.log, f"ahead by {clock.unix() - SystemClock().unix():.0f} s", clock)
        options = RemoteOptions(store, self.follower, queue=self.queues.queue)
        self.tier = RemoteTier(options, NAMESPACE, SIZE, clock)

    def store(self, chunk: Chunk, ttl_s: int) -> None:
        """As of a request whose text may be used for so long."""
        self.read_log()
        terms = Terms(expires_s=int(self.clock.unix()) + ttl_s)
        assert self.tier.submit_store(chunk, terms, aligned(SIZE, content(chunk.key, SIZE)))
        self._turn()

    def left_s(self, chunk: Chunk) -> float | None:
        """For how long a chunk may be used still, by this host's clock; None if it is a miss."""
        self.read_log()
        self.tier.ask([chunk], 0)
        self._turn()
        if not self.tier.lookup(chunk.key):
            return None
        assert self.tier.submit_load(chunk.key, aligned(SIZE))
        self._turn()
        return self.tier.terms(chunk.key).expires_s - self.clock.unix()

    def read_log(self) -> None:
        assert self.follower.poll()
        self.follower.foreign()

    def _turn(self) -> None:
        for _ in range(3):
            self.queues.run()
            assert not [transfer.fault for transfer in self.tier.finished() if transfer.fault is not None]


@pytest.fixture(params=STORES, ids=lambda store: store.__name__)
def replica(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[float], Replica]]:
    """Makes replicas of one store, each with a clock that is so far ahead."""
    with ExitStack() as stack:
        opens: Opens = stack.enter_context(request.param(tmp_path))

        def made(ahead_s: float) -> Replica:
            clock = WrongClock(ahead_s)
            one = Replica(opens(clock), clock)
            stack.callback(one.tier.close, 1.0)
            return one

        yield made


def test_a_text_lives_as_long_as_it_was_given(replica: Callable[[float], Replica]) -> None:
    """Whoever stores and whoever reads it: it is a hit for its time to live, and a miss after it."""
    replicas = [replica(ahead_s) for ahead_s in (-HOUR_S, 0, HOUR_S)]
    for number, (one, other) in enumerate(itertools.product(replicas, replicas)):
        lives, is_over = chain(f"lives {number}", 1)[0], chain(f"is over {number}", 1)[0]
        one.store(lives, TTL_S)
        one.store(is_over, -TTL_S)
        left_s = other.left_s(lives)
        assert left_s is not None and abs(left_s - TTL_S) < SLACK_S
        assert other.left_s(is_over) is None


def test_a_wrong_clock_is_told_once(replica: Callable[[float], Replica], caplog: pytest.LogCaptureFixture) -> None:
    """The log has it once, and the metric for as long as it is so; a right clock is nothing."""
    with caplog.at_level(logging.WARNING):
        right = replica(0)
        right.read_log()
        assert right.follower.clock_offset_s == 0 and not caplog.records
        wrong = replica(HOUR_S)
        for _ in range(2):
            wrong.read_log()
    assert abs(wrong.follower.clock_offset_s + HOUR_S) < SLACK_S
    (record,) = caplog.records
    assert record.getMessage().startswith("l2_clocks_differ")


def test_a_log_of_this_process_has_its_clock() -> None:
    """A store without a log is on this node."""
    assert VolatileLog(WrongClock(HOUR_S)).clock_offset_s() == 0
