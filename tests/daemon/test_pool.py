"""The pool against a model: what is found is whole, what is leased does not change, and no byte is lost."""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotspan.core.terms import MAX_LABELS, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey
from hotspan.daemon.leases import Lease
from hotspan.daemon.pool import MAX_LEASES, Pool
from hotspan.daemon.stored import Refusal, StoredObject, Writing, object_key
from hotspan.l2.base import updated, updates_of
from hotspan.l2.daemon_protocol import CHANGE_BITS
from hotspan.testing.chunks import chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.record import Record, pack

PAGES = 24
KEYS = [key_of(name) for name in "abcdefgh"]


def pool_of(pages: int = PAGES, clock: SimulatedClock | None = None, max_lease_s: float = 60.0) -> Pool:
    """A pool with so many pages, behind one that is not its own."""
    memory = memoryview(bytearray((pages + 1) * PAGE_BYTES))
    return Pool(memory, PAGE_BYTES, clock or SimulatedClock(), max_lease_s)


def fill(pool: Pool, stored: StoredObject, data: bytes) -> None:
    """Write an object's bytes."""
    for offset, size in stored.extents:
        pool.memory[offset : offset + size] = data[:size]
        data = data[size:]


def bytes_of(pool: Pool, stored: StoredObject) -> bytes:
    """What lies where an object is."""
    return b"".join(bytes(pool.memory[offset : offset + size]) for offset, size in stored.extents)


def store(pool: Pool, key: ChunkKey, data: bytes, *, is_own: bool = False) -> StoredObject:
    """Put an object."""
    writing = pool.reserve(key, len(data), is_own=is_own)
    assert isinstance(writing, Writing), writing
    fill(pool, writing.object, data)
    pool.commit(writing)
    return writing.object


def there(pool: Pool, *keys: ChunkKey) -> list[bool]:
    """Which of these are found."""
    return [stored is not None for stored in pool.peek(keys)]


@dataclass
class Held:
    """A lease, and what it promised."""

    lease: Lease
    contents: list[bytes]
    until_s: float


class PoolMachine(RuleBasedStateMachine):
    """Random steps; the model knows which bytes each object has, and which were promised until when."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.pool = pool_of(clock=self.clock)
        self.contents: dict[StoredObject, bytes] = {}
        self.held: dict[int, Held] = {}
        self.writing: dict[ChunkKey, Writing] = {}
        self.puts = 0

    @rule(key=st.sampled_from(KEYS), size=st.integers(1, 6 * PAGE_BYTES))
    def put(self, key: ChunkKey, size: int) -> None:
        writing = self.reserve(key, size)
        if writing is not None:
            self.end(writing, is_whole=True)

    @rule(key=st.sampled_from(KEYS), size=st.integers(1, (PAGES + 2) * PAGE_BYTES))
    def begin(self, key: ChunkKey, size: int) -> None:
        self.reserve(key, size)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), is_whole=st.booleans())
    def finish(self, data: st.DataObject, is_whole: bool) -> None:
        self.end(self.writing[data.draw(st.sampled_from(sorted(self.writing)))], is_whole)

    def reserve(self, key: ChunkKey, size: int) -> Writing | None:
        """Room, filled with bytes that nothing else has."""
        (before,) = self.pool.peek([key])
        found = self.pool.reserve(key, size, is_own=False)
        if isinstance(found, Refusal):
            assert (found is Refusal.EXISTS) == (before is not None or key in self.writing)
            assert (found is Refusal.TOO_LARGE) == (size > PAGES * PAGE_BYTES and found is not Refusal.EXISTS)
            return None
        assert before is None and key not in self.writing
        self.puts += 1
        self.writing[key] = found
        self.contents[found.object] = content(key, size, self.puts)
        fill(self.pool, found.object, self.contents[found.object])
        return found

    def end(self, writing: Writing, is_whole: bool) -> None:
        """Commit or abort."""
        ended: list[bool] = []
        writing.on_end.append(lambda: ended.append(True))
        (self.pool.commit if is_whole else self.pool.abort)(writing)
        assert ended == [True] and there(self.pool, writing.object.key) == [is_whole]
        del self.writing[writing.object.key]

    @precondition(lambda self: len(self.pool) > 0)
    @rule(data=st.data(), ttl_s=st.floats(0.5, 100), owner=st.sampled_from([None, "one", "two"]))
    def lease(self, data: st.DataObject, ttl_s: float, owner: str | None) -> None:
        names = [key for key, is_there in zip(KEYS, there(self.pool, *KEYS), strict=True) if is_there]
        keys = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        found = [stored for stored in self.pool.find(keys) if stored is not None]
        self.pool.use(keys)
        lease = self.pool.lease(found, ttl_s, owner)
        assert lease is not None and len(found) == len(keys)
        until_s = self.clock.monotonic() + min(ttl_s, 60.0)
        self.held[lease.id] = Held(lease, [self.contents[stored] for stored in found], until_s)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.held[data.draw(st.sampled_from(sorted(self.held)))].lease
        self.pool.release(lease.id, "another")
        self.check_promises()
        del self.held[lease.id]
        for _ in range(2):
            self.pool.release(lease.id, lease.owner)

    @rule(owner=st.sampled_from(["one", "two"]))
    def owner_dies(self, owner: str) -> None:
        self.pool.release_all(owner)
        self.held = {id: held for id, held in self.held.items() if held.lease.owner != owner}

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: ChunkKey) -> None:
        was_there = there(self.pool, key) == [True]
        assert self.pool.delete(key) == was_there and there(self.pool, key) == [False]

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pool.expire()
        now = self.clock.monotonic()
        self.held = {id: held for id, held in self.held.items() if held.until_s > now}
        assert self.pool.leases == len(self.held)

    @invariant()
    def check_promises(self) -> None:
        """What a lease holds has the bytes it had, whatever became of the object."""
        for held in self.held.values():
            assert [bytes_of(self.pool, stored) for stored in held.lease.objects] == held.contents

    @invariant()
    def check_contents(self) -> None:
        """What is found has the bytes that were put, and the books agree."""
        for stored in self.pool.peek(KEYS):
            assert stored is None or bytes_of(self.pool, stored) == self.contents[stored]
        for writing in self.writing.values():
            assert bytes_of(self.pool, writing.object) == self.contents[writing.object]
        self.pool.check()

    def teardown(self) -> None:
        for writing in list(self.writing.values()):
            self.pool.abort(writing)
        self.clock.advance(100)
        self.pool.expire()
        for key in KEYS:
            self.pool.delete(key)
        self.pool.check()
        assert self.pool.free_bytes == PAGES * PAGE_BYTES and self.pool.pinned_bytes == 0 == self.pool.used_bytes


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_least_used_goes_first() -> None:
    """In a full pool what was used again stays, and what came first goes."""
    pool = pool_of(4)
    for key in KEYS[:4]:
        store(pool, key, bytes(PAGE_BYTES))
    pool.use(KEYS[:1])
    store(pool, KEYS[4], bytes(PAGE_BYTES))
    assert there(pool, *KEYS[:5]) == [True, False, True, True, True]
    assert pool.counts.evicted == 1 and pool.counts.evicted_bytes == PAGE_BYTES


def test_what_others_stand_on_goes_last() -> None:
    """Of a text of hotspan's own the end goes first, though it came last."""
    pool = pool_of(4)
    chunks = chain("text", 4)
    for chunk in chunks:
        record = pack(Record(chunk.key, chunk.parent, bytes(32), 100, Terms(tenant=3), 0, chunk.index))
        store(pool, chunk.key, record.ljust(PAGE_BYTES, b"\0"), is_own=True)
    for n, key in enumerate(KEYS[:3]):
        store(pool, key, bytes(PAGE_BYTES))
        assert there(pool, *(chunk.key for chunk in chunks)) == [True] * (3 - n) + [False] * (n + 1)


def test_nothing_goes_for_what_finds_no_room_anyway() -> None:
    """Where leases and writers hold too much, a put is refused at once, and what could go stays."""
    pool = pool_of(4)
    for key in KEYS[:4]:
        store(pool, key, bytes(PAGE_BYTES))
    lease = pool.lease([stored for stored in pool.peek(KEYS[:2]) if stored], 10)
    assert lease is not None
    assert pool.reserve(KEYS[4], 3 * PAGE_BYTES, is_own=False) is Refusal.NO_ROOM
    assert there(pool, *KEYS[:4]) == [True] * 4 and pool.counts.evicted == 0
    assert isinstance(pool.reserve(KEYS[4], 2 * PAGE_BYTES, is_own=False), Writing)
    assert there(pool, *KEYS[:4]) == [True, True, False, False]


def test_what_was_deleted_is_free_when_its_last_reader_is_gone() -> None:
    """However the last lease of a deleted object ends, its bytes are free then, and not before."""
    clock = SimulatedClock()
    for way in ("release", "death", "time"):
        pool = pool_of(1, clock)
        stored = store(pool, KEYS[0], b"x")
        leases = [pool.lease([stored], 10, "owner") for _ in range(2)]
        assert pool.delete(KEYS[0]) and pool.reserve(KEYS[0], 1, is_own=False) is Refusal.NO_ROOM
        assert leases[0] is not None and leases[1] is not None
        pool.release(leases[0].id, "owner")
        assert pool.free_bytes == 0
        if way == "release":
            pool.release(leases[1].id, "owner")
        elif way == "death":
            pool.release_all("owner")
        else:
            clock.advance(10)
            pool.expire()
        assert pool.free_bytes == PAGE_BYTES
        pool.check()


def test_a_lease_lasts_no_longer_than_allowed() -> None:
    """Whatever was asked for, a lease ends after the daemon's own limit."""
    clock = SimulatedClock()
    pool = pool_of(clock=clock, max_lease_s=5)
    pool.lease([store(pool, KEYS[0], b"x")], 1e9)
    clock.advance(5)
    pool.expire()
    assert pool.leases == 0 and pool.counts.leases_expired == 1


def test_leases_are_not_without_number() -> None:
    """Beyond the limit there is no lease, until some are over."""
    clock = SimulatedClock()
    pool = pool_of(clock=clock)
    stored = store(pool, KEYS[0], b"x")
    for _ in range(MAX_LEASES):
        assert pool.lease([stored], 1) is not None
    assert pool.lease([stored], 1) is None
    clock.advance(1)
    assert pool.lease([stored], 1) is not None and pool.leases == 1


def test_updates_wait_for_their_object_and_survive_it() -> None:
    """Updates from before it came, or from when it gave way, are on an object that comes; a delete ends them.

    Updates of before are of generation 0: they do not let an object outlive what was invalidated before it came.
    """
    pool = pool_of(1)
    early, late = updates_of(Terms(labels=frozenset([1])), 5), updates_of(Terms(labels=frozenset([2])), 6)
    pool.add_updates({KEYS[0]: early})
    stored = store(pool, KEYS[0], b"x")
    pool.add_updates({KEYS[0]: late})
    assert stored.updates == {*updates_of(Terms(labels=frozenset([1])), 0), *late}
    store(pool, KEYS[1], b"y")
    assert there(pool, *KEYS[:2]) == [False, True]
    assert store(pool, KEYS[0], b"x").updates == set(updates_of(Terms(labels=frozenset([1, 2])), 0))
    pool.delete(KEYS[0])
    assert store(pool, KEYS[0], b"x").updates == set()


def test_updates_do_not_grow_without_end() -> None:
    """With more labels than are kept one by one the updates say that any tag takes the object; its expiry stays."""
    pool = pool_of(1)
    stored = store(pool, KEYS[0], b"x")
    pool.add_updates({KEYS[0]: updates_of(Terms(expires_s=77), 3)})
    for n in range(1000):
        pool.add_updates({KEYS[0]: updates_of(Terms(labels=frozenset([n + 1])), n)})
    assert len(stored.updates) <= 2 * MAX_LABELS
    terms = updated(Terms(), stored.updates)
    assert terms.is_wild and terms.expires_s == 77


def test_versions_tell_bytes_and_updates_apart() -> None:
    """Updates change the lower bits of a version, however often; other bytes under any name have other upper ones."""
    pool = pool_of(2)
    stored = store(pool, KEYS[0], b"x")
    versions = [stored.version]
    for n in range(3):
        pool.add_updates(
            {KEYS[0]: updates_of(Terms(labels=frozenset([n // 2 + 1])), 5)}
        )  # the second one is there already
        versions.append(stored.version)
    assert versions[0] < versions[1] == versions[2] < versions[3]
    assert len({version >> CHANGE_BITS for version in versions}) == 1
    other = store(pool, KEYS[1], b"x").version
    stored.version |= (1 << CHANGE_BITS) - 1
    last = stored.version
    pool.add_updates({KEYS[0]: updates_of(Terms(labels=frozenset([9])), 5)})
    pool.delete(KEYS[1])
    again = store(pool, KEYS[1], b"x").version
    assert len({version >> CHANGE_BITS for version in (last, stored.version, other, again)}) == 4


def test_a_lost_log_takes_hotspans_own_objects_only() -> None:
    """What other clients put does not depend on hotspan's log; hotspan's objects and all updates go with it."""
    pool = pool_of(4)
    record = pack(Record(KEYS[0], None, bytes(32), 100, Terms()))
    store(pool, KEYS[0], record.ljust(PAGE_BYTES, b"\0"), is_own=True)
    store(pool, KEYS[1], b"other")
    pool.add_updates({KEYS[2]: updates_of(Terms(labels=frozenset([1])), 5)})
    pool.forget_own()
    assert there(pool, *KEYS[:2]) == [False, True] and store(pool, KEYS[2], b"x").updates == set()
    pool.check()


def test_only_a_record_of_its_own_makes_an_object_hotspans() -> None:
    """Bytes in hotspan's bucket that are no record, or another chunk's, are kept, and stand on nothing."""
    pool = pool_of(4)
    stranger = pack(Record(KEYS[5], KEYS[4], bytes(32), 100, Terms()))
    for key, data in ((KEYS[0], b"short"), (KEYS[1], bytes(PAGE_BYTES)), (KEYS[2], stranger)):
        assert store(pool, key, data, is_own=True).record == b""
    pool.check()


def test_names_are_kept_apart() -> None:
    """A chunk's name in hotspan's bucket is its key; any other name, bucket or spelling is another object."""
    key = key_of("A")
    names = [("hotspan", key.hex()), ("hotspan", key.hex().upper()), ("other", key.hex()), ("a", "bc"), ("ab", "c")]
    assert object_key(*names[0]) == key
    assert len({object_key(*name) for name in names}) == len(names)
