"""What the keyring's tests share: a key store on the disk, and keyrings over it."""

import threading
from pathlib import Path
from typing import Any

from hotspan.core.clock import Clock
from hotspan.core.terms import tenant_label
from hotspan.keyring.fetcher import Ticket
from hotspan.keyring.keyring import Keyring, open_keyring
from hotspan.keyring.records import StoreHeader
from hotspan.keyring.store import create_store
from hotspan.keyring.wrap import create_kek, open_wrapper

NONCE = bytes(12)
PATIENCE_S = 60.0
"""What the machine may need for anything."""


def make_store(directory: Path, kek: str) -> Path:
    """An empty key store in `directory`/store, for the KEK `kek`."""
    path = directory / "store"
    create_store(path, StoreHeader(open_wrapper(kek, {}).id, 1_700_000_000.0))
    return path


def make_kek(directory: Path, name: str = "kek") -> str:
    """The reference of a fresh KEK file."""
    create_kek(directory / name)
    return f"file:{directory / name}"


def opened(store: Path, kek: str, *tenants: str, clock: Clock | None = None) -> Keyring:
    """A keyring that holds `tenants`."""
    keyring = open_keyring(store, kek, {}, clock)
    assert keyring.prepare(tenants, PATIENCE_S) == ()
    keyring.check()
    return keyring


def sealed(keyring: Keyring, tenant: str, text: bytes = b"kv") -> tuple[bytes, bytes, bytes]:
    """The key id, the writer and the ciphertext of `text` under what seals `tenant`'s frames now."""
    sealing = keyring.sealing(tenant_label(tenant))
    assert sealing is not None
    return sealing.key_id, sealing.writer, sealing.aead.encrypt(NONCE, text, None)


def reads(keyring: Keyring, frame: tuple[bytes, bytes, bytes], text: bytes = b"kv") -> bool:
    """Whether `keyring` opens what `sealed` gave."""
    key = keyring.opening(frame[0], frame[1])
    return key is not None and key.decrypt(NONCE, frame[2], None) == text


def at_once(keyring: Keyring, tenant: str) -> bytes | None:
    """`names`, which must not wait for keys: nothing is fetched before it has returned."""
    returned, fetch, waits = threading.Event(), keyring._obtain, []

    def held(ticket: Ticket) -> Any:
        waits.append(returned.wait(PATIENCE_S))
        return fetch(ticket)

    keyring._obtain = held  # type: ignore[method-assign]
    try:
        names = keyring.names(tenant)
    finally:
        keyring._obtain = fetch  # type: ignore[method-assign]
        returned.set()
    assert all(waits), "it waited for the keys"
    return names
