"""What a running engine asks for keys: names for a tenant's chunks, keys to write and to read its frames.

    store (wrapped, on disk)  --read, unwrap in background threads-->  held (in the clear, in memory)
            ^                                                             |  names, sealing, opening: never block
            +-- create, rotate, rewrap, shred: durable before they return +

A tenant whose keys can't be had is not an error: its requests are computed and not cached.
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError, HotspanError, KeyUnavailable
from hotspan.core.frame import FrameSealing
from hotspan.core.terms import tenant_label
from hotspan.core.threads import start_worker
from hotspan.keyring.fetcher import Fetcher, Ticket
from hotspan.keyring.records import TenantRecord
from hotspan.keyring.sealing import NonceCounter, Root, Sealing, frame_key, fresh_writer
from hotspan.keyring.store import FileStamp, KeyStore, Stored
from hotspan.keyring.tenant import (
    TenantSecrets,
    fresh_root,
    fresh_secrets,
    unwrap_secrets,
    wrap_root,
    wrap_secrets,
)
from hotspan.keyring.wrap import ChangingWrapper, KeyWrapper, open_wrapper
from hotspan.keyring.wrapped import wrapped_by

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class ShredReceipt:
    """Says that `tenant`'s keys were destroyed at Unix time `at_s`; `roots` are the ids of its root keys, in hex.

    had_keys: there was something to destroy, also where it was damaged, so that its roots can't be told.
    """

    tenant: str
    roots: tuple[str, ...]
    at_s: float
    had_keys: bool


@dataclass(frozen=True, slots=True)
class KeyringStats:
    """tenants: whose keys are held. waiting: whose keys are wanted and not had. failures: since the start."""

    tenants: int
    waiting: int
    failures: int


NO_KEYS = KeyringStats(0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """One tenant in memory; `stamp` is of the file it was read from."""

    secrets: TenantSecrets
    stamp: FileStamp


class Keyring:
    """The keys of one process. Any thread may call it; what may block says so."""

    def __init__(self, store: KeyStore, wrapper: KeyWrapper, clock: Clock | None = None) -> None:
        """Takes over `store`: `close` closes it."""
        self._store = store
        self._wrapper = wrapper
        self._clock: Clock = clock or SystemClock()
        # One counter for all tenants, so that keys forgotten and fetched again don't start over at zero.
        self._nonces = NonceCounter()
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._labels: dict[int, str] = {}  # of the tenants that were held: records and frames have no names
        self._roots: dict[bytes, Root] = {}
        self._shredding: set[str] = set()
        self._shred_lock = threading.Lock()
        self._failures = 0
        self._next_log_s = float("-inf")
        self._closed = threading.Event()
        self._fetcher = Fetcher(self._fetch, self._clock)
        self._refresher = start_worker("keyring-refresh", self._keep_fresh, is_over=self._closed.is_set)

    def __repr__(self) -> str:
        return f"Keyring({self._store!r}, {self._wrapper.id!r}, tenants={len(self._held)})"

    def __enter__(self) -> "Keyring":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget every key and let go of the store; again is harmless. Blocks: at most about 2 s."""
        self._closed.set()
        self._fetcher.close()
        self._refresher.join(1.0)
        with self._lock:
            for tenant in list(self._held):
                self._forget(tenant)
        self._store.close()

    def prepare(self, tenants: Iterable[str], timeout_s: float) -> tuple[str, ...]:
        """Fetch or create the keys of `tenants` now; those that could not be had, which go on being tried.

        Blocks: until each was tried once, at most `timeout_s`.
        """
        wanted = tuple(dict.fromkeys(tenants))
        with self._lock:
            missing = [tenant for tenant in wanted if tenant not in self._held and tenant not in self._shredding]
        self._fetcher.fetch_now(missing, timeout_s)
        with self._lock:
            return tuple(tenant for tenant in wanted if tenant not in self._held)

    def names(self, tenant: str) -> bytes | None:
        """32 secret bytes to fold into the names of the tenant's chunks; None while they aren't there.

        The same over restarts and rotations; others after a shred. Never blocks: None starts a fetch in the background,
        at most one each 5 s.
        """
        with self._lock:
            held = self._held.get(tenant)
            if held is not None:
                return held.secrets.names
            if tenant not in self._shredding:
                self._fetcher.ask(tenant)
            return None

    def sealing(self, tenant: int) -> FrameSealing | None:
        """What seals the next frame of the tenant with this label; None while its keys aren't there.

        Never blocks; about 11 us.
        """
        with self._lock:
            held = self._held.get(self._labels.get(tenant, ""))
        if held is None:
            return None
        root, writer = held.secrets.roots[-1], fresh_writer()
        return Sealing(root.id, writer, frame_key(root, writer), self._nonces)

    def opening(self, key_id: bytes, writer: bytes) -> AESGCM | None:
        """The key of the frame of `writer` under the root `key_id`; None if that root is shredded or not there.

        Never blocks; about 10 us.
        """
        with self._lock:
            root = self._roots.get(key_id)
        if root is None:
            return None
        key = frame_key(root, writer)
        with self._lock:
            return key if key_id in self._roots else None  # it may have been shredded meanwhile

    def has(self, tenant: str) -> bool:
        """Whether the tenant has keys in the store, whole or damaged. Blocks: for the disk. Raises: OSError."""
        return self._store.stamp(tenant) is not None

    def shred(self, tenant: str) -> ShredReceipt:
        """Destroy the tenant's keys: what they sealed can never be read again, and that is durable before this returns.

        Only a later `names` gives the tenant new keys. Other processes on the same store forget within about 1 s.
        Blocks: for the disk.
        Raises: OSError if it could not be made durable: the keys stay forgotten here, and the tenant has none until
                a shred succeeds or the process starts again.
        """
        with self._shred_lock:
            with self._lock:
                self._shredding.add(tenant)
                self._fetcher.cancel(tenant)
                known = self._forget(tenant)
            had_keys = self.has(tenant)
            roots = self._store.shred(tenant) or known
            with self._lock:
                self._shredding.discard(tenant)
        receipt = ShredReceipt(tenant, tuple(root.hex() for root in roots), self._clock.unix(), had_keys or bool(roots))
        logger.info("keyring_tenant_shredded tenant=%r roots=%d", tenant, len(receipt.roots))
        return receipt

    def rotate(self, tenant: str) -> str:
        """Give the tenant a new root; the id of it, in hex. New frames are sealed under it, older ones stay readable.

        Blocks: for the KMS and the disk.
        Raises: ConfigError if the tenant has no keys; KeyUnavailable; OSError.
        """
        root = fresh_root()
        wrapped = wrap_root(self._wrapper, tenant, root, self._clock.unix())

        def append(record: TenantRecord) -> TenantRecord:
            if wrapped_by(wrapped.wrapped) != self._wrapper.id:
                raise KeyUnavailable("the key-encryption key was changed at the same moment: rotate again")
            return record.with_root(wrapped)

        stored = self._store.update(tenant, append)
        if stored is None:
            raise ConfigError(f"tenant {tenant!r} has no keys in {self._store.path}: see `hotspan keys list`")
        with self._lock:
            held = self._held.get(tenant)
            if held is not None and stored.record.root_ids == (*held.secrets.root_ids, root.id):
                self._install(_Held(held.secrets.with_root(root), stored.stamp))
        logger.info("keyring_tenant_rotated tenant=%r root=%s", tenant, root.id.hex())
        return root.id.hex()

    def rewrap(self, new: KeyWrapper) -> int:
        """Wrap all tenants' keys by another KEK; how many tenants. Frames and names stay as they are.

        Cut off at any point, it can be called again; until then both KEKs are needed.
        Blocks: for the KMS, two calls a key, and the disk.
        Raises: KeyUnavailable; OSError.
        """
        self._wrapper = ChangingWrapper(new, self._wrapper)
        tenants = self._store.tenants()
        for tenant in tenants:
            self._rewrap(tenant)
        self._store.set_header(replace(self._store.header, wrapper_id=new.id))
        self._wrapper = new
        logger.info("keyring_rewrapped tenants=%d wrapper=%r", len(tenants), new.id)
        return len(tenants)

    def refresh(self) -> None:
        """Notice what other processes changed in the store. One `stat` a tenant; the keyring calls it each second."""
        with self._lock:
            before = dict(self._held)
        for tenant, held in before.items():
            try:
                if self._store.stamp(tenant) == held.stamp:
                    continue
                stored = self._store.read(tenant)
            except (HotspanError, OSError) as error:
                stored = None  # whether it was shredded can't be told: as if it were
                self._log_failure(tenant, error)
            with self._lock:
                if self._held.get(tenant) is held:
                    self._reconcile(tenant, held, stored)

    def stats(self) -> KeyringStats:
        """Counts, for the metrics."""
        with self._lock:
            return KeyringStats(len(self._held), len(self._fetcher), self._failures)

    def check(self) -> None:
        """Raise AssertionError if memory contradicts itself."""
        with self._lock:
            roots = [root.id for held in self._held.values() for root in held.secrets.roots]
            if sorted(roots) != sorted(self._roots):
                raise AssertionError("the roots are not those of the tenants held")
            if self._shredding & self._held.keys():
                raise AssertionError("a tenant is held while it is shredded")

    def _install(self, held: _Held) -> None:
        tenant = held.secrets.tenant
        before = self._held.get(tenant)
        if before is not None and held.secrets.continued_by(before.secrets.root_ids):
            return  # a rotation overtook this fetch
        if before is not None and not before.secrets.continued_by(held.secrets.root_ids):
            self._forget(tenant)
        self._held[tenant] = held
        self._labels[tenant_label(tenant)] = tenant
        self._roots.update({root.id: root for root in held.secrets.roots})

    def _forget(self, tenant: str) -> tuple[bytes, ...]:
        """Drop all that is derived from the tenant's secrets; the ids of its roots."""
        held = self._held.pop(tenant, None)
        if held is None:
            return ()
        for key_id in held.secrets.root_ids:
            self._roots.pop(key_id, None)
        return held.secrets.root_ids

    def _fetch(self, ticket: Ticket) -> bool:
        """Fetch or create one tenant's keys; False to be called again. Runs in the fetcher's threads."""
        try:
            held = self._obtain(ticket)
        except Exception as error:  # a bug, too, must cost hits and not the thread
            if not ticket.cancelled:
                self._log_failure(ticket.tenant, error)
            return False
        with self._lock:
            if held is not None and not ticket.cancelled:
                self._install(held)
        return held is not None or ticket.cancelled

    def _obtain(self, ticket: Ticket) -> _Held | None:
        tenant, wrapper = ticket.tenant, self._wrapper
        with self._lock:
            before = self._held.get(tenant)
        known = before.secrets if before is not None else None
        stored = self._store.read(tenant)
        if stored is None and known is None:
            known = fresh_secrets(tenant)
            record = wrap_secrets(wrapper, known, self._clock.unix())
            # A shred may have come in between: only a later `names` then creates. And what the former KEK wrapped
            # must not appear after `rewrap` went by.
            if self._store.create(record, lambda: not ticket.cancelled and wrapper.id == self._wrapper.id):
                logger.info("keyring_tenant_created tenant=%r", tenant)
            stored = self._store.read(tenant)
        if stored is None:
            return None
        return _Held(unwrap_secrets(wrapper, stored.record, known), stored.stamp)

    def _reconcile(self, tenant: str, held: _Held, stored: Stored | None) -> None:
        if stored is None or not held.secrets.continued_by(stored.record.root_ids):
            self._forget(tenant)
            self._fetcher.cancel(tenant)
            logger.info("keyring_tenant_forgotten tenant=%r: its keys in the store are gone or others", tenant)
        elif len(stored.record.roots) == len(held.secrets.roots):
            self._held[tenant] = replace(held, stamp=stored.stamp)  # wrapped by another KEK
        else:
            self._fetcher.ask(tenant)  # rotated: the keys held serve until the new root is there

    def _rewrap(self, tenant: str) -> None:
        wrapper = self._wrapper

        def change(blob: bytes, context: bytes) -> bytes:
            return blob if wrapped_by(blob) == wrapper.id else wrapper.wrap(wrapper.unwrap(blob, context), context)

        while True:  # again if another process changed it meanwhile
            stored = self._store.read(tenant)
            if stored is None or stored.record.wrappers() == {wrapper.id}:
                return
            self._store.update(tenant, partial(_swap, stored.record, stored.record.rewrapped(change)))

    def _log_failure(self, tenant: str, error: BaseException) -> None:
        """One line a minute, whatever the number of tenants and attempts."""
        with self._lock:
            self._failures += 1
            count, now_s = self._failures, self._clock.monotonic()
            if now_s < self._next_log_s:
                return
            self._next_log_s = now_s + _LOG_EVERY_S
        what = str(error) if isinstance(error, (HotspanError, OSError)) else type(error).__name__
        logger.warning("keyring_keys_unavailable tenant=%r failures=%d error=%s", tenant, count, what)

    def _keep_fresh(self) -> None:
        while not self._closed.wait(REFRESH_S):
            try:
                self.refresh()
            except Exception as error:  # nothing known gets here, and nothing may end this thread
                self._log_failure("", error)


def _swap(was: TenantRecord, becomes: TenantRecord, found: TenantRecord) -> TenantRecord:
    return becomes if found == was else found


def open_keyring(
    directory: Path, kek: str, environment: Mapping[str, str], clock: Clock | None = None, *, exclusive: bool = False
) -> Keyring:
    """The keyring on the key store in `directory`, whose key-encryption key `kek` names (keyring/wrap.py).

    exclusive: alone, as for changes while no server runs.
    Blocks:    for the disk; no KMS is asked, so that an engine starts without it.
    Raises:    ConfigError if there is no store, if it is in use, or if another KEK wraps its keys.
    """
    wrapper = open_wrapper(kek, environment)
    store = KeyStore(directory, exclusive=exclusive)
    if store.header.wrapper_id != wrapper.id:
        store.close()
        raise ConfigError(
            f"the keys in {directory} are wrapped by {store.header.wrapper_id!r} and --kek is {wrapper.id!r}: give the "
            "key-encryption key that the store was made with or last rotated to"
        )
    return Keyring(store, wrapper, clock)
