"""One simulated replica: a queue, one step of prefill at a time, many decodes, and caches.

    arrive -> queue (FIFO) -> prefill: load what a tier has and is worth it, compute the rest -> first byte
           -> decode, beside others -> end

With blending, a prompt may be made of windows (windows.py) instead. Prompts that wait and fit into one step together
are prefilled together, and get their first tokens when all of them are computed.

Prefill and decode share the steps of one engine. While something is prefilled a step has `step_tokens` tokens, one of
them for each request that decodes; so n decoding requests leave 1 - n/step_tokens of the prefill's speed, and get their
next token only when such a step ends. All that decode go at one pace, so that one count of steps tells how far each is.
"""

from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from hotspan.core.trace import Request
from hotspan.router.types import Medium
from hotspan.simulate.caches import BlockCache, Change, Pool
from hotspan.simulate.costs import Blend, Costs
from hotspan.simulate.windows import Blended, Windows

_TINY = 1e-9

NEVER = float("inf")


class Job:
    """A request on its way."""

    __slots__ = (
        *("arrived_s", "began_s", "blended", "changes", "ended_s", "first_s", "found", "index", "loaded", "replica"),
        *("request", "tail"),
    )

    def __init__(self, index: int, request: Request, arrived_s: float) -> None:
        self.index = index
        self.request = request
        self.arrived_s = arrived_s
        self.began_s = self.first_s = self.ended_s = -1.0
        self.replica = -1
        self.found = 0  # tokens in the GPU's pool
        self.blended = 0  # tokens taken from windows
        self.tail = 0  # tokens in the pool, its answer's among them, that have no name there
        self.loaded: dict[Medium, int] = {}  # tokens
        self.changes: dict[Medium, Change] = {}


class SimulatedReplica:
    """The state of one, at `at_s`. The simulation calls `advance` when `next_s` has come.

    pool:   the GPU's. caches: all by medium; L2's is the same object for all replicas.
    on_first, on_end: a job's first byte, its last.
    blend:  it reuses what is no prefix, too.
    """

    def __init__(
        self,
        number: int,
        costs: Costs,
        pool: Pool,
        caches: Mapping[Medium, BlockCache],
        block_tokens: int,
        on_first: Callable[[Job, float], None],
        on_end: Callable[[Job, float], None],
        blend: Blend | None = None,
    ) -> None:
        self.number = number
        self.at_s = 0.0
        self.busy_s = 0.0  # in which something was prefilled
        self._costs = costs
        self._pool = pool
        self._caches = {Medium.GPU: pool, **caches}
        self._block_tokens = block_tokens
        self._windows = Windows(blend, costs, caches, block_tokens) if blend is not None else None
        self._on_first = on_first
        self._on_end = on_end
        self._queue: deque[Job] = deque()
        self._current: list[Job] = []  # whose prompts are prefilled together
        self._work_s = self._prompts_s = 0.0  # left of them, and of all of them, at full speed
        self._steps = 0.0  # tokens that each decoding request got so far
        self._decoding: list[tuple[float, int, Job]] = []  # (when `_steps` is this, it ends)

    @property
    def requests(self) -> int:
        """That have not ended."""
        return len(self._queue) + len(self._current) + len(self._decoding)

    def arrive(self, job: Job, now_s: float) -> None:
        """A request comes."""
        self.advance(now_s)
        job.replica = self.number
        self._queue.append(job)
        self._begin()

    def next_s(self) -> float:
        """When something happens next if nothing comes."""
        found = NEVER
        if self._current:
            found = self._first_s()
        if self._decoding:
            found = min(found, self._decoded_s())
        return found

    def advance(self, now_s: float) -> None:
        """Let time pass, which must not be beyond `next_s`, and let happen what is due."""
        passed = now_s - self.at_s
        if passed > 0:
            if self._decoding:
                self._steps += passed / self._step_s()
            if self._current:
                self._work_s -= passed * self._prefill_speed()
                self.busy_s += passed
            self.at_s = now_s
        # What is left may be too short to move the clock: then it is due, too.
        while self._decoding and (self._decoding[0][0] <= self._steps + _TINY or self._decoded_s() <= self.at_s):
            self._end(heappop(self._decoding)[2])
        if self._current and (self._work_s <= _TINY or self._first_s() <= self.at_s):
            self._end_prefill()
        self._begin()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _first_s(self) -> float:
        """When the first tokens of the current prompts come."""
        return self.at_s + self._work_s / self._prefill_speed()

    def _decoded_s(self) -> float:
        """When the next answer is whole."""
        return self.at_s + max(0.0, self._decoding[0][0] - self._steps) * self._step_s()

    def _prefill_speed(self) -> float:
        tokens = self._costs.step_tokens
        return max(1, tokens - len(self._decoding)) / tokens

    def _step_s(self) -> float:
        costs = self._costs
        alone_s = costs.step_s + costs.request_step_s * (len(self._decoding) - 1)
        if not self._current:
            return alone_s
        return max(
            alone_s, min(costs.step_tokens / costs.prefill_tokens_per_s, self._prompts_s / self._prefill_speed())
        )

    def _begin(self) -> None:
        """Begin with the prompt that waits longest, and with those behind it that fit into one step with it."""
        if self._current:
            return
        left = self._costs.step_tokens - len(self._decoding)
        while self._queue and len(self._decoding) + len(self._current) < self._costs.max_running:
            job = self._queue[0]
            *_, held = self._found(job.request)
            left -= job.request.tokens - held * self._block_tokens
            if self._current and left < 0:
                break
            self._current.append(self._queue.popleft())
            job.began_s = self.at_s
            self._work_s += self._take(job)
        self._prompts_s = self._work_s

    def _found(self, request: Request) -> tuple[int, dict[Medium, int], float, int]:
        """Tokens in the pool, tokens to load by tier, the seconds of that, and all blocks of both."""
        costs, caches, block = self._costs, self._caches, self._block_tokens
        end = min(len(request.keys), (request.tokens - 1) // block)  # the last token is always computed
        held = caches[Medium.GPU].prefix(request.keys, 0, end)
        kept, loaded, work_s = held * block, dict[Medium, int](), 0.0
        for medium in (Medium.RAM, Medium.DISK, Medium.L2):
            cache = caches.get(medium)
            if cache is not None and held < end:
                until = cache.prefix(request.keys, held, end)
                load_s = costs.loading_s(medium, (until - held) * block)
                if until > held and load_s < costs.prefill_s(held * block, until * block):
                    loaded[medium] = (until - held) * block
                    work_s += load_s
                    held = until
        return kept, loaded, work_s, held

    def _take(self, job: Job) -> float:
        """Seconds of prefill, of what is found in no cache or not worth loading; all of it is in the caches then."""
        request, costs, caches, block = job.request, self._costs, self._caches, self._block_tokens
        job.found, job.loaded, work_s, held = self._found(request)
        if self._windows is not None:
            blended = self._windows.plan(request, job.found, held * block)
            if blended is not None:
                return self._blend(job, self._windows, blended)
            self._windows.learn(request, held * block)
        loaded = range(job.found // block, held)
        job.tail = self._tail(request, len(request.keys))
        self._pool.begin(job.tail)
        for medium, cache in caches.items():
            job.changes[medium] = cache.use(request.keys, loaded)
        return work_s + costs.prefill_s(held * block, request.tokens)

    def _blend(self, job: Job, windows: Windows, blended: Blended) -> float:
        """Seconds of a prompt that is blended: nothing of it is kept but the beginning that the pool had."""
        job.loaded, job.blended = {}, blended.tokens
        windows.use(blended.windows)
        kept = job.found // self._block_tokens
        job.tail = self._tail(job.request, kept)
        self._pool.begin(job.tail)
        self._pool.use(job.request.keys[:kept])
        return blended.work_s

    def _end_prefill(self) -> None:
        done, self._current, self._work_s = self._current, [], 0.0
        for job in done:
            self._first(job)

    def _first(self, job: Job) -> None:
        job.first_s = self.at_s
        self._on_first(job, self.at_s)
        if job.request.answer_tokens > 1:
            heappush(self._decoding, (self._steps + job.request.answer_tokens - 1, job.index, job))
        else:
            self._end(job)

    def _end(self, job: Job) -> None:
        job.ended_s = self.at_s
        self._pool.end(job.tail)
        for cache in self._caches.values():
            cache.ended(job.request)
        self._on_end(job, self.at_s)

    def _tail(self, request: Request, blocks: int) -> int:
        """Tokens behind its first blocks, its answer's among them."""
        computed = request.tokens + request.answer_tokens - 1  # the last token of an answer is never put in
        return max(0, computed - blocks * self._block_tokens)
