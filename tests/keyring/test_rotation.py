"""New roots and new key-encryption keys leave names and frames as they are."""

import os
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError, KeyUnavailable
from hotspan.keyring.keyring import open_keyring
from hotspan.keyring.store import KeyStore
from hotspan.keyring.wrap import LocalWrapper, open_wrapper
from kit.waiting import until
from tests.keyring.conftest import Kms
from tests.keyring.rig import PATIENCE_S, make_kek, opened, reads, sealed


def test_a_rotation_keeps_old_frames(store: Path, kek: str) -> None:
    """After a rotation new frames name the new root, old ones open, and names stay; here and in other processes."""
    with opened(store, kek, "a") as one, opened(store, kek, "a") as two:
        names, old = one.names("a"), sealed(one, "a")
        root = one.rotate("a")
        new = sealed(one, "a")
        assert new[0].hex() == root != old[0].hex()
        assert reads(one, old) and reads(one, new) and one.names("a") == names
        two.refresh()
        assert reads(two, old)  # no gap while the new root is fetched
        until(lambda: reads(two, new))
        until(lambda: sealed(two, "a")[0] == new[0])
        assert two.names("a") == names
        one.check()
        two.check()
    with opened(store, kek, "a") as again:
        assert reads(again, old) and reads(again, new) and sealed(again, "a")[0] == new[0]


def test_who_has_no_keys_can_not_be_rotated(store: Path, kek: str) -> None:
    """Rotating an unknown tenant is an error that says where to look, and creates nothing."""
    with open_keyring(store, kek, {}) as keyring:
        with pytest.raises(ConfigError, match="keys list"):
            keyring.rotate("a")
        assert not keyring.has("a")


def test_another_kek_leaves_frames_as_they_are(store: Path, kek: str, tmp_path: Path) -> None:
    """After a rewrap only the new KEK opens the store; names and frames are the same, without a gap."""
    new_kek = make_kek(tmp_path, "new")
    with opened(store, kek, "a", "b") as keyring, opened(store, kek, "a") as other:
        names, frame = keyring.names("a"), sealed(keyring, "a")
        keyring.rotate("b")
        assert keyring.rewrap(open_wrapper(new_kek, {})) == 2
        assert keyring.rewrap(open_wrapper(new_kek, {})) == 2  # again is harmless
        for each in (keyring, other):
            each.refresh()
            assert reads(each, frame)
            each.check()
        assert keyring.prepare(["c"], PATIENCE_S) == ()
    with pytest.raises(ConfigError, match="last rotated to"):
        open_keyring(store, kek, {})
    (tmp_path / "kek").unlink()
    with opened(store, new_kek, "a", "b", "c") as keyring:
        assert keyring.names("a") == names and reads(keyring, frame)
        assert keyring._store.tenants() == ["a", "b", "c"]
        for tenant in "abc":
            stored = keyring._store.read(tenant)
            assert stored is not None and stored.record.wrappers() == {open_wrapper(new_kek, {}).id}


def test_a_rewrap_that_was_cut_off_can_be_finished(store: Path, kek: str, tmp_path: Path) -> None:
    """Half-way, the old KEK still opens the store, and a second rewrap finishes it."""
    new = open_wrapper(make_kek(tmp_path, "new"), {})

    class Failing:
        def __init__(self) -> None:
            self.id, self.left = new.id, 3

        def wrap(self, key: bytes, context: bytes) -> bytes:
            self.left -= 1
            if self.left < 0:
                raise KeyUnavailable("the KMS went away")
            return new.wrap(key, context)

        def unwrap(self, blob: bytes, context: bytes) -> bytes:
            return new.unwrap(blob, context)

    with opened(store, kek, "a", "b") as keyring:
        names = keyring.names("a"), keyring.names("b")
        with pytest.raises(KeyUnavailable):
            keyring.rewrap(Failing())
    with open_keyring(store, kek, {}) as keyring:
        keyring.prepare(["a", "b"], PATIENCE_S)
        assert [tenant for tenant in "ab" if keyring.names(tenant) is None] == ["a"]
        keyring.rewrap(new)
    with opened(store, f"file:{tmp_path / 'new'}", "a", "b") as keyring:
        assert (keyring.names("a"), keyring.names("b")) == names


def test_moving_to_the_kms_and_back(kms: Kms, store: Path, kek: str) -> None:
    """A store made with a file can be handed to the KMS and back."""
    with opened(store, kek, "a") as keyring:
        names = keyring.names("a")
        keyring.rewrap(open_wrapper(kms.reference(), {}))
    with opened(store, kms.reference(), "a") as keyring:
        assert keyring.names("a") == names
        keyring.rewrap(open_wrapper(kek, {}))
    with opened(store, kek, "a") as keyring:
        assert keyring.names("a") == names


def test_the_wrong_kek_is_an_error_at_the_start(store: Path, tmp_path: Path) -> None:
    """Opening with another KEK names both; the store is left free."""
    with pytest.raises(ConfigError, match=r"wrapped by 'local:.*--kek is 'local:"):
        open_keyring(store, make_kek(tmp_path, "other"), {})
    KeyStore(store, exclusive=True).close()


def test_a_tenant_wrapped_by_another_kek_gives_no_keys(store: Path, kek: str) -> None:
    """A tenant whose keys another KEK wrapped is unavailable, not wrong."""
    with opened(store, kek, "a"):
        pass
    with KeyStore(store) as opened_store:
        stranger = LocalWrapper(os.urandom(32))
        opened_store.update("a", lambda r: r.rewrapped(lambda _, context: stranger.wrap(os.urandom(32), context)))
    with open_keyring(store, kek, {}) as keyring:
        assert keyring.prepare(["a"], PATIENCE_S) == ("a",)


def test_a_rotation_overtaken_by_another_kek_is_refused(store: Path, kek: str, tmp_path: Path) -> None:
    """Nothing wrapped by the former KEK is written after a rewrap went by."""
    new = open_wrapper(make_kek(tmp_path, "new"), {})
    with opened(store, kek, "a") as keyring:
        old = keyring._wrapper

        class Slow:
            id = old.id

            def wrap(self, key: bytes, context: bytes) -> bytes:
                blob = old.wrap(key, context)
                keyring._wrapper = old
                keyring.rewrap(new)
                return blob

            def unwrap(self, blob: bytes, context: bytes) -> bytes:
                return old.unwrap(blob, context)

        keyring._wrapper = Slow()
        with pytest.raises(KeyUnavailable, match="rotate again"):
            keyring.rotate("a")
        stored = keyring._store.read("a")
        assert stored is not None and stored.record.wrappers() == {new.id}
        assert keyring.rotate("a")
        keyring.check()
