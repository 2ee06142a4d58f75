"""One world of the search: an engine on simulated devices, its tiers, and random requests, all from one seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.request import RequestStatus

from hotspan.cache.entry import Entry, State
from hotspan.cache.tiered import TieredCache
from hotspan.engine import opening, replicas
from hotspan.engine.connector import HotspanConnector
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions
from hotspan.l2.written_under import StoreNames
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers import lower
from kit.cuda.install import installed
from kit.cuda.machine import CudaError, Machine
from kit.simulated.inline import InlineQueues

from ..harness.core import Core, core
from ..harness.simulated import at_once
from .media import Media
from .plan import MANY_HEADS, Plan, Totals, slot_bytes
from .runner import Ranks
from .watch import Watch, watched

MAX_TOKENS = 3900
_HANGS = 20_000
"""Turns after which nothing comes any more."""

_TEXTS = 6
_TENANTS = (None, "tenant-a", "tenant-b")


class Mistakes:
    """Calls that raise at random, before or after they have done their work. count: those that did."""

    def __init__(self, plan: Plan) -> None:
        self._chance = random.Random(f"mistakes:{plan.seed}")
        self._share = plan.mistakes
        self.count = 0

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            self._may_raise()
            return function(*arguments, **named)

        return called

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            self._may_raise()
            found = function(*arguments, **named)
            self._may_raise()
            return found

        return called

    def _may_raise(self) -> None:
        if self._chance.random() < self._share:
            self.count += 1
            raise RuntimeError("a mistake of the search's")


class World(Core):
    """A running engine of a world, and what happens to it."""

    def __init__(
        self,
        running: Core,
        plan: Plan,
        watch: Watch,
        queues: InlineQueues,
        clock: SimulatedClock,
        media: Media,
    ) -> None:
        super().__init__(running.core)
        self.plan, self.queues, self.clock = plan, queues, clock
        self.watch, self.machine = watch, watch.machine
        watch.slab = self.cache.ram.slab
        self.totals = Totals()
        self.mistakes = Mistakes(plan)
        self.media = media
        self._looked_at: dict[int, Entry] = {}  # by slot
        self._live: list[str] = []
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **named: Any) -> Any:
            self.totals.preempted += 1
            return preempt(*arguments, **named)

        self.scheduler._preempt_request = counted
        self._chance = random.Random(f"cuda-orders:{plan.seed}:{watch.machine.operations}")
        self._number = 0

    def step(self, times: int = 1) -> dict[str, int]:
        ended: dict[str, int] = {}
        for _ in range(times):
            self._look()
            self.clock.advance(0.002)
            if not self.machine.chance.random() < 0.2:
                self.queues.run(self.machine.chance.randrange(4))
            if self.follower is not None:
                self.follower.poll()
            self._drift(0.5 if self.scheduler.running else 30.0)
            ended |= super().step()
        self._live = [name for name in self._live if name not in ended]
        return ended

    def until(self, is_so: Callable[[], bool], turn: Callable[[], object], seconds: float = 0.0) -> None:
        """Turn until it is so; nothing here takes time. Raises: AssertionError if it never is."""
        for _ in range(_HANGS):
            if is_so():
                return
            self.queues.run(2)
            turn()
        raise AssertionError("it hangs")

    def _drift(self, pieces: float) -> None:
        """Streams go on while the scheduler does, and further while it has nothing to compute."""
        for _ in range(int(self.machine.chance.expovariate(1 / pieces))):
            if not self.machine.turn():
                return

    def run(self) -> None:
        """All actions of one life; afterwards nothing is under way."""
        texts = [self.text(n + 10 * self.plan.seed, self._chance.randrange(300, 3000)) for n in range(_TEXTS)]
        for _ in range(self.plan.actions):
            self._act(texts)
            self.step(self._chance.randrange(1, 6))
        self.queues.hang(False)
        if self.plan.settles:
            self.finish()
            self.settle()
            self.check()

    def revisit(self) -> None:
        """Ask for the texts' beginnings, of which this engine has stored nothing yet."""
        names = [f"again{n}" for n in range(_TEXTS)]
        for n, name in enumerate(names):
            self.start(name, self.text(n + 10 * self.plan.seed, 1000))
        self.finish()
        self.totals.found_on_start = sum(self.cached[name] for name in names)

    def _act(self, texts: list[list[int]]) -> None:
        chance, act = self._chance, self._chance.random()
        if act < 0.45:
            self._ask(chance.choice(texts))
        elif act < 0.53 and self._live:
            self.core.abort_requests([self._live.pop(chance.randrange(len(self._live)))])
            self.totals.aborted += 1
        elif act < 0.57:
            self.scheduler.reset_prefix_cache()
        elif act < 0.57 + self.plan.resets:
            if not self._can_reset:
                return
            self.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            self.totals.resets += 1
        elif act < 0.60 + self.plan.resets:
            scope = {"tags": [f"tag-{chance.randrange(3)}"]} if chance.random() < 0.7 else {"all": True}
            self.begin(do="invalidate", **scope)
            self.totals.invalidations += 1
        elif act < 0.64 + self.plan.resets:
            self.queues.hang(chance.random() < 0.5)
        elif act < 0.66 + self.plan.resets:
            self.clock.advance(chance.choice((0.1, 3.0)))
        elif act < 0.72 + self.plan.resets:
            self.media.change(chance)
        self.administrator.run_waiting()

    @property
    def _can_reset(self) -> bool:
        """Whether vLLM resets with running requests: no step is in flight, and no load, also of an aborted one."""
        waits = RequestStatus.WAITING_FOR_REMOTE_KVS
        held = (each.is_finished() and any(self._held(name)) for name, each in self.scheduler.requests.items())
        loads = (each.status is waits for each in self.scheduler.requests.values())
        return not self.core.batch_queue and not any(loads) and not any(held)

    def _held(self, name: str) -> tuple[list[int], ...]:
        """The blocks that a request has, by group."""
        return self.scheduler.kv_cache_manager.get_block_ids(name)  # type: ignore[no-any-return]

    def _ask(self, base: list[int]) -> None:
        chance = self._chance
        self._number += 1
        name = f"r{self._number}"
        own = self.text(10**6 * (self.plan.seed + 1) + self._number, chance.randrange(1, 300))
        prompt = base if chance.random() < 0.2 else base[: chance.randrange(200, len(base))] + own
        tags = {"tags": [f"tag-{chance.randrange(3)}"]} if chance.random() < 0.3 else {}
        salt = chance.choice(_TENANTS) if chance.random() < 0.3 else None
        lora = self.media.adapter(chance)
        self.totals.adapted += lora is not None
        self.start(name, prompt[:MAX_TOKENS], chance.randrange(1, 40), salt=salt, lora=lora, **tags)
        self._live.append(name)
        self.totals.requests += 1

    def count(self) -> Totals:
        """What was done and found until now."""
        totals, machine = self.totals, self.machine
        totals.engines = 1
        totals.wrong, totals.compared = self.runner.found_wrong, self.runner.compared
        totals.cached = sum(self.cached.values())
        totals.accepted, totals.rejected = self.runner.ranks[0].accepted, self.runner.ranks[0].rejected
        totals.full, totals.lost = self.media.refused, self.mistakes.count
        totals.copies, totals.early, totals.device_errors = machine.copies, machine.early, machine.errors
        totals.races, totals.wrong_uses = sum(machine.races.counts.values()), len(machine.wrong_uses)
        return totals

    def check(self) -> None:
        """Raise AssertionError if the books don't agree. Counts bytes in slots that are nobody's."""
        self.cache.check()
        self.prefixes.check()
        self.totals.left += self.watch.leftovers(list(self.cache.ram.entries.values()))

    def _look(self) -> None:
        """Count bytes that are nobody's in the slots of chunks that have become ready since the last look."""
        ready = [entry for entry in self.cache.ram.entries.values() if entry.state is State.READY]
        fresh = [entry for entry in ready if self._looked_at.get(entry.slot) is not entry]
        self._looked_at |= {entry.slot: entry for entry in fresh}
        self.totals.left += self.watch.leftovers(fresh)


@contextmanager
def running(model: Path, plan: Plan, machine: Machine, media: Media) -> Iterator[World]:
    """An engine of a world. Work on devices goes on while it shuts down."""
    clock, queues = SimulatedClock(), InlineQueues(plan.seed)
    runner = type("Runner", (Ranks,), _runner_of(plan, machine))
    with ExitStack() as stack:
        for where, name, instead in (
            (opening, "DiskOptions", partial(media.disk_options, queue=queues.queue)),
            (opening, "RemoteOptions", partial(RemoteOptions, queue=queues.queue)),
            (LogFollower, "start", lambda self: self.poll()),
            (StoreNames, "start", lambda self: None),
            (TieredCache, "wait", lambda self, timeout_s: clock.advance(timeout_s)),
            (lower, "start", at_once),
            (replicas, "share_a_host", lambda parallel: True),
        ):
            stack.enter_context(patch.object(where, name, instead))
        create = EngineArgs.create_engine_config

        @wraps(create)
        def configured(*arguments: Any, **named: Any) -> Any:
            config = create(*arguments, **named)
            config.scheduler_config.async_scheduling = plan.is_async  # vLLM's platform for CPUs turns it off
            return config

        stack.enter_context(patch.object(EngineArgs, "create_engine_config", configured))
        mistakes = Mistakes(plan)
        stack.enter_context(patch.object(TieredCache, "begin_load", mistakes.before(TieredCache.begin_load)))
        stack.enter_context(
            patch.object(HotspanConnector, "_begin_load", mistakes.around(HotspanConnector._begin_load))
        )
        watch = stack.enter_context(watched(machine))
        stack.enter_context(installed(machine))
        options: dict[str, Any] = {
            "tensor_parallel_size": plan.ranks,
            "block_size": plan.block,
            "num_gpu_blocks_override": plan.blocks,
            "hf_overrides": MANY_HEADS if plan.ranks > 4 or plan.kind.is_replicated else {},
            **_speculation(plan),
        }
        made = stack.enter_context(
            core(
                model,
                disk=media.disk,
                l2=media.l2,
                clock=clock,
                runner=runner,
                ram_gib=plan.slots * slot_bytes(plan) / 2**30,
                **(options | dict(plan.kind.options)),
            )
        )
        world = World(made, plan, watch, queues, clock, media)
        world.mistakes = mistakes
        try:
            yield world
        finally:
            queues.hang(False)
            media.empty()


def _runner_of(plan: Plan, machine: Machine) -> dict[str, Any]:
    return {
        "machine": machine,
        "kind": plan.kind,
        "depth": plan.depth,
        "has_graphs": plan.has_graphs,
        "drafts": plan.drafts,
    }


def _speculation(plan: Plan) -> dict[str, Any]:
    """vLLM's options for as many drafts; what makes them is the runner's."""
    if not plan.drafts:
        return {}
    ngram = {"method": "ngram", "num_speculative_tokens": plan.drafts, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {"speculative_config": ngram}


def run(model: Path, plan: Plan, folder: Path) -> tuple[Totals, list[str]]:
    """All lives of a world: what was done, and in words what was found wrong."""
    totals, found = Totals(worlds=1), list[str]()
    media = Media(plan, folder)
    for life in range(plan.lives):
        now = plan.of_life(life)
        machine = Machine(plan.seed * 100 + life, now.ranks, pace=plan.pace, eager=plan.eager)
        machine.has_triton = plan.has_triton
        slab = plan.slots * slot_bytes(plan)
        machine.pins, machine.chunk_bytes = int(plan.pins * slab) if plan.pins < 1 else 1 << 62, slab // 4
        has_failed = False
        with contextlib.suppress(CudaError), running(model, now, machine, media) as world:
            if plan.fails and life == 0:
                machine.fails_at = machine.operations + machine.chance.randrange(1_500)
            try:
                if life:
                    world.revisit()
                world.run()
            except CudaError:
                has_failed = True
                if not machine.errors:
                    raise
            finally:
                totals.add(world.count())
        if machine.errors and not has_failed and machine.fails_at is None:
            found.append("a device failed, and nobody had it fail")
        found += [*machine.races.found, *machine.wrong_uses]
    if totals.wrong:
        found.append(f"the KV of {totals.wrong} tokens is another's")
    if totals.left:
        found.append(f"{totals.left} bytes of slots are nobody's")
    return totals, found
