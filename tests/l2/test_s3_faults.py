"""The S3 store in trouble: what is not whole is a miss, and what can't be reached is an OSError."""

import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import obstore
import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.l2.base import updates_of
from hotspan.l2.options import S3Options
from hotspan.l2.s3 import S3Blobs, S3Store
from hotspan.testing.chunks import aligned, chain
from hotspan.testing.clock import SimulatedClock
from kit.s3_server import CLIENT, S3Server
from tests.l2.s3_rig import (
    BUCKET,
    FRAME_BYTES,
    TENANT,
    Place,
    Replicas,
    find,
    places,
    put_all,
)

TAG = Terms(labels=tag_labels(["z"]))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(BUCKET) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def place(server: S3Server) -> Place:
    """A prefix of its own."""
    return Place(server.url, uuid.uuid4().hex)


@pytest.fixture
def replica(place: Place) -> Iterator[Replicas]:
    """Makes stores of the place."""
    replicas = Replicas(place)
    yield replicas
    replicas.close()


def test_a_chunk_is_one_object_until_it_is_updated(
    replica: Replicas, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One PUT per chunk, under the names that s3.py gives, per tenant; metadata is there from the first update on."""
    store, text, put = replica(), chain("a", 16), obstore.put
    store.log.read(0)
    written: list[str] = []
    monkeypatch.setattr(
        obstore, "put", lambda to, path, *args, **options: (written.append(path), put(to, path, *args, **options))[1]
    )
    put_all(store, text)
    assert len(written) == len(text)
    names = {chunk.key.hex() for chunk in text}
    objects = place.paths("objects")
    assert {path.split("/")[-1] for path in objects} == names and place.paths("metadata") == []
    assert all(path.split("/")[2] == f"{TENANT:x}" for path in objects)
    assert places(find(replica(), text, tenant=TENANT + 1)) == []
    store.add_updates({text[0].key: updates_of(TAG, 9)})
    (path,) = place.paths("metadata")
    assert path.split("/")[-1] == text[0].key.hex() and len(written) == len(text) + 1


@pytest.mark.parametrize("is_known", [False, True])
def test_a_hit_during_a_delete_keeps_its_tag(
    replica: Replicas, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A chunk that is put anew and hit while somebody still deletes the former one has the tag of that hit.

    is_known: the former chunk had that tag, so that the hit adds nothing.
    """
    store, other, (chunk,), delete = replica(), replica(), chain("a", 1), S3Blobs.remove
    put_all(store, [chunk])
    store.add_updates({chunk.key: updates_of(TAG if is_known else Terms(labels=tag_labels(["old"])), 9)})

    def overtaken(bucket: S3Blobs, paths: Sequence[str]) -> None:
        delete(bucket, paths)
        monkeypatch.setattr(S3Blobs, "remove", delete)
        put_all(other, [chunk], stamp=2)
        (there,) = find(other, [chunk])
        assert there is not None and (TAG.labels <= there.terms.labels) == is_known
        if not is_known:
            other.add_updates({chunk.key: updates_of(TAG, 9)})

    monkeypatch.setattr(S3Blobs, "remove", overtaken)
    store.delete([chunk.key], TENANT)
    (found,) = find(store, [chunk])
    assert found is not None and TAG.labels <= found.terms.labels
    store.delete([chunk.key], TENANT)
    put_all(store, [chunk], stamp=3)
    (found,) = find(other, [chunk])
    assert found is not None and not found.terms.labels


def test_a_delete_takes_nothing_from_a_chunk_that_another_delete_made_room_for(
    replica: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata that was emptied and got the same update again is not what it was, though S3's ETag is of its bytes."""
    store, other, (chunk,), delete = replica(), replica(), chain("a", 1), S3Blobs.remove
    put_all(store, [chunk])
    store.add_updates({chunk.key: updates_of(TAG, 9)})

    def overtaken(bucket: S3Blobs, paths: Sequence[str]) -> None:
        delete(bucket, paths)
        monkeypatch.setattr(S3Blobs, "remove", delete)
        other.delete([chunk.key], TENANT)
        assert put_all(other, [chunk]) == [True]
        other.add_updates({chunk.key: updates_of(TAG, 9)})

    monkeypatch.setattr(S3Blobs, "remove", overtaken)
    store.delete([chunk.key], TENANT)
    (found,) = find(store, [chunk])
    assert found is not None and TAG.labels <= found.terms.labels


def test_a_delete_by_who_does_not_know_the_tenant_takes_chunk_and_tags(replica: Replicas) -> None:
    """Such as one that renews a time to live: the chunk is gone as its tags are, and can be put again."""
    store, text = replica(), chain("a", 2)
    put_all(store, text)
    store.add_updates({text[0].key: updates_of(TAG, 9)})
    store.delete([chunk.key for chunk in text])
    assert places(find(replica(), text)) == []
    assert put_all(store, text, stamp=2) == [True, True]
    assert [one and one.terms.labels for one in find(replica(), text)] == [frozenset(), frozenset()]


def test_a_delete_between_a_put_and_its_hit_leaves_no_chunk_without_its_tag(
    replica: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates older than a put may be emptied after a hit that relied on them: then the chunk goes as well."""
    store, other, (chunk,), create, delete = replica(), replica(), chain("a", 1), S3Blobs.create, S3Blobs.remove
    store.add_updates({chunk.key: updates_of(TAG, 9)})

    def put_late(bucket: S3Blobs, name: str, data: Sequence[memoryview | bytes]) -> bool:
        def removed(other_bucket: S3Blobs, paths: Sequence[str]) -> None:
            delete(other_bucket, paths)
            monkeypatch.setattr(S3Blobs, "remove", delete)
            assert create(bucket, name, data)
            (hit,) = find(other, [chunk])
            assert hit is not None and TAG.labels <= hit.terms.labels

        monkeypatch.setattr(S3Blobs, "create", create)
        monkeypatch.setattr(S3Blobs, "remove", removed)
        other.delete([chunk.key], TENANT)
        return True

    monkeypatch.setattr(S3Blobs, "create", put_late)
    put_all(store, [chunk])
    assert find(store, [chunk]) == [None]
    assert put_all(store, [chunk]) == [True]
    (found,) = find(other, [chunk])
    assert found is not None and not found.terms.labels


@pytest.mark.parametrize("lost", ["log", "epochs", ""])
def test_with_the_log_all_objects_are_lost(replica: Replicas, place: Place, lost: str) -> None:
    """Once the log began anew nothing of before is found by who has read it; the text can be stored again."""
    clock = SimulatedClock()
    store, other = replica(clock), replica(clock)
    text = chain("a", 3)
    put_all(store, text)
    assert places(find(other, text)) == [0, 1, 2]
    before = store.log.append([Scope()], "me")
    for path in place.paths(lost):
        place.delete(path)
    clock.advance(2.0)
    for each in (store, other):
        assert each.log.read(before).floor > before
        assert places(find(each, text)) == []
    assert put_all(store, text, stamp=2) == [True] * 3
    assert places(find(other, text)) == [0, 1, 2]


def test_a_put_that_failed_can_be_done_again(replica: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose put raised, where it writes its updates again or its object, is not there, and can be put."""
    store = replica()
    (chunk,) = chain("a", 1)
    store.add_updates({chunk.key: updates_of(TAG, 9)})
    write = S3Blobs.put
    for fails_at in ("metadata", "objects"):

        def failing(bucket: S3Blobs, path: str, *args: object, fails_at: str = fails_at, **more: object) -> object:
            if path.startswith(fails_at):
                raise ConnectionError("the line was cut")
            return write(bucket, path, *args, **more)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(S3Blobs, "put", failing)
            with pytest.raises(ConnectionError):
                put_all(store, [chunk])
        assert find(store, [chunk]) == [None]
    assert put_all(store, [chunk]) == [True] and places(find(store, [chunk])) == [0]


def test_what_is_late_is_not_begun(server: S3Server) -> None:
    """At the deadline a call raises, and those of its requests that have not begun never do."""
    bucket = S3Blobs(f"s3://{BUCKET}", S3Options(client=CLIENT | {"endpoint": server.url}, connections=1))
    goes_on, begun = threading.Event(), list[int]()

    def job(number: int) -> None:
        begun.append(number)
        goes_on.wait(60)

    for _ in range(50):
        with pytest.raises(TimeoutError):
            bucket.each(job, range(3), time.monotonic() + 0.05)
        if begun:  # a machine that stands still does not even begin the first one in time
            break
    goes_on.set()
    bucket.each(lambda _: None, [0])
    assert begun == [0]
    bucket.close()


def test_a_closed_store_raises(place: Place) -> None:
    """After `close` every method raises OSError."""
    store = place.store()
    log = store.log
    text = chain("a", 4)
    put_all(store, text)
    found = find(store, text)[0]
    assert found is not None
    store.close()
    for call in (
        lambda: find(store, text),
        lambda: store.get(found, [aligned(FRAME_BYTES)]),
        lambda: put_all(store, text),
        lambda: store.add_updates({text[0].key: [b"update"]}),
        lambda: store.delete([text[0].key]),
        lambda: store.usage(),
        lambda: log.append([Scope()], "a"),
        lambda: log.read(0),
        lambda: log.report("a", 1, 5.0),
        lambda: log.forget("a"),
        lambda: log.replicas(),
    ):
        with pytest.raises(OSError, match="closed"):
            call()


def test_a_bucket_that_is_not_there_is_an_error(server: S3Server) -> None:
    """Nothing is a miss in a bucket that nobody created."""
    store = S3Store("s3://no-such-bucket/x", S3Options(client={"endpoint": server.url, "skip_signature": True}))
    for call in (lambda: find(store, chain("a", 4)), lambda: put_all(store, chain("a", 1))):
        with pytest.raises(OSError, match="no-such-bucket"):
            call()
    store.close()


def test_the_usual_variables_say_where_and_who(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint, region and credentials may come from AWS_* variables; with none of them named, the store works."""
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    store = S3Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    put_all(store, chain("a", 4))
    assert places(find(store, chain("a", 4))) == [0, 1, 2, 3]
    store.close()


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("s3:///prefix", {}),
        ("redis://host", {}),
        ("s3://bucket", {"client": {"enpoint": "http://127.0.0.1"}}),
        ("s3://bucket", {"connections": 0}),
        ("s3://bucket", {"timeout_s": 0.0}),
    ],
)
def test_settings_that_can_not_work_are_refused(url: str, settings: dict[str, object]) -> None:
    """A URL without a bucket, unknown settings and numbers out of range are errors at once."""
    with pytest.raises(ConfigError):
        S3Store(url, S3Options(**settings))  # type: ignore[arg-type]


def test_secrets_are_not_shown() -> None:
    """Neither settings nor the errors of a store that can't connect say a key."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = Place(f"http://127.0.0.1:{nobody.getsockname()[1]}", "x")
        settings = S3Options(client={"secret_access_key": "a secret"})
        store = place.store(timeout_s=0.5)
        with pytest.raises(OSError) as caught:
            find(store, chain("a", 4))
        assert "secret" not in f"{settings!r} {caught.value!r} {caught.value.__cause__!r}"
        store.close()


def test_a_put_that_was_given_up_has_the_bytes_that_it_was_given(
    replica: Replicas, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller's buffer has next, once it has given up, is in no object, however late the upload goes off."""
    store, put, released = replica(), obstore.put, threading.Event()
    store.log.read(0)
    frame = bytearray(b"a" * FRAME_BYTES)

    def late(*args: Any, **options: Any) -> Any:
        assert released.wait(60.0)
        return put(*args, **options)

    monkeypatch.setattr(obstore, "put", late)
    monkeypatch.setattr(store.blobs, "_timeout_s", 0.05)
    with pytest.raises(TimeoutError):
        store.blobs.create("objects/x/0/y", [memoryview(frame)[:100], memoryview(frame)[100:]])
    frame[:] = b"b" * FRAME_BYTES
    released.set()
    store.close()  # waits for what has begun
    assert place.read("objects/x/0/y") == b"a" * FRAME_BYTES
