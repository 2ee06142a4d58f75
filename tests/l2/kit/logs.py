"""What the log of a store that replicas share must do. Part of the kit in stores.py."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hotspan.core.terms import Scope, Terms, tag_labels, tenant_label
from hotspan.l2.base import ObjectStore, SharedInvalidation, SharedLog, updates_of
from hotspan.testing.chunks import HANG_S, chain
from kit.waiting import until
from tests.l2.kit.stores import (
    MAX_ENTRIES,
    NAMESPACE,
    TERMS,
    MakeStore,
    StoreFixtures,
    found,
    frame_of,
    put,
    read,
)

FEW = 8
"""Entries that a log keeps; it may keep as many again."""


def log_of(store: ObjectStore) -> SharedLog:
    """Raises: AssertionError for a store without one: its tests do not derive from those of logs."""
    assert store.log is not None
    return store.log


class SharedLogTests(StoreFixtures):
    """Of every store with a log."""

    BEGINS_ITSELF = False
    """Whether the server begins the log, before any replica comes."""

    def lose_log(self, store: ObjectStore) -> None:
        """Make the log one that has lost entries which `store` had read: somebody asks for more than there ever was."""
        log_of(store).read(log_of(store).read(0).generation + 1000)

    def test_a_new_log_has_no_entries(self, store: ObjectStore, other: ObjectStore) -> None:
        """A log begins at its floor, a time in milliseconds, in an epoch that all replicas see."""
        before_ms = time.time() * 1000
        pages = [log_of(each).read(after) for each in (store, other) for after in (0, 5)]
        assert len({page.epoch for page in pages}) == 1 and len(pages[0].epoch) == 16
        assert {page.generation for page in pages} == {pages[0].floor} and not any(page.entries for page in pages)
        assert abs(pages[0].floor - before_ms) < 60_000

    def test_who_asks_whether_a_store_is_used_leaves_nothing(self, store: ObjectStore, other: ObjectStore) -> None:
        """A new one is not, however often it is asked; one with a log is, and so is one with only a report."""
        for each in (store, other, store):
            assert log_of(each).is_used() == self.BEGINS_ITSELF
        log_of(store).report("replica", 1, 60)
        assert log_of(other).is_used()
        log_of(store).forget("replica")
        assert log_of(other).is_used() == self.BEGINS_ITSELF
        log_of(store).read(0)
        assert log_of(other).is_used()

    @pytest.mark.parametrize(
        "scope",
        [
            Scope(),
            Scope(tenant=tenant_label("t"), adapter=2**64 - 1),
            Scope(labels=frozenset([2**64 - 1, 2**63, 1])),
            Scope(keys=frozenset(chunk.key for chunk in chain("a", 400))),
            Scope(tenant=1, namespace=NAMESPACE, keys=frozenset()),
        ],
        ids=["everything", "tenant", "labels", "keys", "namespace"],
    )
    def test_an_entry_says_what_was_appended(self, store: ObjectStore, other: ObjectStore, scope: Scope) -> None:
        """Every replica reads each scope as it was, twice if it was appended twice, and whose it was."""
        generations = [log_of(store).append([scope], by) for by in ("replica-1", "replica-1", "ä/b c")]
        page = log_of(other).read(0)
        expected = zip(generations, ("replica-1", "replica-1", "ä/b c"), strict=True)
        assert list(page.entries) == [SharedInvalidation(generation, (scope,), by) for generation, by in expected]
        assert page.floor < generations[0] < generations[1] < generations[2] == page.generation

    def test_a_reader_gets_what_comes_after(self, store: ObjectStore, other: ObjectStore) -> None:
        """Entries above a generation, and no others; of the newest on there are none."""
        generations = [log_of(each).append([Scope(tenant=n)], "me") for n, each in enumerate([store, other] * 3)]
        for each in (store, other):
            for number, after in enumerate(generations):
                page = log_of(each).read(after)
                assert [entry.generation for entry in page.entries] == generations[number + 1 :]
                assert page.generation == generations[-1]

    def test_generations_increase_whoever_appends(self, store: ObjectStore, other: ObjectStore) -> None:
        """Replicas that append at once get generations of their own, each above its last, and a reader misses none."""
        logs = [log_of(store), log_of(other), log_of(store), log_of(other)]
        done = threading.Event()
        seen: list[SharedInvalidation] = []

        def append(number: int) -> list[int]:
            return [logs[number].append([Scope(tenant=number * 100 + n)], str(number)) for n in range(20)]

        def follow() -> None:
            after = 0
            while True:
                is_last = done.is_set()
                page = log_of(other).read(after)
                seen.extend(page.entries)
                after = page.generation
                if is_last:
                    return

        with ThreadPoolExecutor(len(logs) + 1) as threads:
            following = threads.submit(follow)
            given = list(threads.map(append, range(len(logs))))
            done.set()
            following.result(HANG_S)
        assert all(each == sorted(set(each)) for each in given)
        generations = sorted(at for each in given for at in each)
        assert len(set(generations)) == len(generations)
        assert [entry.generation for entry in seen] == generations
        by_generation = {entry.generation: entry.scopes[0].tenant for entry in seen}
        assert all(by_generation[at] == i * 100 + n for i, each in enumerate(given) for n, at in enumerate(each))

    @pytest.mark.parametrize("others", [1, FEW, 3 * FEW])
    def test_who_slept_writes_behind_all_others(self, open_store: MakeStore, others: int) -> None:
        """A replica that did not read while others appended, and trimmed what it knew, gets a generation above theirs;
        who has read theirs reads its entry, too."""
        store, other = open_store(FEW), open_store(FEW)
        slept = log_of(store).append([Scope(tenant=1)], "sleeps")
        last = max(log_of(other).append([Scope(tenant=2)], "wakes") for _ in range(others))
        generation = log_of(store).append([Scope(tenant=3)], "sleeps")
        page = log_of(other).read(last)
        assert generation == last + 1 == slept + others + 1
        assert [(entry.generation, entry.scopes) for entry in page.entries] == [(generation, (Scope(tenant=3),))]
        kept = log_of(open_store(FEW)).read(0).entries
        assert [entry.generation for entry in kept] == list(range(kept[0].generation, generation + 1))

    def test_replicas_are_those_that_reported(self, store: ObjectStore, other: ObjectStore) -> None:
        """Each replica is there with what it said last, whatever its name, until it says that it is gone."""
        names = ["replica-1", "../../etc/x", "ä b:c", "."]
        for n, name in enumerate(names):
            log_of(store).report(name, n, 60)
        log_of(other).report("replica-1", 70, 60)
        assert log_of(other).replicas() == dict(zip(names, [70, 1, 2, 3], strict=True))
        for name in [*names[1:], "never here"]:
            log_of(other).forget(name)
        assert log_of(store).replicas() == {"replica-1": 70}

    def test_a_replica_that_says_nothing_is_not_alive(self, store: ObjectStore, other: ObjectStore) -> None:
        """A report holds for as long as it says, and one that comes before its end prolongs it."""
        log_of(store).report("lives", 1, 60)
        log_of(store).report("dies", 1, 0.3)
        until(lambda: "dies" not in log_of(other).replicas())
        assert log_of(other).replicas() == {"lives": 1}
        log_of(store).report("dies", 1, 60)
        assert log_of(other).replicas() == {"lives": 1, "dies": 1}

    def test_a_log_that_lost_entries_begins_anew(self, store: ObjectStore, other: ObjectStore) -> None:
        """The loss is a new epoch for all, its floor above every generation of the last, and its entries are kept."""
        last = max(log_of(store).append([Scope(tenant=n)], "me") for n in range(3))
        before = log_of(other).read(0)
        self.lose_log(store)
        pages = [log_of(each).read(after) for each in (store, other) for after in (0, last)]
        assert len({page.epoch for page in pages}) == 1 and pages[0].epoch != before.epoch
        assert all(page.floor > last and page.generation == page.floor and not page.entries for page in pages)
        generation = log_of(other).append([Scope(tenant=9)], "me")
        page = log_of(store).read(pages[0].generation)
        assert page.epoch == pages[0].epoch and [entry.generation for entry in page.entries] == [generation]
        assert generation > pages[0].floor

    def test_a_new_epoch_hides_all_objects(self, store: ObjectStore, other: ObjectStore) -> None:
        """With the log all objects and updates are lost, to those who knew them, too; they can be put anew."""
        (chunk,) = chain("a", 1)
        put(store, chunk, 4096)
        store.add_updates({chunk.key: updates_of(Terms(labels=tag_labels(["old"])), 9)})
        assert found(other, chunk) is not None
        self.lose_log(store)
        for each in (store, other):
            log_of(each).read(0)
            assert found(each, chunk) is None
        assert put(other, chunk, 4096, version=1)
        one = found(store, chunk)
        assert one is not None and one.terms == TERMS
        assert read(store, one) == frame_of(chunk.key, 4096, version=1)

    def test_a_loss_that_several_notice_is_one(self, open_store: MakeStore) -> None:
        """Replicas that find at once that entries were lost begin one epoch between them."""
        stores = [open_store(MAX_ENTRIES) for _ in range(4)]
        last = log_of(stores[0]).append([Scope()], "me")
        for each in stores:
            assert log_of(each).read(0).generation == last
        barrier = threading.Barrier(len(stores))

        def notice(store: ObjectStore) -> bytes:
            barrier.wait(HANG_S)
            return log_of(store).read(last + 1000).epoch

        with ThreadPoolExecutor(len(stores)) as threads:
            epochs = list(threads.map(notice, stores))
        assert {log_of(each).read(0).epoch for each in stores} == set(epochs)


class TrimmedLogTests(StoreFixtures):
    """Of a log that is told how many entries to keep."""

    def test_a_log_keeps_the_newest_entries(self, open_store: MakeStore) -> None:
        """Of many entries those above the floor are there, about as many as were asked for, and the floor says so."""
        store, other = open_store(FEW), open_store(FEW)
        generations = [log_of(each).append([Scope(tenant=n)], "me") for n, each in enumerate([store, other] * 20)]
        for each in (store, other):
            page = log_of(each).read(0)
            kept = [entry.generation for entry in page.entries]
            assert kept == [at for at in generations if at > page.floor]
            assert FEW <= len(kept) <= 2 * FEW and page.floor in generations
            assert [entry.scopes[0].tenant for entry in page.entries] == list(range(40 - len(kept), 40))
            assert log_of(each).read(generations[-2]).epoch == page.epoch

    def test_who_reads_on_misses_nothing(self, open_store: MakeStore) -> None:
        """A reader that keeps up sees every entry once while the oldest are dropped, in one epoch."""
        store, other = open_store(FEW), open_store(FEW)
        first = page = log_of(other).read(0)
        for n in range(40):
            log_of(store).append([Scope(tenant=n)], "me")
            page = log_of(other).read(page.generation)
            assert [entry.scopes[0].tenant for entry in page.entries] == [n] and page.epoch == first.epoch
