"""The replicas as one: who they are, what they hold, how busy they are, and where the next request goes.

This is the object that the gateway, Ray and the simulator all use. It belongs to one thread (or event loop).
"""

import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError, HotspanError
from hotspan.router.index import ASSUMED, SHARED, PrefixIndex
from hotspan.router.load import Arrivals, ReplicaLoad, Speeds, settle_rates
from hotspan.router.policy import Decision, View, Weights, decide
from hotspan.router.session import Overrides, Rendezvous
from hotspan.router.types import Ask, Held, Strategy

ASSUMED_PIECES = 16_384
"""That a replica without events, and without a word on how much it keeps, is taken to keep: about 2M tokens."""

_ANSWER_TOKENS = 128.0
"""Of an answer, until some were counted."""

_NOTHING = Held()


class NoReplicaError(HotspanError):
    """No replica can take a request: there is none, or all are down or excluded."""


@dataclass(slots=True)
class _Replica:
    """One of them.

    assumed: pieces it was sent, longest ago first; with events only those that it has not answered yet, counted.
    """

    name: str
    slot: int
    load: ReplicaLoad
    is_exact: bool
    is_up: bool = True
    turn: int = 0
    assumed: OrderedDict[int, int] = field(default_factory=OrderedDict)


class Ticket:
    """A request that was sent. Say when it begins to answer, and always that it ended."""

    __slots__ = ("_ask", "_began", "_fleet", "_is_over", "_number", "_pending", "_replica", "decision")

    def __init__(
        self, fleet: "Fleet", replica: _Replica, number: int, ask: Ask, decision: Decision, pending: Sequence[int]
    ) -> None:
        self.decision = decision
        self._fleet = fleet
        self._replica = replica
        self._number = number
        self._ask = ask
        self._pending = pending
        self._began = self._is_over = False

    def first_byte(self) -> None:
        """Its prompt is computed. Further calls do nothing."""
        if not self._began and not self._is_over:
            self._began = True
            self._replica.load.first_byte(self._number, self._fleet.clock.monotonic())
            self._fleet.settle_rates()

    def end(self, *, answer_tokens: int | None = None, failed: bool = False) -> None:
        """It is over. Further calls do nothing.

        answer_tokens: that came, if they were counted. failed: if so before its first byte, it left nothing there.
        """
        if not self._is_over:
            self._is_over = True
            self._replica.load.end(self._number, self._fleet.clock.monotonic())
            self._fleet.settle(self._replica, self._pending, None if failed else answer_tokens)
            if failed and not self._began and not self._pending:
                self._fleet.unassume(self._replica, self._ask, self.decision)


class Fleet:
    """Chooses, and keeps account of what it chose."""

    def __init__(
        self,
        *,
        strategy: Strategy = Strategy.AUTO,
        index: PrefixIndex | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        weights: Weights | None = None,
        assumed_pieces: int = ASSUMED_PIECES,
        max_overrides: int = 65_536,
    ) -> None:
        """Raises: ConfigError for a number that can't be.

        assumed_pieces: that a replica without events is taken to keep, unless it says how many tokens that are.
        max_overrides: sessions that are remembered to live elsewhere than computed.
        """
        if assumed_pieces < 1:
            raise ConfigError(f"assumed_pieces is {assumed_pieces}; give at least 1")
        self.strategy = strategy
        self.index = index if index is not None else PrefixIndex()
        self.clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._weights = weights or Weights()
        self._assumed_pieces = assumed_pieces
        self._replicas: dict[str, _Replica] = {}
        self._slots = count()
        self._free_slots: list[int] = []
        self._numbers = count(1)
        self._turn = 0
        self._arrivals = Arrivals()
        self._answer_tokens = _ANSWER_TOKENS
        self._homes = Rendezvous()
        self._overrides = Overrides(max_overrides)

    # -- who there is ----------------------------------------------------------------------------------------------

    def add(self, name: str, *, speeds: Speeds | None = None, exact: bool = False, weight: float = 1.0) -> int:
        """A replica more; its slot in the index.

        exact: events tell what it holds. weight: its share of the sessions, against 1 of the others.
        Raises: ConfigError if it is there already.
        """
        if name in self._replicas:
            raise ConfigError(f"replica {name} is given twice; name each once")
        self._homes.add(name, weight)
        slot = self._free_slots.pop() if self._free_slots else next(self._slots)
        self._replicas[name] = _Replica(name, slot, ReplicaLoad(speeds), exact)
        self.settle_rates()
        return slot

    def remove(self, name: str) -> None:
        """It is gone for good, with all that it held. Its tickets may still end. Raises: KeyError if unknown."""
        replica = self._replicas.pop(name)
        replica.assumed.clear()
        self.index.clear(replica.slot)
        self._free_slots.append(replica.slot)
        self._homes.remove(name)
        self._overrides.drop_replica(name)

    def set_up(self, name: str, is_up: bool) -> None:
        """Whether it can be chosen. While it can't, its sessions live elsewhere, and only they."""
        self._replicas[name].is_up = is_up

    def set_exact(self, name: str, is_exact: bool) -> None:
        """Whether events tell what it holds. What was known in the other way is forgotten."""
        replica = self._replicas[name]
        if replica.is_exact == is_exact:
            return
        replica.is_exact = is_exact
        if not is_exact:
            self.forget(name)
        elif self.strategy is not Strategy.PREFIXAWARE:
            replica.assumed.clear()
            self.index.clear(replica.slot, ASSUMED)

    def forget(self, name: str) -> None:
        """It holds nothing: it has been restarted, or nobody knows what it holds."""
        replica = self._replicas[name]
        replica.assumed.clear()
        self.index.clear(replica.slot)

    def tell(self, name: str, speeds: Speeds, *, is_measured: bool = True) -> None:
        """What a replica itself says; `is_measured`: of its rate of prompts too."""
        self._replicas[name].load.tell(speeds, is_measured=is_measured)
        self.settle_rates()

    def settle_rates(self) -> None:
        """For tickets: what was learnt of one replica says something of the others."""
        settle_rates([replica.load for replica in self._replicas.values()])

    # -- what to do ------------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, *, among: Collection[str] | None = None, without: Collection[str] = ()) -> Decision:
        """Where a request should go now. Changes nothing that later choices depend on.

        among: these only. without: and not these.
        Raises: NoReplicaError if that leaves none.
        """
        there = [
            replica
            for name, replica in self._replicas.items()
            if replica.is_up and (among is None or name in among) and name not in without
        ]
        if not there:
            raise NoReplicaError(
                f"none of {len(self._replicas)} replicas can take a request; see their health in the router's metrics"
            )
        strategy = self.strategy
        held = self.index.match(ask.keys, assumed_only=strategy is Strategy.PREFIXAWARE) if ask.keys else {}
        shared = held.get(SHARED, _NOTHING)
        natural = self._homes.home(ask.session, [replica.name for replica in there]) if ask.session else None
        home = self._moved(ask.session, there) or natural
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
                replica.name == home,
                replica.load.speeds,
            )
            for replica in there
        ]
        decision = decide(ask, views, strategy, self._rng, self._weights)
        decision.home = natural
        return decision

    def dispatch(self, ask: Ask, decision: Decision) -> Ticket:
        """It is sent now; its work is reserved from here on. Raises: NoReplicaError if the replica is gone."""
        replica = self._replicas.get(decision.name)
        if replica is None:
            raise NoReplicaError(f"replica {decision.name} was removed; choose again")
        number, now = next(self._numbers), self.clock.monotonic()
        self._arrivals.count(now)
        self._turn += 1
        replica.turn = self._turn
        replica.load.reserve(number, max(ask.tokens - decision.cached_tokens, 0), decision.load_s, now)
        if ask.session and self.strategy in (Strategy.AUTO, Strategy.SESSION):
            self._bind(ask.session, decision)
        return Ticket(self, replica, number, ask, decision, self._assume(replica, ask, decision))

    def settle(self, replica: _Replica, pending: Sequence[int], answer_tokens: int | None) -> None:
        """For tickets: a request ended. From now on the replica's events say what it holds of its prompt."""
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

    def unassume(self, replica: _Replica, ask: Ask, decision: Decision) -> None:
        """For tickets: what of a prompt was not held before is not held now either."""
        if ask.keys and self._is_kept(replica):
            gone = [key for key in _uncached(ask, decision) if replica.assumed.pop(key, None) is not None]
            self.index.remove(replica.slot, ASSUMED, gone)

    # -- what it knows ---------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> dict[str, ReplicaLoad]:
        """The load of each."""
        return {name: replica.load for name, replica in self._replicas.items()}

    @property
    def overrides(self) -> int:
        """Sessions that live elsewhere than computed."""
        return len(self._overrides)

    def is_exact(self, name: str) -> bool:
        """Whether events tell what it holds."""
        return self._replicas[name].is_exact

    def check(self) -> None:
        """Raise AssertionError if its parts do not fit together."""
        self.index.check()
        slots = [replica.slot for replica in self._replicas.values()]
        if len({*slots, *self._free_slots}) != len(slots) + len(self._free_slots):
            raise AssertionError(f"two replicas share a slot: {slots}, free {self._free_slots}")
        for replica in self._replicas.values():
            replica.load.check()
            if not replica.is_exact and len(replica.assumed) > self._max_pieces(replica):
                raise AssertionError(f"{replica.name} is taken to hold {len(replica.assumed)} pieces")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _moved(self, session: bytes, there: Sequence[_Replica]) -> str | None:
        """Where a session lives instead of where it should, if it does and that can be chosen."""
        moved = self._overrides.get(session) if session else None
        return moved if moved is not None and any(replica.name == moved for replica in there) else None

    def _bind(self, session: bytes, decision: Decision) -> None:
        """Remember where a session lives if that is not where it should."""
        if decision.home == decision.name:
            self._overrides.drop(session)
        elif decision.home is not None:
            self._overrides.set(session, decision.name)

    def _is_kept(self, replica: _Replica) -> bool:
        """Whether what is sent there is taken to stay, longest ago first to go; else it is until the request ends."""
        return not replica.is_exact or self.strategy is Strategy.PREFIXAWARE

    def _assume(self, replica: _Replica, ask: Ask, decision: Decision) -> Sequence[int]:
        """Take a prompt for held where it goes; the pieces that are so only until the request ends."""
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

    def _max_pieces(self, replica: _Replica, piece_tokens: float = 0.0) -> int:
        cache_tokens = replica.load.speeds.cache_tokens
        if not cache_tokens or not piece_tokens:
            return self._assumed_pieces
        return max(min(int(cache_tokens / piece_tokens), self._assumed_pieces), 1)


def _uncached(ask: Ask, decision: Decision) -> Sequence[int]:
    """The pieces that are computed, and those that are loaded."""
    if decision.load_s or ask.piece_tokens <= 0:
        return ask.keys
    return ask.keys[int(decision.cached_tokens / ask.piece_tokens) :]
