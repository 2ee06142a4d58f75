"""The keyring as an engine uses it: never in the way, the same for all replicas, and quiet about its secrets."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from hotspan.core.terms import tenant_label
from hotspan.keyring.keyring import open_keyring
from hotspan.keyring.records import file_name
from hotspan.keyring.wrap import open_wrapper
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until
from tests.cache.rig import Rig
from tests.keyring.conftest import Kms
from tests.keyring.rig import PATIENCE_S, at_once, make_kek, make_store, opened, reads, sealed


def test_names_and_frames_survive_a_restart(store: Path, kek: str) -> None:
    """Another process with the same store gives the same names and opens its frames; its own key is another."""
    with opened(store, kek, "a") as keyring:
        names, frame = keyring.names("a"), sealed(keyring, "a")
        assert names is not None and len(names) == 32
        assert (len(frame[0]), len(frame[1])) == (16, 16)
    with opened(store, kek, "a") as again:
        assert again.names("a") == names
        assert reads(again, frame)
        other = sealed(again, "a")
        assert other[0] == frame[0] and other[1] != frame[1] and other[2] != frame[2]


def test_tenants_share_nothing(store: Path, kek: str) -> None:
    """Two tenants have different names and roots, and no file tells a secret."""
    with opened(store, kek, "a", "b") as keyring:
        assert keyring.names("a") != keyring.names("b")
        assert sealed(keyring, "a")[0] != sealed(keyring, "b")[0]
        on_disk = b"".join(p.read_bytes() for p in store.iterdir())
        for held in keyring._held.values():
            assert held.secrets.names.hex().encode() not in on_disk


def test_an_unknown_tenant_comes_in_the_background(store: Path, kek: str) -> None:
    """The first `names` answers None at once; soon after the keys are there."""
    with open_keyring(store, kek, {}) as keyring:
        assert at_once(keyring, "a") is None and keyring.sealing(tenant_label("a")) is None
        until(lambda: keyring.names("a") is not None)
        assert keyring.sealing(tenant_label("a")) is not None
        keyring.check()


def test_an_unknown_root_is_a_miss(store: Path, kek: str) -> None:
    """A frame of a root that this store never had is not opened."""
    with opened(store, kek, "a") as keyring:
        assert keyring.opening(os.urandom(16), os.urandom(16)) is None


@pytest.mark.parametrize("round_", range(3))
def test_replicas_that_create_at_once_agree(store: Path, kek: str, round_: int) -> None:
    """Keyrings that meet the same new tenants at the same moment all end up with the same keys."""
    tenants = [f"tenant-{number}" for number in range(5)]
    keyrings = [open_keyring(store, kek, {}) for _ in range(4)]
    threads = [threading.Thread(target=k.prepare, args=(tenants, PATIENCE_S)) for k in keyrings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tenant in tenants:
        assert len({k.names(tenant) for k in keyrings} - {None}) == 1
        frame = sealed(keyrings[0], tenant)
        assert all(reads(k, frame) for k in keyrings)
    for keyring in keyrings:
        keyring.check()
        keyring.close()


class LookedAt(SimulatedClock):
    """Counts how often the threads that fetch look at it."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += threading.current_thread() is not threading.main_thread()
        return super().monotonic()


def test_a_kms_outage_costs_hits_and_no_errors(kms: Kms, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the KMS gone, `names` is None at once, is tried again each 5 s and no sooner, and heals by itself."""
    clock = LookedAt()
    store = make_store(tmp_path, kms.reference())
    kms.gate.set("refuse")
    with open_keyring(store, kms.reference(), {}, clock) as keyring, caplog.at_level(logging.WARNING):
        assert at_once(keyring, "a") is None
        until(lambda: keyring.stats().failures == 1)
        connections = kms.gate.connections
        for _ in range(1000):
            assert at_once(keyring, "a") is None
        looks = clock.looks
        until(lambda: clock.looks > looks + 8)  # what waits is not due: four threads have seen that twice
        assert kms.gate.connections == connections
        clock.advance(5)
        until(lambda: keyring.stats().failures == 2)
        assert sum("keyring_keys_unavailable" in r.message for r in caplog.records) == 1
        kms.gate.set("open")
        clock.advance(5)
        until(lambda: keyring.stats().tenants == 1)
        assert keyring.names("a") is not None and keyring.stats().waiting == 0
        kms.gate.set("refuse")  # what is held needs no KMS
        assert reads(keyring, sealed(keyring, "a"))
    kms.gate.set("open")


def test_a_kms_outage_is_in_the_metrics(kms: Kms, tmp_path: Path) -> None:
    """An engine reports failed attempts once each, and whose keys are there or wanted, though nothing is cached."""
    pytest.importorskip("vllm")
    from hotspan.engine.metrics import CacheMetrics

    def reported() -> dict[str, float]:
        stats = metrics.report(1.0)
        found = {} if stats is None else {name: by for kind in stats.data.values() for name, by in kind.items()}
        return {name: by[()] for name, by in found.items() if name.startswith("hotspan_keys_")}

    clock = SimulatedClock()
    store = make_store(tmp_path, kms.reference())
    kms.gate.set("refuse")
    with Rig(ram=1) as rig, open_keyring(store, kms.reference(), {}, clock) as keyring:
        metrics = CacheMetrics(rig.cache, None, keyring)
        assert keyring.names("a") is None
        until(lambda: keyring.stats().failures == 1)
        assert reported() == {"hotspan_keys_failures": 1, "hotspan_keys_tenants": 0, "hotspan_keys_waiting": 1}
        assert reported() == {}
        kms.gate.set("open")
        until(lambda: clock.advance(5) or (keyring.stats().tenants == 1 and not keyring.stats().waiting))
        assert reported() == {"hotspan_keys_tenants": 1, "hotspan_keys_waiting": 0}


def test_a_kms_that_hangs_holds_nobody(kms: Kms, tmp_path: Path) -> None:
    """With a KMS that never answers, `names`, a bounded `prepare` and `close` return in their time."""
    store = make_store(tmp_path, kms.reference())
    kms.gate.set("hang")
    keyring = open_keyring(store, kms.reference(), {})
    assert at_once(keyring, "a") is None
    assert keyring.prepare(["a", "b"], 0.2) == ("a", "b")
    assert keyring.stats().failures == 0, "it waited until a call of the KMS had ended"
    assert at_once(keyring, "b") is None
    kms.gate.set("open")  # cuts the calls that hang: their second attempt succeeds
    until(lambda: keyring.names("a") is not None and keyring.names("b") is not None)
    kms.gate.set("hang")
    assert at_once(keyring, "c") is None
    failures = keyring.stats().failures
    keyring.close()
    assert keyring.stats().failures == failures, "it waited until a call of the KMS had ended"
    assert keyring.names("a") is None and keyring.stats().tenants == 0


def test_tenants_that_could_not_be_prepared_come_by_themselves(kms: Kms, tmp_path: Path) -> None:
    """What `prepare` could not fetch at the start is fetched later, without a request that asks for it."""
    clock = SimulatedClock()
    store = make_store(tmp_path, kms.reference())
    kms.gate.set("refuse")
    with open_keyring(store, kms.reference(), {}, clock) as keyring:
        assert keyring.prepare(["a", "b"], PATIENCE_S) == ("a", "b")
        kms.gate.set("open")
        clock.advance(5)
        until(lambda: keyring.stats().tenants == 2)


def test_a_file_of_another_tenant_is_not_taken(store: Path, kek: str) -> None:
    """A tenant's file copied over another's, even with the name in it changed, gives no keys."""
    with opened(store, kek, "a", "b"):
        pass
    content = (store / file_name("a")).read_text()
    for forged in (content, content.replace('"tenant": "a"', '"tenant": "b"')):
        (store / file_name("b")).write_text(forged)
        with open_keyring(store, kek, {}) as keyring:
            assert keyring.prepare(["b"], PATIENCE_S) == ("b",)
            assert keyring.names("b") is None and keyring.sealing(tenant_label("b")) is None
            assert keyring.prepare(["a"], PATIENCE_S) == ()


@pytest.mark.parametrize("what", ["names of b", "root of b", "root as names", "older root as newest"])
def test_swapped_blobs_are_not_taken(store: Path, kek: str, what: str) -> None:
    """A wrapped key put in the place of another, between tenants or within one, gives no keys."""
    with opened(store, kek, "a", "b") as keyring:
        keyring.rotate("a")
    a, b = (json.loads((store / file_name(tenant)).read_text()) for tenant in "ab")
    match what:
        case "names of b":
            a["names"] = b["names"]
        case "root of b":
            a["roots"][0]["wrapped"] = b["roots"][0]["wrapped"]
        case "root as names":
            a["names"] = a["roots"][0]["wrapped"]
        case _:
            a["roots"][1]["wrapped"] = a["roots"][0]["wrapped"]
    (store / file_name("a")).write_text(json.dumps(a))
    with open_keyring(store, kek, {}) as keyring:
        assert keyring.prepare(["a"], PATIENCE_S) == ("a",)
        assert keyring.names("a") is None


def test_a_store_that_vanishes_gives_no_keys(store: Path, kek: str) -> None:
    """When it can't be told whether keys were shredded they are not used; they come back with the store."""
    clock = SimulatedClock()
    with opened(store, kek, "a", clock=clock) as keyring:
        names, frame = keyring.names("a"), sealed(keyring, "a")
        store.rename(store.with_name("aside"))
        keyring.refresh()
        assert at_once(keyring, "a") is None and not reads(keyring, frame)
        until(lambda: keyring.stats().failures > 0)
        store.with_name("aside").rename(store)
        clock.advance(5)
        until(lambda: keyring.names("a") == names)
        assert reads(keyring, frame)


def test_a_bug_in_a_wrapper_costs_hits_and_not_the_thread(
    store: Path, kek: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception while fetching is a failure like another, whose text is not logged."""
    clock = SimulatedClock()
    with open_keyring(store, kek, {}, clock) as keyring:
        good = keyring._wrapper

        class Broken:
            id = good.id

            def wrap(self, key: bytes, context: bytes) -> bytes:
                raise RuntimeError(key.hex())

            def unwrap(self, blob: bytes, context: bytes) -> bytes:
                raise RuntimeError

        keyring._wrapper = Broken()
        with caplog.at_level(logging.WARNING):
            assert keyring.prepare(["a"], PATIENCE_S) == ("a",)
        assert [r.getMessage() for r in caplog.records] == [
            "keyring_keys_unavailable tenant='a' failures=1 error=RuntimeError"
        ]
        keyring._wrapper = good
        clock.advance(5)
        until(lambda: keyring.names("a") is not None)


def test_logs_hold_no_secrets(store: Path, kek: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Through creation, rotation, failure, rewrap and shred, no secret gets into a log line."""
    caplog.set_level(logging.DEBUG)
    secrets: set[bytes] = set()
    with opened(store, kek, "a", "b") as keyring:
        keyring.rotate("a")
        for held in keyring._held.values():
            secrets |= {held.secrets.names, *(root.secret for root in held.secrets.roots)}
        keyring.rewrap(open_wrapper(make_kek(tmp_path, "new"), {}))
        (store / file_name("b")).write_bytes(b"{}")
        keyring.refresh()
        keyring.shred("a")
    events = {record.getMessage().split()[0] for record in caplog.records}
    assert events >= {
        "keyring_tenant_created",
        "keyring_tenant_rotated",
        "keyring_rewrapped",
        "keyring_keys_unavailable",
        "keyring_tenant_forgotten",
        "keyring_tenant_shredded",
    }
    secrets.add(bytes.fromhex((tmp_path / "kek").read_text()))
    assert len(secrets) == 6
    for secret in secrets:
        assert secret.hex() not in caplog.text and repr(secret)[2:-1] not in caplog.text
