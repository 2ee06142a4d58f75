"""Frame keys and nonces: as documented, never repeated, never shown."""

import hashlib
import hmac
import os
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.terms import tenant_label
from hotspan.keyring.sealing import NonceCounter, Root, frame_key
from tests.keyring.rig import NONCE, PATIENCE_S, opened

ROOT = Root(bytes(range(16)), bytes(range(32, 64)))
WRITER = bytes(range(64, 80))


def by_hand(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 to 32 bytes as RFC 5869 writes it."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_the_frame_key_is_the_documented_one() -> None:
    """The key is HKDF-SHA256(root, writer, "hotspan-frame-2" | key id), by the library, by hand, and for ever."""
    info = b"hotspan-frame-2" + ROOT.id
    library = HKDF(algorithm=SHA256(), length=32, salt=WRITER, info=info).derive(ROOT.secret)
    assert library == by_hand(ROOT.secret, WRITER, info)
    assert library.hex() == "d2fd61595e9638bf4df6c614e780f425a7d0d9cce502bd37a165a89f741f9d97"
    assert frame_key(ROOT, WRITER).encrypt(NONCE, b"kv", b"aad") == AESGCM(library).encrypt(NONCE, b"kv", b"aad")


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16)), unique=True))
def test_no_two_writers_or_roots_share_a_key(names: list[tuple[bytes, bytes]]) -> None:
    """Another writer or another root id is another key, for the same secret."""
    keys = {frame_key(Root(i, ROOT.secret), writer).encrypt(NONCE, bytes(16), None) for i, writer in names}
    assert len(keys) == len(names)


def test_no_nonce_comes_twice_to_any_thread(store: Path, kek: str) -> None:
    """Threads that take nonces for the frames of two tenants, through rotations, never get one twice."""
    taken: list[bytes] = []
    with opened(store, kek, "a", "b") as keyring:

        def take(tenant: str) -> None:
            mine = []
            for _ in range(2000):
                sealing = keyring.sealing(tenant_label(tenant))
                assert sealing is not None
                mine.append(sealing.next_nonce())
            taken.extend(mine)

        threads = [threading.Thread(target=take, args=("ab"[n % 2],)) for n in range(8)]
        for thread in threads:
            thread.start()
        keyring.rotate("a")
        for thread in threads:
            thread.join()
    assert len(taken) == len(set(taken)) == 16_000
    assert {len(nonce) for nonce in taken} == {8}


def test_a_key_fetched_again_goes_on_counting(store: Path, kek: str) -> None:
    """Keys that were forgotten and come back unchanged don't start over at nonce zero."""
    with opened(store, kek, "a") as keyring:
        first = keyring.sealing(tenant_label("a"))
        file = next(p for p in store.glob("*.json") if p.name != "store.json")
        file.rename(store / "aside")
        keyring.refresh()
        assert keyring.sealing(tenant_label("a")) is None
        (store / "aside").rename(file)
        assert keyring.prepare(["a"], PATIENCE_S) == ()
        second = keyring.sealing(tenant_label("a"))
        assert first is not None and second is not None
        assert first.key_id == second.key_id and first.writer != second.writer
        assert first.next_nonce() != second.next_nonce()


@pytest.mark.parametrize("is_random", [True, False])
def test_a_copy_of_the_machine_repeats_no_key(
    store: Path, kek: str, monkeypatch: pytest.MonkeyPatch, is_random: bool
) -> None:
    """A process that goes on twice from one state, be the kernel's random bytes the same, too, has another key."""
    with opened(store, kek, "a") as keyring:
        if not is_random:
            monkeypatch.setattr(os, "urandom", bytes)
        snapshot, sealed = keyring._nonces._next, []
        for _ in range(2):
            keyring._nonces._next = snapshot
            sealing = keyring.sealing(tenant_label("a"))
            assert sealing is not None
            sealed.append((sealing.next_nonce(), sealing.aead.encrypt(NONCE, bytes(64), None)))
    (first, second) = sealed
    assert first[0] == second[0] and first[1] != second[1]


def test_a_forked_child_gets_no_nonce() -> None:
    """A child would repeat its parent's nonces, so it is refused."""
    counter = NonceCounter()
    counter.take()
    child = os.fork()
    if child == 0:
        try:
            counter.take()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    counter.take()


def test_secrets_are_not_shown(store: Path, kek: str) -> None:
    """No repr of what the keyring gives or holds contains a secret."""
    with opened(store, kek, "a") as keyring:
        held = keyring._held["a"]
        secrets = (held.secrets.names, *(root.secret for root in held.secrets.roots))
        stored = keyring._store.read("a")
        shown = "".join(
            map(repr, (keyring, held, held.secrets, keyring.sealing(tenant_label("a")), stored, keyring.stats()))
        )
        for secret in secrets:
            digest = hashlib.sha256(secret).hexdigest()
            assert secret.hex() not in shown and repr(secret)[2:-1] not in shown and digest not in shown
        assert stored is not None
        assert repr(stored.record.names)[2:-1] not in shown


@pytest.mark.parametrize("call", [lambda s: setattr(s, "key_id", b""), lambda s: setattr(s, "writer", b"")])
def test_what_seals_can_not_be_changed(store: Path, kek: str, call: object) -> None:
    """A sealing is frozen: a frame can't be labelled with another key than it was sealed with."""
    with opened(store, kek, "a") as keyring, pytest.raises(AttributeError):
        call(keyring.sealing(tenant_label("a")))  # type: ignore[operator]
