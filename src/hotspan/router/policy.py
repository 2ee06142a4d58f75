"""Which replica takes a request: each has a cost in seconds; the least wins.

    cost = queue         until the replica begins with the prompt
         + load          of what it holds below the GPU, where that is faster than computing it
         + prefill       of the rest; of sections that the replica keeps and blends, a part
         + decode        what the requests there add to each step of the answer
         + others        what this work makes later requests wait
         - affinity      what the session saves later where it lives

The strategies of other platforms have their costs in the same terms, so that they can be compared.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hotspan.core.errors import ConfigError
from hotspan.router.load import Speeds
from hotspan.router.sections import NOTHING, Known, bytes_behind
from hotspan.router.types import PIECE_BYTES, Ask, Held, Medium, Strategy

NEAR_S, NEAR_SHARE = 0.001, 0.01
"""Costs that differ by no more than this, in seconds or as a share, count as equal."""

BLEND_GAIN = 0.6
"""What blending a token saves of computing it: some are computed again, all are loaded and rotated."""

BLEND_LEAST = 0.3
"""A replica blends a prompt if that saves at least this share of the time it takes (engine/blend/plan.py)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the terms.

    affinity:  of a prompt's computing is counted as saved later where its session lives.
    others:    of what those wait who come while this request still waits: its own work, each.
    decode:    a second by which its answer is slowed down, against one of waiting for its beginning.
    threshold: requests in flight at one replica before `prefixaware` and `kvaware` go elsewhere.
    """

    affinity: float = 0.1
    others: float = 2.0
    decode: float = 0.5
    threshold: int = 16

    def __post_init__(self) -> None:
        if not (0 <= self.affinity <= 1 and self.others >= 0 and self.decode >= 0 and self.threshold >= 1):
            raise ConfigError(
                f"{self} can't be: affinity is in [0, 1], others and decode not below 0, threshold at least 1"
            )


class View(NamedTuple):
    """One replica, as it is now and for this request.

    replica:      its slot in the index.
    held:         what it has of the prompt.
    queue_s:      until it begins with a prompt that comes now.
    tokens_per_s: of prompts.
    in_flight:    requests there that have not ended.
    decode_s:     that they add to this one's answer.
    arrivals:     requests that come there, a second.
    turn:         when it got its last request, in requests; 0: never.
    is_home:      the session lives there.
    sections:     of the prompt that it knows, if it blends.
    """

    name: str
    replica: int
    held: Held
    queue_s: float
    tokens_per_s: float
    in_flight: int
    decode_s: float
    arrivals: float
    turn: int
    is_home: bool
    speeds: Speeds
    sections: Known = NOTHING


@dataclass(slots=True)
class Decision:
    """Where a request goes, and why.

    costs:         in seconds, by term, of the chosen one; they add up to what was compared.
    cached_tokens: of its prompt that are not computed.
    load_s:        that goes to loading some of them.
    blended_tokens: as many tokens as blending saves to compute.
    session_bound: it goes where its session lives.
    near:          how many replicas were as good.
    home:          where the session should live, were it not for what moved it.
    """

    name: str
    replica: int
    costs: Mapping[str, float]
    cached_tokens: int
    load_s: float
    session_bound: bool
    strategy: Strategy
    blended_tokens: int = 0
    near: int = 1
    home: str | None = None


class _Cost(NamedTuple):
    """One replica's."""

    total_s: float
    prefill_s: float
    load_s: float
    decode_s: float
    others_s: float
    affinity_s: float
    cached: int
    blended: int


def decide(
    ask: Ask, views: Sequence[View], strategy: Strategy, rng: random.Random, weights: Weights | None = None
) -> Decision:
    """The replica for a request; one at random where several are as good. Raises: ValueError without a view."""
    if not views:
        raise ValueError("there is no replica to choose from")
    weights = weights or _DEFAULT
    match strategy:
        case Strategy.AUTO:
            near = _cheapest(ask, views, weights)
        case Strategy.PREFIXAWARE | Strategy.KVAWARE:
            near = _longest(views, weights.threshold)
        case Strategy.SESSION:  # where it lives, however busy it is there
            near = [view for view in views if view.is_home] or [_next(views)]
        case Strategy.ROUNDROBIN:
            near = [_next(views)]
    chosen = near[0] if len(near) == 1 else near[int(rng.random() * len(near))]
    return _decision(chosen, _cost(ask, chosen, weights), strategy, len(near))


def _cheapest(ask: Ask, views: Sequence[View], weights: Weights) -> list[View]:
    costs_s = [_cost(ask, view, weights).total_s for view in views]
    least = min(costs_s)
    limit = least + max(NEAR_S, NEAR_SHARE * abs(least))
    return [view for view, cost_s in zip(views, costs_s, strict=True) if cost_s <= limit]


def _longest(views: Sequence[View], threshold: int) -> list[View]:
    """Those with the longest beginning below the threshold; the least busy if all are at it, or none has any."""
    free = [view for view in views if view.in_flight < threshold]
    longest = max((max(view.held) for view in free), default=0)
    if longest:
        free = [view for view in free if max(view.held) == longest]
    least = min(view.in_flight for view in free or views)
    return [view for view in free or views if view.in_flight == least]


def _next(views: Sequence[View]) -> View:
    """The one whose last request is the longest ago."""
    return min(views, key=lambda view: view.turn)


def _cost(ask: Ask, view: View, weights: Weights) -> _Cost:
    rate = view.tokens_per_s
    cached, load_s = _loaded(ask, view)
    blended = _blended(ask, view, cached) if view.sections.kept else 0
    prefill_s = (ask.tokens - cached - blended) / rate
    decode_s = weights.decode * view.decode_s
    others_s = weights.others * view.arrivals * view.queue_s * (prefill_s + load_s)
    saved = ask.tokens if view.is_home else _tokens(ask, view.sections.seen, cached)
    affinity_s = weights.affinity * saved / rate
    total_s = view.queue_s + load_s + prefill_s + decode_s + others_s - affinity_s
    return _Cost(total_s, prefill_s, load_s, decode_s, others_s, affinity_s, cached, blended)


def _loaded(ask: Ask, view: View) -> tuple[int, float]:
    """How many tokens are cached or worth loading, and how long the loading takes."""
    if not any(view.held):
        return 0, 0.0
    held, size, most = view.held, ask.piece_tokens, max(ask.tokens - 1, 0)
    at = min(int(held[0] * size), most)
    best, best_s = at, 0.0
    if held[3] <= held[0]:
        return best, best_s
    spent_s, saved_s = 0.0, 0.0
    for medium in (Medium.RAM, Medium.DISK, Medium.L2):
        upto = min(int(held[medium] * size), most)
        speed = view.speeds.tiers.get(medium)
        if upto <= at:
            continue
        if speed is None:
            break
        spent_s += speed.latency_s + (upto - at) / speed.tokens_per_s
        at = upto
        better_s = (at - min(int(held[0] * size), most)) / view.tokens_per_s - spent_s
        if better_s > saved_s:
            saved_s, best, best_s = better_s, at, spent_s
    return best, best_s


def _blended(ask: Ask, view: View, cached: int) -> int:
    """As many tokens as it saves to blend what the replica keeps; 0 if that is so little that it would not."""
    saved = int(BLEND_GAIN * _tokens(ask, view.sections.kept, cached))
    return saved if saved >= BLEND_LEAST * (ask.tokens - cached) else 0


def _tokens(ask: Ask, spans: Sequence[tuple[int, int]], cached: int) -> float:
    """Tokens of spans of the prompt's bytes that are behind what is cached."""
    if not spans or ask.piece_tokens <= 0:
        return 0.0
    per_token = PIECE_BYTES / ask.piece_tokens
    return min(bytes_behind(spans, cached * per_token) / per_token, ask.tokens - cached)


def _decision(view: View, cost: _Cost, strategy: Strategy, near: int) -> Decision:
    costs = {
        "queue": view.queue_s,
        "prefill": cost.prefill_s,
        "load": cost.load_s,
        "decode": cost.decode_s,
        "others": cost.others_s,
        "affinity": -cost.affinity_s,
    }
    return Decision(
        view.name, view.replica, costs, cost.cached, cost.load_s, view.is_home, strategy, cost.blended, near
    )


_DEFAULT = Weights()
