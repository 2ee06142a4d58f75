"""R16: RAM, disk and L2 together in simulated time: replicas with a disk each over one store, of which any part fails.

What each of them must never be given stands in proofs/replica.py; the L2's own troubles in proofs/replicas.py.
"""

import errno
import random
from pathlib import Path

from hotspan.core.errors import DirectoryError
from kit.proof import Progress, Proof, rng_of
from kit.simulated.faults import SHORT, bad_slots
from proofs.disk import DiskShape, SimulatedDisk
from proofs.engine import Broken
from proofs.replica import SIZE, Connect, Replica
from proofs.replicas import WEIGHTS, World, simulate
from proofs.replicas import Options as Options

CLAIM = (
    "over RAM, disk and L2, whatever of them fails: hits are right, nothing comes back, no call raises, no wait is long"
)

_HERE = {
    "end_load": 8,
    "clear": 0.3,
    "end_clear": 2,
    "stop": 0.4,
    "power": 0.4,
    "fail_disk": 1.5,
    "slow_disk": 0.7,
    "damage_disk": 0.7,
    "damage_object": 0.7,
    "lose_answers": 0.7,
    "settle": 0.1,
}
"""What happens besides."""

_ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE, SHORT)
_OF_WORLDS = (
    *("invalidations", "crashes", "losses", "faults", "stops", "resets", "power_losses"),
    *("disk_faults", "damaged_slabs", "damaged_objects", "lost_answers", "rests", "trips_disk", "trips_l2"),
)


class Levels(World):
    """Replicas with disks, and the server that they share. Raises: Broken if a disk can't be opened."""

    def __init__(self, root: Path, case: int, rng: random.Random) -> None:
        self._root = root
        self._case = case
        self._late_chance = 0.0
        super().__init__(rng, is_sealed=case % 2 == 1, weights=WEIGHTS | _HERE)
        self.counts = dict.fromkeys(_OF_WORLDS, 0)
        self._server.after = self._after

    def figures(self) -> dict[str, int]:
        """The same, and how often calls met a bad place."""
        met = sum(self._disk(replica).met.total() for replica in self.replicas)
        return super().figures() | {"calls_at_bad_places": met}

    def end(self) -> None:
        """All is well again; every replica asks for every text, begins anew and does so again. Raises: Broken."""
        self.settle()
        for replica in self.replicas:
            self._read(replica)
            self._stop(replica)
            self._read(replica)
            self._note_trips(replica)
        super().end()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _names(self) -> str:
        return "abc"[: self._rng.randint(1, 3)]

    def _replica(self, name: str, connect: Connect) -> Replica:
        root = self._root / name
        root.mkdir()
        shape = DiskShape(
            payload_bytes=SIZE,
            chunks=self._rng.randint(8, 20),
            is_sealed=self._is_sealed,
            is_packed=self._case // 2 % 2 == 1,
            is_recorded=True,
        )
        disk = SimulatedDisk(root, shape, self._clock, self._rng)
        if self._case % 5 < 2:
            disk.places += bad_slots(self._rng, shape.slots, shape.slot_bytes, 0.05)
        return Replica(
            name,
            connect,
            self._clock,
            self._epochs,
            self._rng,
            is_sealed=self._is_sealed,
            disk=disk,
            is_slow=True,
        )

    def _read(self, replica: Replica) -> None:
        self.settle()
        for text in self._texts:
            replica.arrive(text)
            self.settle()

    def _disk(self, replica: Replica) -> SimulatedDisk:
        if replica.disk is None:
            raise ValueError("each replica here has a disk")
        return replica.disk

    def _reopen(self, replica: Replica) -> None:
        """A new process: what failed in the last one's calls is over, its disk's bad places are not."""
        self._note_trips(replica)
        try:
            replica.start()
        except DirectoryError as error:
            raise Broken(f"{replica.name}: the directory can't be opened again: {error}") from error

    def _note_trips(self, replica: Replica) -> None:
        for tier in replica.tiers:
            self.counts[f"trips_{tier.tier.value}"] += tier.trips

    # -- steps -------------------------------------------------------------------------------------------------------

    def _end_load(self, replica: Replica) -> None:
        replica.end_load()

    def _clear(self, replica: Replica) -> None:
        self.counts["resets"] += 1
        replica.clear()

    def _end_clear(self, replica: Replica) -> None:
        replica.end_clear()

    def _crash(self, replica: Replica) -> None:
        self.counts["crashes"] += 1
        self._disk(replica).crash()
        self._reopen(replica)

    def _stop(self, replica: Replica) -> None:
        self.counts["stops"] += 1
        replica.stop()
        self._disk(replica).crash()  # what hung let nothing go
        self._reopen(replica)

    def _power(self, replica: Replica) -> None:
        self.counts["power_losses"] += 1
        self._disk(replica).lose_power()
        self._reopen(replica)

    def _fail_disk(self, replica: Replica) -> None:
        self.counts["disk_faults"] += 1
        files = self._disk(replica).files
        files.arm(self._rng.randint(1, 6), self._rng.choice(_ERRORS), lasting=self._rng.random() < 0.4)

    def _slow_disk(self, replica: Replica) -> None:
        self._disk(replica).files.slow_s = self._rng.choice((0.005, 0.060, 0.5, 2.0))

    def _damage_disk(self, replica: Replica) -> None:
        self.counts["damaged_slabs"] += self._disk(replica).damage()

    def _damage_object(self, replica: Replica) -> None:
        """Some bytes of an object, or of what lies beside it, are others."""
        data = self._server.data
        names = sorted(name for name in data if name.startswith(("objects/", "metadata/")) and data[name])
        if names:
            self.counts["damaged_objects"] += 1
            name = self._rng.choice(names)
            changed = bytearray(data[name])
            for _ in range(self._rng.randint(1, 8)):
                changed[self._rng.randrange(len(changed))] ^= self._rng.randint(1, 255)
            data[name] = bytes(changed[: self._rng.choice((len(changed), len(changed), len(changed) // 2))])

    def _lose_answers(self, replica: Replica) -> None:
        """Calls of the store are done, and say that they failed."""
        self.counts["lost_answers"] += 1
        self._late_chance = self._rng.choice((0.05, 0.3, 1.0))

    def _hang(self, replica: Replica) -> None:
        """One tier, or both."""
        level = self._rng.choice(("disk", "l2", ""))
        for queue in replica.queues.all:
            queue.hung = queue.hung or queue.name.startswith(level)

    def _repair(self, replica: Replica) -> None:
        super()._repair(replica)
        self._late_chance = 0.0
        files = self._disk(replica).files
        files.disarm()
        files.slow_s = 0.0

    def _settle(self, replica: Replica) -> None:
        self.counts["rests"] += 1
        self.settle()

    def _after(self, call: str) -> None:
        if self._late_chance and self._rng.random() < self._late_chance:
            raise ConnectionError("injected: the answer is lost")


def run(options: Options, progress: Progress) -> Proof:
    """Simulation after simulation, each a case: sealed, compressed, and with bad slots in turns."""

    def made(root: Path, case: int) -> Levels:
        return Levels(root, case, rng_of("tiers", options.seed, case))

    shown = ("disk_hits", "l2_hits", "invalidations", "power_losses", "read", "trips_disk", "trips_l2")
    return simulate("tiers", CLAIM, options, made, shown, progress)
