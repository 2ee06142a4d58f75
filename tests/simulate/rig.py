"""Traces and set-ups that tests make in a line."""

from collections.abc import Iterable

from hotspan.core.trace import BLOCK_TOKENS, Request, Trace
from hotspan.simulate.costs import Costs, Setup, Sizes

RATE = 8000.0


def row(at_s: float, keys: Iterable[int], *, answer_tokens: int = 1, more: int = 0, session: bytes = b"") -> Request:
    """A request for these blocks and so many tokens more."""
    blocks = tuple(keys)
    return Request(at_s, len(blocks) * BLOCK_TOKENS + more, answer_tokens, blocks, session=session)


def workload(*rows: Request) -> Trace:
    """Named so that messages tell it apart."""
    return Trace("made", rows)


def setup(replicas: int = 1, sizes: Sizes | None = None, costs: Costs | None = None, **changes: object) -> Setup:
    """Replicas that compute 8,000 tokens a second."""
    return Setup(replicas, costs or Costs(prefill_tokens_per_s=RATE), sizes or Sizes(), **changes)  # type: ignore[arg-type]
