"""A simulated replica under load: vLLM's way to schedule, a tier on a link, RAM of few slots, and requests that come.

The cache, its waits and its cost model are the real ones, over a clock that only the simulation turns. What is
simulated: the engine's steps, the tier's transfers and the bytes, of which there are none.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hotspan.cache.choice import Part
from hotspan.cache.engine_queue import EngineQueue
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey, Lookup, Tier
from hotspan.l2.questions import Questions
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Durable, Losses, TierUsage, Transfer

NEVER = float("inf")
_POLL_S = 0.001
"""How often an idle engine asks again at least."""


@dataclass(frozen=True)
class Engine:
    """What steps cost, in seconds: each step, each token of a prompt, each token it attends to, each decoded token.

    step_tokens: the most tokens in one step. slots: requests that may run. pool_tokens: of all that run.
    chunk_tokens: what is stored and loaded as one.
    copy_bytes_per_s: between RAM and the engine. noise: of a step, the standard deviation of its logarithm.
    row_s: of each row that its encoder computes, and `step_s` for all of a step.
    """

    step_s: float
    token_s: float
    pair_s: float = 0.0
    decode_s: float = 0.0
    step_tokens: int = 2048
    slots: int = 64
    pool_tokens: int = 1 << 20
    chunk_tokens: int = 256
    copy_bytes_per_s: float = 5e9
    noise: float = 0.05
    row_s: float = 0.0

    def step(self, prompts: Iterable[tuple[int, int]], decodes: int) -> float:
        """One step: where each part of a prompt begins and how many tokens it has; without noise."""
        parts = list(prompts)
        tokens = sum(count for _, count in parts)
        pairs = sum(attended(start, count) for start, count in parts)
        return self.step_s + self.token_s * tokens + self.pair_s * pairs + self.decode_s * decodes

    def encode(self, rows: int) -> float:
        """The encoder's part of a step."""
        return self.step_s + self.row_s * rows if rows else 0.0


def attended(start: int, tokens: int) -> int:
    """How many tokens stand before each of these, in sum."""
    return tokens * start + tokens * (tokens - 1) // 2


@dataclass(frozen=True)
class Pace:
    """How a tier is at a moment: what a transfer waits for, and the bandwidth of all together."""

    latency_s: float
    bytes_per_s: float


HUNG = Pace(NEVER, 1.0)


class EmptySlab:
    """A RAM slab without bytes: slots of any size, that cost nothing."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes, self.bytes = slots, slot_bytes, slots * slot_bytes
        self._page = memoryview(bytearray(PAGE_BYTES))

    def slot(self, index: int) -> memoryview:
        return self._page

    def close(self) -> None:
        return


class LinkTier:
    """A storage tier whose transfers take a lane each, wait out a latency and share a link.

    pace: how it is at a moment. size: bytes of a chunk. noise: of a transfer's time, as `Engine.noise`. An L2 must be
    asked what it has, and answers after its latency.
    """

    def __init__(
        self,
        tier: Tier,
        pace: Callable[[float], Pace],
        size: int,
        lanes: int,
        clock: SimulatedClock,
        rng: random.Random,
        noise: float = 0.1,
        store_depth: int = 8,
    ) -> None:
        self.tier = tier
        self.lanes = lanes
        self.parents: dict[ChunkKey, ChunkKey | None] = {}
        self._pace, self._size, self._clock, self._rng, self._noise = pace, size, clock, rng, noise
        self.losses = Losses()
        self._store_depth = store_depth
        self._free_s = [0.0] * lanes
        self._link_s = 0.0
        self._loads: deque[tuple[float, ChunkKey]] = deque()
        self._stores: deque[tuple[float, ChunkKey]] = deque()
        self._storing = 0
        self._flying: list[tuple[float, int, Transfer]] = []
        self._count = 0
        self._answers: dict[ChunkKey, float] = {}  # what was asked about, and when the answer comes
        self._coming: list[tuple[float, float, list[ChunkKey]]] = []  # when answers come, after how long, about what
        self._questions = Questions(clock)

    @property
    def next_s(self) -> float:
        """When the next transfer ends, or the next answer comes."""
        answer_s = self._coming[0][0] if self.asking else NEVER
        return min(answer_s, self._flying[0][0]) if self._flying else answer_s

    def _submit(self, key: ChunkKey, *, is_load: bool) -> None:
        (self._loads if is_load else self._stores).append((self._clock.monotonic(), key))
        self._begin()

    def _begin(self) -> None:
        """Whatever has begun by now: loads before stores, as soon as a lane is free."""
        now_s = self._clock.monotonic()
        while self._loads or self._stores:
            came_s = min(queue[0][0] for queue in (self._loads, self._stores) if queue)
            begun_s = max(came_s, self._free_s[0])
            if begun_s > now_s:
                return
            heapq.heappop(self._free_s)
            is_load = bool(self._loads) and self._loads[0][0] <= begun_s
            _, key = (self._loads if is_load else self._stores).popleft()
            pace = self._pace(begun_s)
            work_s = self._size / pace.bytes_per_s * self._rng.lognormvariate(0, self._noise)
            self._link_s = max(self._link_s, begun_s) + work_s
            ended_s = self._link_s + pace.latency_s
            heapq.heappush(self._free_s, ended_s)
            self._count += 1
            transfer = Transfer(key, is_load, None, self._size, ended_s - begun_s, None, ended_s)
            heapq.heappush(self._flying, (ended_s, self._count, transfer))

    # -- StorageTier -----------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        while self._coming and self._coming[0][0] <= self._clock.monotonic():
            _, seconds, keys = heapq.heappop(self._coming)
            self._questions.end(keys, seconds)

    @property
    def asking(self) -> int:
        self._answer()
        return len(self._coming)

    @property
    def answer_s(self) -> float:
        self._answer()
        return self._questions.answer_s

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        new = [chunk.key for chunk in chunks if chunk.key not in self._answers]
        if self.tier is Tier.L2 and new:
            now_s = self._questions.begin(new)
            latency_s = self._pace(now_s).latency_s
            self._answers |= dict.fromkeys(new, now_s + latency_s)
            heapq.heappush(self._coming, (now_s + latency_s, latency_s, new))

    def is_asking(self, key: ChunkKey) -> bool:
        return self._answers.get(key, 0.0) > self._clock.monotonic()

    def lookup(self, key: ChunkKey) -> bool:
        is_known = self.tier is not Tier.L2 or self._answers.get(key, NEVER) <= self._clock.monotonic()
        return is_known and key in self.parents

    def terms(self, key: ChunkKey) -> Terms:
        return Terms()

    def labelled(self, scope: Scope) -> list[Chunk]:
        return []

    def can_store(self) -> bool:
        return self._storing < self._store_depth

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        return False

    def released(self) -> list[ChunkKey]:
        return []

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        if self.lookup(chunk.key) or not self.can_store():
            return False
        self.parents[chunk.key] = chunk.parent
        self._answers[chunk.key] = 0.0
        self._storing += 1
        self._submit(chunk.key, is_load=False)
        return True

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        if key not in self.parents:
            return False
        self._submit(key, is_load=True)
        return True

    def finished(self) -> list[Transfer]:
        ended, now_s = [], self._clock.monotonic()
        self._begin()
        while self._flying and self._flying[0][0] <= now_s:
            ended.append(heapq.heappop(self._flying)[2])
            self._storing -= not ended[-1].is_load
        return ended

    def wait(self, timeout_s: float) -> bool:
        return False

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        return

    def join(self, key: ChunkKey, terms: Terms) -> None:
        return

    def discard(self, key: ChunkKey) -> None:
        self.parents.pop(key, None)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        taken = {key for key in self.parents if ScopeSet(scopes).takes(key, bytes(32), Terms())}
        for key in taken:
            del self.parents[key]
        durable(True)
        return len(taken)

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        return  # a world has one

    def usage(self) -> TierUsage:
        return TierUsage(len(self.parents), 1 << 20, 0, 1 << 40, {})

    def give_up(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        return


@dataclass(eq=False)
class Request:
    """One request, and what becomes of it.

    chunks: of its prompt's front, as far as they are named. answer: tokens that it decodes. done: prompt tokens that
    the engine has. emitted: tokens decoded; `again` of them are computed once more, as part of the prompt.
    medium: what its encoder's output is called, of so many rows; 0: it has none. looker: waits for that output.
    """

    name: str
    arrival_s: float
    tokens: int
    chunks: Sequence[Chunk]
    answer: int
    medium: Chunk | None = None
    rows: int = 0
    reader: Reader = field(default_factory=Reader)
    looker: Reader = field(default_factory=Reader)
    is_decided: bool = False
    state: str = "waiting"
    done: int = 0
    emitted: int = 0
    again: int = 0
    hit_tokens: int = 0
    loading: list[ChunkKey] = field(default_factory=list)
    storing: list[Chunk] = field(default_factory=list)
    first_s: float = 0.0
    ended_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s


class World:
    """Runs requests over one engine and one cache.

    arrive: what comes next: called with the time, it returns the requests that are due and when to ask again.
    ended:  told of each request that ended.
    """

    def __init__(
        self,
        engine: Engine,
        cache: TieredCache,
        tier: LinkTier | None,
        clock: SimulatedClock,
        rng: random.Random,
        *,
        is_sync: bool = True,
    ) -> None:
        self.engine, self.cache, self.tier, self.clock = engine, cache, tier, clock
        self.queue = EngineQueue(cache.cost, engine.step_tokens, clock) if cache.cost is not None else None
        self._chunk = engine.chunk_tokens
        self._rng = rng
        self._is_sync = is_sync
        self._waiting: deque[Request] = deque()
        self._loading: list[tuple[float, Request]] = []
        self._running: list[Request] = []
        self._encoding: list[Request] = []  # in the step that is being scheduled
        self.steps = self.preempted = self.encoded = 0
        self.busy_s = 0.0

    def run(self, arrive: Callable[[float], tuple[list[Request], float]], ended: Callable[[Request], None]) -> None:
        """Until nothing is left, and nothing comes."""
        while True:
            due, next_s = arrive(self.clock.monotonic())
            for request in due:
                self._waiting.append(request)
                self.cache.ask([*request.chunks, *([request.medium] if request.medium else [])], request.reader)
                if self.queue is not None:
                    self.queue.arrive(request.name, request.arrival_s)
            if not (self._waiting or self._running or self._loading) and next_s == NEVER:
                return
            self._step(next_s, ended)

    def announce(self, chunks: Sequence[Chunk], hold_s: float) -> None:
        """A request for these chunks is about to come."""
        self.cache.prefetches.begin(chunks, Terms().tenant, hold_s, lambda found: None)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _step(self, next_s: float, ended: Callable[[Request], None]) -> None:
        now_s = self.clock.monotonic()
        for ready in [each for each in self._loading if each[0] <= now_s]:
            self._loading.remove(ready)
            self._loaded(ready[1])
            self._waiting.appendleft(ready[1])
        budget = self.engine.step_tokens
        parts: list[tuple[Request, int, int]] = []
        decodes = 0
        self._preempt()
        for request in self._running:
            if request.done < request.tokens:
                budget -= self._prefill(request, parts, budget)
            elif budget:
                decodes += 1
                budget -= 1
        copied = self._admit(parts, budget)
        self.cache.prefetches.is_busy = bool(self._running or self._waiting or self._loading)
        if not parts and not decodes:
            self._sleep(next_s)
            return
        rows = sum(request.rows for request in self._encoding)
        encoding_s = self.engine.encode(rows) * self._rng.lognormvariate(0, self.engine.noise)
        seconds = self.engine.step([(start, count) for _, start, count in parts], decodes)
        seconds = seconds * self._rng.lognormvariate(0, self.engine.noise) + encoding_s
        if self.queue is not None:
            tokens = sum(count for _, _, count in parts)
            context = sum(attended(start, count) for _, start, count in parts)
            self.queue.begin(tokens, context, tokens + decodes)
            if rows and self.cache.cost is not None:
                self.queue.deduct(self.cache.cost.encode_s(rows))
                self.cache.cost.observe_encoding(rows, encoding_s)
        self.steps += 1
        self.busy_s += seconds + copied
        self.clock.advance(seconds + copied)
        for request in self._running:
            if request.storing:
                self.cache.end_store(request.storing)
                request.storing = []
        for request in self._encoding:
            self.cache.end_store([request.medium] if request.medium is not None else [])
        self._encoding.clear()
        self.cache.step()
        if self.queue is not None:
            self.queue.end()
        self._end(parts, ended)

    def _end(self, parts: list[tuple[Request, int, int]], ended: Callable[[Request], None]) -> None:
        now_s = self.clock.monotonic()
        computed = {request.name for request, _, _ in parts}
        for request in list(self._running):
            if request.done < request.tokens:
                continue
            request.emitted += 1
            if request.name in computed and not request.first_s:
                request.first_s = now_s
            if request.emitted >= request.answer:
                request.ended_s = now_s
                request.state = "ended"
                self._running.remove(request)
                if self.queue is not None:
                    self.queue.forget(request.name)
                ended(request)

    def _preempt(self) -> None:
        """The requests that came last begin anew while those that run have no room for their next tokens."""
        while len(self._running) > 1 and sum(self._held(each) + 1 for each in self._running) > self.engine.pool_tokens:
            last = self._running.pop()
            self.cache.end_store(last.storing)
            last.storing, last.done, last.state, last.reader = [], 0, "waiting", Reader()
            last.looker, last.is_decided = Reader(), False
            last.tokens += last.emitted - last.again
            last.again = last.emitted
            self.preempted += 1
            self._waiting.appendleft(last)
            if self.queue is not None:
                self.queue.forget(last.name)
                self.queue.arrive(last.name)
            self.cache.ask([*last.chunks, *([last.medium] if last.medium else [])], last.reader)

    @staticmethod
    def _held(request: Request) -> int:
        """Tokens of the pool."""
        return request.tokens + request.emitted - request.again

    def _prefill(self, request: Request, parts: list[tuple[Request, int, int]], budget: int) -> int:
        count = min(request.tokens - request.done, budget)
        if count > 0:
            parts.append((request, request.done, count))
            if self.queue is not None:
                self.queue.note(request.name, request.done + count)
            first, stop = -(-request.done // self._chunk), (request.done + count) // self._chunk
            placed = self.cache.begin_store(request.chunks[first:stop], request.reader)
            request.storing += [placement.chunk for placement in placed]
            request.done += count
        return count

    def _admit(self, parts: list[tuple[Request, int, int]], budget: int) -> float:
        """Requests that wait, in order; returns the seconds of copies that the step waits for."""
        copied_s = 0.0
        skipped: list[Request] = []
        held = [*self._running, *(request for _, request in self._loading)]
        pool = self.engine.pool_tokens - sum(self._held(request) for request in held)
        while self._waiting and budget > 0 and len(self._running) < self.engine.slots:
            request = self._waiting[0]
            if request.state == "waiting":
                found = self._look(request)
                if found is None:
                    skipped.append(self._waiting.popleft())
                    continue
                if request.tokens > pool and (held or copied_s or parts):
                    self.cache.reconsider(request.reader)
                    break
                copied_s += self._begin(request, found)
                if request.state == "loading":
                    pool -= request.tokens
                    self._waiting.popleft()
                    continue
            self._waiting.popleft()
            pool -= request.tokens
            request.state = "running"
            self._running.append(request)
            budget -= self._prefill(request, parts, budget)
        self._waiting.extendleft(reversed(skipped))
        return copied_s

    def _look(self, request: Request) -> list[Chunk] | None:
        """The chunks in RAM from its front; None while it waits."""
        cache, reader = self.cache, request.reader
        cache.step()
        if reader.plan is None and self.queue is not None:
            if not cache.choose(
                [request.chunks],
                reader,
                self.queue.text(request.name, request.tokens, self._chunk, waiting=cache.waiting),
            ):
                return None
        elif cache.is_waiting(reader):
            return None
        found: list[Chunk] = []
        is_waiting = False
        for chunk in request.chunks:
            answer = cache.lookup(chunk, reader)
            if answer is Lookup.MISS:
                break
            is_waiting |= answer is Lookup.RETRY
            found.append(chunk)
        if is_waiting and not self._await(reader):
            return None
        return None if self._is_output_awaited(request, len(found) * self._chunk) else found

    def _is_output_awaited(self, request: Request, done: int) -> bool:
        """Whether a request waits for its encoder output, as engine/encoder/outputs.py has it wait."""
        cost, decisions, medium = self.cache.cost, self.cache.decisions, request.medium
        if medium is None:
            return False
        if not request.is_decided and cost is not None and self.queue is not None:
            text = self.queue.text(request.name, request.tokens, 1, done, waiting=self.cache.waiting)
            text = decisions.after(text, request.reader, request.looker)
            parts = [Part(medium, request.rows, cost.encode_s(request.rows))]
            if not decisions.are_known(parts, request.looker, text):
                return True
            decisions.weigh(parts, request.looker, text, cost.prefill_s(done, request.tokens), is_more=True)
        request.is_decided = True
        return self.cache.lookup(medium, request.looker) is Lookup.RETRY

    def _begin_output(self, request: Request) -> None:
        """A request begins: its encoder output is copied from RAM, or made in this step."""
        medium, looker = request.medium, request.looker
        if medium is None:
            return
        looker.cut = True
        if self.cache.lookup(medium, looker) is Lookup.HIT:
            self.cache.begin_load([medium.key], looker)
            self.cache.end_load([medium.key])
        else:
            self.encoded += 1
            self._encoding.append(request)
            self.cache.begin_store([medium], looker)
        self.cache.release(looker)

    def _await(self, reader: Reader) -> bool:
        """Whether all that a request waits for comes in the time for which it may hold up the step."""
        if self.queue is None or self.tier is None or reader.plan is None or not (self._is_sync and reader.waiting):
            return False
        left_s = self.queue.stall_left_s
        if reader.plan.choice.load_s > left_s:
            return False
        began_s = self.clock.monotonic()
        while reader.waiting and self.tier.next_s <= began_s + left_s:
            self.clock.advance(max(self.tier.next_s - self.clock.monotonic(), 0.0))
            self.cache.step()
        self.queue.stall(self.clock.monotonic() - began_s)
        return not reader.waiting

    def _begin(self, request: Request, found: list[Chunk]) -> float:
        """What it has in RAM is copied, within the step or beside it; returns the step's seconds for it."""
        request.done = min(len(found) * self._chunk, request.tokens - 1)
        request.hit_tokens = request.hit_tokens if request.again else request.done
        if self.queue is not None:
            self.queue.admit(request.name, request.tokens, request.done)
        self._begin_output(request)
        if not found:
            self.cache.release(request.reader)
            return 0.0
        request.loading = [chunk.key for chunk in found]
        self.cache.begin_load(request.loading, request.reader)
        size = len(found) * self.cache.ram.slab.slot_bytes
        seconds = size / self.engine.copy_bytes_per_s
        if self.cache.cost is not None:
            self.cache.cost.observe_copy(size, seconds)
        is_sync = self._is_sync and (self.queue is None or self.queue.may_stall(seconds))
        if is_sync:
            self._loaded(request)
            if self.queue is not None:
                self.queue.stall(seconds)
            return seconds
        request.state = "loading"
        self._loading.append((self.clock.monotonic() + seconds, request))
        return 0.0

    def _loaded(self, request: Request) -> None:
        self.cache.end_load(request.loading)
        request.loading = []
        request.state = "loaded"

    def _sleep(self, next_s: float) -> None:
        """Nothing to compute: until something lands or arrives; an engine with requests polls."""
        now_s = self.clock.monotonic()
        events = [next_s, *(at for at, _ in self._loading)]
        if self.tier is not None and self._waiting:
            events += [self.tier.next_s, now_s + (_POLL_S if self.tier.asking else 0.2)]
        elif self._waiting:
            events.append(now_s + 0.2)
        self.clock.advance(max(min(events) - now_s, 0.0) + (_POLL_S if self._waiting else 0.0))
        self.cache.step()
