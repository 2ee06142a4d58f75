"""After a shred nothing is left: on disk, in memory, in other processes, or on its way there."""

import os
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hotspan.core.terms import tenant_label
from hotspan.keyring.keyring import REFRESH_S, open_keyring
from hotspan.keyring.records import file_name
from hotspan.keyring.sealing import Root, frame_key
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until
from tests.keyring.conftest import Kms
from tests.keyring.rig import PATIENCE_S, at_once, make_store, opened, reads, sealed


def test_a_shred_is_for_good(store: Path, kek: str) -> None:
    """After a shred the file is gone, no frame opens, and a later `names` gives the tenant other secrets."""
    clock = SimulatedClock()
    with opened(store, kek, "a", "b", clock=clock) as keyring:
        names, frame, other = keyring.names("a"), sealed(keyring, "a"), sealed(keyring, "b")
        keyring.rotate("a")
        newer = sealed(keyring, "a")
        assert reads(keyring, frame) and reads(keyring, newer)
        receipt = keyring.shred("a")
        keyring.check()
        assert receipt.tenant == "a" and receipt.at_s == clock.unix() and receipt.had_keys
        assert not keyring.shred("a").had_keys
        assert receipt.roots == (frame[0].hex(), newer[0].hex())
        assert not (store / file_name("a")).exists()
        assert keyring.sealing(tenant_label("a")) is None and not reads(keyring, frame) and not reads(keyring, newer)
        assert keyring.stats().waiting == 0  # nothing is created that nobody asked for
        assert at_once(keyring, "a") is None
        until(lambda: keyring.names("a") is not None)
        assert keyring.names("a") != names and sealed(keyring, "a")[0] not in (frame[0], newer[0])
        assert not reads(keyring, frame) and reads(keyring, other)
        keyring.check()


def test_a_fetch_under_way_does_not_outlive_a_shred(kms: Kms, tmp_path: Path) -> None:
    """A creation that hangs in the KMS while the tenant is shredded leaves no keys, in memory or on disk."""
    store = make_store(tmp_path, kms.reference())
    kms.gate.set("hang")
    with open_keyring(store, kms.reference(), {}) as keyring:
        before, fetch, fetched = kms.gate.connections, keyring._fetcher._fetch, []
        keyring._fetcher._fetch = lambda ticket: fetched.append(fetch(ticket)) or fetched[-1]  # type: ignore[func-returns-value]
        assert keyring.names("a") is None
        until(lambda: kms.gate.connections > before)
        assert keyring.shred("a").roots == ()
        kms.gate.set("open")  # the hanging call goes on now
        until(lambda: bool(fetched))
        assert keyring.stats().tenants == 0 and keyring.stats().waiting == 0
        assert not (store / file_name("a")).exists()
        assert keyring.names("a") is None
        until(lambda: keyring.names("a") is not None)


def test_keys_read_before_a_shred_are_not_held_after_it(store: Path, kek: str) -> None:
    """A fetch that had the tenant's file already, and unwraps it during the shred, is dropped."""
    with opened(store, kek, "a"):
        pass
    begun, go_on = threading.Event(), threading.Event()
    with open_keyring(store, kek, {}) as keyring:
        real = keyring._wrapper

        class Slow:
            id = real.id

            def wrap(self, key: bytes, context: bytes) -> bytes:
                return real.wrap(key, context)

            def unwrap(self, blob: bytes, context: bytes) -> bytes:
                begun.set()
                assert go_on.wait(PATIENCE_S)
                return real.unwrap(blob, context)

        keyring._wrapper = Slow()
        fetch, fetched = keyring._fetcher._fetch, []
        keyring._fetcher._fetch = lambda ticket: fetched.append(fetch(ticket)) or fetched[-1]  # type: ignore[func-returns-value]
        assert keyring.names("a") is None and begun.wait(PATIENCE_S)
        assert len(keyring.shred("a").roots) == 1
        go_on.set()
        until(lambda: bool(fetched))
        assert keyring.stats().tenants == 0 and keyring.sealing(tenant_label("a")) is None
        keyring.check()


def test_a_shred_that_is_not_durable_says_so(store: Path, kek: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk fails, shred raises, the tenant has no keys here, and a second shred that succeeds frees it."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with opened(store, kek, "a") as keyring:
        frame = sealed(keyring, "a")
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="Input/output"):
                keyring.shred("a")
        assert keyring.names("a") is None and keyring.sealing(tenant_label("a")) is None and not reads(keyring, frame)
        assert keyring.prepare(["a"], 0.1) == ("a",)
        assert keyring.stats().waiting == 0
        keyring.shred("a")
        assert keyring.prepare(["a"], PATIENCE_S) == ()
        assert not reads(keyring, frame)
        keyring.check()


def test_a_shred_reaches_other_processes(store: Path, kek: str) -> None:
    """A replica, which looks each second, forgets by itself what another shredded."""
    assert REFRESH_S <= 1.0
    with opened(store, kek, "a", "b") as one, opened(store, kek, "a", "b") as two:
        kept, frame = sealed(one, "b"), sealed(one, "a")
        assert reads(two, frame)
        one.shred("a")
        until(lambda: not reads(two, frame))
        assert two.sealing(tenant_label("a")) is None and reads(two, kept)
        two.check()


def test_a_tenant_shredded_and_made_again_elsewhere_is_noticed(store: Path, kek: str) -> None:
    """A replica that sees another file in place of the one it read drops the old keys and fetches the new ones."""
    with opened(store, kek, "a") as one, opened(store, kek, "a") as two:
        frame = sealed(one, "a")
        one.shred("a")
        one.prepare(["a"], PATIENCE_S)
        two.refresh()
        assert not reads(two, frame)
        assert two.prepare(["a"], PATIENCE_S) == ()
        assert two.names("a") == one.names("a")
        two.check()


def test_a_key_derived_during_a_shred_is_dropped(store: Path, kek: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that derives its key while the tenant is shredded is a miss."""
    with opened(store, kek, "a") as keyring:
        key_id = sealed(keyring, "a")[0]

        def derive(root: Root, writer: bytes) -> AESGCM:
            keyring.shred("a")
            return frame_key(root, writer)

        monkeypatch.setattr("hotspan.keyring.keyring.frame_key", derive)
        assert keyring.opening(key_id, os.urandom(16)) is None
        keyring.check()
