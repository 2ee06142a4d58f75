"""What a store keeps of the names that it was written under. Part of the kit in stores.py."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from hotspan.l2 import written_under
from hotspan.l2.base import ObjectStore
from hotspan.l2.blobs import Part
from hotspan.l2.objects import BlobStore
from hotspan.l2.written_under import NAMES, NamesPlace, StoreNames
from hotspan.testing.chunks import HANG_S
from hotspan.tiers.written_under import MAX_BYTES, Name, name_of, pack_names, parse_names
from kit.waiting import until
from tests.l2.kit.stores import MAX_ENTRIES, MakeStore, StoreFixtures

Starts = Callable[[Name], StoreNames]


def own(number: int = 0, seed: str = "0") -> Name:
    """A namespace, with a seed for the engine's hashes."""
    return name_of(bytes([number]) * 32, {"hash": seed, "engine": "vllm 0.32.0"})


def place_of(store: ObjectStore) -> NamesPlace:
    """Raises: AssertionError for a store that keeps no names: its tests do not derive from these."""
    assert isinstance(store, BlobStore) and isinstance(store.blobs, NamesPlace)
    return store.blobs


def kept(store: ObjectStore) -> list[Name]:
    """What is there."""
    (data,) = place_of(store).read([Part(NAMES, MAX_BYTES + 1)])
    return parse_names(data)


class StoreNamesTests(StoreFixtures):
    """Of a store whose blobs can be written anew."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(written_under, "AGAIN_S", 0.01)

    @pytest.fixture
    def start(self, make_store: MakeStore) -> Iterator[Starts]:
        """What notes a name on a connection of its own, as a start does; ended with the test."""
        started: list[StoreNames] = []

        def begin(name: Name) -> StoreNames:
            names = StoreNames(lambda: make_store(MAX_ENTRIES), name, "the store")
            started.append(names)
            names.start()
            return names

        yield begin
        for names in started:
            names.close()

    def test_a_store_says_once_that_it_is_cold(
        self, store: ObjectStore, start: Starts, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The first start under another name says what differs; later ones under either name say nothing."""
        for name in (own(), own(1, seed="1"), own(), own(1, seed="1")):
            names = start(name)
            until(lambda name=name: kept(store)[:1] == [name])
            names.close()
        said = [message for message in caplog.messages if "names" in message]
        assert len(said) == 1 and "l2_written_under_other_names l2=the store" in said[0]
        assert said[0].endswith("what differs: PYTHONHASHSEED")
        assert [name.namespace for name in kept(store)] == [own(1).namespace, own().namespace]

    def test_names_of_others_are_bounded(
        self, store: ObjectStore, start: Starts, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What somebody planted is neither read whole, nor believed, nor in the way."""
        for planted in (b"x" * (1 << 20), b"\xff", b"{}"):
            place_of(store).overwrite(NAMES, planted)
            start(own())
            until(lambda: kept(store) == [own()])
        assert not [message for message in caplog.messages if "names" in message]

    def test_a_known_name_is_not_written_again(self, store: ObjectStore) -> None:
        """A start that finds its own name first only reads."""
        place_of(store).overwrite(NAMES, pack_names(own(), [own(1)]))

        class Reads:
            def read(self, parts: Sequence[Part]) -> list[bytes | None]:
                return place_of(store).read(parts)

            def overwrite(self, name: str, data: bytes) -> None:
                raise AssertionError("it was written")

        StoreNames(lambda: store, own(), "the store").note(Reads())

    @pytest.mark.parametrize("fails", ["read", "overwrite"])
    def test_a_store_that_fails_is_tried_again(
        self, store: ObjectStore, make_store: MakeStore, fails: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A store that can't be reached at the start, or written, keeps nobody waiting, and has the name once it is."""
        opened = make_store(MAX_ENTRIES)
        works, failed = getattr(place_of(opened), fails), threading.Event()
        calls: list[str] = []

        def fail(*arguments: object) -> object:
            calls.append(fails)
            if len(calls) < 3:
                raise ConnectionError("not now")
            failed.set()
            return works(*arguments)

        monkeypatch.setattr(place_of(opened), fails, fail)
        names = StoreNames(lambda: opened, own(), "the store")
        names.start()
        assert failed.wait(HANG_S)
        until(lambda: kept(store) == [own()])
        names.close()
