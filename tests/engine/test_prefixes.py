"""What an invalidation costs the scheduler's thread, whatever is running."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.engine.prefixes import GpuPrefixes

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
