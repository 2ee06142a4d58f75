"""The store on a Redis server of its own: the kit, and what only Redis can do to it."""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from hotspan.core.errors import ConfigError
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import MIB, Chunk
from hotspan.l2 import redis_servers
from hotspan.l2.base import updates_of
from hotspan.l2.log import pack_entry
from hotspan.l2.metadata import MAX_BYTES, MAX_UPDATES
from hotspan.l2.options import RedisOptions
from hotspan.l2.redis import RedisStore
from hotspan.testing.chunks import aligned, chain, key_of
from kit.redis_server import RedisServer, redis_server
from kit.waiting import PATIENCE_S, at_last, until
from tests.l2.kit.bounds import ROOM_BYTES, StoreBoundsTests, growth_of
from tests.l2.kit.names import StoreNamesTests
from tests.l2.kit.outages import StoreOutageTests
from tests.l2.kit.races import SharedStoreTests
from tests.l2.kit.stores import TERMS, MakeStore, ObjectStoreTests, found, frame_of, put, read
from tests.relay import Relay

SIZE = 2 * MIB + 4096
(A,) = chain("a", 1)
(B,) = chain("b", 1)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One for all tests that do it no harm."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """Empty."""
    shared_server.ask("FLUSHALL")
    return shared_server


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))
    yield store
    store.close()


@pytest.fixture
def relay(server: RedisServer) -> Iterator[Relay]:
    relay = Relay(server.port)
    yield relay
    relay.close()


class TestRedisStore(SharedStoreTests, StoreNamesTests):
    """One server."""

    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        return lambda entries: RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S, log_entries=entries))


class RedisPlanter:
    """Whoever may write the server."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._key = "hotspan:2:{log}"

    def entry(self, number: int, size: int = 0) -> None:
        ((_, fields),) = self._client.xrevrange(self._key, count=1)  # type: ignore[misc]
        body = bytes(size) if size else pack_entry([Scope()], "somebody")
        self._client.xadd(self._key, {next(iter(fields)): body}, id=f"{number}-0")

    def report(self, number: int, data: bytes | int) -> None:
        said = data if isinstance(data, bytes) else bytes(data)
        self._client.hset(f"{self._key}:replicas", f"replica {number}", said)  # type: ignore[arg-type]

    def metadata(self, name: str, size: int) -> None:
        kind, epoch, chunk = name.split("/")
        self._client.set(f"hotspan:2:{kind}:{epoch}:{{{chunk}}}", bytes(size))


class TestRedisStoreBounds(StoreBoundsTests):
    """One server."""

    LARGE = 3
    LARGE_BYTES = 30 * MIB

    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        return lambda entries: RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S, log_entries=entries))

    @pytest.fixture
    def planter(self, server: RedisServer) -> Iterator[RedisPlanter]:
        yield RedisPlanter(server.url)
        server.ask("FLUSHALL")

    test_large_reports_are_not_read_whole = None  # one call has all reports: too many bytes are an error

    def test_large_reports_are_refused(self, store: RedisStore, planter: RedisPlanter) -> None:
        """Reports that no honest replicas make are an error before they are received."""
        for number in range(3):
            planter.report(number, 30 * MIB)

        def refused() -> None:
            with pytest.raises(OSError):
                store.log.replicas()

        _, grown = growth_of(refused)
        assert grown < ROOM_BYTES


class TestRedisStoreOnUnixSocket(ObjectStoreTests):
    """One server on the same machine."""

    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        return lambda entries: RedisStore(f"unix://{server.socket}?db=3", RedisOptions(timeout_s=PATIENCE_S, ttl_s=60))


class TestRedisOutage(StoreOutageTests):
    """A server that is killed and frozen."""

    LIMIT_S = 30.0

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[RedisServer]:
        with redis_server(tmp_path) as server:
            yield server

    @pytest.fixture
    def make_store(self, server: RedisServer) -> MakeStore:
        return lambda entries: RedisStore(f"{server.url}/2", RedisOptions(timeout_s=5.0, log_entries=entries))


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("http://localhost", {}),
        ("redis://localhost?tls=yes", {}),
        ("redis://localhost:6379?db=x", {}),
        ("rediss://localhost?ssl_cert_reqs=perhaps", {}),
        ("redis://localhost", {"prefix": "{x}"}),
        ("redis://localhost", {"prefix": ""}),
        ("redis://localhost", {"timeout_s": 0}),
        ("redis://localhost", {"ttl_s": -1.0}),
    ],
)
def test_what_can_not_work_is_refused(url: str, options: dict[str, float]) -> None:
    """A URL that redis-py does not understand, and settings without sense, raise ConfigError; nothing is asked."""
    with pytest.raises(ConfigError):
        RedisStore(url, RedisOptions(**options))  # type: ignore[arg-type]


def test_prefixes_keep_stores_apart(server: RedisServer) -> None:
    """Two prefixes on one server share neither objects nor updates nor the log nor replicas."""
    one, two = (
        RedisStore(server.url, RedisOptions(prefix=prefix, timeout_s=PATIENCE_S)) for prefix in ("one", "one:1")
    )
    put(one, A, 4096)
    one.log.append([Scope()], "me")
    one.log.report("me", 1, 60)
    assert found(two, A) is None and put(two, A, 4096, version=1)
    assert not two.log.read(0).entries and two.log.replicas() == {}
    assert read(one, found(one, A)) == frame_of(A.key, 4096)
    one.close()
    two.close()


# -- round trips ---------------------------------------------------------------------------------------------------


def reads_of(server: RedisServer) -> int:
    """How often the server has received something."""
    return int(server.ask("INFO", "stats").split(b"total_reads_processed:")[1].split(b"\r\n")[0])


def test_a_long_text_is_one_question(server: RedisServer, store: RedisStore) -> None:
    """To find 400 chunks and to update them takes the server a few reads each, not one a chunk."""
    chunks = chain("text", 400)
    for chunk in chunks:
        put(store, chunk, 4096)
    before = reads_of(server)
    assert all(store.find([chunk.key for chunk in chunks]))
    between = reads_of(server)
    store.add_updates({chunk.key: updates_of(Terms(labels=tag_labels(["z"])), 9) for chunk in chunks})
    assert between - before < 40 and reads_of(server) - between < 40


def test_a_put_of_what_is_there_sends_nothing(server: RedisServer, store: RedisStore) -> None:
    """A second put of an object costs no bytes."""
    put(store, A, SIZE)
    before = int(server.ask("INFO", "stats").split(b"total_net_input_bytes:")[1].split(b"\r\n")[0])
    assert not put(store, A, SIZE, version=1)
    assert int(server.ask("INFO", "stats").split(b"total_net_input_bytes:")[1].split(b"\r\n")[0]) - before < 4096


# -- what is left on the server ------------------------------------------------------------------------------------


def keys_of(server: RedisServer, pattern: str = "*") -> list[str]:
    return [line for line in server.ask("KEYS", pattern).decode().split("\r\n") if line.startswith("hotspan")]


def life_of(server: RedisServer, key: str) -> int:
    """Milliseconds until a key expires; -1 for never."""
    return int(server.ask("PTTL", key)[1:])


def test_nothing_is_left_of_what_is_gone(server: RedisServer, store: RedisStore) -> None:
    """An object is two keys; deleted objects leave none; without `ttl_s` no key expires."""
    put(store, A, SIZE)
    store.add_updates({A.key: updates_of(TERMS, 9), B.key: updates_of(TERMS, 9)})
    put(store, B, 4096)
    keys = keys_of(server)
    assert len(keys) == 2 + 2 + 1 and {life_of(server, key) for key in keys} == {-1}
    store.delete([A.key, B.key])
    assert keys_of(server) == ["hotspan:2:{log}"]


def test_the_loser_of_a_race_leaves_nothing(server: RedisServer, store: RedisStore, relay: Relay) -> None:
    """Who sends an object while another puts it is told so, and the first one stays."""
    late = RedisStore(relay.url, RedisOptions(timeout_s=PATIENCE_S))
    assert found(late, A) is None
    won = []

    def overtake(data: bytes) -> list[bytes]:
        if b"SET" in data and not won:
            won.append(put(store, A, SIZE))
        return [data]

    relay.request = overtake
    assert not put(late, A, SIZE, version=1) and won == [True]
    assert len(keys_of(server, f"*{A.key.hex()}*")) == 2
    assert read(late, found(late, A)) == frame_of(A.key, SIZE)
    late.close()


def test_a_put_that_breaks_off_leaves_nothing(server: RedisServer, relay: Relay) -> None:
    """An object that did not arrive whole is found by nobody, and leaves its metadata only; the chunk can be put."""
    store = RedisStore(relay.url, RedisOptions(timeout_s=PATIENCE_S))
    assert found(store, A) is None
    passed = [0]

    def cut(data: bytes) -> Iterator[bytes]:
        passed[0] += len(data)
        yield data if passed[0] < SIZE * 2 // 3 else b""

    relay.request = cut
    with pytest.raises(OSError):
        put(store, A, SIZE)
    relay.request = lambda data: [data]
    assert len(keys_of(server, f"*{A.key.hex()}*")) == 1
    assert found(store, A) is None and put(store, A, SIZE) and read(store, found(store, A)) == frame_of(A.key, SIZE)
    store.close()


@pytest.mark.parametrize("verb", [b"SET", b"APPEND", b"XADD"])
def test_a_call_whose_reply_is_lost_can_be_made_again(
    server: RedisServer, store: RedisStore, relay: Relay, verb: bytes
) -> None:
    """What was done although its reply never came is there once: an object, a tag; an entry may stand twice."""
    late = RedisStore(relay.url, RedisOptions(timeout_s=PATIENCE_S))
    tag = Terms(labels=tag_labels(["z"]))
    put(store, B, 4096)
    calls: dict[bytes, Callable[[], object]] = {
        b"SET": lambda: put(late, A, SIZE),
        b"APPEND": lambda: late.add_updates({B.key: updates_of(tag, 9)}),
        b"XADD": lambda: late.log.append([Scope(tenant=5)], "me"),
    }
    assert found(late, A) is None
    is_next = []

    def request(data: bytes) -> list[bytes]:
        is_next.extend([True] if verb in data else [])
        return [data]

    relay.request, relay.reply = request, lambda data: [b""] if is_next else [data]
    with pytest.raises(OSError):
        calls[verb]()
    relay.request = relay.reply = lambda data: [data]
    calls[verb]()
    one, there = found(store, B), found(store, A)
    assert one is not None and (tag.labels <= one.terms.labels) == (verb == b"APPEND")
    assert (read(store, there) == frame_of(A.key, SIZE)) == (verb == b"SET")
    entries = store.log.read(0).entries
    assert {entry.scopes for entry in entries} == ({(Scope(tenant=5),)} if verb == b"XADD" else set())
    late.close()


def test_what_was_put_expires(server: RedisServer) -> None:
    """With `ttl_s` object and metadata go after that time, updated or hit or not, put or not; the log stays."""
    store = RedisStore(server.url, RedisOptions(ttl_s=60, timeout_s=PATIENCE_S))
    store.add_updates({A.key: updates_of(TERMS, 9), B.key: updates_of(TERMS, 9)})
    (alone,) = keys_of(server, f"*{B.key.hex()}}}")
    assert 30_000 < life_of(server, alone) <= 60_000, "updates of a chunk that nobody puts stay for ever"
    put(store, A, SIZE)
    keys = keys_of(server, f"*{A.key.hex()}}}")
    for key in keys:
        server.ask("PEXPIRE", key, "30000")
    store.add_updates({A.key: updates_of(TERMS, 10)})
    read(store, found(store, A))
    assert len(keys) == 2 and all(0 < life_of(server, key) <= 30_000 for key in keys)
    assert life_of(server, "hotspan:2:{log}") == -1
    for key in keys:
        server.ask("PEXPIRE", key, "1")
    until(lambda: found(store, A) is None)
    assert put(store, A, SIZE, version=1)
    store.close()


# -- a server that forgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["objects", "metadata"])
def test_an_object_without_its_half_is_gone(server: RedisServer, store: RedisStore, kind: str) -> None:
    """Where the object or its metadata was evicted it is not found, others are, and it can be put anew."""
    put(store, A, SIZE)
    put(store, B, SIZE)
    (name,) = keys_of(server, f"*{kind}*{A.key.hex()}*")
    server.ask("DEL", name)
    assert found(store, A) is None and read(store, found(store, B)) == frame_of(B.key, SIZE)
    assert put(store, A, SIZE, version=1)
    assert read(store, found(store, A)) == frame_of(A.key, SIZE, version=1)


@pytest.mark.parametrize("size", [SIZE // 2, SIZE + 1])
def test_an_object_of_another_size_is_a_miss(server: RedisServer, store: RedisStore, size: int) -> None:
    """An object that somebody cut or made longer is no hit."""
    put(store, A, SIZE)
    (name,) = keys_of(server, f"*objects*{A.key.hex()}*")
    if size < SIZE:
        server.ask(
            "EVAL", "redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], 0, ARGV[1]))", "1", name, f"{size}"
        )
    else:
        server.ask("APPEND", name, "x")
    assert read(store, found(store, A)) is None


@pytest.mark.parametrize(("policy", "ttl_s", "least"), [("allkeys-lru", None, 0), ("volatile-lru", 600, 3)])
def test_a_server_that_evicts_tells_no_lies(tmp_path: Path, policy: str, ttl_s: float | None, least: int) -> None:
    """Of more than fits, whatever is found is read whole, with its updates, or is gone for all from then on.

    Under allkeys-lru the log may go, and everything with it: to the server all is equally old in the test's second.
    """
    with redis_server(tmp_path, "--maxmemory", "40mb", "--maxmemory-policy", policy) as server:
        store, other = (RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S, ttl_s=ttl_s)) for _ in range(2))
        chunks = [chain(f"{n}", 1)[0] for n in range(24)]
        for chunk in chunks:
            try:
                assert put(store, chunk, SIZE)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            store.add_updates({chunk.key: updates_of(Terms(labels=tag_labels(["z"])), 9)})
        whole = 0
        for chunk in chunks:
            one = found(store, chunk)
            if one is not None:
                data = read(store, one)
                assert data is None or data == frame_of(chunk.key, SIZE)
                assert one.terms.labels == TERMS.labels | tag_labels(["z"])
                assert data is not None or found(other, chunk) is None
                whole += data is not None
        assert least <= whole < len(chunks)
        store.close()
        other.close()


def test_a_full_server_takes_nothing_and_gives_what_it_has(tmp_path: Path) -> None:
    """Where a server is full and evicts nothing, a put raises OSError and leaves nothing to be found; reads go on.

    A put needs its value's size twice: the server keeps a buffer of that size for the connection's next command.
    """
    with redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        store = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))
        put(store, A, 2 * MIB)
        with pytest.raises(OSError) as said:
            put(store, B, 8 * MIB)
        assert said.value.errno == errno.ENOSPC and found(store, B) is None
        assert read(store, found(store, A)) == frame_of(A.key, 2 * MIB)
        store.close()


def test_an_emptied_server_is_a_new_epoch(server: RedisServer, store: RedisStore) -> None:
    """After FLUSHALL the log has another epoch above all that was, whoever notices first."""
    other = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))
    notices: list[Callable[[int], object]] = [
        store.log.read,
        lambda seen: store.log.append([Scope(tenant=1)], "me"),
        lambda seen: found(store, A),
        lambda seen: put(store, A, 4096),
    ]
    for notice in notices:
        store.log.append([Scope()], "me")
        page = other.log.read(0)
        store.log.read(0)
        server.ask("FLUSHALL")
        notice(page.generation)
        after = other.log.read(page.generation)
        assert after.epoch != page.epoch and after.floor > page.generation
        assert other.log.read(0).epoch == after.epoch == store.log.read(0).epoch
    other.close()


@pytest.mark.parametrize("entries_since", [0, 5])
def test_an_older_copy_of_the_log_is_noticed(tmp_path: Path, entries_since: int) -> None:
    """After a restart from an older copy who had read what was lost begins a new epoch, even after others wrote."""
    with redis_server(tmp_path) as server:
        store, other = (RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S)) for _ in range(2))
        put(store, A, 4096)
        store.log.append([Scope(tenant=1)], "me")
        server.ask("SAVE")
        store.log.append([Scope(tenant=2)], "me")
        seen = other.log.read(0)
        server.stop()
        server.start()
        fresh = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))
        assert found(fresh, A) is not None and len(fresh.log.read(0).entries) == 1  # it can't know
        for n in range(entries_since):
            fresh.log.append([Scope(tenant=3 + n)], "fresh")
        page = other.log.read(seen.generation)
        assert page.epoch != seen.epoch and page.floor > seen.generation
        assert fresh.log.read(0).epoch == store.log.read(0).epoch == page.epoch and found(fresh, A) is None
        for each in (store, other, fresh):
            each.close()


def test_a_log_larger_than_a_reply_is_read(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its entries are, a replica that begins reads all of them, and may add to them."""
    monkeypatch.setattr(redis_servers, "MAX_REPLY_BYTES", 64 << 10)
    keys = frozenset(key_of(f"invalidated {n}") for n in range(100))
    last = [store.log.append([Scope(tenant=1, keys=keys)], "me") for _ in range(30)][-1]
    fresh = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))
    page = fresh.log.read(0)
    assert [entry.scopes for entry in page.entries] == [(Scope(tenant=1, keys=keys),)] * 30
    assert page.generation == last and fresh.log.append([Scope(tenant=2)], "fresh") == last + 1
    fresh.close()


def test_a_text_with_more_metadata_than_a_reply_holds_is_found(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What many requests have hit is read in several calls."""
    monkeypatch.setattr(redis_servers, "MAX_REPLY_BYTES", 64 << 10)
    chunks = chain("a", 12)
    updates = updates_of(Terms(is_wild=True), 1) * 1000
    for chunk in chunks:
        put(store, chunk, 4096)
    for chunk in chunks:
        store.add_updates({chunk.key: updates})
    assert [one.record.key for one in store.find([chunk.key for chunk in chunks]) if one] == [c.key for c in chunks]


def test_metadata_does_not_grow_for_ever(server: RedisServer, store: RedisStore) -> None:
    """Updates are added until there are too many for the chunk to be found; a put begins anew with none."""
    for _ in range(5):
        store.add_updates({A.key: updates_of(Terms(is_wild=True), 1) * (MAX_UPDATES // 2)})
    (name,) = keys_of(server, "*metadata*")
    assert MAX_BYTES < int(server.ask("STRLEN", name)[1:]) <= 2 * MAX_BYTES
    assert put(store, A, 4096) and found(store, A) is not None


@pytest.mark.parametrize("field", ["junk", "00", "AB" * 16, "00" * 16, "EPOCH"])
@pytest.mark.parametrize("sequence", [0, 1])
def test_an_entry_of_somebody_elses_ends_the_epoch(
    server: RedisServer, store: RedisStore, field: str, sequence: int
) -> None:
    """Nobody knows what it invalidated: the log begins anew, once."""
    before = store.log.append([Scope()], "me")
    epoch = store.log.read(0).epoch
    field = epoch.hex() if field == "EPOCH" else field
    server.ask("XADD", "hotspan:2:{log}", f"{before + 1}-{sequence}", field, "junk")
    page = store.log.read(0)
    assert page.epoch != epoch and page.floor > before and not page.entries
    assert store.log.read(page.generation).epoch == page.epoch


def test_an_evicted_log_is_a_new_epoch(server: RedisServer, store: RedisStore) -> None:
    """Where the server evicted the log alone, a replica that starts finds nothing of what is there."""
    put(store, A, 4096)
    before = store.log.append([Scope(tenant=1)], "me")
    server.ask("DEL", "hotspan:2:{log}")
    fresh = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))
    assert found(fresh, A) is None
    page = store.log.read(before)
    assert page.floor > before and page.epoch == fresh.log.read(0).epoch
    fresh.close()


# -- a server that lies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", [b"+what\r\n", b"-ERR no\r\n", b"*-1\r\n", b":5\r\n", b"$3\r\nabc\r\n", b"HTTP/1.1 400\r\n", b""]
)
def test_what_is_no_answer_is_an_error_once(relay: Relay, said: bytes) -> None:
    """A wrong answer to any method, and nothing after it, raises OSError; the next call is right."""
    store = RedisStore(relay.url, RedisOptions(timeout_s=PATIENCE_S))
    put(store, A, 4096)
    one = found(store, A)
    assert one is not None
    calls: list[Callable[[], object]] = [
        lambda: store.find([A.key, B.key]),
        lambda: put(store, B, 4096),
        lambda: store.delete([B.key]),
        lambda: store.log.append([Scope()], "me"),
        lambda: store.log.read(0),
        lambda: store.log.replicas(),
    ]
    if not said.startswith(b"$"):  # which is a value, and too short for a hit
        calls.append(lambda: store.get(one, [aligned(HEADER_BYTES + 4096)]))
    for call in calls:
        connections, is_first = relay.connections, [True]

        def lie(data: bytes, is_first: list[bool] = is_first) -> Sequence[bytes]:
            if is_first:
                is_first.clear()
                return [said, b""] if said else [b""]  # and hangs up: the other replies went with this one
            return [data]

        relay.reply = lie
        with pytest.raises(OSError):
            call()
        relay.reply = lambda data: [data]
        assert read(store, found(store, A)) == frame_of(A.key, 4096)
        assert relay.connections == connections + 1
    store.close()


def test_a_trickling_server_holds_nobody(store: RedisStore, relay: Relay) -> None:
    """Every method ends in time when the server's answers come byte by byte."""
    put(store, A, 4096)
    one = found(store, A)
    assert one is not None

    def trickle(data: bytes) -> Iterator[bytes]:
        for n in range(len(data)):
            yield data[n : n + 1]
            time.sleep(0.2)  # each answer takes a minute and more

    at_once, quick = relay.reply, RedisStore(relay.url, RedisOptions(timeout_s=0.5))
    for call in (lambda: quick.find([A.key]), lambda: quick.get(one, [aligned(HEADER_BYTES + 4096)]), quick.usage):
        relay.reply = at_once
        assert at_last(lambda: found(quick, A)) is not None  # over a connection that is there from now on
        relay.reply = trickle
        with pytest.raises(TimeoutError):
            call()
    quick.close()


def test_a_connection_that_ended_while_idle_costs_nothing(server: RedisServer, store: RedisStore) -> None:
    """When the server closed what lay idle the next call makes a new connection, and does not fail."""
    put(store, A, 4096)
    for _ in range(3):
        assert found(store, A) is not None
        server.ask("CLIENT", "KILL", "TYPE", "normal")


# -- closing -------------------------------------------------------------------------------------------------------


def test_close_ends_calls_under_way(tmp_path: Path) -> None:
    """A call that waits for the server raises at once when the store is closed, and so does every call afterwards."""
    with redis_server(tmp_path) as server:
        store = RedisStore(server.url, RedisOptions(timeout_s=10 * PATIENCE_S))
        put(store, A, 4096)
        server.freeze()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.find, [A.key])
            while not store.servers._busy:
                time.sleep(0.001)
            store.close()
            assert isinstance(waiting.exception(PATIENCE_S), ConnectionError), "it waited for the server"
        server.thaw()
        with pytest.raises(OSError, match="closed"):
            store.find([A.key])


def test_no_connection_is_left_open(server: RedisServer) -> None:
    """After `close` the server has as many clients as before, and threads shared few connections."""

    def clients() -> int:
        return int(server.ask("INFO", "clients").split(b"connected_clients:")[1].split(b"\r\n")[0])

    until(lambda: clients() == 1)  # which asks
    store = RedisStore(server.url, RedisOptions(timeout_s=PATIENCE_S))

    def use(chunk: Chunk) -> None:
        put(store, chunk, 4096)
        store.find([chunk.key])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, chain("x", 40)))
    assert 1 < clients() <= 1 + 4
    store.close()
    until(lambda: clients() == 1)
