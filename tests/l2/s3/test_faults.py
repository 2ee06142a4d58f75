"""The S3 store in trouble: what is not whole is a miss, and what can't be reached is an OSError."""

import socket
import threading
import time
import uuid

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk
from hotspan.l2.base import Found, marks_of
from hotspan.l2.s3 import S3Store
from hotspan.l2.s3_bucket import Bucket
from hotspan.l2.s3_settings import S3Settings
from hotspan.testing.chunks import aligned, chain, content
from tests.l2.s3.rig import (
    BUCKET,
    FRAME_BYTES,
    TENANT,
    Place,
    Replicas,
    X,
    Y,
    find,
    places,
    put_all,
    read,
    record_of,
)
from tests.l2.s3_server import CLIENT, S3Server


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut", "longer", "index", "other"])
def test_an_object_that_is_not_what_was_put_is_a_miss(replica: Replicas, place: Place, damage: str) -> None:
    """Bytes that somebody wrote over a segment are no segment; who puts the text again puts it right."""
    text, others = chain("a", 4), chain("b", 4)
    put_all(replica(), text)
    (path,) = place.paths("chunks")
    whole = place.read(path)
    put_all(replica(), others)
    (other_path,) = set(place.paths("chunks")) - {path}
    changed = {
        "garbage": b"something else" * 1000,
        "empty": b"",
        "cut": whole[:-1],
        "longer": whole + b"x",
        "index": whole[:100] + b"?" + whole[101:],
        "other": place.read(other_path),
    }
    place.write(path, changed[damage])
    reader = replica()
    assert places(find(reader, text)) == []
    assert put_all(reader, text, stamp=2) == [True] * 4
    found = find(replica(), text)
    assert [read(reader, each) for each in found] == [content(chunk.key, FRAME_BYTES, 2) for chunk in text]


def test_records_of_other_chunks_are_a_miss(replica: Replicas, place: Place) -> None:
    """A whole segment under the name of another one that ends alike is not what was asked for."""
    one = chain("a", 4)
    other = [*chain("b", 3), Chunk(one[3].key, chain("b", 3)[2].key, 3)]
    put_all(replica(), other)
    assert places(find(replica(), one)) == []
    assert places(find(replica(), other)) == [0, 1, 2, 3]


@pytest.mark.parametrize("change", ["rewritten", "cut", "deleted"])
def test_an_object_that_changed_since_it_was_found_is_gone(replica: Replicas, place: Place, change: str) -> None:
    """What was found is read from the very object it was found in, or not at all; and is looked for again after."""
    store = replica()
    text = chain("a", 4)
    put_all(store, text)
    found = find(store, text)
    (path,) = place.paths("chunks")
    data = place.read(path)
    if change == "deleted":
        replica().delete([text[3].key], TENANT)
    else:
        place.write(path, bytes(len(data)) if change == "rewritten" else data[:5000])
    assert read(store, found[1]) is None
    assert put_all(store, text, stamp=2)[3]
    assert read(store, find(store, text)[1]) == content(text[1].key, FRAME_BYTES, 2)


def test_marks_that_can_not_be_read_make_copies_dead(replica: Replicas, place: Place) -> None:
    """A chunk whose marks somebody overwrote is a miss, until it is stored again; then marks hold as before."""
    store = replica()
    text = chain("a", 4)
    put_all(store, text)
    store.mark({text[2].key: marks_of(Terms(labels=X), 1)})
    (path,) = place.paths("marks")
    place.write(path, b"something else" * 5)
    assert places(find(store, text)) == [0, 1, 3]
    store.delete([text[0].key], TENANT)
    assert put_all(store, text, stamp=2) == [True] * 4
    store.mark({text[2].key: marks_of(Terms(labels=Y), 1)})
    found = find(replica(), text)
    assert places(found) == [0, 1, 2, 3] and found[2] is not None and found[2].terms.labels == Y


def test_with_the_log_all_objects_are_lost(replica: Replicas, place: Place) -> None:
    """Once the log began anew nothing of before is found, waits or counts as there; the text can be stored again."""
    store, other = replica(), replica()
    text = chain("a", 6)
    put_all(store, text)
    assert places(find(other, text)) == [0, 1, 2, 3]
    for path in place.paths("log"):
        place.delete(path)
    assert places(find(other, text)) == places(find(store, text)) == []
    assert read(store, Found(record_of(text[4]), Terms())) is None
    assert put_all(store, text, stamp=2) == [True] * 6
    assert places(find(other, text)) == [0, 1, 2, 3]


def test_a_put_that_failed_can_be_done_again(replica: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose put raised counts as not put, the others of its segment still wait, and the next put stores all."""
    store = replica()
    text = chain("a", 4)
    put_all(store, text[:3])

    def failing(*_: object, **__: object) -> None:
        raise ConnectionError("the line was cut")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "write", failing)
        with pytest.raises(ConnectionError):
            put_all(store, text[3:])
    assert read(store, Found(record_of(text[3]), Terms())) is None
    assert places(find(store, text)) == []
    assert put_all(store, text[3:]) == [True]
    assert places(find(store, text)) == [0, 1, 2, 3]


def test_what_is_late_is_not_begun(server: S3Server) -> None:
    """At the deadline a call raises, and those of its requests that have not begun never do."""
    bucket = Bucket(f"s3://{BUCKET}", CLIENT | {"endpoint": server.url}, 60.0, connections=1)
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
    bucket.call(lambda: None, bucket.until())
    assert begun == [0]
    bucket.close()


def test_a_closed_store_raises(place: Place) -> None:
    """After `close` every method raises OSError."""
    store = place.store()
    assert store.log is not None
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
        lambda: store.mark({text[0].key: [b"mark"]}),
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
    store = S3Store("s3://no-such-bucket/x", S3Settings(client={"endpoint": server.url, "skip_signature": True}))
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
        ("s3://bucket", {"segment_chunks": 0}),
        ("s3://bucket", {"segment_chunks": 15}),
        ("s3://bucket", {"connections": 0}),
        ("s3://bucket", {"timeout_s": 0.0}),
    ],
)
def test_settings_that_can_not_work_are_refused(url: str, settings: dict[str, object]) -> None:
    """A URL without a bucket, unknown settings and numbers out of range are errors at once."""
    with pytest.raises(ConfigError):
        S3Store(url, S3Settings(**settings))  # type: ignore[arg-type]


def test_secrets_are_not_shown() -> None:
    """Neither settings nor the errors of a store that can't connect say a key."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = Place(f"http://127.0.0.1:{nobody.getsockname()[1]}", "x")
        settings = S3Settings(client={"secret_access_key": "a secret"})
        store = place.store(timeout_s=0.5)
        with pytest.raises(OSError) as caught:
            find(store, chain("a", 4))
        assert "secret" not in f"{settings!r} {caught.value!r} {caught.value.__cause__!r}"
        store.close()
