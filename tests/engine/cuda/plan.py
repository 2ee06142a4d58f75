"""What a world of the search is like, drawn from its seed, and what was done and found in worlds."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

from kit.engine import CHUNK

from ..harness.core import BLOCK
from .kinds import KINDS, Kind


@dataclass(frozen=True)
class Plan:
    """What a world is like, drawn from its seed.

    slots: of RAM, about. block: tokens in one. blocks: of each device.
    pins: whether all of the slab can be registered; else where that fails, in parts of it.
    fails: whether the device fails at some operation, for good. resets: of all actions.
    settles: whether all that is under way ends before the engine does.
    has_graphs: whether kernels find a step's blocks in the static buffers of a graph.
    drafts: speculative tokens of a step at most; 0 where nothing is drafted.
    adapters: that requests may name. disk_slots: of the disk, about; 0 for more than are ever stored.
    disk_fills: whether others take the space of the disk's file system. l2_fills: whether the L2 refuses and drops.
    depth: how many times as many layers as the kind has.
    mistakes: of all loads, those that raise as they are prepared, or as they begin.
    later_ranks: of the engines after the first: other ones where each holds the same KV, and finds it all the same.
    """

    seed: int
    kind: Kind
    ranks: int
    is_async: bool
    has_disk: bool
    has_l2: bool
    slots: int
    block: int
    blocks: int
    pins: float
    has_triton: bool
    pace: float
    eager: float
    fails: bool
    lives: int
    actions: int
    resets: float
    settles: bool
    has_graphs: bool
    drafts: int
    adapters: int
    disk_slots: int
    disk_fills: bool
    l2_fills: bool
    depth: int
    mistakes: float
    later_ranks: int

    @property
    def layers(self) -> list[Any]:
        """Each layer's spec."""
        return self.kind.layers(self.block) * self.depth

    def of_life(self, life: int) -> Plan:
        """The same world, with as many ranks as a later engine has."""
        return replace(self, ranks=self.later_ranks) if life else self


@dataclass
class Totals:
    """What was done and found. accepted, rejected: drafts. adapted: requests with an adapter. full: stores that a disk
    or L2 refused for want of space. lost: loads that raised. found_on_start: cached tokens that an earlier engine had
    stored. wrong: tokens whose KV was another's. left: bytes in slots that no store put there.
    """

    worlds: int = 0
    engines: int = 0
    requests: int = 0
    cached: int = 0
    compared: int = 0
    copies: int = 0
    early: int = 0
    preempted: int = 0
    accepted: int = 0
    rejected: int = 0
    adapted: int = 0
    full: int = 0
    lost: int = 0
    found_on_start: int = 0
    aborted: int = 0
    resets: int = 0
    invalidations: int = 0
    device_errors: int = 0
    wrong: int = 0
    races: int = 0
    wrong_uses: int = 0
    left: int = 0

    def add(self, more: Totals) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))

    @property
    def failures(self) -> int:
        return self.wrong + self.races + self.wrong_uses + self.left


def drawn(seed: int, kind: str | None = None, **fixed: Any) -> Plan:
    """The world of a seed; `fixed`: fields of its plan that are not drawn."""
    chance = random.Random(f"cuda-orders:{seed}")
    ranks = 8 if chance.random() < 0.02 else chance.choice((1, 1, 1, 2))
    chosen = KINDS[kind] if kind is not None else chance.choice(list(KINDS.values()))
    has_l2 = chance.random() < 0.2
    block = BLOCK if chosen.name == "states" else chance.choice((16, 16, 16, BLOCK))
    plan: dict[str, Any] = {
        "ranks": ranks,
        "is_async": chance.random() < 0.6,
        "has_l2": has_l2,
        "has_disk": chance.random() < 0.5,
        "slots": chance.choice((8, 12, 20, 40)) * {"states": 6, "windows": 2}.get(chosen.name.split()[0], 1),
        "block": block,
        "blocks": chance.choice((66, 72, 96)) * (BLOCK // block),
        "pins": chance.choice((1.0, 1.0, 1.0, 0.0, 0.5)),
        "has_triton": chance.random() < 0.4,
        "pace": chance.choice((0.0, 2.0, 6.0, 20.0)),
        "eager": chance.choice((0.0, 0.5, 1.0)),
        "fails": chance.random() < 0.08,
        "lives": chance.choice((1, 1, 1, 2)),
        "actions": chance.randrange(30, 90),
        "resets": 0.02,
        "settles": chance.random() < 0.7,
    }
    plan |= {"has_graphs": chance.random() < 0.4, "drafts": chance.choice((0, 0, 3))}
    plan |= {
        "adapters": chance.choice((0, 0, 2)),
        "disk_slots": chance.choice((0, 0, 2 * plan["slots"])),
        "disk_fills": chance.random() < 0.3,
        "l2_fills": chance.random() < 0.5,
        "depth": chance.choice((1, 1, 12, 40)),
        "mistakes": random.Random(f"mistakes:{seed}").choice((0.0, 0.0, 0.0, 0.15)),
    }
    if ranks > 2:
        plan["depth"] = 1
    plan |= fixed
    if chosen.name == "states":
        plan["drafts"] = 0
    if plan["fails"]:  # what it left behind is looked at by another
        plan |= {"has_disk": True, "lives": 2}
    if chosen.name not in _ONE_GROUP:
        plan["blocks"] = 140 * (BLOCK // plan["block"])
    if "later_ranks" not in plan:
        plan["later_ranks"] = chance.choice((1, 2, plan["ranks"])) if chosen.is_replicated else plan["ranks"]
    return Plan(seed, chosen, **plan)


MANY_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
"""For eight ranks, and for engines that share a disk with such a one."""

_ONE_GROUP = {"full", "heads last", "across layers", "latents", "fp8"}


def slot_bytes(plan: Plan) -> int:
    """A slot's size: of several groups, the layers lie over each other."""
    layers = plan.layers
    pages = layers if plan.kind.name in _ONE_GROUP else layers[: plan.depth]
    blocks = 1 if plan.kind.name == "states" else -(-CHUNK // plan.block)
    copies = 1 if plan.kind.is_replicated else plan.ranks
    return -(-sum(each.page_size_bytes for each in pages) * blocks * copies // 4096) * 4096
