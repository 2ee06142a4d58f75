"""How far two answers to one question are apart: the first difference, and log probabilities up to it."""

from dataclasses import dataclass
from math import exp, log
from typing import Final

from hotspan.ab.asking import Answer, Position

_LEAST: Final = 1e-9
"""Probability that stands for 0, which a rounding of log probabilities makes of less."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two answers, compared.

    first:     position of the first difference, from 0; None: there is none.
    agreed:    tokens before it. length: of the longer answer. Characters, where tokens are not known.
    kl:        sum of the top-k KL over `positions` tokens; both 0 without log probabilities.
    """

    first: int | None
    agreed: int
    length: int
    kl: float = 0.0
    positions: int = 0


def divergence(ours: Answer, theirs: Answer) -> Divergence:
    """How far `theirs` is from `ours`.

    Log probabilities are compared at each token up to the first that differs, that one included: from there on, the two
    sides compute with different texts.
    """
    has_tokens = bool(ours.tokens and theirs.tokens)
    a, b = (ours.units, theirs.units) if has_tokens else (ours.record.answer, theirs.record.answer)
    length = max(len(a), len(b))
    agreed = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first = None if ours.is_same(theirs) else agreed
    if not has_tokens:
        return Divergence(first, agreed, length)
    pairs = list(zip(ours.tokens, theirs.tokens, strict=False))[: agreed + 1]
    found = [top_k_kl(x, y) for x, y in pairs if x.top and y.top]
    return Divergence(first, agreed, length, sum(found), len(found))


def top_k_kl(ours: Position, theirs: Position) -> float:
    """KL(ours || theirs), in nats, of the distributions over {each token that both lists have} and {all other tokens}.

    By the data-processing inequality it is never above the KL over the whole vocabulary: what happens among the other
    tokens is not seen. Exact log probabilities of all tokens would be needed for more.
    """
    shared = ours.top.keys() & theirs.top.keys()
    p, q = ([exp(min(each.top[token], 0.0)) for token in sorted(shared)] for each in (ours, theirs))
    p, q = ([*each, 1.0 - sum(each)] for each in (p, q))
    p, q = ([max(one, _LEAST) for one in each] for each in (p, q))
    p, q = ([one / sum(each) for one in each] for each in (p, q))
    return max(0.0, sum(x * log(x / y) for x, y in zip(p, q, strict=True)))
