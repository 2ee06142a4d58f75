"""The replicas: what each holds, how busy each is, and which one takes the next request.

This is the object that the gateway, Ray and the simulator all use. It belongs to one thread (or event loop).
"""

import logging
import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError, HotspanError
from hotspan.router.index import ASSUMED, SHARED, PrefixIndex
from hotspan.router.load import Arrivals, ReplicaLoad, Speeds, settle_rates
from hotspan.router.matching import Matching
from hotspan.router.policy import Decision, View, Weights, decide
from hotspan.router.sections import NOTHING, SectionIndex
from hotspan.router.session import MAX_SESSIONS, Recent, home
from hotspan.router.types import Ask, Held, Strategy

logger = logging.getLogger(__name__)

ASSUMED_PIECES = 16_384
"""Pieces that a replica without events, and without a known capacity, is assumed to keep: about 2M tokens."""

_ANSWER_TOKENS = 128.0
"""Expected length of an answer until some were counted."""

_NOTHING = Held()


class NoReplicaError(HotspanError):
    """No replica can take a request: there is none, or all are down or excluded."""


@dataclass(slots=True)
class ReplicaState:
    """What is known of one replica.

    slot:     its number in the index. is_exact: events tell what it holds. is_told: there are events that are whole.
    matching: whether prompts are found in them; if not, what it holds is assumed in spite of its events.
    turn:     when it got its last request, in requests of the fleet; 0: never.
    assumed:  pieces it was sent, longest ago first; with events only those that it has not answered yet, counted.
    """

    name: str
    slot: int
    load: ReplicaLoad
    is_exact: bool
    is_told: bool = False
    matching: Matching = field(default_factory=Matching)
    turn: int = 0
    assumed: OrderedDict[int, int] = field(default_factory=OrderedDict)


class Ticket:
    """A request that was sent. Call `first_byte` when its answer begins, and always `end`.

    work_s: that it is expected to take until its first byte, once it begins.
    """

    __slots__ = (
        "_ask",
        "_began",
        "_fleet",
        "_is_over",
        "_number",
        "_pending",
        "_replica",
        "decision",
        "sent_s",
        "work_s",
    )

    def __init__(
        self, fleet: "Fleet", replica: ReplicaState, number: int, ask: Ask, decision: Decision, pending: Sequence[int]
    ) -> None:
        self.decision = decision
        self.sent_s = fleet.clock.monotonic()
        tokens = ask.tokens - decision.cached_tokens - decision.blended_tokens
        self.work_s = replica.load.reserve(number, tokens, decision.load_s, self.sent_s)
        self._fleet = fleet
        self._replica = replica
        self._number = number
        self._ask = ask
        self._pending = pending
        self._began = self._is_over = False

    def first_byte(self) -> None:
        """The prompt is computed. Further calls do nothing."""
        if not self._began and not self._is_over:
            self._began = True
            self._replica.load.first_byte(self._number, self._fleet.clock.monotonic())
            self._fleet.settle_rates()

    def end(self, *, answer_tokens: int | None = None, failed: bool = False) -> None:
        """The request has ended. Further calls do nothing.

        answer_tokens: of the answer, if they were counted.
        failed:        before its first byte this means that nothing of its prompt is cached there.
        """
        if not self._is_over:
            self._is_over = True
            self._replica.load.end(self._number, self._fleet.clock.monotonic())
            self._fleet.settle(self._replica, self._pending, None if failed else answer_tokens)
            if not failed and self._replica.is_told:
                self._replica.matching.answered(self._ask.keys, self._fleet.clock.monotonic())
            if failed and not self._began and not self._pending:
                self._fleet.unassume(self._replica, self._ask, self.decision)


class Fleet:
    """Chooses replicas, and keeps account of the requests that were sent.

    replicas: by name. up: those that may be chosen.
    """

    def __init__(
        self,
        *,
        strategy: Strategy = Strategy.AUTO,
        index: PrefixIndex | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        weights: Weights | None = None,
        assumed_pieces: int = ASSUMED_PIECES,
        max_moved: int = MAX_SESSIONS,
    ) -> None:
        """Raises: ConfigError for a number out of range.

        assumed_pieces: that a replica without events is assumed to keep, unless its capacity in tokens is known.
        max_moved:      sessions that are remembered to live elsewhere than computed.
        """
        if assumed_pieces < 1:
            raise ConfigError(f"assumed_pieces is {assumed_pieces}; give at least 1")
        self.strategy = strategy
        self.index = index if index is not None else PrefixIndex()
        self.sections = SectionIndex()
        self.clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._weights = weights or Weights()
        self._assumed_pieces = assumed_pieces
        self.replicas: dict[str, ReplicaState] = {}
        self.up: set[str] = set()
        self.moved: Recent[bytes, str] = Recent(max_moved)
        self._slots = count()
        self._free_slots: list[int] = []
        self._numbers = count(1)
        self._turn = 0
        self._arrivals = Arrivals()
        self._answer_tokens = _ANSWER_TOKENS

    # -- replicas --------------------------------------------------------------------------------------------------

    def add(self, name: str, *, speeds: Speeds | None = None, exact: bool = False) -> int:
        """Add a replica, which is up; its slot in the index.

        exact:  events tell what it holds.
        Raises: ConfigError if it is there already.
        """
        if name in self.replicas:
            raise ConfigError(f"replica {name} is given twice; name each once")
        slot = self._free_slots.pop() if self._free_slots else next(self._slots)
        self.replicas[name] = ReplicaState(name, slot, ReplicaLoad(speeds), exact, exact)
        self.up.add(name)
        self.settle_rates()
        return slot

    def remove(self, name: str) -> None:
        """Forget a replica and all that it held. Its tickets may still end. Raises: KeyError if unknown."""
        replica = self.replicas.pop(name)
        replica.assumed.clear()
        self.index.clear(replica.slot)
        self.sections.clear(replica.slot)
        self._free_slots.append(replica.slot)
        self.up.discard(name)
        for session in [session for session, where in self.moved.items() if where == name]:
            del self.moved[session]

    def set_up(self, name: str, is_up: bool) -> None:
        """Whether a replica may be chosen. While it may not, its sessions, and only they, live elsewhere.

        Raises: KeyError if unknown.
        """
        name = self.replicas[name].name
        (self.up.add if is_up else self.up.discard)(name)

    def set_exact(self, name: str, is_exact: bool) -> None:
        """Whether events tell what a replica holds. What was known from the other source is forgotten.

        A replica whose prompts are not found in its events goes on as one without.
        """
        replica = self.replicas[name]
        if replica.is_told == is_exact:
            return
        replica.is_told = is_exact
        replica.matching.clear()
        if not is_exact:
            self.forget(name)
        self._settle_exact(replica)

    def forget(self, name: str) -> None:
        """Forget what a replica holds: it has been restarted, or this is no longer known."""
        replica = self.replicas[name]
        replica.assumed.clear()
        self.index.clear(replica.slot)
        self.sections.clear(replica.slot)

    def tell(self, name: str, speeds: Speeds, *, is_measured: bool = True) -> None:
        """Take over what a replica says of itself. is_measured: its rate of prompts is among it."""
        self.replicas[name].load.tell(speeds, is_measured=is_measured)
        self.settle_rates()

    def settle_rates(self) -> None:
        """For tickets: apply what was learnt of one replica to the others."""
        settle_rates([replica.load for replica in self.replicas.values()])

    # -- requests --------------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, *, among: Collection[str] | None = None, without: Collection[str] = ()) -> Decision:
        """The best replica for a request now. Changes nothing that later choices depend on.

        among:   these only. without: and not these.
        Raises:  NoReplicaError if that leaves none.
        """
        there = [
            replica
            for name, replica in self.replicas.items()
            if name in self.up and (among is None or name in among) and name not in without
        ]
        if not there:
            raise NoReplicaError(
                f"none of {len(self.replicas)} replicas can take a request; see their health in the router's metrics"
            )
        strategy = self.strategy
        held = self.index.match(ask.keys, assumed_only=strategy is Strategy.PREFIXAWARE) if ask.keys else {}
        shared = held.get(SHARED, _NOTHING)
        names = [replica.name for replica in there]
        natural = home(ask.session, names) if ask.session else None
        moved = self.moved.used(ask.session) if ask.session else None
        lives_at = moved if moved in names else natural
        now = self.clock.monotonic()
        arrivals = self._arrivals.per_s(now) / len(there)
        answer_tokens = ask.answer_tokens or self._answer_tokens
        views = [
            View(
                replica.name,
                replica.slot,
                held.get(replica.slot, shared),
                replica.load.queue_s(now),
                replica.load.pace,
                replica.load.in_flight,
                replica.load.in_flight * replica.load.speeds.decode_s * answer_tokens,
                arrivals,
                replica.turn,
                replica.name == lives_at,
                replica.load.speeds,
                self.sections.known(replica.slot, ask.sections)
                if ask.sections and replica.load.speeds.is_blending
                else NOTHING,
            )
            for replica in there
        ]
        decision = decide(ask, views, strategy, self._rng, self._weights)
        decision.home = natural
        return decision

    def dispatch(self, ask: Ask, decision: Decision) -> Ticket:
        """Reserve the work of a request, which is sent now. Raises: NoReplicaError if the replica was removed."""
        replica = self.replicas.get(decision.name)
        if replica is None:
            raise NoReplicaError(f"replica {decision.name} was removed; choose again")
        now = self.clock.monotonic()
        self._arrivals.count(now)
        self._look(replica, now)
        self._turn += 1
        replica.turn = self._turn
        if ask.session and self.strategy in (Strategy.AUTO, Strategy.SESSION):
            self._bind(ask.session, decision)
        pending = self._assume(replica, ask, decision)
        if not decision.blended_tokens:  # what is blended is not stored
            self.sections.add(replica.slot, ask.sections)
        return Ticket(self, replica, next(self._numbers), ask, decision, pending)

    def settle(self, replica: ReplicaState, pending: Sequence[int], answer_tokens: int | None) -> None:
        """For tickets: a request ended. From now on the replica's events tell what is cached of its prompt."""
        if answer_tokens:
            self._answer_tokens += (answer_tokens - self._answer_tokens) / 100
        if not pending or self._is_kept(replica):
            return
        assumed, gone = replica.assumed, []
        for key in pending:
            left = assumed.get(key, 0) - 1
            if left > 0:
                assumed[key] = left
            elif left == 0:
                del assumed[key]
                gone.append(key)
        if gone:
            self.index.remove(replica.slot, ASSUMED, gone)

    def unassume(self, replica: ReplicaState, ask: Ask, decision: Decision) -> None:
        """For tickets: what was not cached of a prompt before is not cached now either."""
        if ask.keys and self._is_kept(replica):
            gone = [key for key in _uncached(ask, decision) if replica.assumed.pop(key, None) is not None]
            self.index.remove(replica.slot, ASSUMED, gone)

    def check(self) -> None:
        """Raise AssertionError if its parts do not fit together."""
        self.index.check()
        slots = [replica.slot for replica in self.replicas.values()]
        if len({*slots, *self._free_slots}) != len(slots) + len(self._free_slots):
            raise AssertionError(f"two replicas share a slot: {slots}, free {self._free_slots}")
        for replica in self.replicas.values():
            replica.load.check()
            if not replica.is_exact and len(replica.assumed) > self._max_pieces(replica):
                raise AssertionError(f"{replica.name} is taken to hold {len(replica.assumed)} pieces")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _look(self, replica: ReplicaState, now: float) -> None:
        """Look whether earlier prompts are found in a replica's events, and go by what works."""
        matching = replica.matching
        if not replica.is_told or not matching.look(now, partial(self.index.reported, replica.slot)):
            return
        if matching.is_good:
            logger.info("prompts_matched replica=%s share=%.2f: events are used again", replica.name, matching.share)
        else:
            logger.warning(
                "prompts_unmatched replica=%s share=%.2f: its events have other prompts than those that are read here; "
                "what it holds is assumed from what was sent (see docs/routing.md)",
                *(replica.name, matching.share),
            )
        self._settle_exact(replica)

    def _settle_exact(self, replica: ReplicaState) -> None:
        replica.is_exact = replica.is_told and replica.matching.is_good
        if replica.is_exact and self.strategy is not Strategy.PREFIXAWARE:
            replica.assumed.clear()
            self.index.clear(replica.slot, ASSUMED)

    def _bind(self, session: bytes, decision: Decision) -> None:
        """Remember where a session lives if that is not where its name puts it."""
        if decision.home == decision.name:
            self.moved.pop(session, None)
        elif decision.home is not None:
            self.moved[session] = decision.name

    def _is_kept(self, replica: ReplicaState) -> bool:
        """Whether prompts that are sent there are assumed to stay cached; else only until the request ends."""
        return not replica.is_exact or self.strategy is Strategy.PREFIXAWARE

    def _assume(self, replica: ReplicaState, ask: Ask, decision: Decision) -> Sequence[int]:
        """Assume a prompt to be cached where it goes; the pieces for which this ends with the request."""
        keys, assumed = ask.keys, replica.assumed
        if not keys:
            return ()
        if not self._is_kept(replica):
            if self.strategy is not Strategy.AUTO:
                return ()
            pending = _uncached(ask, decision)
            for key in pending:
                assumed[key] = assumed.get(key, 0) + 1
            self.index.add(replica.slot, ASSUMED, pending)
            return pending
        for key in reversed(keys):  # a prompt's end is forgotten before its beginning
            assumed[key] = 0
            assumed.move_to_end(key)
        self.index.add(replica.slot, ASSUMED, keys)
        over = len(assumed) - self._max_pieces(replica, ask.piece_tokens)
        if over > 0:
            self.index.remove(replica.slot, ASSUMED, [assumed.popitem(last=False)[0] for _ in range(over)])
        return ()

    def _max_pieces(self, replica: ReplicaState, piece_tokens: float = 0.0) -> int:
        cache_tokens = replica.load.speeds.cache_tokens
        if not cache_tokens or not piece_tokens:
            return self._assumed_pieces
        return max(min(int(cache_tokens / piece_tokens), self._assumed_pieces), 1)


def _uncached(ask: Ask, decision: Decision) -> Sequence[int]:
    """The pieces of a prompt that are computed or loaded."""
    if decision.load_s or ask.piece_tokens <= 0:
        return ask.keys
    return ask.keys[int(decision.cached_tokens / ask.piece_tokens) :]
