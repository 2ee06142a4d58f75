"""The scheduler's half: which windows a new prompt has, whether it is blended, and what the worker is to do.

arrives --match--> ordinary                             what is seen a second time is stored from it
               \\-> plan --begin--> job --report--> the engine computes the last token
"""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from hotspan.cache.choice import Text
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.config.settings import BlendSettings
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.types import ChunkKey
from hotspan.engine.blend.agreement import Checks
from hotspan.engine.blend.index import Found, WindowIndex
from hotspan.engine.blend.isolation import NONCE_BYTES, isolated
from hotspan.engine.blend.orders import BlendJob, Orders, Piece, Report, Selection, Speed, StoreJob
from hotspan.engine.blend.plan import Pace, Refusal, SpanPlan
from hotspan.engine.blend.planner import Planner, Prompt, selection
from hotspan.engine.blend.runs import Run, token_count
from hotspan.engine.blend.selectors import Selector
from hotspan.engine.blend.store import WindowStore
from hotspan.engine.blend.survey import survey
from hotspan.engine.blend.windows import Tokens, as_tokens, sections, windows
from hotspan.engine.requests import RequestRecord

logger = logging.getLogger(__name__)

_STORES_PER_STEP = 4
"""Windows that may be stored after a step beyond those that its tokens fill. What is more waits for the next one."""

_MIN_BUDGET = 128
"""Tokens that a step computes of blends, however much else it computes."""

_IDLE_CHECK, _BUSY_CHECK = 512, 64
"""Tokens at most that a step computes of checks, in an engine that has nothing else to do, and in one that has."""

_MAX_FAILURES = 3
"""Blends in a row that may fail before blending is off."""


@dataclass(slots=True)
class _Request(Prompt):
    """What is known of one request from its look-up to its end.

    to_store: windows in its prompt that are seen again.
    plan:     what it will be.
    job:      its number, once it is blended. report: what its answer says of that, once that is complete.
    is_settled: it is not looked at again.
    """

    to_store: list[Found] = field(default_factory=list)
    plan: SpanPlan | None = None
    job: int | None = None
    report: dict[str, Any] | None = None
    is_settled: bool = False


class _Loading(NamedTuple):
    """A job in flight.

    keys: of the windows that it loads. tokens: by kind. is_stale: the cache was cleared since.
    ordered: by which orders, None while it is not.
    """

    request_id: str
    keys: list[ChunkKey]
    tokens: dict[str, int]
    is_stale: bool = False
    ordered: int | None = None


class Blending:
    """Blending in one engine. The scheduler's thread calls it.

    pace:   predicted speeds; None until the worker's self-test passed, and nothing is blended before.
    off:    why nothing is blended; None while it is.
    checks: of what was blended against full prefills.
    """

    def __init__(
        self,
        settings: BlendSettings,
        cache: TieredCache,
        chunk_tokens: int,
        block_tokens: int,
        step_tokens: int,
        separators: Sequence[Sequence[int]] = (),
        clock: Clock | None = None,
    ) -> None:
        self.off: str | None = None
        self.index = WindowIndex(chunk_tokens)
        self.checks = Checks(settings.check_every, settings.min_agreement, block_tokens, cache.stats)
        self._store = WindowStore(cache)
        self._clock = clock or SystemClock()
        self._planner = Planner(settings, cache, self._store, chunk_tokens, block_tokens, self._clock)
        self._settings = settings
        self._cache = cache
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self.separators = separators
        self._requests: dict[str, _Request] = {}
        self._loading: dict[int, _Loading] = {}
        self._new_jobs: list[BlendJob] = []
        self._cancelled: list[int] = []
        self._orders = 0
        self._jobs = 0
        self._failures = 0

    @property
    def pace(self) -> Pace | None:
        return self._planner.pace

    # -- a request -----------------------------------------------------------------------------------------------------

    def ask(self, request: Request, record: RequestRecord) -> None:
        """A request came: tiers that must ask elsewhere begin to find out which windows of its prompt they have."""
        if self.off is None and self.pace is not None and self._is_asked_for(record) and _is_plain(request):
            keyer, tokens = _keyer(request, record), as_tokens(request.prompt_token_ids or ())
            if keyer is not None:
                runs = [run for each in sections(tokens, self.separators) for run in windows(each, self.index.width)]
                self._store.ask([_named(keyer, tokens[run.start : run.stop]) for run in runs], record.terms)

    def match(
        self,
        request: Request,
        record: RequestRecord,
        kept_tokens: int,
        loaded_tokens: int,
        text: Text | None = None,
    ) -> int | None:
        """Tokens behind the exact prefix that are claimed; 0 for a request that is not blended. May be asked again.

        None: windows are on their way to RAM, or a tier has yet to say whether it has them; ask again later.

        kept_tokens: in the engine's own prefix cache. loaded_tokens: behind these, exact, in the tiers.
        text:        as the cost model sees the prompt now; None: as in an engine that has nothing else to do.
        """
        if self.off is not None or self.pace is None:
            return 0
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._arrive(request, record, kept_tokens + loaded_tokens)
        if known is None or known.job is not None or known.is_settled or not self._is_asked_for(record):
            return 0
        if known.plan is not None:  # the engine had no room for it: what it is now may be something else
            self._planner.release(known)
            known.plan = None
        text = text or Text(len(known.tokens), self.index.width, kept_tokens)
        planned = self._planner.plan(known, len(request.block_hashes), kept_tokens, loaded_tokens, text)
        if isinstance(planned, Refusal):
            is_chosen = known.chosen is not None
            self._planner.release(known)
            known.is_settled = True
            if is_chosen or any(map(self._store.is_there, known.windows)):
                self._cache.stats.blends[planned.value] += 1
            return 0
        known.plan = planned
        return planned.claimed.tokens if planned is not None else None

    def begin(self, request: Request, blocks: Sequence[int]) -> SpanPlan | None:
        """The engine has blocks for a request: it is blended in them if it was planned, under private names."""
        known = self._requests.get(request.request_id)
        plan = known.plan if known is not None else None
        if known is None or plan is None:
            return None
        known.plan, known.is_settled = None, True
        self._cache.release(known.record)  # a prefix that it might have loaded
        keys = [reuse.window.key for reuse in plan.reused]
        chosen = self._selection_of(known.record)
        computed = plan.recomputed(self._selected(plan) if chosen.selector is Selector.FIRST_K else ())
        counts = {"reused": plan.reused_tokens, "recomputed": token_count(computed) - token_count(plan.fresh)}
        loading = _Loading(request.request_id, keys, counts | {"fresh": token_count(plan.fresh)})
        slots = self._store.begin_load(
            keys, known.reader, [self._reader(known.record, each.run) for each in plan.reused]
        )
        known.job, self._jobs = self._jobs, self._jobs + 1
        self._loading[known.job] = loading
        nonce = os.urandom(NONCE_BYTES)
        private = isolated(request.block_hashes, plan.first_approximate, self._block_tokens, nonce)
        request.block_hashes[:] = private
        known.record.is_blended = True
        known.record.may_store = False  # neither this prompt's windows nor its chunks: from there on all is approximate
        known.to_store.clear()
        pieces = [Piece(reuse.run, slot, reuse.skip, reuse.at) for reuse, slot in zip(plan.reused, slots, strict=True)]
        is_checked = self.checks.is_due(known.job, known.tokens, len(blocks))
        job = BlendJob(
            known.job,
            request.request_id,
            known.tokens,
            list(blocks),
            pieces,
            computed,
            is_checked,
            chosen if chosen.needs_probe else None,
        )
        self._new_jobs.append(job)
        return plan

    def withdraw(self, request_id: str) -> None:
        """A request could not begin: it is computed, and nothing is held for it. If it raises, call it again."""
        known = self._requests.get(request_id)
        if known is None:
            return
        known.plan, known.is_settled = None, True
        self._new_jobs = [job for job in self._new_jobs if job.request_id != request_id]
        if known.job is not None and (loading := self._loading.get(known.job)) is not None:
            while loading.keys:
                self._cache.end_load(loading.keys[-1:])
                loading.keys.pop()
            del self._loading[known.job]
        if known.job is not None:
            self.checks.drop(known.job)
        known.job = None
        self._planner.release(known)

    def end(self, request_id: str) -> dict[str, Any] | None:
        """A request ended, or was aborted. If it raises, call it again.

        Returns: what its answer says of blending; None if it was not blended.
        """
        known = self._requests.get(request_id)
        if known is None:
            return None
        self._cache.release(known.reader)
        del self._requests[request_id]
        if known.job in self._loading:
            self._cancelled.append(known.job)
        elif known.job is not None:
            self.checks.allow(known.job)
        return known.report

    # -- a step --------------------------------------------------------------------------------------------------------

    def orders(self, scheduled: SchedulerOutput) -> Orders | None:
        """What the worker does in this step; None if there is nothing."""
        self._orders += 1
        stores = self._begin_stores(scheduled)
        checks = self.checks.begin(self._orders)
        self._cancelled += self.checks.take_cancelled()
        if not (stores or self._loading or self._store.is_busy or self.checks.is_busy):
            self._cancelled.clear()
            return None
        budget = max(_MIN_BUDGET, self._step_tokens - scheduled.total_num_scheduled_tokens)
        is_idle = not (scheduled.total_num_scheduled_tokens or self._loading)
        check_budget = _IDLE_CHECK if is_idle else _BUSY_CHECK
        return self._handed(Orders(budget, self._new_jobs, stores, self._cancelled, checks, check_budget, self._orders))

    def bare_orders(self) -> Orders | None:
        """Orders that go on with what has begun, and begin nothing else; None if there is nothing."""
        if not self.is_busy:
            return None
        return self._handed(Orders(_MIN_BUDGET, self._new_jobs, [], self._cancelled, number=self._orders))

    def _handed(self, orders: Orders) -> Orders:
        """These orders, which the worker gets for certain."""
        for job in orders.blends:
            self._loading[job.number] = self._loading[job.number]._replace(ordered=orders.number)
        self._new_jobs, self._cancelled = [], []
        return orders

    def note(self, report: Report) -> None:
        """What the worker did. Mutates: takes out of the report what is done, so that the rest may be done again.

        A report may be lost, come twice or late, or name what nobody asked for: what waits for one ends with a later
        one (`Report.done`), and what waits for none is left as it is.
        """
        stats = self._cache.stats
        if report.off is not None:
            self._turn_off(report.off)
        if report.speed is not None and self.off is None:
            self._planner.pace, stats.is_blending = _pace(report.speed), True
            logger.warning("blending_on mode=%s: answers of blended requests are approximate", self._settings.mode)
        stats.blend_seconds += report.seconds
        report.off, report.speed, report.seconds = None, None, 0.0
        while report.selected:
            number, count = report.selected.popitem()
            if number in self._loading:
                self._loading[number].tokens["recomputed"] += count
        while report.ended:
            self._end_job(report.ended[0], is_failed=report.ended[0] in report.failed)
            del report.ended[0]
        if self._failures >= _MAX_FAILURES:
            self._turn_off(f"{self._failures} blends in a row failed")
        for keys, success in ((report.stored, True), (report.unstored, False)):
            while keys:
                self._store.end_store(keys[0], report.done, success=success)
                del keys[0]
        while report.checked:
            number, checked = report.checked.popitem()
            if (reason := self.checks.end(number, checked)) is not None:
                self._turn_off(reason)
        self._give_up(report.done, report.running)

    def _give_up(self, done: int, running: Collection[int]) -> None:
        """The worker had carried out these orders, and only this was running then: what else was ordered has ended."""
        self._store.give_up(done)
        self.checks.give_up(done, running)
        for number, job in list(self._loading.items()):
            if job.ordered is not None and job.ordered <= done and number not in running:
                if (known := self._requests.get(job.request_id)) is not None:
                    known.job = None  # whether it was blended is not known
                self._end_job(number, is_failed=False)

    def _end_job(self, number: int, *, is_failed: bool) -> None:
        """A blend ended. Mutates: it loses its keys, and is not there at last."""
        job = self._loading.get(number)
        if job is None:
            return
        while job.keys and not job.is_stale:
            self._cache.end_load(job.keys[-1:])
            job.keys.pop()
        self._count(number, job, is_failed=is_failed)
        del self._loading[number]

    def forget_all(self) -> None:
        """Nothing of the requests that are here is kept any more, and nothing is found for those that wait."""
        for known in self._requests.values():
            if known.job is None:
                self._cache.release(known.reader)
            known.chosen = known.plan = None
            known.is_settled = True
            known.to_store.clear()

    def clear(self) -> None:
        """The cache was cleared: what is in flight has nothing to give back any more."""
        self._loading = {number: job._replace(is_stale=True) for number, job in self._loading.items()}
        self._store.clear()
        for known in self._requests.values():
            known.chosen = known.plan = None

    @property
    def is_busy(self) -> bool:
        """Whether the worker loads, computes or stores."""
        return bool(self._loading) or self._store.is_busy or self.checks.is_busy

    @property
    def is_stale(self) -> bool:
        """Whether the worker still uses slots of before the cache was cleared."""
        return any(job.is_stale for job in self._loading.values()) or self._store.is_stale

    # -- inside --------------------------------------------------------------------------------------------------------

    def _count(self, number: int, job: _Loading, *, is_failed: bool) -> None:
        """A job ended; that of a request which has ended before it was cancelled."""
        known = self._requests.get(job.request_id)
        is_cancelled = known is None or known.job != number
        self._cache.stats.blends["failed" if is_failed else "cancelled" if is_cancelled else "blended"] += 1
        self._failures = self._failures + 1 if is_failed else 0
        if known is not None and not is_cancelled and not is_failed:
            known.report = {"mode": self._selection_of(known.record).selector.value, **job.tokens}
            self._cache.stats.blended_tokens.update(job.tokens)
        else:
            self.checks.drop(number)

    def _arrive(self, request: Request, record: RequestRecord, exact_tokens: int) -> _Request | None:
        """Look at a prompt for the first time; None if nothing of it may be found or learnt."""
        ids = request.prompt_token_ids
        keyer = _keyer(request, record)
        if keyer is None or not record.may_store or not _is_plain(request) or ids is None:
            return None
        tokens = as_tokens(ids)
        seen = survey(
            self.index, keyer.owner, tokens, exact_tokens, sections(tokens, self.separators), partial(_named, keyer)
        )
        found = sorted([*seen.known, *seen.noted], key=lambda each: each.run)
        to_store = [each for each in seen.known if each.run.start >= exact_tokens and not self._store.is_there(each)]
        reader = Reader(terms=record.terms, bare_terms=record.terms)
        known = _Request(record, tokens, found, reader, self._clock.monotonic(), to_store=to_store)
        self._requests[request.request_id] = known
        if self._is_asked_for(record):
            self._store.ask([each.window.key for each in found], record.terms)
        return known

    def _is_asked_for(self, record: RequestRecord) -> bool:
        if record.blend is not None:
            return record.blend is not False
        return self._settings.mode != "allowed"

    def _selection_of(self, record: RequestRecord) -> Selection:
        return selection(self._settings, self.index.width, record)

    def _selected(self, plan: SpanPlan) -> list[int]:
        """The reused tokens that are computed again: the first of each run of windows that lay side by side before."""
        runs: list[tuple[Run, int]] = []
        for reuse in plan.reused:
            if runs and runs[-1][0].stop == reuse.run.start and runs[-1][1] == reuse.shift:
                runs[-1] = (Run(runs[-1][0].start, reuse.run.stop), reuse.shift)
            else:
                runs.append((reuse.run, reuse.shift))
        first = self._settings.first_k
        return [place for run, _ in runs for place in range(run.start, min(run.stop, run.start + first))]

    def _reader(self, record: RequestRecord, run: Run) -> Reader:
        """The terms of a window: those of the request where the window ends."""
        terms = record.terms_at((run.stop - 1) // self.index.width)
        return Reader(terms=terms, bare_terms=terms, renews=record.renews)

    def _begin_stores(self, scheduled: SchedulerOutput) -> list[StoreJob]:
        """Stores of windows whose last token is computed with this step."""
        stores: list[StoreJob] = []
        try:
            self._add_stores(scheduled, stores)
        except BaseException:
            for store in stores:  # the worker is not told of them
                self._store.end_store(store.key, self._orders, success=False)
            raise
        return stores

    def _add_stores(self, scheduled: SchedulerOutput, stores: list[StoreJob]) -> None:
        """Begin them. Mutates: `stores`."""
        limit = _STORES_PER_STEP + scheduled.total_num_scheduled_tokens // self.index.width
        for request_id, count in scheduled.num_scheduled_tokens.items():
            known = self._requests.get(request_id)
            if known is None or not known.to_store:
                continue
            computed = known.record.request.num_computed_tokens + count
            waiting = []
            for found in known.to_store if known.record.may_store else ():
                if found.run.stop <= computed and len(stores) < limit:
                    stores += self._begin_store(request_id, known.record, found)
                else:
                    waiting.append(found)
            known.to_store = waiting

    def _begin_store(self, request_id: str, record: RequestRecord, found: Found) -> list[StoreJob]:
        slot = self._store.begin_store(found, self._reader(record, found.run), self._orders)
        if slot is None:
            return []
        found.window.position = found.run.start
        return [StoreJob(found.window.key, request_id, found.run.start, slot)]

    def _turn_off(self, reason: str) -> None:
        if self.off is None:
            self.off, self._cache.stats.is_blending = reason, False
            logger.warning("blending_off: %s; requests are computed without it", reason)


def _pace(speed: Speed) -> Pace:
    return Pace(0.0, speed.token_s, 0.0, speed.move_s, speed.layers)


def _is_plain(request: Request) -> bool:
    """Whether a request is a text whose answer has not begun."""
    return (
        not request.mm_features
        and request.lora_request is None
        and request.pooling_params is None
        and request.prompt_embeds is None
        and not request.skip_reading_prefix_cache
        and request.num_preemptions == 0
        and request.num_output_tokens == 0
    )


def _keyer(request: Request, record: RequestRecord) -> ChunkKeyer | None:
    """What names the windows of a request; None if nothing of it may be cached."""
    if record.keyer is None or not request.cache_salt:
        return record.keyer
    return record.keyer.salted(request.cache_salt)


def _named(keyer: ChunkKeyer, tokens: Tokens) -> ChunkKey:
    return keyer.window_key(tokens.astype("<u4").tobytes(), 0)
