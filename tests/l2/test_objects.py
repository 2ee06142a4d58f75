"""The one store and the one log over blobs in memory: calls that fail, replies that are lost, copies that are old."""

import errno
import json
from collections.abc import Callable
from itertools import count

import pytest

from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import ChunkKey
from hotspan.l2.base import PREAMBLE_BYTES, SharedInvalidation, updates_of
from hotspan.l2.bounds import MAX_ENTRY_BYTES
from hotspan.l2.follower import LogFollower
from hotspan.l2.log import SharedInvalidationLog, checked, pack_entry
from hotspan.l2.metadata import ENTRY_BYTES, LIFE_BYTES, MAX_UPDATES, new_life, pack_updates, parse_metadata
from hotspan.l2.objects import BlobStore
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock
from kit.simulated.memory_store import MemoryServer
from tests.l2.kit.bounds import StoreBoundsTests, report_of
from tests.l2.kit.names import StoreNamesTests
from tests.l2.kit.races import SharedStoreTests
from tests.l2.kit.stores import TENANT, TERMS, MakeStore, found, frame_of, put, read, record_of

SIZE = 4096
TAG = Terms(labels=tag_labels(["z"]))
(A,) = chain("a", 1)


class TestMemory(SharedStoreTests, StoreNamesTests):
    """The kit."""

    EVICTS = True

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryServer(SimulatedClock(), evicts=self.EVICTS).store

    test_a_new_log_has_no_entries = None  # judges the floor by the real time
    test_a_replica_that_says_nothing_is_not_alive = None  # waits in real time
    test_nobody_sees_half_an_object = None  # creation is one step here
    test_a_delete_during_a_put_leaves_all_or_nothing = None
    test_of_several_puts_at_once_one_wins = None
    test_threads_do_not_disturb_each_other = None  # of media: here there is a lock


class MemoryPlanter:
    """Whoever writes the blobs themselves."""

    def __init__(self, server: MemoryServer) -> None:
        self._data = server.data

    def entry(self, number: int, size: int = 0) -> None:
        log = next(name for name in self._data if name.startswith("log/")).rpartition("/")[0]
        self._data[f"{log}/{number:016x}"] = bytes(size) if size else b"E" + pack_entry([Scope()], "somebody")

    def report(self, number: int, data: bytes | int) -> None:
        said = f"replica {number}".encode() + b"\0" + data if isinstance(data, bytes) else bytes(data)
        self._data[report_of(f"replica {number}")] = said

    def metadata(self, name: str, size: int) -> None:
        self._data[name] = bytes(size)


class TestMemoryBounds(StoreBoundsTests):
    """The bounds of the one store and the one log."""

    @pytest.fixture
    def server(self) -> MemoryServer:
        return MemoryServer(SimulatedClock())

    @pytest.fixture
    def make_store(self, server: MemoryServer) -> MakeStore:
        return server.store

    @pytest.fixture
    def planter(self, server: MemoryServer) -> MemoryPlanter:
        return MemoryPlanter(server)

    test_large_metadata_is_not_read_whole = None  # an append of this medium copies: it is in this process


class TestMemoryThatNeverEvicts(TestMemory):
    """The kit, where metadata begins with the first update."""

    EVICTS = False


@pytest.fixture
def blobs(clock: SimulatedClock) -> MemoryServer:
    return MemoryServer(clock)


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


def log_of(store: BlobStore) -> SharedInvalidationLog:
    assert store.log is not None
    return store.log


def insisting(call: Callable[[], object]) -> object:
    """What a call returns that is made again when it fails, as replicas do later."""
    for _ in range(3):
        try:
            return call()
        except ConnectionError:
            continue
    raise AssertionError("it failed again and again")


@pytest.mark.parametrize("evicts", [True, False])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_every_call_may_fail_or_lose_its_reply(moment: str, evicts: bool, clock: SimulatedClock) -> None:
    """Whichever call of the medium fails, or is done and nobody hears of it: asked again, all is there, and once."""
    calls = next(nth for nth in count(1) if calls_with_fault(moment, nth, clock, evicts=evicts) < nth)
    assert calls > 10


def calls_with_fault(moment: str, nth: int, clock: SimulatedClock, *, evicts: bool) -> int:
    """How many calls it takes to write all kinds of things while the n-th call fails; all must be there then."""
    blobs, calls = MemoryServer(clock, evicts=evicts), 0

    def fail(method: str) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise ConnectionError(f"{method} failed")

    store, other = (blobs.store() for _ in range(2))
    setattr(blobs, moment, fail)
    insisting(lambda: put(store, A, SIZE))
    insisting(lambda: store.add_updates({A.key: updates_of(TAG, 9)}))
    generations = [
        insisting(lambda: log_of(store).append([Scope(tenant=1)], "me")),
        insisting(lambda: log_of(store).append([Scope(tenant=2)], "me")),
    ]
    insisting(lambda: log_of(store).report("me", 3, 60.0))
    setattr(blobs, moment, lambda method: None)
    one, page = found(other, A), log_of(other).read(0)
    assert one is not None and one.record == record_of(A, SIZE) and one.terms.labels == TERMS.labels | TAG.labels
    assert read(other, one) == frame_of(A.key, SIZE) and log_of(other).replicas() == {"me": 3}
    tenants = [entry.scopes[0].tenant for entry in page.entries]
    assert tenants in ([1, 2], [1, 1, 2], [1, 2, 2]) and set(generations) <= {e.generation for e in page.entries}
    assert log_of(store).read(0).epoch == page.epoch and found(store, A) == one
    return calls


@pytest.mark.parametrize("entries_since", [0, 1, 2, 5])
def test_an_older_copy_is_noticed_by_who_knows_more(blobs: MemoryServer, entries_since: int) -> None:
    """After a restart from an older copy, also one to which others have added, what it has is no hit for anybody."""
    store = blobs.store()
    put(store, A, SIZE)
    log_of(store).append([Scope(tenant=1)], "me")
    copy = dict(blobs.data)
    for tenant in (2, 3):
        last = log_of(store).append([Scope(tenant=tenant)], "me")
    blobs.data = copy
    fresh = blobs.store()
    assert found(fresh, A) is not None  # it can't know
    for n in range(entries_since):
        log_of(fresh).append([Scope(tenant=10 + n)], "fresh")
    page = log_of(store).read(last)
    assert page.floor > last and not page.entries
    assert log_of(fresh).read(0).epoch == page.epoch
    assert found(fresh, A) is None and found(store, A) is None


@pytest.mark.parametrize("entries_since", [0, 1])
def test_an_older_copy_is_noticed_by_who_knew_more_before_it_restarted(
    blobs: MemoryServer, clock: SimulatedClock, entries_since: int
) -> None:
    """Store and replica both restart, the store from an older copy: what was invalidated since is no hit."""
    store = blobs.store()
    put(store, A, SIZE)
    before = LogFollower(log_of(store), "a", clock)
    assert before.poll()
    copy = dict(blobs.data)
    for tenant in (TENANT, 2):
        before.append([Scope(tenant=tenant)])
    before.foreign()
    blobs.data = copy
    store = blobs.store()
    for n in range(entries_since):
        log_of(store).append([Scope(tenant=10 + n)], "b")
    after = LogFollower(log_of(store), "a", clock, since=before.position)
    assert after.poll() and after.foreign() == [Scope()]
    assert after.generation > before.generation and found(store, A) is None


def test_an_entry_that_is_too_long_takes_its_tenants(blobs: MemoryServer) -> None:
    """An invalidation of more keys than others could read at once is wider, and no longer."""
    store = blobs.store()
    keys = frozenset(ChunkKey(n.to_bytes(32)) for n in range(MAX_ENTRY_BYTES // 64))
    log_of(store).append([Scope(tenant=1, keys=keys), Scope(tenant=1), Scope(tenant=2)], "me")
    log_of(store).append([Scope(keys=keys)], "me")
    assert [entry.scopes for entry in log_of(store).read(0).entries] == [(Scope(tenant=1), Scope(tenant=2)), (Scope(),)]


def test_a_copy_of_an_epoch_before_is_no_log(blobs: MemoryServer) -> None:
    """Where even the epoch is an older one, who knew the later one begins another, above both."""
    store = blobs.store()
    log_of(store).append([Scope(tenant=1)], "me")
    copy = dict(blobs.data)
    later = log_of(store).read(log_of(store).read(0).generation + 1000)
    generation = log_of(store).append([Scope(tenant=2)], "me")
    blobs.data = copy
    page = log_of(store).read(0)
    assert page.epoch != later.epoch and page.floor > generation and not page.entries


def log_blob(blobs: MemoryServer, generation: int) -> str:
    """The name of the blob of an entry."""
    (name,) = (name for name in blobs.data if name.startswith("log/") and name.endswith(f"{generation:016x}"))
    return name


DAMAGES = [b"", b"E", b"?", b"junk", b"E{}", b"Ejunk", *(b"E" + checked(d) for d in (b"junk", b"{}", b"[" * 100_000))]


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_ends_the_epoch(blobs: MemoryServer, damage: bytes, at: int) -> None:
    """Nobody knows what it invalidated: the log begins anew, once, for who knew it and who did not."""
    store, fresh = blobs.store(), blobs.store()
    generations = [log_of(store).append([Scope(tenant=n)], "me") for n in range(3)]
    before = log_of(store).read(generations[0])
    put(store, A, SIZE)
    blobs.data[log_blob(blobs, generations[at])] = damage
    pages = [log_of(each).read(after) for each in (store, fresh) for after in (generations[0], 0)]
    assert all(page.epoch == pages[0].epoch != before.epoch and page.floor > generations[2] for page in pages)
    assert not any(page.entries for page in pages) and found(fresh, A) is None


def test_a_lost_entry_is_noticed_by_who_had_read_it(blobs: MemoryServer) -> None:
    """The newest one ends the epoch for its readers; before one that is gone from the middle all counts as trimmed."""
    store = blobs.store()
    generations = [log_of(store).append([Scope(tenant=n)], "me") for n in range(4)]
    epoch = log_of(store).read(0).epoch
    del blobs.data[log_blob(blobs, generations[1])]
    page = log_of(blobs.store()).read(0)
    assert page.floor == generations[1] and [entry.generation for entry in page.entries] == generations[2:]
    del blobs.data[log_blob(blobs, generations[3])]
    page = log_of(store).read(generations[3])
    assert page.epoch != epoch and page.floor > generations[3]


@pytest.mark.parametrize("scope", [{"tenant": 7}, {"tenant": 7, "labels": "x"}, [{"tenant": 7, "also": []}]])
def test_an_entry_of_another_form_takes_its_tenant(blobs: MemoryServer, scope: object) -> None:
    """Of an entry that can't be understood and whose tenant can, all of the tenant goes; the log goes on behind it."""
    store = blobs.store()
    put(store, A, SIZE)
    generations = [log_of(store).append([Scope(tenant=n)], "me") for n in range(3)]
    blobs.data[log_blob(blobs, generations[1])] = b"E" + checked(json.dumps({"by": "me", "scope": scope}).encode())
    page = log_of(store).read(generations[0])
    assert page.entries[0] == SharedInvalidation(generations[1], (Scope(tenant=7),), "me", is_whole=False)
    assert page.entries[1].is_whole and page.generation == generations[2] and found(store, A) is not None


@pytest.mark.parametrize("damage", [b"", b"{", b"1e999", bytes(17)])
def test_a_damaged_epoch_is_over(blobs: MemoryServer, clock: SimulatedClock, damage: bytes) -> None:
    """An epoch whose blob can't be read is followed by another."""
    store = blobs.store()
    put(store, A, SIZE)
    before = log_of(store).read(0)
    (name,) = (name for name in blobs.data if name.startswith("epochs/"))
    blobs.data[name] = damage
    clock.advance(1.1)
    page = log_of(store).read(0)
    assert page.epoch != before.epoch and log_of(store).read(0).epoch == page.epoch and found(store, A) is None


@pytest.mark.parametrize("number", ["1e999", "1" + "0" * 400, "NaN", '"x"', "null", "[]"])
def test_reports_that_nobody_can_read_are_nobodys(blobs: MemoryServer, number: str) -> None:
    """What another writes of a replica with a number beyond all bounds is as if it was not there."""
    log = log_of(blobs.store())
    log.report("me", 5, 5.0)
    blobs.data["replicas/generation"] = f'generation\0{{"generation": {number}, "until_s": 9e12}}'.encode()
    blobs.data["replicas/until"] = f'until\0{{"generation": 1, "until_s": {number}}}'.encode()
    assert log.replicas()["me"] == 5


def test_to_report_the_same_again_costs_nothing(blobs: MemoryServer, clock: SimulatedClock) -> None:
    """A report that says what the last one said is written only when that would soon be over."""
    log, other = log_of(blobs.store()), log_of(blobs.store())
    written: list[str] = []
    blobs.before = lambda method: written.append(method) if method == "overwrite replicas" else None
    for _ in range(100):
        log.report("me", 5, 5.0)
        clock.advance(0.1)
        assert other.replicas() == {"me": 5}
    assert 5 < len(written) < 15
    log.report("me", 6, 5.0)
    assert other.replicas() == {"me": 6}


def test_what_is_not_the_chunks_object_is_a_miss(blobs: MemoryServer) -> None:
    """Another chunk's object, a damaged or cut one, and what was put anew since it was found are no hit."""
    store, (other,) = blobs.store(), chain("b", 1)
    put(store, other, SIZE, version=5)
    put(store, A, SIZE)
    name, other_name = (next(n for n in blobs.data if "objects" in n and c.key.hex() in n) for c in (A, other))
    whole = blobs.data[name]
    one = found(store, A)
    for data in (b"", b"x" * 100, bytes(len(whole)), whole[:100] + b"?" + whole[101:], blobs.data[other_name]):
        blobs.data[name] = data
        assert found(store, A) is None and read(store, one) is None
    for data in (whole[:-1], whole + b"x", whole[:PREAMBLE_BYTES]):
        blobs.data[name] = data
        assert read(store, found(store, A)) is None
    store.delete([A.key], TENANT)
    assert put(store, A, SIZE, version=1) and read(store, one) is None
    assert read(blobs.store(), found(store, A)) == frame_of(A.key, SIZE, version=1)


def test_two_groups_that_wrote_apart_end_in_one_epoch(blobs: MemoryServer) -> None:
    """Replicas that wrote to two copies of one log, of which one is left: who wrote to the other begins a new epoch."""
    a, b = blobs.store(), blobs.store()
    log_of(a).append([Scope(tenant=1)], "a")
    log_of(b).read(0)
    one, two = dict(blobs.data), dict(blobs.data)
    blobs.data = one
    log_of(a).append([Scope(tenant=2)], "a")
    blobs.data = two
    newest = log_of(b).append([Scope(tenant=3)], "b")
    blobs.data = one  # healed: b's entry of the same number is gone
    page = log_of(b).read(newest)
    assert page.floor > newest and log_of(a).read(0).epoch == page.epoch


def test_an_epoch_that_begins_at_a_number_that_is_known_is_followed_by_another(blobs: MemoryServer) -> None:
    """A log is lost and begun by a newcomer at the millisecond of the last entry that we know: we append to a third."""
    log = log_of(blobs.store())
    before = log.read(0)
    blobs.data.clear()
    assert log_of(blobs.store()).read(0).generation == before.generation
    generation = log.append([Scope(tenant=5)], "me")
    assert generation > before.generation
    assert [entry.scopes for entry in log_of(blobs.store()).read(0).entries] == [(Scope(tenant=5),)]


def test_no_entry_is_acknowledged_in_a_log_that_is_lost(blobs: MemoryServer, clock: SimulatedClock) -> None:
    """After the medium lost everything, an entry begins the next epoch, and is there however late it is read."""
    log = log_of(blobs.store())
    before = log.append([Scope(tenant=4)], "me")
    lost = log.epoch()
    blobs.data.clear()
    generation = log.append([Scope(tenant=5)], "me")
    clock.advance(10)
    page = log.read(generation - 1)
    assert [entry.scopes for entry in page.entries] == [(Scope(tenant=5),)]
    assert page.epoch != lost and page.floor > before


@pytest.mark.parametrize("slept_before", ["create log", "read log", "read epochs"])
def test_who_slept_while_it_wrote_leaves_nothing_in_front(blobs: MemoryServer, slept_before: str) -> None:
    """Whenever a writer sleeps until what it knew is trimmed, its entry comes last, and no other of its own is there:
    who had not read one that was trimmed would take it for that."""
    store, other = blobs.store(8), blobs.store(8)
    known = log_of(store).append([Scope(tenant=1)], "sleeps")
    last = 0

    def sleep(call: str) -> None:
        nonlocal last
        if call == slept_before and not last:
            last = 1
            last = max(log_of(other).append([Scope(tenant=2)], "wakes") for _ in range(20))

    blobs.before = sleep
    generation = log_of(store).append([Scope(tenant=3)], "sleeps")
    blobs.before = lambda call: None
    numbers = [int(name.rpartition("/")[2], 16) for name in blobs.data if name.startswith("log/")]
    assert min(numbers) > known + 1 and generation == max(numbers) > last
    assert [entry.generation for entry in log_of(other).read(last).entries] == [generation]
    assert log_of(blobs.store()).read(known).floor > known


@pytest.mark.parametrize("call", ["find", "get", "put", "update", "delete"])
def test_a_put_after_an_outage_goes_to_the_epoch_that_holds(blobs: MemoryServer, call: str) -> None:
    """Where a call failed and the medium comes back empty, what is put at once is not put into the epoch before."""
    store = blobs.store()
    assert put(store, A, SIZE)
    one = found(store, A)
    calls: dict[str, Callable[[], object]] = {
        "find": lambda: found(store, A),
        "get": lambda: read(store, one),
        "put": lambda: put(store, A, SIZE),
        "update": lambda: store.add_updates({A.key: updates_of(TAG, 9)}),
        "delete": lambda: store.delete([A.key], TENANT),
    }

    def fail(method: str) -> None:
        raise ConnectionError("the medium is away")

    blobs.before = fail
    with pytest.raises(ConnectionError):
        calls[call]()
    blobs.before = lambda method: None
    blobs.data.clear()
    assert put(store, A, SIZE, version=1)
    log_of(store).append([Scope(tenant=5)], "me")
    assert read(store, found(store, A)) == frame_of(A.key, SIZE, version=1)


def test_an_object_lives_as_long_as_its_metadata(blobs: MemoryServer) -> None:
    """Metadata that is gone, begun anew, of another chunk, damaged or too long: the object is a miss till it is put."""
    store = blobs.store()
    name = store.metadata_name(A.key)
    for data in (None, new_life(), b"", b"short", b"x" * 40):
        store.delete([A.key], TENANT)
        assert put(store, A, SIZE)
        before = blobs.data.pop(name)
        if data is not None:
            blobs.data[name] = data
        assert found(store, A) is None
        blobs.data[name] = before
        assert found(store, A) is not None
        blobs.data[name] = before + bytes(ENTRY_BYTES) * (MAX_UPDATES + 1)
        assert found(store, A) is None and put(store, A, SIZE, version=1)
        one = found(store, A)
        assert one is not None and one.terms == TERMS and read(store, one) == frame_of(A.key, SIZE, version=1)


def test_without_eviction_metadata_begins_with_the_first_update(blobs: MemoryServer) -> None:
    """A put writes its object alone; updates that were there before it are written again, so that they are younger."""
    blobs.evicts = False
    store = blobs.store()
    appended: list[str] = []
    blobs.before = appended.append
    assert put(store, A, SIZE)
    assert [name for name in blobs.data if A.key.hex() in name and "metadata" in name] == []
    assert appended.count("append metadata") == 0
    store.add_updates({A.key: updates_of(TAG, 9)})
    del blobs.data[next(name for name in blobs.data if name.startswith("objects/"))]
    assert found(store, A) is None and put(store, A, SIZE, version=1)
    one = found(store, A)
    assert one is not None and one.terms.labels == TERMS.labels | TAG.labels and appended.count("append metadata") == 2


@pytest.mark.parametrize("data", [b"", b"short", bytes(16), b"x" * 40])
def test_without_eviction_metadata_of_something_else_is_a_miss(blobs: MemoryServer, data: bytes) -> None:
    """What is no metadata might have been some that forbids the chunk; it is a miss until it is put again."""
    blobs.evicts = False
    store = blobs.store()
    assert put(store, A, SIZE)
    blobs.data[store.metadata_name(A.key)] = data
    assert found(store, A) is None and put(store, A, SIZE, version=1)
    assert read(store, found(store, A)) == frame_of(A.key, SIZE, version=1)


def test_a_update_that_can_not_be_read_makes_it_wild() -> None:
    """A bit that flipped, an end that is missing: any tag takes the chunk, and the other updates count."""
    life, updates = new_life(), updates_of(TAG, 9)
    whole = life + pack_updates(updates) * 2
    assert parse_metadata(whole) is not None
    for at in range(LIFE_BYTES, len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        for damaged in (bytes(flipped), whole[: at + 1] if at + 1 < len(whole) else bytes(flipped)):
            metadata = parse_metadata(damaged)
            assert metadata is not None
            if (len(damaged) - LIFE_BYTES) % ENTRY_BYTES or damaged == bytes(flipped):
                assert b"" in metadata.updates


def test_the_epoch_is_read_again_where_nobody_reads_the_log(blobs: MemoryServer, clock: SimulatedClock) -> None:
    """A store whose log is not the one that is followed learns of a new epoch within a second."""
    store, other = blobs.store(), blobs.store()
    put(store, A, SIZE)
    assert found(other, A) is not None
    log_of(store).read(log_of(store).read(0).generation + 1000)
    clock.advance(1.1)
    assert found(other, A) is None and put(other, A, SIZE) and found(store, A) is not None


def test_a_store_that_others_change_all_the_time_gives_up(blobs: MemoryServer) -> None:
    """A put raises after some tries; a log that is lost again and again does, too."""
    store = blobs.store()
    store.find([A.key])

    def forget(method: str) -> None:
        if method.startswith("create"):
            raced = [name for name in blobs.data if name.startswith("metadata/")]
            blobs.data[store.metadata_name(A.key)] = new_life()
            assert len(raced) <= 1

    def vanish(method: str) -> None:
        if method.startswith("read"):
            blobs.data.pop(store.metadata_name(A.key), None)

    blobs.before = lambda method: (forget(method), vanish(method))[0]
    with pytest.raises(OSError, match="each time") as refused:
        put(store, A, SIZE)
    assert refused.value.errno == errno.EBUSY
    blobs.before = lambda method: blobs.data.clear()
    with pytest.raises(ConnectionError, match="again and again"):
        log_of(store).read(0)
