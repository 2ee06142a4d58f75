"""A tier under test, driven from outside: one store, one load, one invalidation, each to its end."""

import threading
import time
from typing import Protocol

from hotspan.core.terms import Scope, Terms, tenant_label
from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import HANG_S, aligned, content
from hotspan.tiers.base import StorageTier, Transfer

NAMESPACE = bytes(range(32))
"""Of all chunks in the kit."""

TENANT = tenant_label("a tenant")
TERMS = Terms(tenant=TENANT)
"""On which the kit stores, where it says no others."""


class CheckedTier(StorageTier, Protocol):
    """A tier whose books can be checked while nothing is in flight."""

    def check(self) -> None: ...


def settle(tier: StorageTier, transfers: int, timeout_s: float = HANG_S) -> list[Transfer]:
    """Wait for that many transfers to end. Raises: AssertionError if they do not."""
    ended: list[Transfer] = []
    deadline = time.monotonic() + timeout_s
    while len(ended) < transfers:
        tier.wait(0.01)
        ended += tier.finished()
        if time.monotonic() > deadline:
            raise AssertionError(f"{transfers - len(ended)} of {transfers} transfers did not end in {timeout_s} s")
    return ended


def store(tier: StorageTier, chunk: Chunk, size: int, version: int = 0, terms: Terms = TERMS) -> Transfer | None:
    """Store the chunk's content and wait; None if the tier did not take it."""
    if not tier.submit_store(chunk, terms, aligned(size, content(chunk.key, size, version))):
        return None
    (transfer,) = settle(tier, 1)
    return transfer


def load(tier: StorageTier, key: ChunkKey, size: int) -> tuple[Transfer, bytes] | None:
    """Load a chunk and wait: how it ended and the bytes; None if the tier has it not."""
    into = aligned(size)
    if not tier.submit_load(key, into):
        return None
    (transfer,) = settle(tier, 1)
    return transfer, bytes(into)


class DurableSpy:
    """A `durable` that remembers what it was told, and how often."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self._called = threading.Event()

    def __call__(self, done: bool) -> None:
        self.told.append(done)
        self._called.set()

    def wait(self, tier: StorageTier, timeout_s: float = HANG_S) -> bool:
        """What it was told. Raises: AssertionError if that takes too long, or if it was told twice."""
        deadline = time.monotonic() + timeout_s
        while not self._called.wait(0.005):
            tier.finished()
            if time.monotonic() > deadline:
                raise AssertionError(f"nobody said in {timeout_s} s whether the invalidation is durable")
        (done,) = self.told
        return done


def invalidate(tier: StorageTier, scope: Scope) -> int:
    """Invalidate and wait until it is durable; how many chunks. Raises: AssertionError if it could not be made so."""
    spy = DurableSpy()
    removed = tier.invalidate([scope], spy)
    if not spy.wait(tier):
        raise AssertionError("the invalidation could not be made durable")
    return removed
