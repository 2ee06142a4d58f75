"""What a world has beside its engine: a disk and an L2 that become full, and the files of adapters that change."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from hotspan.tiers.disk import DiskOptions
from kit.simulated.faults import SmallDisk
from kit.simulated.memory_store import MemoryServer

from .plan import Plan, slot_bytes

_FRAME_BYTES = 8192
"""More than a frame adds to what a slot has."""


class _Disk(SmallDisk):
    """refused: how often it had no space."""

    refused = 0

    def allocate(self, fd: int, size: int, at: int = 0) -> None:
        if size > self._free(fd):
            self.refused += 1
        super().allocate(fd, size, at)


class Media:
    """A disk, an L2 and adapters, which all lives of a world share.

    disk, l2: None where it has none.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.disk = folder / "kv" if plan.has_disk else None
        self.l2 = MemoryServer(before=self._before) if plan.has_l2 else None
        self._files: _Disk | None = None
        self._is_full, self._l2_refused = False, 0
        self._folder = folder / "adapters"
        self._loras = [self._lora(n, n + 1) for n in range(plan.adapters)]

    # -- tiers -----------------------------------------------------------------------------------------------------

    def disk_options(self, directory: Path, size: int, threads: int, **options: Any) -> DiskOptions:
        """`DiskOptions` of a disk that is as small as this world's."""
        slot = slot_bytes(self.plan) + _FRAME_BYTES
        if self.plan.disk_slots:
            size = self.plan.disk_slots * slot
        if self.plan.disk_fills:
            self._files = _Disk(3 * self.plan.slots * slot, slot) if self._files is None else self._files
            options |= {"files": self._files, "reserve_bytes": slot, "step_bytes": 4 * slot}
        return DiskOptions(directory, size, threads, **options)

    def _before(self, call: str) -> None:
        if self._is_full and call in ("create objects", "append metadata"):
            self._l2_refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def change(self, chance: random.Random) -> None:
        """Others take space or give it back; an L2 drops what is old; an adapter is trained anew."""
        if self._files is not None and chance.random() < 0.5:
            self._files.others_bytes = int(self._files.total_bytes * chance.choice((0.0, 0.5, 0.9, 1.0)))
        if self.l2 is not None and self.plan.l2_fills and chance.random() < 0.5:
            self._is_full = chance.random() < 0.5
            if chance.random() < 0.5:
                self.l2.evict(chance.randrange(6))
        if self._loras and chance.random() < 0.3:
            number = chance.randrange(len(self._loras))
            self._loras[number] = self._lora(number, self._loras[number].lora_int_id + len(self._loras))

    def empty(self) -> None:
        """There is space again."""
        self._is_full = False
        if self._files is not None:
            self._files.others_bytes = 0

    @property
    def refused(self) -> int:
        """How many stores found no space."""
        return self._l2_refused + (self._files.refused if self._files is not None else 0)

    # -- adapters --------------------------------------------------------------------------------------------------

    def adapter(self, chance: random.Random) -> LoRARequest | None:
        """Whose a request is; None for the base model's."""
        return chance.choice(self._loras) if self._loras and chance.random() < 0.4 else None

    def _lora(self, number: int, version: int) -> LoRARequest:
        """One of the adapters as it is now; vLLM knows each of its versions by a number of its own."""
        path = self._folder / str(version)
        path.mkdir(parents=True)
        (path / "weights").write_bytes(f"adapter {number} of version {version}".encode())
        return LoRARequest(f"adapter-{number}", version, str(path))
