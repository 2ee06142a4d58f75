"""The pool with a disk below it, against a model: what was evicted comes back as it was, or not at all."""

import errno
import random
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotspan.core.errors import DirectoryError
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey
from hotspan.daemon.disk import DiskCopies, disk_options
from hotspan.daemon.log import NodeLog
from hotspan.daemon.pool import Pool
from hotspan.daemon.stored import Refusal, StoredObject, Writing
from hotspan.l2.base import updated, updates_of
from hotspan.l2.log import SharedInvalidationLog
from hotspan.testing.chunks import content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.files import Files
from hotspan.tiers.record import Record, pack, unpack
from kit.simulated.faults import BadPlace, BadPlaces, FaultyFiles
from kit.simulated.inline import InlineQueues
from kit.simulated.power import RecordingFiles, power_loss_images
from tests.daemon.test_pool import bytes_of, fill, store, there

MEMORY_PAGES, DISK_PAGES = 10, 32  # a slot is a page, and a copy has one for its header
KEYS = [key_of(name) for name in "abcdefgh"]


@dataclass
class Node:
    """A daemon's pool, disk and log in this thread: I/O ends when the test turns the crank."""

    path: Path
    files: Files = field(default_factory=Files)
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    disk_pages: int = DISK_PAGES
    allow_direct: bool = False

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """As a daemon starts."""
        self.queues = InlineQueues(7)
        options = disk_options(self.path, self.disk_pages * PAGE_BYTES)
        options = replace(options, files=self.files, allow_direct=self.allow_direct, queue=self.queues.queue)
        self.disk = DiskCopies(options, self.clock, PAGE_BYTES)
        self.disk.post = lambda call: call()
        memory = memoryview(bytearray((MEMORY_PAGES + 1) * PAGE_BYTES))
        self.pool = Pool(memory, PAGE_BYTES, self.clock, disk=self.disk)
        self.log = NodeLog(self.clock, file=self.disk.log, metadata=self.pool.metadata)
        self.shared = SharedInvalidationLog(self.log, 100, self.clock)
        if self.log.oldest is None:
            self.pool.forget_own()
        self.disk.settles = self.log.write

    def kill(self) -> None:
        """It is gone, with all that was not written yet; the kernel has what was."""
        self.disk.slab.directory.close()
        self.disk.log.close()

    def settled(self) -> bool:
        """All I/O ends; whether what was said until now is confirmed."""
        told: list[bool] = []
        self.disk.settle(told.append)
        self.queues.run()
        return told == [True]

    def put(self, key: ChunkKey, data: bytes) -> bool:
        """Whether there was room."""
        writing = self.pool.reserve(key, len(data), is_own=False)
        if isinstance(writing, Refusal):
            return False
        fill(self.pool, writing.object, data)
        self.pool.commit(writing)
        return True

    def read(self, key: ChunkKey) -> bytes | None:
        """What a lease gives of an object, once it is in memory; None for a miss."""
        self.pool.load(key)
        self.queues.run()
        (stored,) = self.pool.find([key])
        if stored is None or not stored.extents:
            return None
        return bytes_of(self.pool, stored)

    def evict(self, keys: int = MEMORY_PAGES) -> None:
        """Have others in the place of what is in memory, and then nobody."""
        writing = self.pool.reserve(key_of("everything"), keys * PAGE_BYTES, is_own=False)
        assert isinstance(writing, Writing), writing
        self.pool.abort(writing)

    def terms(self, key: ChunkKey) -> Terms:
        """What replicas are told of one of hotspan's own."""
        stored = self.at(key)
        record = unpack(stored.record)
        assert record is not None
        return updated(record.terms, stored.updates)

    def at(self, key: ChunkKey) -> StoredObject:
        """An object that is there."""
        (stored,) = self.pool.peek([key])
        assert stored is not None
        return stored


def own(key: ChunkKey, size: int = 100, **terms: int) -> bytes:
    """An object of hotspan's own, as a replica stores it."""
    record = Record(key, None, bytes(32), size, Terms(**terms), stamp=9)
    return pack(record).ljust(PAGE_BYTES, b"\0") + content(key, PAGE_BYTES + size)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """With an empty disk."""
    return Node(tmp_path / "disk")


class NodeMachine(RuleBasedStateMachine):
    """Random steps; the model knows the bytes that a name last had, and whether it may be there."""

    def __init__(self) -> None:
        super().__init__()
        root = Path("/dev/shm")  # in memory: what a sync costs is not this test's
        self.directory = TemporaryDirectory(prefix="hotspan-node-", dir=root if root.is_dir() else None)
        self.node = Node(Path(self.directory.name) / "disk", FaultyFiles())
        self.contents: dict[ChunkKey, bytes] = {}
        self.unconfirmed: set[ChunkKey] = set()
        self.puts = 0

    @rule(key=st.sampled_from(KEYS), size=st.integers(1, 5 * PAGE_BYTES))
    def put(self, key: ChunkKey, size: int) -> None:
        self.puts += 1
        data = content(key, size, self.puts)
        if self.node.put(key, data):
            self.contents[key] = data

    @rule(key=st.sampled_from(KEYS))
    def read(self, key: ChunkKey) -> None:
        assert self.node.read(key) in (None, self.contents.get(key))

    @rule(key=st.sampled_from(KEYS))
    def load(self, key: ChunkKey) -> None:
        self.node.pool.load(key)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: ChunkKey) -> None:
        self.node.pool.delete(key)
        self.contents.pop(key, None)
        self.unconfirmed.add(key)
        assert there(self.node.pool, key) == [False]

    @rule()
    def confirm(self) -> None:
        if self.node.settled():
            self.unconfirmed.clear()

    @rule(turns=st.integers(1, 3))
    def io(self, turns: int) -> None:
        self.node.queues.run(turns)

    @rule(pages=st.integers(1, MEMORY_PAGES))
    def evict(self, pages: int) -> None:
        if self.node.pool.pinned_bytes == 0:
            self.node.evict(pages)

    @rule(nth=st.integers(1, 4), kind=st.sampled_from(["preadv", "pwritev", "pwrite", "sync"]))
    def fault(self, nth: int, kind: str) -> None:
        files = self.node.files
        assert isinstance(files, FaultyFiles)
        files.arm(nth, kinds=[kind])

    @rule(seconds=st.floats(0.1, 20))
    def time_passes(self, seconds: float) -> None:
        self.node.clock.advance(seconds)
        self.node.pool.sweep()

    @rule()
    def crash(self) -> None:
        files = self.node.files
        assert isinstance(files, FaultyFiles)
        files.disarm()
        self.node.kill()
        self.node.start()
        for key in self.unconfirmed:  # what nobody confirmed may be back
            (stored,) = self.node.pool.peek([key])
            if stored is not None:
                self.node.pool.delete(key)
        assert self.node.settled()
        self.unconfirmed.clear()
        self.contents = {key: data for key, data in self.contents.items() if there(self.node.pool, key) == [True]}

    @invariant()
    def check(self) -> None:
        self.node.pool.check()
        for key in KEYS:
            (stored,) = self.node.pool.peek([key])
            if stored is not None:
                assert stored.size == len(self.contents[key])
                assert not stored.extents or bytes_of(self.node.pool, stored) == self.contents[key]

    def teardown(self) -> None:
        self.node.queues.run()
        self.node.pool.check()
        self.node.kill()
        self.directory.cleanup()


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_more_than_memory_holds_is_there(node: Node) -> None:
    """Objects of any size, more than memory has room for, are all found, and all read back as they were."""
    values = {
        key: content(key, size) for key, size in zip(KEYS, [1, 4095, 4096, 4097, 9000, 20000, 30000], strict=False)
    }
    for key, data in values.items():
        assert node.put(key, data)
        node.queues.run()
    assert node.pool.counts.evicted > 0 == node.disk.counts.late
    assert there(node.pool, *values) == [True] * len(values)
    for key, data in values.items():
        assert node.read(key) == data
    assert node.disk.counts.loaded > 0 and node.disk.counts.corrupt == 0
    node.pool.check()


def test_what_moved_has_another_version(node: Node) -> None:
    """An object that was read back has another version than before: nobody copies from where it was."""
    node.put(KEYS[0], b"x" * 100)
    node.queues.run()
    before = node.at(KEYS[0]).version
    node.evict()
    assert not node.at(KEYS[0]).extents
    node.read(KEYS[0])
    assert node.at(KEYS[0]).version != before


def test_a_restart_finds_it_warm(node: Node) -> None:
    """What was written before a crash is there, with its updates; so is the log, under the same epoch."""
    values = {key: content(key, 7000) for key in KEYS[:5]}
    for key, data in values.items():
        assert node.put(key, data)
        node.queues.run()
    stored = store(node.pool, KEYS[5], own(KEYS[5], tenant=3), is_own=True)
    node.queues.run(1)
    node.pool.add_updates({KEYS[5]: updates_of(Terms(labels=frozenset([5])), 9)})
    before = unpack(stored.record)
    assert before is not None
    terms = updated(before.terms, stored.updates)
    generation = node.shared.append([Scope(tenant=3)], "me")
    assert node.settled()
    before_kill = node.shared.read(0)
    node.kill()
    node.start()
    assert node.shared.read(0) == before_kill and [each.generation for each in before_kill.entries] == [generation]
    assert [node.read(key) for key in values] == list(values.values())
    assert unpack(node.at(KEYS[5]).record) == before._replace(terms=terms) and terms.labels == {5}
    assert node.read(KEYS[5]) == own(KEYS[5], tenant=3)
    node.pool.check()


def test_a_delete_is_a_miss_across_a_crash(node: Node) -> None:
    """A deleted object, and one that took its name, do not become the old one again."""
    for key in KEYS[:2]:
        node.put(key, b"old" * 3000)
        node.queues.run()
    for key in KEYS[:2]:
        assert node.pool.delete(key)
    node.put(KEYS[1], b"new" * 3000)
    assert node.settled()
    node.evict()
    assert node.read(KEYS[0]) is None and node.read(KEYS[1]) == b"new" * 3000
    node.kill()
    node.start()
    assert node.read(KEYS[0]) is None and node.read(KEYS[1]) == b"new" * 3000


def test_a_delete_while_it_is_written_or_read(node: Node) -> None:
    """An object that is deleted while a thread writes or reads it is gone, and its place free afterwards."""
    node.put(KEYS[0], b"x" * 9000)
    assert node.pool.delete(KEYS[0]) and node.put(KEYS[0], b"y" * 9000)
    node.queues.run()
    node.evict()
    loading = node.pool.load(KEYS[0])
    ended: list[bool] = []
    assert loading is not None
    loading.on_end.append(partial(ended.append, True))
    assert node.pool.delete(KEYS[0])
    node.queues.run()
    assert ended == [True] and there(node.pool, KEYS[0]) == [False]
    assert node.disk.used_bytes == 0 and node.pool.free_bytes == node.pool.capacity_bytes
    node.pool.check()


@pytest.mark.parametrize("at", [0, 5000, 9999])
def test_a_wrong_byte_is_a_miss(node: Node, at: int) -> None:
    """One bit that changed on disk makes an object a miss, once and for all; the others are there."""
    for key in KEYS[:2]:
        node.put(key, content(key, 10_000))
        node.queues.run()
    assert node.at(KEYS[0]).is_saved
    at += (node.disk.slab._entries[KEYS[0]].slot + 1) * PAGE_BYTES
    node.evict()
    with (node.path / "slab").open("r+b") as slab:
        slab.seek(at)
        wrong = bytes([slab.read(1)[0] ^ 1])
        slab.seek(at)
        slab.write(wrong)
    assert node.read(KEYS[0]) is None and there(node.pool, *KEYS[:2]) == [False, True]
    assert node.read(KEYS[1]) == content(KEYS[1], 10_000) and node.disk.counts.corrupt == 1
    node.pool.check()


def test_the_disk_gives_up_what_was_not_used(node: Node) -> None:
    """On a full disk what was used again stays, what is being read stays, and what gave way is gone altogether."""
    for n, key in enumerate(KEYS[:4]):
        node.put(key, content(key, 7 * PAGE_BYTES))
        node.queues.run()
        assert n == 0 or node.disk.counts.evicted == 0
    node.evict()
    assert node.disk.used_bytes == DISK_PAGES * PAGE_BYTES
    assert node.read(KEYS[0]) is not None
    node.pool.use([KEYS[0]])
    node.evict()
    assert node.pool.load(KEYS[1]) is not None
    node.put(KEYS[4], content(KEYS[4], 3 * PAGE_BYTES))
    node.queues.run()
    assert there(node.pool, *KEYS[:5]) == [True, True, False, True, True] and node.disk.counts.evicted == 1
    node.pool.check()


def test_faults_are_misses_and_the_disk_rests(node: Node) -> None:
    """Reads that fail are misses; after three the disk is left alone for a second, then for longer, until it works."""
    files = FaultyFiles()
    node.kill()
    node.files = files
    node.start()
    for key in KEYS[:6]:
        node.put(key, content(key, 4 * PAGE_BYTES))
        node.queues.run()
    node.evict()
    files.arm(1, errno.EIO, kinds=["preadv"], lasting=True)
    for n, key in enumerate(KEYS[:3]):
        assert node.disk.is_up and node.read(key) is None and node.disk.counts.faults == n + 1
    assert not node.disk.is_up and node.disk.counts.trips == 1
    assert there(node.pool, *KEYS[3:6]) == [False] * 3 and node.pool.load(KEYS[3]) is None
    assert node.pool.reserve(KEYS[3], 1, is_own=False) is Refusal.EXISTS
    node.put(KEYS[6], b"in memory")
    assert node.read(KEYS[6]) == b"in memory"
    node.clock.advance(1.0)
    assert there(node.pool, *KEYS[3:6]) == [True] * 3
    assert node.read(KEYS[3]) is None and not node.disk.is_up
    node.clock.advance(1.9)
    assert not node.disk.is_up
    files.disarm()
    node.clock.advance(0.2)
    assert node.read(KEYS[4]) == content(KEYS[4], 4 * PAGE_BYTES)
    node.pool.sweep()
    node.queues.run()
    node.evict()
    assert node.read(KEYS[6]) == b"in memory", "what waited for the disk was not written"


def test_a_hanging_disk_is_left_alone(node: Node) -> None:
    """Once two I/Os move nothing for a second, who waits is let go, what is there is a miss, and memory goes on."""
    for key in KEYS[:5]:
        node.put(key, content(key, 2 * PAGE_BYTES))
        node.queues.run()
    node.evict()
    node.queues.hang()
    ended: list[ChunkKey] = []
    for key in KEYS[:3]:
        loading = node.pool.load(key)
        assert loading is not None
        loading.on_end.append(partial(ended.append, key))
    node.clock.advance(1.1)
    assert node.pool.writing(KEYS[0]) is not None
    node.pool.sweep()
    assert sorted(ended) == sorted(KEYS[:3]) and not node.disk.is_up and node.disk.counts.trips == 1
    assert there(node.pool, *KEYS[:5]) == [False] * 5 and node.pool.writing(KEYS[0]) is None
    assert node.put(KEYS[5], b"memory") and node.pool.unsaved == 1
    node.queues.hang(False)
    node.queues.run()
    node.pool.sweep()
    assert node.disk.is_up and node.read(KEYS[3]) == content(KEYS[3], 2 * PAGE_BYTES)
    node.queues.run()
    assert node.pool.unsaved == 0
    node.pool.check()


def test_a_disk_hangs_until_an_io_ends(node: Node) -> None:
    """That what was queued is dropped does not make a disk work whose threads all hang: nobody waits for it again."""
    for key in KEYS[:7]:
        node.put(key, content(key, PAGE_BYTES))
        node.queues.run()
    node.evict()
    node.queues.hang()
    assert all(node.pool.load(key) for key in KEYS[:6])  # four threads have begun
    node.clock.advance(1.1)
    for _ in range(20):
        node.pool.sweep()
        assert not node.disk.is_up and node.disk.counts.trips == 1
        node.clock.advance(0.25)
    node.queues.hang(False)
    node.queues.run()
    node.pool.sweep()
    assert node.disk.is_up and node.read(KEYS[6]) == content(KEYS[6], PAGE_BYTES)


def test_a_trial_that_hangs_is_not_the_last(node: Node) -> None:
    """A disk that failed, and then hung in the read that was to try it, is used again once it works."""
    node.kill()
    node.files = files = FaultyFiles()
    node.start()
    for key in KEYS[:5]:
        node.put(key, content(key, 4 * PAGE_BYTES))
        node.queues.run()
    node.evict()
    files.arm(1, errno.EIO, kinds=["preadv"], lasting=True)
    assert [node.read(key) for key in KEYS[:3]] == [None] * 3 and not node.disk.is_up
    files.disarm()
    node.clock.advance(1.1)
    assert node.pool.load(KEYS[3]) is not None
    node.clock.advance(3.0)
    node.pool.sweep()
    assert not node.disk.is_up and node.disk.counts.trips == 2
    node.queues.run()
    node.pool.sweep()
    assert node.disk.is_up and node.read(KEYS[4]) == content(KEYS[4], 4 * PAGE_BYTES)


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_log_that_can_not_be_written_is_emptied(node: Node, is_repaired: bool) -> None:
    """What the log could not take is confirmed when the log is empty: the next start then forgets hotspan's own.

    If the log can be written again before that, nothing is forgotten.
    """
    node.kill()
    node.files = files = FaultyFiles()
    node.start()
    store(node.pool, KEYS[0], own(KEYS[0]), is_own=True)
    assert node.put(KEYS[1], b"other") and node.settled()
    node.shared.append([Scope(tenant=8)], "me")
    files.arm(2, errno.ENOSPC, kinds=["sync"])  # the first is the table's
    assert node.settled() and files.hits == 1
    if is_repaired:
        node.shared.append([Scope(tenant=9)], "me")
        assert node.settled()
    before = node.log.read(0)
    node.kill()
    node.start()
    assert node.read(KEYS[1]) == b"other"
    assert (node.log.read(0) == before) is is_repaired and (node.read(KEYS[0]) is not None) is is_repaired


def test_a_log_is_emptied_under_every_name_that_it_may_have(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new log got its name, and nobody knows if a power loss undoes that; then the disk takes no other new log.

    An invalidation that is confirmed then is known after a restart, or hotspan's own objects are gone.
    """
    node.kill()
    node.files = files = FaultyFiles()
    node.start()
    store(node.pool, KEYS[0], own(KEYS[0], tenant=8), is_own=True)
    node.shared.append([Scope(tenant=7)], "me")

    def not_synced(source: Path, target: Path) -> None:
        source.replace(target)
        raise OSError(errno.EIO, "the directory was not synced")

    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", not_synced)
        assert node.settled()
    node.shared.append([Scope(tenant=8)], "me")
    files.arm(1, errno.ENOSPC, kinds=["open"], lasting=True)
    assert node.settled() and files.hits == 1
    files.disarm()
    open_fds = len(files.open_fds)
    node.kill()
    node.start()
    assert len(node.log) == 0 and node.read(KEYS[0]) is None and len(files.open_fds) == open_fds


def test_nothing_is_confirmed_on_a_disk_that_takes_nothing(node: Node) -> None:
    """While neither the table nor the log can be written, nobody is told that what was deleted stays away."""
    node.kill()
    node.files = files = FaultyFiles()
    node.start()
    assert node.put(KEYS[0], b"x") and node.settled()
    files.arm(1, errno.EIO, kinds=["pwrite", "sync"], lasting=True)
    assert node.pool.delete(KEYS[0]) and not node.settled()
    node.shared.append([Scope()], "me")
    assert not node.settled()
    files.disarm()
    assert node.settled()
    node.kill()
    node.start()
    assert node.read(KEYS[0]) is None and len(node.log) == 1


def test_a_lost_log_forgets_hotspans_own_on_disk(node: Node) -> None:
    """When the log begins anew, hotspan's own copies and their updates go, across a crash, too; others stay."""
    store(node.pool, KEYS[0], own(KEYS[0], tenant=4), is_own=True)
    store(node.pool, KEYS[1], b"other")
    node.pool.add_updates({KEYS[0]: updates_of(Terms(labels=frozenset([1])), 5)})
    node.shared.append([Scope()], "me")
    assert node.settled()
    node.evict()
    assert node.at(KEYS[0]).record == own(KEYS[0], tenant=4)[:256]
    epoch = node.shared.read(0).epoch
    node.shared.read(node.shared.read(0).generation + 5)
    node.pool.forget_own()
    for _ in range(2):
        assert there(node.pool, *KEYS[:2]) == [False, True] and len(node.log) == 0
        assert node.shared.read(0).epoch != epoch
        assert node.settled()
        node.kill()
        node.start()
    assert store(node.pool, KEYS[0], own(KEYS[0]), is_own=True).updates == set()


def test_another_size_keeps_what_fits(tmp_path: Path) -> None:
    """A smaller slab drops what lay beyond its end, a larger one has more room; neither gives wrong bytes."""
    node = Node(tmp_path / "disk")
    for key in KEYS[:4]:
        node.put(key, content(key, 6 * PAGE_BYTES))
        node.queues.run()
    for pages, left in ((16, 2), (60, 2)):
        node.kill()
        node.disk_pages = pages
        node.start()
        values = [node.read(key) for key in KEYS[:4]]
        assert sum(value is not None for value in values) == left
        assert all(value in (None, content(key, 6 * PAGE_BYTES)) for key, value in zip(KEYS, values, strict=False))
        assert node.settled()
        node.pool.check()


def test_a_power_loss_brings_nothing_back(tmp_path: Path) -> None:
    """Whatever of the unsynced writes is lost: what was deleted for sure stays away; the rest is right, or a miss."""
    files = RecordingFiles(tmp_path / "disk")
    node, rng = Node(tmp_path / "disk", files), random.Random(2)
    versions: dict[ChunkKey, list[bytes]] = {key: [] for key in KEYS}
    dead = 0
    for n in range(70):
        key = rng.choice(KEYS)
        if there(node.pool, key) == [True]:
            node.pool.delete(key)
            assert node.settled()
            files.mark((key, len(versions[key])))
        versions[key].append(content(key, rng.randrange(1, 4 * PAGE_BYTES), n))
        node.put(key, versions[key][-1])
        node.queues.run(rng.randrange(4))
    found = 0
    for image in power_loss_images(files.recording, seed=4, count=200):
        shutil.rmtree(tmp_path / "image", ignore_errors=True)
        image.restore(tmp_path / "image")
        after = Node(tmp_path / "image")
        gone = dict.fromkeys(KEYS, 0)
        for key, count in image.marks:
            gone[key] = count
        for key in KEYS:
            value = after.read(key)
            assert value is None or value in versions[key][gone[key] :]
            found += value is not None
            dead += gone[key]
        after.pool.check()
        after.kill()
    assert found > 100 and dead > 100


def test_a_power_loss_takes_no_confirmed_invalidation(tmp_path: Path) -> None:
    """Whatever of the unsynced writes is lost: what was confirmed as invalidated is in the log that a start finds."""
    files = RecordingFiles(tmp_path / "disk")
    node, rng = Node(tmp_path / "disk", files), random.Random(5)
    for n in range(20):
        node.put(rng.choice(KEYS), content(KEYS[0], rng.randrange(1, 4 * PAGE_BYTES), n))
        node.queues.run(rng.randrange(4))
        generation = node.shared.append([Scope(tenant=n)], "me")
        if rng.random() < 0.7:
            assert node.settled()
            files.mark(generation)
    confirmed = 0
    for image in power_loss_images(files.recording, seed=4, count=60):
        shutil.rmtree(tmp_path / "image", ignore_errors=True)
        image.restore(tmp_path / "image")
        after = Node(tmp_path / "image")
        if image.marks:
            confirmed += 1
            assert after.log.oldest is not None and after.shared.read(0).generation >= max(image.marks)
        after.kill()
    assert confirmed > 30


def test_no_confirmed_update_is_lost(tmp_path: Path) -> None:
    """Chunks are updated while they are here, on their way, evicted or never stored, and the power goes.

    Each tag and expiry that was confirmed binds the chunk that is found afterwards, or that is stored anew.
    """
    files = RecordingFiles(tmp_path / "disk")
    node, rng = Node(tmp_path / "disk", files, disk_pages=16), random.Random(6)
    node.shared.append([Scope(tenant=1)], "me")
    assert node.settled()
    for n in range(1, 80):
        key = rng.choice(KEYS)
        if there(node.pool, key) == [False] and rng.random() < 0.5 and node.pool.pinned_bytes < 4 * PAGE_BYTES:
            store(node.pool, key, own(key), is_own=True)
        node.queues.run(rng.randrange(4))
        until_s = int(node.clock.unix()) + 1000 + rng.randrange(100)
        node.pool.add_updates({key: updates_of(Terms(labels=frozenset([n]), expires_s=until_s), n)})
        if rng.random() < 0.6:
            assert node.settled()
            files.mark((key, n, until_s))
        if rng.random() < 0.3 and node.pool.pinned_bytes == 0:
            node.evict()
    assert node.disk.counts.evicted > 0
    found = 0
    for image in power_loss_images(files.recording, seed=4, count=40):
        shutil.rmtree(tmp_path / "image", ignore_errors=True)
        image.restore(tmp_path / "image")
        after = Node(tmp_path / "image", disk_pages=16)
        for key, label, until_s in image.marks:
            if there(after.pool, key) == [False]:
                store(after.pool, key, own(key), is_own=True)
                after.queues.run()
            else:
                found += 1
            terms = after.terms(key)
            assert label in terms.labels or terms.is_wild
            assert 0 < terms.expires_s <= until_s
        after.kill()
    assert found > 100


def test_a_chunk_that_is_stored_again_has_its_updates(node: Node) -> None:
    """A chunk that was updated, and evicted after a restart, is stored anew: any tag takes it, and it expires no later.

    Also if it was deleted meanwhile, which might be for another chunk of its slot.
    """
    store(node.pool, KEYS[0], own(KEYS[0]), is_own=True)
    node.queues.run()
    until_s = int(node.clock.unix()) + 60
    node.pool.add_updates({KEYS[0]: updates_of(Terms(labels=frozenset([5]), expires_s=until_s), 9)})
    node.shared.append([Scope(tenant=3)], "me")
    assert node.settled()
    node.kill()
    node.start()
    for n in range(DISK_PAGES):
        node.put(key_of(f"other {n}"), content(KEYS[1], 5 * PAGE_BYTES))
        node.queues.run()
    assert there(node.pool, KEYS[0]) == [False]
    for _ in range(2):
        store(node.pool, KEYS[0], own(KEYS[0]), is_own=True)
        assert node.terms(KEYS[0]) == Terms(is_wild=True, expires_s=until_s)
        node.pool.delete(KEYS[0])


def test_values_in_fragments(node: Node) -> None:
    """A value whose place in memory is in pieces is written and read back as it was."""
    for n in range(MEMORY_PAGES):
        node.put(key_of(f"page {n}"), content(KEYS[0], PAGE_BYTES, n))
    for n in range(0, MEMORY_PAGES, 2):
        node.pool.delete(key_of(f"page {n}"))
    node.queues.run()
    value = content(KEYS[0], 5 * PAGE_BYTES - 17)
    assert node.put(KEYS[0], value) and len(node.at(KEYS[0]).extents) == 5
    node.queues.run()
    node.evict()
    for n in range(MEMORY_PAGES):
        node.put(key_of(f"again {n}"), b"x")
    for n in range(1, MEMORY_PAGES, 2):
        node.pool.delete(key_of(f"again {n}"))
    node.queues.run()
    assert node.read(KEYS[0]) == value and len(node.at(KEYS[0]).extents) == 5


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    """A second daemon, a directory of something else, and too little room are errors that say what to do."""

    def opened(name: str, size: int = 1 << 20) -> DiskCopies:
        return DiskCopies(disk_options(tmp_path / name, size), SimulatedClock())

    first = opened("disk")
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "disk").iterdir()} == {0o600}
    with pytest.raises(DirectoryError, match="in use by process"):
        opened("disk")
    first.close(1.0)
    opened("disk").close(1.0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(DirectoryError, match="empty directory"):
        opened("other")
    with pytest.raises(DirectoryError, match="lower --disk-gib"):
        opened("huge", 1 << 50)
    with pytest.raises(DirectoryError, match="--disk-gib"):
        opened("none", 4095)
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match="not a directory"):
        opened("file")


@pytest.mark.parametrize("kind", ["read", "write", "torn"])
def test_a_bad_slot_is_set_aside(tmp_path: Path, kind: str) -> None:
    """A page of the disk that fails for good costs its slot, over restarts, too; the disk takes part all the time."""
    files = BadPlaces([BadPlace(kind, PAGE_BYTES, 2 * PAGE_BYTES)])
    node = Node(tmp_path, files)
    for number in range(60):
        node.put(key_of(f"object {number}"), content(key_of(f"object {number}"), 2 * PAGE_BYTES))
        node.queues.run()
        node.read(key_of(f"object {number - 8}"))
        assert node.disk.is_up
    assert node.disk.bad_slots == 1 and node.disk.counts.trips == 0 and len(node.disk) == 10
    assert node.disk.capacity_bytes == (DISK_PAGES - 1) * PAGE_BYTES
    met = sum(files.met.values())
    node.disk.close(1.0)
    node.start()
    for number in range(60):
        node.put(key_of(f"other {number}"), content(key_of(f"other {number}"), 2 * PAGE_BYTES))
        node.queues.run()
    assert node.disk.bad_slots == 1 and sum(files.met.values()) == met
