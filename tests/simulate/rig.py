"""Workloads and set-ups that tests say in a line."""

from collections.abc import Iterable

from hotspan.simulate.costs import Costs, Sizes
from hotspan.simulate.mooncake import BLOCK_TOKENS
from hotspan.simulate.simulation import Setup
from hotspan.simulate.trace import Row, Workload

RATE = 8000.0


def row(at_s: float, keys: Iterable[int], *, answer_tokens: int = 1, more: int = 0, session: bytes = b"") -> Row:
    """A request for these blocks and so many tokens more."""
    blocks = tuple(keys)
    return Row(at_s, len(blocks) * BLOCK_TOKENS + more, answer_tokens, blocks, session=session)


def workload(*rows: Row) -> Workload:
    """Named so that messages tell it apart."""
    return Workload("made", rows)


def setup(replicas: int = 1, sizes: Sizes | None = None, costs: Costs | None = None, **changes: object) -> Setup:
    """Replicas that compute 8,000 tokens a second."""
    return Setup(replicas, costs or Costs(prefill_tokens_per_s=RATE), sizes or Sizes(), **changes)  # type: ignore[arg-type]
