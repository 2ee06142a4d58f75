"""What an invalidation costs the scheduler's thread, whatever is running."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.engine.prefixes import GpuPrefixes
from tests.operations import operations

NAMESPACE = bytes(32)
STEP = 4


class CountedName(bytes):
    """A block's hash that counts how often it is compared or hashed."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        CountedName.looks += 1
        return bytes.__eq__(self, other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        CountedName.looks += 1
        return bytes.__hash__(self)


def request(name: str, hashes: list[bytes]) -> Any:
    return SimpleNamespace(request_id=name, block_hashes=hashes)


def names(text: int, count: int) -> list[bytes]:
    return [CountedName(text.to_bytes(4) + n.to_bytes(28)) for n in range(count)]


def kept(prefixes: GpuPrefixes, name: str, hashes: list[bytes]) -> None:
    ended = request(name, hashes)
    prefixes.arrive(ended)
    prefixes.end(ended, lambda index: Terms(tenant=1), lambda index: frozenset())


def test_short_texts_cost_no_look_through_all_that_runs() -> None:
    """A tenant's 200 texts that are shorter than a chunk are forgotten while 50 long requests of others run: what is
    looked at does not grow with the product."""
    prefixes = GpuPrefixes(span_hashes=STEP)
    for text in range(200):
        kept(prefixes, f"short {text}", names(text, 1))
    for text in range(1_000, 1_050):
        prefixes.arrive(request(f"long {text}", names(text, 400)))
    CountedName.looks = 0
    prefixes.invalidate([Scope(tenant=1)], NAMESPACE, {})
    assert CountedName.looks < 20_000


@pytest.mark.parametrize("before", [0, STEP, 2 * STEP])
def test_who_runs_on_from_a_piece_is_renamed(before: int) -> None:
    """A request whose text goes on where a forgotten piece ends is renamed; one that shares only what is before is
    not."""
    prefixes = GpuPrefixes(span_hashes=STEP)
    text = names(1, before + STEP + 1)
    other = request("other", [*text[:before], *names(2, STEP)])
    running = request("running", list(text))
    for each in (running, other):
        prefixes.arrive(each)
    ended = request("short", text[: before + 2])
    prefixes.arrive(ended)
    label = Terms(tenant=1, labels=frozenset([7]))
    prefixes.end(ended, lambda index: label if index == before // STEP else Terms(tenant=1), lambda index: frozenset())
    _, users = prefixes.invalidate([Scope(tenant=1, labels=frozenset([7]))], NAMESPACE, {})
    assert users == {"running"}
    assert running.block_hashes[0] != text[0] and other.block_hashes[:before] == text[:before]
    prefixes.check()


class Pool:
    """An engine's pool that has the blocks of the last `size` texts."""

    num_gpu_blocks = 64

    def __init__(self) -> None:
        self.cached_block_hash_to_block = self
        self.held: set[bytes] = set()

    def get_one_block(self, key: bytes) -> Any:
        return SimpleNamespace(block_id=0) if key[:-4] in self.held else None


def test_a_request_that_ends_costs_what_it_computed_since_it_began() -> None:
    """What was kept when a request began is not kept again: its end costs the same after 4 chunks as after 400."""

    def cost(chunks: int) -> int:
        prefixes, running = GpuPrefixes(span_hashes=STEP), request("running", names(1, chunks * STEP))
        how = (lambda index: Terms(tenant=1)), (lambda index: frozenset())
        prefixes.arrive(running)
        prefixes.keep(running, *how)
        running.block_hashes += names(2, STEP)
        before = operations(lambda: prefixes.keep(running, *how))
        prefixes.end(running, *how)
        assert len(prefixes.spans) == chunks + 1
        prefixes.check()
        return before

    assert cost(400) == cost(4)


def test_what_the_pool_no_longer_has_is_forgotten_a_little_at_a_time() -> None:
    """However many texts have passed, no request's end looks at more than twice the chunks that it brings, and what is
    known stays in proportion to what the pool has."""
    prefixes, pool, looked = GpuPrefixes(span_hashes=STEP), Pool(), []
    prefixes.bind(pool)  # type: ignore[arg-type]
    for text in range(3_000):
        hashes = names(text, 2 * STEP)
        pool.held = set(hashes)
        looked.append(operations(lambda hashes=hashes, text=text: kept(prefixes, f"text {text}", hashes)))  # type: ignore[misc]
    assert max(looked) < 10 * min(looked)
    assert len(prefixes.spans) <= 1_100 + Pool.num_gpu_blocks // STEP
    prefixes.check()


def test_a_running_request_stays_known_before_it_has_blocks() -> None:
    """What a running request is about to compute is not forgotten for want of blocks: an invalidation finds it."""
    prefixes = GpuPrefixes(span_hashes=STEP)
    prefixes.bind(Pool())  # type: ignore[arg-type]
    running = request("running", names(1, STEP))
    prefixes.arrive(running)
    prefixes.keep(running, lambda index: Terms(tenant=7), lambda index: frozenset())
    for text in range(2, 2_000):
        kept(prefixes, f"text {text}", names(text, STEP))
    assert prefixes.invalidate([Scope(tenant=7)], NAMESPACE, {})[1] == {"running"}
