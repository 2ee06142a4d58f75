"""What an invalidation costs the scheduler's thread, whatever is running."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.core.namespace import ChunkKeyer
from hotspan.core.terms import Scope, Terms
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.requests import ChunkGroup, RequestRecord
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


GROUP = ChunkGroup(0, STEP, STEP, is_chain=True)


def record(name: str, hashes: list[bytes], **terms: Any) -> RequestRecord:
    """A request of a tenant's, with these block hashes."""
    request: Any = SimpleNamespace(request_id=name, block_hashes=hashes)
    own = Terms(tenant=1)
    return RequestRecord(
        request=request, keyer=ChunkKeyer(bytes(32)), groups=(GROUP,), **({"terms": own, "bare_terms": own} | terms)
    )


def names(text: int, count: int) -> list[bytes]:
    return [CountedName(text.to_bytes(4) + n.to_bytes(28)) for n in range(count)]


def kept(prefixes: GpuPrefixes, name: str, hashes: list[bytes]) -> None:
    ended = record(name, hashes)
    prefixes.arrive(ended)
    prefixes.end(ended)


def test_short_texts_cost_no_look_through_all_that_runs() -> None:
    """A tenant's 200 texts that are shorter than a chunk are forgotten while 50 long requests of others run: what is
    looked at does not grow with the product."""
    prefixes = GpuPrefixes(span_hashes=STEP)
    for text in range(200):
        kept(prefixes, f"short {text}", names(text, 1))
    for text in range(1_000, 1_050):
        prefixes.arrive(record(f"long {text}", names(text, 400)))
    CountedName.looks = 0
    prefixes.invalidate([Scope(tenant=1)], NAMESPACE, {})
    assert CountedName.looks < 20_000


@pytest.mark.parametrize("before", [0, STEP, 2 * STEP])
def test_who_runs_on_from_a_piece_is_renamed(before: int) -> None:
    """A request whose text goes on where a forgotten piece ends is renamed; one that shares only what is before is
    not."""
    prefixes = GpuPrefixes(span_hashes=STEP)
    text = names(1, before + STEP + 1)
    other = record("other", [*text[:before], *names(2, STEP)])
    running = record("running", list(text))
    for each in (running, other):
        prefixes.arrive(each)
    label = Terms(tenant=1, labels=frozenset([7]))
    ended = record("short", text[: before + 2], terms=label, tags_from=before // STEP)
    prefixes.arrive(ended)
    prefixes.end(ended)
    _, users = prefixes.invalidate([Scope(tenant=1, labels=frozenset([7]))], NAMESPACE, {})
    assert users == {"running"}
    assert running.request.block_hashes[0] != text[0] and other.request.block_hashes[:before] == text[:before]
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
        prefixes, running = GpuPrefixes(span_hashes=STEP), record("running", names(1, chunks * STEP))
        prefixes.arrive(running)
        prefixes.keep(running)
        running.request.block_hashes += names(2, STEP)
        before = operations(lambda: prefixes.keep(running))
        prefixes.end(running)
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
    running = record("running", names(1, STEP), terms=Terms(tenant=7), bare_terms=Terms(tenant=7))
    prefixes.arrive(running)
    prefixes.keep(running)
    for text in range(2, 2_000):
        kept(prefixes, f"text {text}", names(text, STEP))
    assert prefixes.invalidate([Scope(tenant=7)], NAMESPACE, {})[1] == {"running"}
