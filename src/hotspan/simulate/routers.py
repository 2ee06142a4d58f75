"""What chooses a replica in a simulation: the product's own fleet, and two others to hold it against.

None of them sees the simulated replicas: only the requests that it sent itself, their first bytes and ends, what real
ones say in their metrics, and, where events are on, what these tell.
"""

import random
from dataclasses import replace
from typing import Final, Protocol

from hotspan.core.clock import Clock
from hotspan.core.errors import ConfigError
from hotspan.core.trace import Request
from hotspan.router.fleet import Fleet, Ticket
from hotspan.router.load import TOLD_EVERY_S, Speeds, TierSpeed
from hotspan.router.sections import MIN_BYTES, Section
from hotspan.router.types import PIECE_BYTES, Ask, Medium, Strategy
from hotspan.simulate.caches import Change
from hotspan.simulate.costs import GB, Costs, Setup, Sizes
from hotspan.simulate.replica import Job

LEAST_LOAD: Final = "least-load"
PREFIX_TREE: Final = "prefix-tree"
UNTOLD: Final = "auto-no-events"

POLICIES: Final = (*(strategy.value for strategy in Strategy), UNTOLD, LEAST_LOAD, PREFIX_TREE)
"""Those of the router by their names; `auto` without events; the fewest tokens waiting; and the longest prefix in a
tree of what was sent where, without a look at load."""


class Router(Protocol):
    """What the simulation asks and tells."""

    @property
    def is_told(self) -> bool:
        """Whether it wants events."""

    def send(self, job: Job) -> int:
        """The replica that takes a request, which is sent there now."""

    def first_byte(self, job: Job) -> None: ...

    def end(self, job: Job) -> None: ...

    def event(self, replica: int, medium: Medium, change: Change) -> None:
        """What came to a replica and went, as it told some time ago."""


class FleetRouter:
    """The router's own object. It learns what a replica says of itself as late as from a real one's metrics.

    block_tokens: that a key of a request stands for.
    speeds: what each says, its rate of prompts only once it has answered.
    """

    def __init__(self, fleet: Fleet, replicas: int, block_tokens: int, *, is_told: bool, speeds: Speeds) -> None:
        self.is_told = is_told
        self._block_tokens = block_tokens
        self._fleet = fleet
        self._speeds = speeds
        self._next_told_s = 0.0
        self._have_answered: set[int] = set()
        self._tickets: dict[int, Ticket] = {}
        self._names = [f"http://replica-{n}:8000" for n in range(replicas)]
        self._slots = [fleet.add(name, exact=is_told) for name in self._names]

    def send(self, job: Job) -> int:
        now_s = self._fleet.clock.monotonic()
        if now_s >= self._next_told_s:
            self._next_told_s = now_s + TOLD_EVERY_S
            for n, name in enumerate(self._names):
                self._fleet.tell(name, self._speeds, is_measured=n in self._have_answered)
        request = job.request
        sections = self._sections(request) if self._speeds.is_blending else ()
        ask = Ask(request.keys, request.tokens, self._block_tokens, session=request.session, sections=sections)
        decision = self._fleet.choose(ask)
        self._tickets[job.index] = self._fleet.dispatch(ask, decision)
        return self._slots.index(decision.replica)

    def _sections(self, request: Request) -> list[Section]:
        """As a router sees them, which knows text: `piece_tokens` of its Ask are the tokens of so many bytes."""
        scale = PIECE_BYTES / self._block_tokens
        found = (Section(key, round(start * scale), round(stop * scale)) for key, start, stop in request.sections)
        return [section for section in found if section.stop - section.start >= MIN_BYTES]

    def first_byte(self, job: Job) -> None:
        self._have_answered.add(job.replica)
        self._tickets[job.index].first_byte()

    def end(self, job: Job) -> None:
        self._tickets.pop(job.index).end(answer_tokens=job.request.answer_tokens)

    def event(self, replica: int, medium: Medium, change: Change) -> None:
        index, slot = self._fleet.index, self._slots[replica]
        if change.went:
            index.remove(slot, medium, change.went)
        if change.came:
            index.add(slot, medium, change.came)


class Baseline:
    """A router to compare with: it goes by what it sent itself."""

    is_told = False

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self._replicas = replicas
        self._rng = rng

    def first_byte(self, job: Job) -> None: ...

    def end(self, job: Job) -> None: ...

    def event(self, replica: int, medium: Medium, change: Change) -> None: ...


class LeastLoad(Baseline):
    """The fewest tokens of prompts that wait for their first byte; of equal ones, one at random."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self._waiting = [0] * replicas

    def send(self, job: Job) -> int:
        least = min(self._waiting)
        chosen = self._rng.choice([n for n, tokens in enumerate(self._waiting) if tokens == least])
        self._waiting[chosen] += job.request.tokens
        return chosen

    def first_byte(self, job: Job) -> None:
        self._waiting[job.replica] -= job.request.tokens


class PrefixTree(Baseline):
    """Where the longest beginning of the prompt was sent before, whatever waits there; anywhere if nowhere."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self._sent: dict[int, int] = {}

    def send(self, job: Job) -> int:
        keys, sent = job.request.keys, self._sent
        where = (1 << self._replicas) - 1
        for key in keys:
            further = where & sent.get(key, 0)
            if not further:
                break
            where = further
        chosen = self._rng.choice([n for n in range(where.bit_length()) if where >> n & 1])
        for key in keys:
            sent[key] = sent.get(key, 0) | 1 << chosen
        return chosen


def make_router(policy: str, setup: Setup, clock: Clock, rng: random.Random) -> Router:
    """The router of this name. `auto` and `kvaware` are told what replicas hold if the setup has events.

    Raises: ConfigError for a name that is none.
    """
    baselines: dict[str, type[LeastLoad | PrefixTree]] = {LEAST_LOAD: LeastLoad, PREFIX_TREE: PrefixTree}
    if policy in baselines:
        return baselines[policy](setup.replicas, rng)
    if policy not in POLICIES:
        raise ConfigError(f"there is no strategy {policy!r}; there are {', '.join(POLICIES)}")
    strategy = Strategy.AUTO if policy == UNTOLD else Strategy(policy)
    is_told = setup.events_s is not None and policy in (Strategy.AUTO, Strategy.KVAWARE)
    fleet = Fleet(strategy=strategy, clock=clock, rng=rng)
    speeds = told_speeds(setup.costs, setup.sizes, is_blending=setup.blend is not None)
    return FleetRouter(fleet, setup.replicas, setup.block_tokens, is_told=is_told, speeds=speeds)


def told_speeds(costs: Costs, sizes: Sizes, *, is_blending: bool = False) -> Speeds:
    """What `router.measured` reads of a replica: its rate of prompts, that of disk and L2, how much it keeps, and
    whether it blends.

    What real ones do not say, how fast RAM is and what a running request adds to a step, the router takes for what it
    takes it for of real ones.
    """
    unsaid = Speeds()
    tiers = {
        medium: TierSpeed(costs.load_gb_per_s[medium] * GB / costs.kv_bytes, costs.load_s[medium])
        for medium in (Medium.DISK, Medium.L2)
    }
    return replace(
        unsaid,
        tokens_per_s=costs.prefill_tokens_per_s,
        tiers={**unsaid.tiers, **tiers},
        cache_tokens=max(sizes.tokens(medium, costs) for medium in (Medium.GPU, Medium.RAM, Medium.DISK)),
        is_blending=is_blending,
    )
