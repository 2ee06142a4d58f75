"""The managed-tiered-storage protocol, sentence by sentence, against anything that speaks it."""

import http.client
import itertools
import json
import os
import select
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.daemon_protocol.client import Client, Lease, answer_on, eventually, parse_lease, raw, value_of
from tests.daemon_protocol.conftest import SEGMENT_BYTES, Endpoint

MIB = 1 << 20
KEY = "meta-llama/Llama-3.1-8B@00000001@0@9f86d081884c7d65"


@pytest.fixture
def leases(client: Client) -> Iterator[list[Lease]]:
    """Leases that are released after the test."""
    leases: list[Lease] = []
    yield leases
    for lease in leases:
        client.release(lease)


def fill(client: Client, size: int, prefix: str = "fill") -> None:
    """Put `size` bytes of other objects, each of which must be taken."""
    for number in range(-(-size // MIB)):
        key = f"{prefix}-{uuid.uuid4().hex}"
        assert client.put(key, number.to_bytes(4, "big") * (MIB // 4)) == 200


class TestPut:
    def test_a_value_comes_back(self, client: Client) -> None:
        """What was put with 200 is leased, and its bytes stand at the offsets."""
        value = value_of("a", 100_001)
        assert client.put("a", value) == 200
        assert client.get("a") == value

    def test_a_second_put_is_409_and_changes_nothing(self, client: Client) -> None:
        """Objects do not change: 409, also for another value, and the connection goes on."""
        value = value_of("a", 200_000)
        assert client.put("a", value) == 200
        for other in (value, value_of("b", 200_000), b"x", value_of("c", 3 * MIB)):
            assert client.put("a", other) == 409
            assert client.get("a") == value

    def test_of_puts_at_once_one_wins(self, endpoint: Endpoint, client: Client) -> None:
        """Eight clients put a key together: one 200, the others 409, and the winner's bytes stay."""
        values = [value_of(f"race-{number}", MIB + number) for number in range(8)]
        statuses = [0] * len(values)

        def put(number: int) -> None:
            own = Client(endpoint.port, endpoint.name, client.bucket)
            statuses[number] = own.put("race", values[number])
            own.close()

        threads = [threading.Thread(target=put, args=(number,)) for number in range(len(values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] + [409] * 7
        assert client.get("race") == values[statuses.index(200)]

    @pytest.mark.parametrize("size", [1, 255, 4096, 16384, 16385, 65536, 5 * MIB + 3])
    def test_any_size(self, client: Client, size: int) -> None:
        """One byte and several MiB, aligned or not, come back with exactly their length."""
        value = value_of(str(size), size)
        assert client.put("sized", value) == 200
        assert client.get("sized") == value

    def test_a_body_in_pieces(self, endpoint: Endpoint, client: Client) -> None:
        """A body that comes in pieces of uneven length, as a stream of chunks does, is stored whole."""
        value = value_of("pieces", 300_000)
        with raw(endpoint.port) as sock:
            sock.sendall(put_head(client, "pieces", len(value)))
            at = 0
            for size in (1, 999, 65536, 7, 65536, len(value)):
                sock.sendall(value[at : at + size])
                at += size
            assert answer_on(sock) == 200
        assert client.get("pieces") == value

    def test_a_put_that_is_cut_off_stored_nothing(self, endpoint: Endpoint, client: Client) -> None:
        """A connection that ends in the middle of a body leaves no object, and the key can be put."""
        with raw(endpoint.port) as sock:
            sock.sendall(put_head(client, "cut", MIB) + bytes(MIB // 2))
        value = value_of("cut", MIB)
        assert client.lease("cut")[1] is None
        assert eventually(lambda: client.put("cut", value) == 200)
        assert client.get("cut") == value

    def test_without_a_length_it_is_refused(self, endpoint: Endpoint) -> None:
        """A put says how long it is: without Content-Length, or with a broken one, it is 4xx."""
        for header in (b"", b"Content-Length: many\r\n", b"Content-Length: -1\r\n"):
            with raw(endpoint.port) as sock:
                sock.sendall(b"PUT /v1/kv/lmcache/k HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n")
                sock.shutdown(socket.SHUT_WR)
                status = answer_on(sock)
                assert status is not None and 400 <= status < 500

    def test_what_can_not_fit_is_refused(self, endpoint: Endpoint, client: Client) -> None:
        """A value larger than the segment fails with neither 200 nor 409, and what is stored stays readable."""
        value = value_of("small", 1000)
        assert client.put("small", value) == 200
        with raw(endpoint.port) as sock:
            sock.sendall(put_head(client, "huge", SEGMENT_BYTES + 1))
            status = answer_on_early(sock, SEGMENT_BYTES + 1)
        assert status not in (200, 409)
        assert client.get("huge") is None
        assert client.get("small") in (value, None)

    def test_buckets_are_apart(self, endpoint: Endpoint, client: Client) -> None:
        """The same key in two buckets is two objects."""
        other = Client(endpoint.port, endpoint.name, client.bucket + "-other")
        assert client.put("k", b"one") == 200
        assert other.get("k") is None
        assert other.put("k", b"two") == 200
        assert (client.get("k"), other.get("k")) == (b"one", b"two")
        other.close()


class TestKeys:
    @pytest.mark.parametrize(
        "key", [KEY, f"{KEY}@a salt", "a b", "a/b", "a//b", "100%", "a%20b", "a+b", "ünï", "a?b=c", "a#b", "..", ".m0"]
    )
    def test_every_key_is_one_object(self, client: Client, key: str) -> None:
        """A key with slashes, spaces, percent signs or anything else, encoded once, is put and found."""
        value = value_of(key, 5000)
        assert client.put(key, value) == 200
        assert client.get(key) == value
        assert client.put(key, b"again") == 409

    def test_keys_are_decoded_once(self, client: Client) -> None:
        """`a%2520b` is the key a%20b, and not the key "a b", which is `a%20b`; a plus is a plus."""
        encoded = ["a%2520b", "a%20b", "a+b", "a%2Fb", "a%252Fb"]
        for number, key in enumerate(encoded):
            assert client.put(key, f"value {number}".encode(), is_encoded=True) == 200
        for number, key in enumerate(encoded):
            assert client.get(key, is_encoded=True) == f"value {number}".encode()
        assert client.get("a b") == b"value 1" and client.get("a%20b") == b"value 0" and client.get("a/b") == b"value 3"

    def test_an_at_sign_may_be_encoded(self, client: Client) -> None:
        """`@` and `%40` are the same key, in both directions; so are %2f and %2F, and any needless encoding."""
        assert client.put("m@1@2", b"one", is_encoded=True) == 200
        assert client.get("m%401%402", is_encoded=True) == b"one"
        assert client.put("n%401", b"two", is_encoded=True) == 200
        assert client.get("n@1", is_encoded=True) == b"two"
        assert client.put("m%401@2", b"other", is_encoded=True) == 409
        assert client.put("x%2fy", b"three", is_encoded=True) == 200
        assert client.get("x%2Fy", is_encoded=True) == b"three" == client.get("%78%2F%79", is_encoded=True)

    def test_the_path_is_split_before_it_is_decoded(self, client: Client) -> None:
        """`%2F` never ends a segment, also not where that would make another route; a raw slash does."""
        assert client.put("a%2Fleases", b"one", is_encoded=True) == 200
        assert client.get("a%2Fleases", is_encoded=True) == b"one"
        assert client.get("a") is None
        status, _ = client.request("PUT", client.path("a") + "/b", b"two")
        assert 400 <= status < 500
        assert client.get("a/b") is None and client.get("b") is None

    def test_buckets_are_decoded_too(self, endpoint: Endpoint) -> None:
        """A bucket's name is a segment like a key's."""
        odd = Client(endpoint.port, endpoint.name, f"a/b c@{uuid.uuid4().hex}")
        assert odd.put("k", b"value") == 200 and odd.get("k") == b"value"
        odd.close()


class TestLease:
    def test_its_shape(self, client: Client, leases: list[Lease]) -> None:
        """A lease is JSON with a string and a list of offsets and lengths that add up to the object."""
        value = value_of("shape", 3 * MIB + 17)
        assert client.put("shape", value) == 200
        lease = client.leased("shape")
        leases.append(lease)
        assert lease.size == len(value)
        places = sorted(lease.offsets)
        assert all(offset + size <= following for (offset, size), (following, _) in itertools.pairwise(places))

    def test_offsets_are_absolute_in_the_segment(self, endpoint: Endpoint, client: Client, leases: list[Lease]) -> None:
        """Each fragment's bytes stand at its offset of the file, counted from the file's beginning."""
        value = value_of("absolute", MIB + 1)
        assert client.put("absolute", value) == 200
        lease = client.leased("absolute")
        leases.append(lease)
        fd = os.open(f"/dev/shm/{endpoint.name}", os.O_RDONLY)
        assert b"".join(os.pread(fd, size, offset) for offset, size in lease.offsets) == value
        os.close(fd)

    def test_what_is_not_there_is_a_miss(self, client: Client) -> None:
        """A key that nobody puts is no 200, held or not."""
        for timeout_ms in (0, 1000):
            status, lease = client.lease("never", timeout_ms=timeout_ms)
            assert status in (404, 504) and lease is None

    def test_parameters_may_be_missing(self, client: Client, leases: list[Lease]) -> None:
        """A lease without one of its parameters, or any, or with others, is granted."""
        assert client.put("k", b"value") == 200
        for query in ("", "?", "?ttl_s=5", "?timeout_ms=0", "?timeout_ms=5&ttl_s=5&x=y", "?ttl_s=1e1", "?ttl_s=3"):
            status, body = client.request("POST", client.path("k") + "/leases" + query)
            assert status == 200
            leases.append(parse_lease(body, time.monotonic() + 1))

    def test_several_at_once(self, client: Client) -> None:
        """Leases on one key are independent: each has an id of its own, and the last one still pins."""
        value = value_of("several", 4 * MIB)
        assert client.put("several", value) == 200
        several = [client.leased("several") for _ in range(5)]
        assert len({lease.id for lease in several}) == 5
        for lease in several[:-1]:
            assert client.release(lease) == 200
        fill(client, 2 * SEGMENT_BYTES)
        assert client.bytes_of(several[-1]) == value
        assert client.release(several[-1]) == 200

    def test_it_waits_for_what_is_being_written(self, endpoint: Endpoint, client: Client, leases: list[Lease]) -> None:
        """Asked for in the middle of a put, a lease is held until the object is whole, and has its bytes."""
        value = value_of("slow", 2 * MIB)
        with raw(endpoint.port) as writer, raw(endpoint.port) as reader:
            writer.sendall(put_head(client, "slow", len(value)) + value[:MIB])
            assert eventually(lambda: is_being_written(client, "slow"))
            reader.sendall(lease_head(client, "slow", 60_000))
            assert not readable(reader, 0.4)
            writer.sendall(value[MIB:-1])
            assert not readable(reader, 0.2)
            writer.sendall(value[-1:])
            assert answer_on(writer) == 200
            assert readable(reader, 60.0), "held on though the object is whole"
            response = http.client.HTTPResponse(reader)
            response.begin()
            assert response.status == 200
            leases.append(parse_lease(response.read(), time.monotonic() + 1))
        assert client.bytes_of(leases[0]) == value

    @pytest.mark.parametrize(("timeout_ms", "statuses"), [(0, {404, 504}), (200, {504})])
    def test_nobody_sees_half_an_object(
        self, endpoint: Endpoint, client: Client, timeout_ms: int, statuses: set[int]
    ) -> None:
        """What does not become whole within `timeout_ms` is answered 504."""
        with raw(endpoint.port) as writer:
            writer.sendall(put_head(client, "half", MIB) + bytes(MIB // 2))
            assert eventually(lambda: is_being_written(client, "half"))
            status, lease = client.lease("half", timeout_ms=timeout_ms)
            assert status in statuses and lease is None

    def test_a_writer_that_vanishes_ends_the_wait(self, endpoint: Endpoint, client: Client) -> None:
        """A lease that waits for a put which is cut off is a miss, and no hang."""
        with raw(endpoint.port) as reader:
            with raw(endpoint.port) as writer:
                writer.sendall(put_head(client, "gone", MIB) + bytes(1000))
                assert eventually(lambda: is_being_written(client, "gone"))
                reader.sendall(lease_head(client, "gone", 5000))
            assert answer_on(reader) in (404, 504)

    @pytest.mark.parametrize("query", ["timeout_ms=soon&ttl_s=30.0", "timeout_ms=0&ttl_s=long"])
    def test_parameters_that_are_no_numbers(self, client: Client, query: str) -> None:
        """They are 4xx."""
        assert client.put("k", b"value") in (200, 409)
        status, _ = client.request("POST", f"{client.path('k')}/leases?{query}")
        assert 400 <= status < 500

    @pytest.mark.parametrize("number", ["-1", "nan", "inf", "-inf", "1e400", "9" * 400, "0", "", "1_0", "٣"])
    def test_strange_numbers_are_no_crash(self, client: Client, number: str) -> None:
        """Negative, endless, huge and foreign numbers are refused or taken, never a 5xx but the hold's 504."""
        assert client.put("k", b"value") in (200, 409)
        for query in (f"timeout_ms={quote(number)}&ttl_s=1", f"timeout_ms=0&ttl_s={quote(number)}"):
            status, body = client.request("POST", f"{client.path('k')}/leases?{query}")
            assert status < 500 or status == 504
            if status == 200:
                assert client.release(parse_lease(body, time.monotonic())) == 200
        assert client.get("k") == b"value"


class TestPins:
    def test_leased_bytes_are_never_touched(self, client: Client, leases: list[Lease]) -> None:
        """While the segment is filled three times over, what is leased keeps its bytes, all that time."""
        values = {f"pinned-{number}": value_of(f"pinned-{number}", 2 * MIB + number) for number in range(4)}
        for key, value in values.items():
            assert client.put(key, value) == 200
            leases.append(client.leased(key))
        for _ in range(12):
            fill(client, SEGMENT_BYTES // 4)
            assert [client.bytes_of(lease) for lease in leases] == list(values.values())
        assert [client.get(key) for key in values] == list(values.values())

    def test_what_nobody_leases_makes_room(self, client: Client) -> None:
        """Objects without a lease go when room is needed, and what remains of them is whole."""
        keys = [f"loose-{number}" for number in range(96)]
        for key in keys:
            assert client.put(key, value_of(key, MIB)) == 200
        there = [value for key in keys if (value := client.get(key)) is not None]
        assert 0 < len(there) <= SEGMENT_BYTES // MIB
        assert client.get(keys[-1]) == value_of(keys[-1], MIB)
        assert set(there) <= {value_of(key, MIB) for key in keys}

    def test_a_full_segment_refuses(self, client: Client, leases: list[Lease]) -> None:
        """Where everything is pinned a put fails, with neither 200 nor 409; after the release it is taken."""
        for number in range(6):
            assert client.put(f"big-{number}", value_of(f"big-{number}", 8 * MIB)) == 200
            leases.append(client.leased(f"big-{number}"))
        assert client.put("too much", bytes(32 * MIB)) not in (200, 409)
        assert client.lease("too much")[1] is None
        for number, lease in enumerate(leases):
            assert client.bytes_of(lease) == value_of(f"big-{number}", 8 * MIB)
            assert client.release(lease) == 200
        assert client.put("too much", bytes(32 * MIB)) == 200

    def test_a_pin_ends_with_its_time(self, client: Client) -> None:
        """A lease pins until `ttl_s` have passed, and no longer, though nobody releases it."""
        values = [value_of(f"timed-{number}", 8 * MIB) for number in range(6)]
        for number, value in enumerate(values):
            assert client.put(f"timed-{number}", value) == 200
        leases = [client.leased(f"timed-{number}", ttl_s=2.0) for number in range(6)]
        while client.put("next", bytes(32 * MIB)) != 200:
            intact = [client.bytes_of(lease) for lease in leases] == values
            if time.monotonic() < leases[0].until_s:
                assert intact
            assert time.monotonic() < leases[-1].until_s + 60
            time.sleep(0.05)
        assert time.monotonic() >= leases[0].until_s

    def test_fragments_are_concatenated(self, client: Client, leases: list[Lease]) -> None:
        """An object that finds room only between pinned ones is refused, or its fragments in order are its bytes."""
        keys = [f"grid-{number}" for number in range(56)]
        for key in keys:
            assert client.put(key, value_of(key, MIB)) == 200
            if key in keys[::2]:
                leases.append(client.leased(key))
        value = value_of("between", 12 * MIB)
        if client.put("between", value) == 200:
            leases.append(client.leased("between"))
            assert client.bytes_of(leases[-1]) == value
        for key, lease in zip(keys[::2], leases, strict=False):
            assert client.bytes_of(lease) == value_of(key, MIB)


class TestRelease:
    def test_it_is_idempotent(self, client: Client) -> None:
        """A release is 200, and 200 again however often it is said, also after the lease's time."""
        assert client.put("k", b"value") == 200
        lease, short = client.leased("k"), client.leased("k", ttl_s=0.05)
        assert [client.release(lease) for _ in range(3)] == [200] * 3
        assert eventually(lambda: time.monotonic() > short.until_s)
        assert [client.release(short) for _ in range(2)] == [200] * 2

    def test_again_it_frees_nobody_elses_pin(self, client: Client, leases: list[Lease]) -> None:
        """A release said twice takes one lease, not another one of the same key."""
        value = value_of("twice", 4 * MIB)
        assert client.put("twice", value) == 200
        first = client.leased("twice")
        leases.append(client.leased("twice"))
        for _ in range(3):
            assert client.release(first) == 200
        fill(client, 2 * SEGMENT_BYTES)
        assert client.bytes_of(leases[0]) == value

    def test_ids_may_come_quoted(self, client: Client) -> None:
        """An id is the same whether its characters are percent-encoded or not: the pin is gone."""
        assert client.put("quoted", bytes(40 * MIB)) == 200
        lease = client.leased("quoted")
        assert client.put("next", bytes(40 * MIB)) != 200
        everything = "".join(f"%{byte:02X}" for byte in lease.id.encode())
        assert client.request("POST", f"/v1/leases/{everything}/release")[0] == 200
        assert client.put("next", bytes(40 * MIB)) == 200

    def test_an_unknown_id_is_no_crash(self, client: Client) -> None:
        """An id that was never given, of any form, is answered 200 or 4xx."""
        for said in ("never", "lease%2F1", "%00", "%FF", "a" * 2000, "..", "%2E%2E", "0"):
            assert 200 <= client.request("POST", f"/v1/leases/{said}/release")[0] < 500


class TestConnections:
    def test_128_are_kept(self, endpoint: Endpoint, client: Client) -> None:
        """128 connections at once each put, lease and release in turn, without being closed in between."""
        connections = [http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=30) for _ in range(128)]
        try:
            for connection in connections:
                connection.connect()
            sockets = [connection.sock for connection in connections]
            ids = ["" for _ in connections]

            def ask(method: str, targets: list[str], bodies: list[bytes]) -> list[bytes]:
                for connection, target, body in zip(connections, targets, bodies, strict=True):
                    connection.request(method, target, body)
                answers = [connection.getresponse() for connection in connections]
                assert [answer.status for answer in answers] == [200] * len(connections)
                return [answer.read() for answer in answers]

            paths = [client.path(f"conn-{number}") for number in range(128)]
            values = [value_of(path, 3000) for path in paths]
            ask("PUT", paths, values)
            for _ in range(3):
                bodies = ask("POST", [f"{path}/leases?timeout_ms=1000&ttl_s=30.0" for path in paths], [b""] * 128)
                leases = [parse_lease(body, time.monotonic() + 20) for body in bodies]
                assert [client.bytes_of(lease) for lease in leases] == values
                ids = [quote(lease.id, safe="") for lease in leases]
                ask("POST", [f"/v1/leases/{lease}/release" for lease in ids], [b""] * 128)
            assert [connection.sock for connection in connections] == sockets
        finally:
            for connection in connections:
                connection.close()

    def test_an_idle_one_is_kept(self, client: Client) -> None:
        """A connection serves hundreds of requests of every kind, misses and refusals among them."""
        assert client.put("k", b"value") == 200
        sock = client._connection.sock
        for _ in range(100):
            assert client.put("k", b"other") == 409
            assert client.lease("not there")[1] is None
            assert client.get("k") == b"value"
        assert client._connection.sock is sock


class TestPayloads:
    @pytest.mark.parametrize("size", [4096, 131072, MIB + 5])
    def test_raw_bytes(self, client: Client, size: int) -> None:
        """The multi-process mode's payload: bytes whose leased size is the destination's, exactly."""
        value = value_of("raw", size)
        assert client.put(KEY, value) == 200
        destination = bytearray(size)
        lease = client.leased(KEY)
        assert lease.size == len(destination)
        destination[:] = client.bytes_of(lease)
        assert client.release(lease) == 200 and destination == value

    def test_a_header_and_a_payload(self, client: Client) -> None:
        """The in-process mode's payload: 7 native int32, then the bytes, as they were put."""
        payload = value_of("headed", 2 * 16 * 256 * 128)
        header = struct.pack("7i", len(payload), 2, 5, 2, 16, 256, 128)
        assert client.put(f"{KEY}@salt", header + payload) == 200
        data = client.get(f"{KEY}@salt")
        assert data is not None and struct.unpack_from("7i", data) == (len(payload), 2, 5, 2, 16, 256, 128)
        assert data[28:] == payload


class TestRestart:
    def test_a_client_sees_the_new_segment(self, own_endpoint: Endpoint) -> None:
        """After a restart the name stands for another file, and a client that maps it anew reads what is put."""
        client = Client(own_endpoint.port, own_endpoint.name)
        old, new = value_of("old", 5 * MIB), value_of("new", 5 * MIB)
        assert client.put("k", old) == 200
        lease = client.leased("k")
        assert client.bytes_of(lease) == old
        before = client.segment.identity
        client.close()
        own_endpoint.restart()
        status = client.put("k", new)
        assert status in (200, 409)
        assert client.get("k") == (new if status == 200 else old)
        assert client.segment.identity != before
        assert client.release(lease) in (200, 404)
        client.close()

    def test_an_old_mapping_is_not_written_to(self, own_endpoint: Endpoint) -> None:
        """Who still has the old segment mapped, and an old lease, never sees new bytes in it."""
        client = Client(own_endpoint.port, own_endpoint.name)
        assert client.put("k", value_of("old", 40 * MIB)) == 200
        lease = client.leased("k")
        fd = os.open(f"/dev/shm/{own_endpoint.name}", os.O_RDONLY)
        client.close()
        own_endpoint.restart()
        assert client.put("other", value_of("new", 40 * MIB)) in (200, 409)
        data = b"".join(os.pread(fd, size, offset) for offset, size in lease.offsets)
        os.close(fd)
        assert data == value_of("old", 40 * MIB) or len(data) < lease.size
        client.close()


class TestBrokenRequests:
    @pytest.mark.parametrize(
        ("method", "target"),
        [
            ("GET", "/nothing"),
            ("GET", "/v1/kv/lmcache/never"),
            ("POST", "/v1/kv/lmcache/never"),
            ("PATCH", "/v1/kv/lmcache/never"),
            ("PUT", "/v1/kv/lmcache"),
            ("PUT", "/v1/kv"),
            ("PUT", "/v2/kv/lmcache/k"),
            ("PUT", "/v1/kv/lmcache/k/leases"),
            ("POST", "/v1/kv/lmcache/k/leases/more"),
            ("POST", "/v1/leases/x"),
            ("POST", "/v1/leases/x/renew"),
            ("GET", "/v1/leases/x/release"),
            ("PUT", "/v1/leases/x/release"),
            ("BREW", "/v1/kv/lmcache/k"),
            ("OPTIONS", "*"),
        ],
    )
    def test_what_there_is_not(self, client: Client, method: str, target: str) -> None:
        """Unknown routes and verbs are 4xx (501 for a verb that HTTP does not know), and the daemon goes on."""
        status, _ = client.request(method, target)
        client.close()
        assert 400 <= status < 500 or (status == 501 and method in ("BREW", "PATCH", "OPTIONS"))
        assert client.put(f"after-{uuid.uuid4().hex}", b"value") == 200

    @pytest.mark.parametrize(
        "data",
        [
            b"\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            b"PUT /v1/kv/lmcache/k HTTP/9.9\r\nContent-Length: 1\r\n\r\nx",
            b"PUT /v1/kv/lmcache/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\nx",
            b"POST /v1/kv/lmcache/k/leases?timeout_ms=0 HTTP/1.1\r\nHost: localhost\r\nbroken header\r\n\r\n",
            b"POST /v1/kv/lmcache/%zz/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
            b"POST /v1/kv/lmcache/%ff%fe/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
            b"POST /v1/kv/\xff\xfe/k/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
            b"POST /v1/kv/lmcache/"
            + b"k" * 100_000
            + b"/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
            b"POST /v1/leases/x/release HTTP/1.1\r\nHost: localhost\r\n" + b"X-Y: z\r\n" * 20_000 + b"\r\n",
            b"PUT /v1/kv/lmcache/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
            b"PUT /v1/kv/lmcache/k HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ],
        ids=range(13),
    )
    def test_what_is_no_request(self, endpoint: Endpoint, client: Client, data: bytes) -> None:
        """Malformed requests are 4xx (505 and 507 included where HTTP has them), a miss or a hang-up; never a crash."""
        with raw(endpoint.port) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                status = answer_on(sock)
            except OSError:
                status = None
        assert status is None or 400 <= status < 500 or status in (504, 505, 507)
        value = value_of("alive", 1000)
        assert client.put("alive", value) == 200 and client.get("alive") == value

    def test_an_empty_value(self, client: Client) -> None:
        """A value of no bytes is refused or stored; a lease never has a fragment of no length."""
        status = client.put("empty", b"")
        assert status < 500
        answer, body = client.request("POST", client.path("empty") + "/leases?timeout_ms=0&ttl_s=1")
        if answer == 200:
            assert all(part["len"] > 0 for part in json.loads(body)["offsets"])

    def test_bodies_where_none_belong(self, client: Client) -> None:
        """A lease or release with a body is served, or refused if it is large; nobody takes it for another request."""
        assert client.put("k", b"value") == 200
        for _ in range(2):
            status, body = client.request(
                "POST", client.path("k") + "/leases?timeout_ms=0&ttl_s=5", b"PUT / HTTP/1.1\r\n\r\n"
            )
            assert status == 200
            lease = parse_lease(body, time.monotonic())
            target = f"/v1/leases/{quote(lease.id, safe='')}/release"
            assert client.request("POST", target, b"DELETE / HTTP/1.1\r\n\r\n")[0] == 200
        assert client.request("POST", target, b"PUT / HTTP/1.1\r\n\r\n" * 5000)[0] in (200, 413)
        assert client.get("k") == b"value"


def put_head(client: Client, key: str, size: int) -> bytes:
    """The head of a put, for a test that writes the body itself."""
    return f"PUT {client.path(key)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


def lease_head(client: Client, key: str, timeout_ms: int) -> bytes:
    """A whole request for a lease."""
    target = f"{client.path(key)}/leases?timeout_ms={timeout_ms}&ttl_s=30.0"
    return f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether an answer begins within that time."""
    return bool(select.select([sock], [], [], seconds)[0])


def is_being_written(client: Client, key: str) -> bool:
    """Whether the daemon has begun to take a put: a short hold then ends with 504."""
    return client.lease(key, timeout_ms=1)[0] == 504


def answer_on_early(sock: socket.socket, size: int) -> int | None:
    """The status of a put's answer, which may come before the body is sent; then no more of it is."""
    left = size
    try:
        while left and not readable(sock, 0):
            left -= sock.send(bytes(min(left, MIB)))
    except OSError:
        pass
    return answer_on(sock)
