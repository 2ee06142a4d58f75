"""Reaching Redis: passwords, TLS and clusters, with real servers."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.crc import key_slot

from hotspan.core.terms import Scope
from hotspan.core.types import MIB
from hotspan.l2 import redis_servers
from hotspan.l2.options import RedisOptions
from hotspan.l2.redis import RedisStore
from hotspan.l2.redis_servers import Command, RedisServers
from hotspan.testing.chunks import chain, key_of
from hotspan.testing.clock import SimulatedClock
from kit.ports import free_port
from kit.redis_server import RedisServer, redis_server
from kit.waiting import PATIENCE_S, at_last
from tests.certificates import make_certificate
from tests.l2.kit.logs import SharedLogTests
from tests.l2.kit.races import StoreRaceTests
from tests.l2.kit.stores import MakeStore, ObjectStoreTests, found, frame_of, put, read

SIZE = 2 * MIB + 4096
(A,) = chain("a", 1)


# -- passwords -----------------------------------------------------------------------------------------------------


def test_a_password_opens_and_is_never_shown(tmp_path: Path) -> None:
    """With the right password it works, with a wrong one every call raises OSError; no message holds either."""
    with redis_server(tmp_path, "--requirepass", "s3cret-right") as server:
        right = RedisStore(f"redis://:s3cret-right@127.0.0.1:{server.port}/0", RedisOptions(timeout_s=PATIENCE_S))
        assert put(right, A, 4096) and read(right, found(right, A)) == frame_of(A.key, 4096)
        right.close()
        for password in (":s3cret-wrong@", "someone:s3cret-right@", ""):
            wrong = RedisStore(f"redis://{password}127.0.0.1:{server.port}", RedisOptions(timeout_s=PATIENCE_S))
            with pytest.raises(OSError) as said:
                wrong.find([A.key])
            assert "s3cret" not in f"{said.value} {said.value.__cause__} {wrong!r}"
            wrong.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{}", "redis://127.0.0.1:{}/3", "rediss://127.0.0.1:{}"])
def test_a_greeting_that_never_comes_holds_nobody(url: str) -> None:
    """A server that takes connections and says nothing, or a byte now and then, holds no call beyond its deadline."""
    for said in (b"", b"+"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stopped = threading.Event()

            def serve(
                listener: socket.socket = listener, said: bytes = said, stopped: threading.Event = stopped
            ) -> None:
                with contextlib.suppress(OSError):
                    client, _ = listener.accept()
                    with client:
                        while not stopped.wait(0.05):
                            client.sendall(said)

            thread = threading.Thread(target=serve)
            thread.start()
            store = RedisStore(url.format(listener.getsockname()[1]), RedisOptions(timeout_s=0.5))
            with pytest.raises(OSError) as failed:
                store.find([A.key])
            assert isinstance(failed.value, TimeoutError) or "SSL" in str(failed.value)  # not a line that was too long
            store.close()
            stopped.set()
            thread.join(PATIENCE_S)


def test_a_name_that_nobody_knows_is_an_error() -> None:
    """A host that can't be resolved raises OSError."""
    store = RedisStore("redis://nobody.invalid:6379", RedisOptions(timeout_s=5))
    with pytest.raises(OSError):
        store.find([A.key])
    store.close()


NODE = [b"127.0.0.1", 7000]


@pytest.mark.parametrize(
    "reply",
    [
        [[0, 16384, NODE]],
        [[-1, 5, NODE]],
        [[5, 4, NODE]],
        [[0, 10**9, NODE]],  # a list of so many would take 8 GB
        [[0, 10**17, NODE]],
        [[0, 16383, NODE], [3, 3, NODE]],
        [[0, 16383, [b"127.0.0.1", 10**9]]],
        [[0, 16383]],
        [b"0"],
        5,
    ],
)
def test_slots_that_no_cluster_has(reply: Any) -> None:
    """Whatever a server says about who has which slot, it is a list of as many as there are, or an OSError at once."""
    servers = RedisServers("redis://127.0.0.1:1", 1.0)
    assert servers.read_slots([[0, 9, NODE], [10, 16383, NODE]]) == [("127.0.0.1", 7000)] * 16384
    with pytest.raises(OSError), servers.call():
        servers.read_slots(reply)


def test_a_reply_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the replies to one call take is bounded, whatever they consist of."""
    monkeypatch.setattr(redis_servers, "MAX_REPLY_BYTES", MIB)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                with client:
                    client.recv(4096)
                    client.sendall(b"$19\r\ncluster_enabled:0\r\n\r\n")
                    client.recv(4096)
                    client.sendall(b"*1000000000\r\n")
                    while True:
                        client.sendall(b"*0\r\n" * 16000)

        thread = threading.Thread(target=serve)
        thread.start()
        servers = RedisServers(f"redis://127.0.0.1:{listener.getsockname()[1]}", PATIENCE_S)
        with pytest.raises(ConnectionError, match="bytes"), servers.call():
            servers.ask([Command("key", ("GET", "key"), bytes)])
        servers.close()
        thread.join(PATIENCE_S)


def test_what_is_sent_extends_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large value may take as long as its size allows, on a link that is slower than one step's timeout."""
    clock = SimulatedClock()
    monkeypatch.setattr("hotspan.core.deadline.time.monotonic", clock.monotonic)
    sent: list[bytes] = []

    class Slow:
        """Takes 16 MiB a second."""

        timeout_s = 0.0

        def settimeout(self, timeout_s: float) -> None:
            self.timeout_s = timeout_s

        def sendall(self, data: bytes) -> None:
            clock.advance(len(data) / (16 * MIB))
            if len(data) > self.timeout_s * 16 * MIB:
                raise TimeoutError("timed out")
            sent.append(bytes(data))

    servers = RedisServers("redis://127.0.0.1:1", 1.0)
    value = bytes(range(256)) * (32 * MIB // 256)
    with servers.call():
        redis_servers._TimedSocket(Slow()).sendall(memoryview(value))  # type: ignore[arg-type]
    assert b"".join(sent) == value


# -- TLS -----------------------------------------------------------------------------------------------------------


class TlsServer(NamedTuple):
    """A server that speaks TLS on `port`, and whom a client must trust for that."""

    port: int
    trusted: Path
    server: RedisServer


@contextlib.contextmanager
def tls_server(directory: Path, name: str) -> Iterator[TlsServer]:
    """With a certificate for `name`."""
    made, port = make_certificate(directory, host=name), free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(made.certificate), "--tls-key-file", str(made.key)]
    trust = ["--tls-ca-cert-file", str(made.certificate), "--tls-auth-clients", "no"]
    with redis_server(directory / "server", *options, *trust) as server:
        yield TlsServer(port, made.certificate, server)


class TestRedisStoreOverTls(ObjectStoreTests):
    """The kit, encrypted."""

    @pytest.fixture(scope="class")
    def tls(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
        with tls_server(tmp_path_factory.mktemp("tls"), "127.0.0.1") as tls:
            yield tls

    @pytest.fixture
    def make_store(self, tls: TlsServer) -> MakeStore:
        tls.server.ask("FLUSHALL")
        url = f"rediss://127.0.0.1:{tls.port}?ssl_ca_certs={tls.trusted}"
        return lambda entries: RedisStore(url, RedisOptions(timeout_s=PATIENCE_S))


@pytest.mark.parametrize("name", ["127.0.0.1", "elsewhere.example"])
def test_a_server_must_prove_who_it_is(tmp_path: Path, name: str) -> None:
    """A certificate that nobody trusts, or that is another host's, is refused, unless the URL says not to look."""
    with tls_server(tmp_path, name) as tls:
        base = f"rediss://127.0.0.1:{tls.port}"
        trusting = f"{base}?ssl_ca_certs={tls.trusted}"
        for url in [base] if name == "127.0.0.1" else [base, trusting]:
            store = RedisStore(url, RedisOptions(timeout_s=PATIENCE_S))
            with pytest.raises(OSError, match=r"(?i)certificate"):
                store.find([A.key])
            store.close()
        for url in (f"{base}?ssl_cert_reqs=none", f"{trusting}&ssl_check_hostname=no"):
            store = RedisStore(url, RedisOptions(timeout_s=PATIENCE_S))
            assert store.find([A.key]) == [None]
            store.close()


# -- clusters ------------------------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """Three servers with a third of the slots each."""

    servers: list[RedisServer]

    @property
    def url(self) -> str:
        return self.servers[0].url

    def flush(self) -> None:
        for server in self.servers:
            assert server.ask("FLUSHALL") == b"+OK\r\n"

    def give(self, slot: int, to: int) -> None:
        """Another server has a slot from now on."""
        (_, name, _) = self.servers[to].ask("CLUSTER", "MYID").split(b"\r\n")
        for server in [self.servers[to], *self.servers]:
            assert server.ask("CLUSTER", "SETSLOT", str(slot), "NODE", name.decode()) == b"+OK\r\n"


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        # Nobody is taken for dead because it is frozen, or the machine stands still.
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "120000", "--cluster-port"]
        servers = [
            stack.enter_context(redis_server(tmp_path_factory.mktemp("node"), *options, str(free_port())))
            for _ in range(3)
        ]
        for server, (first, last) in zip(servers, [(0, 5460), (5461, 10922), (10923, 16383)], strict=True):
            assert server.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == b"+OK\r\n"
        for server in servers[1:]:
            bus = options_of(server, "cluster-port")
            assert servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(server.port), bus) == b"+OK\r\n"
        deadline = time.monotonic() + PATIENCE_S
        while not all(b"cluster_state:ok" in server.ask("CLUSTER", "INFO") for server in servers):
            assert time.monotonic() < deadline, "the cluster did not form"
            time.sleep(0.02)
        yield Cluster(servers)


def options_of(server: RedisServer, name: str) -> str:
    return server.ask("CONFIG", "GET", name).split(b"\r\n")[-2].decode()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    running_cluster.flush()
    return running_cluster


class TestRedisStoreOnCluster(ObjectStoreTests, SharedLogTests, StoreRaceTests):
    """The kit over three servers."""

    @pytest.fixture
    def make_store(self, cluster: Cluster) -> MakeStore:
        return lambda entries: RedisStore(cluster.url, RedisOptions(timeout_s=PATIENCE_S))


def test_an_object_lies_on_one_server_and_all_take_part(cluster: Cluster) -> None:
    """Objects spread over the servers, each with its metadata."""
    store = RedisStore(cluster.url, RedisOptions(timeout_s=PATIENCE_S))
    chunks = [chain(f"{n}", 1)[0] for n in range(30)]
    for chunk in chunks:
        put(store, chunk, SIZE)
    held = [server.ask("KEYS", "*").decode() for server in cluster.servers]
    counts = [[keys.count(chunk.key.hex()) for keys in held] for chunk in chunks]
    assert all(sorted(count) == [0, 0, 2] for count in counts)
    assert all(any(count[n] for count in counts) for n in range(3))
    assert store.usage().bytes > 30 * SIZE
    store.close()


def test_a_slot_that_moved_is_found_again(cluster: Cluster) -> None:
    """When a slot goes to another server one call fails at most, and the next one asks the right server."""
    store = RedisStore(cluster.url, RedisOptions(timeout_s=PATIENCE_S))
    store.log.append([Scope()], "me")
    slot = key_slot(A.key.hex().encode())
    owner = next(n for n, last in enumerate([5460, 10922, 16383]) if slot <= last)
    assert found(store, A) is None
    cluster.give(slot, (owner + 1) % 3)
    with contextlib.suppress(OSError):
        put(store, A, 4096)
    assert put(store, A, 4096) and read(store, found(store, A)) == frame_of(A.key, 4096)
    store.delete([A.key])
    cluster.give(slot, owner)
    store.close()


def test_a_cluster_outlives_the_server_of_its_url(cluster: Cluster) -> None:
    """What is known of a cluster is enough to learn of its changes while the first server hangs."""
    store = RedisStore(cluster.url, RedisOptions(timeout_s=0.7))
    keys = [key_of(f"{n}") for n in range(100)]
    others = [key for key in keys if 5461 <= key_slot(key.hex().encode()) <= 10922]
    log_slot = key_slot(b"log")
    assert others and log_slot > 5460, "the log would be on the server that hangs"
    at_last(lambda: store.find(others))
    cluster.servers[0].freeze()
    try:
        with pytest.raises(OSError):
            store.find(keys)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                assert store.find(others) == [None] * len(others)
                break
            assert time.monotonic() < deadline
    finally:
        cluster.servers[0].thaw()
    store.close()
