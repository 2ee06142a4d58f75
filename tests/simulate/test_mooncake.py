"""Drawn traces are like the published ones."""

import pytest

from hotspan.core.types import ChunkKey
from hotspan.simulate.mooncake import BLOCK_TOKENS, CONVERSATION, SHAPES, Shape


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_traces_are_like_the_published_ones(shape: Shape) -> None:
    """Lengths and reuse come out as published, and 24 to 42 % of the blocks are ever reused, whatever the seed."""
    drawn = [shape.draw(seed, scale=0.5).facts() for seed in (1, 2, 3)]
    for facts in drawn:
        assert facts.requests == pytest.approx(shape.published.requests / 2, rel=0.001)
        assert facts.median_tokens == pytest.approx(shape.published.median_tokens, rel=0.1)
        assert facts.mean_tokens == pytest.approx(shape.published.mean_tokens, rel=0.15)
        assert facts.asked_before == pytest.approx(shape.published.asked_before, abs=0.05)
        assert facts.reused is not None and 0.24 <= facts.reused <= 0.42


def test_a_trace_follows_from_its_seed() -> None:
    """The same seed gives the same requests in order of arrival, another seed gives others."""
    trace = CONVERSATION.draw(7, 0.02)
    assert trace == CONVERSATION.draw(7, 0.02) != CONVERSATION.draw(8, 0.02)
    times = [request.at_s for request in trace.requests]
    assert times == sorted(times) and times[0] >= 0


def test_chunks_are_whole_blocks_of_chains() -> None:
    """A chunk stands on the same chunk in every request, and a request has as many as whole blocks fit its tokens."""
    parents: dict[ChunkKey, ChunkKey | None] = {}
    for request in SHAPES[1].draw(1, 0.05).requests:
        assert len(request.chunks) == request.tokens // BLOCK_TOKENS
        for n, key in enumerate(request.chunks):
            assert parents.setdefault(key, request.chunks[n - 1] if n else None) == (
                request.chunks[n - 1] if n else None
            )
