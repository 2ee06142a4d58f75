"""Random steps of an engine in a world: what `model` and `simulate` have in common."""

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.errors import DirectoryError
from hotspan.core.types import PAGE_BYTES, Tier
from hotspan.testing.chunks import aligned
from hotspan.tiers.shares import Share, Shares
from kit.simulated.faults import SHORT, BadPlaces, bad_slots
from proofs.disk import DiskShape
from proofs.engine import Broken, Engine, texts
from proofs.world import World, WorldOptions

QUOTAS = {3: Share(floor=0.1, quota=0.4)}
_LANDINGS = 20
"""How often I/O that ended may begin other I/O, which ends too, before an engine is idle."""

_PACKED = 4 / 3
"""How many compressed chunks of three pages fit where one plain one does, headers included."""
"""Tenant 3 has a quota, the others share the rest."""

WEIGHTS = {
    "arrive": 18,
    "ask": 14,
    "give_up": 1,
    "end_load": 8,
    "end_store": 10,
    "step": 12,
    "turn": 24,
    "time": 8,
    "long_time": 0.5,
    "invalidate": 2.5,
    "crash": 0.3,
}
TROUBLES = {"power": 0.5, "fault": 1.5, "repair": 1.5, "slow": 0.7, "hang": 0.5}
HOLDERS = {"hold": 2.0, "send": 2.0, "copy": 1.0, "announce": 1.5}
"""What happens besides in a simulation."""


@dataclass(slots=True)
class Drive:
    """An engine, its world, and who decides what comes next.

    is_troubled: disks fail and power goes. arm: the tier is guarded, and this is told of its calls before the first.
    bad_part:    of the disk's slots that are bad, for good; with some, the tier is guarded.

    Raises: DirectoryError if the first opening fails, which only `arm` can bring about.
    """

    root: Path
    rng: random.Random
    is_sealed: bool = False
    is_packed: bool = False
    is_troubled: bool = False
    tenants: int = 3
    each: int = 3
    arm: Callable[[BadPlaces], None] | None = None
    bad_part: float = 0.0
    disk_slots: int | None = None
    steps: int = 0
    crashes: int = 0
    losses: int = 0
    faults: int = 0
    found: int = 0
    world: World = field(init=False)
    engine: Engine = field(init=False)
    actions: dict[str, Callable[[], None]] = field(init=False)

    def __post_init__(self) -> None:
        shares = Shares(by_tenant=QUOTAS)
        options = WorldOptions(
            is_guarded=self.is_troubled or self.arm is not None or self.bad_part > 0,
            is_deciding=self.rng.random() < 0.5,
            ram_slots=self.rng.randint(5, 9),
            ram_shares=shares,
            disk=DiskShape(
                payload_bytes=(3 if self.is_packed else 1) * PAGE_BYTES,
                chunks=self.disk_slots or self.rng.randint(10, 20),
                is_sealed=self.is_sealed,
                is_packed=self.is_packed,
                is_recorded=self.is_troubled,
                shares=shares,
            ),
        )
        self.world = World(self.root, options, self.rng)
        disk = options.disk
        if self.bad_part:
            self.world.places.extend(bad_slots(self.rng, disk.slots, disk.slot_bytes, self.bad_part))
        try:
            self.world.open(self.arm or (lambda files: None))
        except DirectoryError:
            self.abandon()
            raise
        self.engine = Engine(
            self.world.cache,
            self.world.clock,
            texts(self.tenants, self.each),
            self.rng,
            disk.payload_bytes,
            self.world.below,
        )
        self.actions = {
            "arrive": lambda: self.engine.arrive(),
            "ask": lambda: self.engine.ask_again(),
            "give_up": lambda: self.engine.give_up(),
            "end_load": lambda: self.engine.end_load(),
            "end_store": lambda: self.engine.end_store(),
            "step": lambda: self.engine.step(),
            "turn": self._turn,
            "time": lambda: self.world.clock.advance(self.rng.uniform(0.001, 0.070)),
            "long_time": lambda: self._pass(self.rng.uniform(1, 30)),
            "invalidate": lambda: self.engine.invalidate(),
            "hold": lambda: self.engine.hold(),
            "send": lambda: self.engine.send(),
            "copy": lambda: self.engine.arrive(is_copy=True),
            "announce": lambda: self.engine.announce(),
            "crash": self._crash,
            "power": self._lose_power,
            "fault": self._break,
            "repair": self._repair,
            "slow": self._slow,
            "hang": self._hang,
        }

    def run(self, steps: int) -> None:
        """Random steps. Raises: Broken."""
        weights = WEIGHTS | TROUBLES | HOLDERS if self.is_troubled else dict(WEIGHTS)
        if self.arm is not None:
            del weights["crash"], weights["long_time"]  # the one fault is all that goes wrong
        names, chances = list(weights), list(weights.values())
        for name in self.rng.choices(names, chances, k=steps):
            self.do(name)

    def do(self, name: str) -> None:
        """One step, and all that holds after it. Raises: Broken."""
        self.steps += 1
        self.actions[name]()
        self.engine.check()
        for tier, usage in self.engine.cache.usage().items():
            disk_chunks = self.world.options.disk.chunks * (_PACKED if self.is_packed else 1)
            most = disk_chunks if tier is Tier.DISK else usage.capacity_chunks
            for tenant, share in QUOTAS.items():
                if usage.tenants.get(tenant, 0) > share.quota * most and usage.capacity_chunks:
                    raise Broken(f"tenant {tenant} is above its quota in {tier.value}")

    def end(self) -> None:
        """All is well again, and everybody goes. Raises: Broken if anything is left over."""
        self._repair()
        self.engine.end(self._land)
        files = self.world.files
        self.world.close()
        if files.open_fds:
            raise Broken(f"{len(files.open_fds)} descriptors are left open")

    def idle(self, seconds: float) -> None:
        """Time in which nobody asks for anything: what is in flight ends at its begin."""
        for _ in range(_LANDINGS):
            self.world.queues.run()
            self.engine.cache.step()
        self.world.clock.advance(seconds)

    def heal(self, max_s: float) -> float:
        """Seconds until the tier takes part again, with traffic. Raises: Broken if it does not within `max_s`."""
        self._repair()
        started_s = self.world.clock.monotonic()
        while (took_s := self.world.clock.monotonic() - started_s) <= max_s:
            if self.world.is_up:
                return took_s
            self.world.clock.advance(0.25)
            self.world.queues.run()
            for name in ("arrive", "step", "end_store", "end_load"):
                self.do(name)
        raise Broken(f"the tier is not back {max_s:g} s after the fault was gone")

    def abandon(self) -> None:
        """Let go of everything, whatever state it is in."""
        self.world.crash()
        self.world.slab.close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        """Time passes. With disks that fail it may find I/O in flight, which stands still for all of it."""
        if self.bad_part and not self.is_troubled:
            self.idle(seconds)
        else:
            self.world.clock.advance(seconds)

    def _turn(self) -> None:
        self.world.queues.run(self.rng.randint(1, 4))

    def _land(self) -> None:
        self.world.queues.run()
        self.world.clock.advance(0.5)

    def _crash(self) -> None:
        self.crashes += 1
        self.world.crash()
        self._reopen()

    def _lose_power(self) -> None:
        self.losses += 1
        self.world.lose_power()
        self._reopen()

    def _reopen(self) -> None:
        """A new process, which looks at all that the last one left."""
        try:
            self.world.open()
        except DirectoryError as error:
            raise Broken(f"the directory can't be opened after a crash: {error}") from error
        self.engine.begin_anew(self.world.cache)
        disk = self.world.disk
        into = aligned(self.world.options.disk.payload_bytes)
        for key in self.engine.epochs:
            if disk.submit_load(key, into):
                terms = disk.terms(key)
                self.world.queues.run()
                if any(transfer.fault is None for transfer in disk.finished()):
                    self.found += 1
                    self.engine.found(key, bytes(into), terms)
        self.world.queues.run()

    def _break(self) -> None:
        self.faults += 1
        error = self.rng.choice((errno.EIO, errno.ENOSPC, errno.EMFILE, SHORT))
        self.world.files.arm(self.rng.randint(1, 6), error, lasting=self.rng.random() < 0.3)

    def _repair(self) -> None:
        self.world.files.disarm()
        self.world.files.slow_s = 0.0
        self.world.queues.hang(False)

    def _slow(self) -> None:
        self.world.files.slow_s = self.rng.choice((0.005, 0.060, 0.5, 2.0))

    def _hang(self) -> None:
        self.world.queues.hang()
