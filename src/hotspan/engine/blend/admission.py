"""The scheduler's half: which windows a new prompt has, whether it is blended, and what the worker is to do.

arrives --match--> ordinary                             what is seen a second time is stored from it
               \\-> plan --begin--> job --report--> the engine computes the last token
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.config.settings import BlendSettings
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.terms import Scope
from hotspan.core.types import IN_RAM_ONLY, Chunk, ChunkKey, Lookup
from hotspan.engine.blend.index import Found, Window, WindowIndex
from hotspan.engine.blend.isolation import NONCE_BYTES, isolated
from hotspan.engine.blend.orders import BlendJob, Orders, Piece, Report, StoreJob
from hotspan.engine.blend.plan import Pace, Refusal, SpanPlan, plan_spans
from hotspan.engine.blend.runs import Run, token_count
from hotspan.engine.blend.selectors import Selector
from hotspan.engine.blend.survey import survey
from hotspan.engine.blend.windows import Tokens, as_tokens, sections
from hotspan.engine.requests import RequestRecord

logger = logging.getLogger(__name__)

_STORES_PER_STEP = 4
"""Windows at most that are stored after one step; others wait until they are seen again."""

_MIN_BUDGET = 128
"""Tokens that a step computes of blends, however much else it computes."""

_MAX_FAILURES = 3
"""Blends in a row that may fail before blending is off."""


@dataclass(slots=True)
class _Request:
    """What is known of one request from its look-up to its end.

    reusable, to_store: windows in its prompt.
    reader: holds windows in RAM from the plan to the load.
    job:    its number, once it is blended. report: what its answer says of that, once that is complete.
    is_settled: it is not looked at again.
    """

    record: RequestRecord
    tokens: Tokens
    reusable: tuple[Found, ...]
    to_store: list[Found]
    reader: Reader = field(default_factory=lambda: Reader(cut=True))
    plan: SpanPlan | None = None
    job: int | None = None
    report: dict[str, Any] | None = None
    is_settled: bool = False


class _Loading(NamedTuple):
    """A job in flight. keys: of the windows that it loads. tokens: by kind. is_stale: the cache was cleared since."""

    request_id: str
    keys: list[ChunkKey]
    tokens: dict[str, int]
    is_stale: bool = False


class _Storing(NamedTuple):
    """A store in flight, by the key that the window has in RAM."""

    window: Window
    position: int
    is_stale: bool = False


class Blending:
    """Blending in one engine. The scheduler's thread calls it.

    Windows are kept in RAM only, under keys that have their position as well: what is rotated is never in doubt.

    pace: predicted speeds; None until the worker's self-test passed, and nothing is blended before.
    off:  why nothing is blended; None while it is.
    """

    def __init__(
        self,
        settings: BlendSettings,
        cache: TieredCache,
        chunk_tokens: int,
        block_tokens: int,
        step_tokens: int,
        separators: Sequence[Sequence[int]] = (),
    ) -> None:
        self.pace: Pace | None = None
        self.off: str | None = None
        self.index = WindowIndex(chunk_tokens)
        self._settings = settings
        self._cache = cache
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._separators = separators
        self._requests: dict[str, _Request] = {}
        self._loading: dict[int, _Loading] = {}
        self._storing: dict[ChunkKey, _Storing] = {}
        self._new_jobs: list[BlendJob] = []
        self._cancelled: list[int] = []
        self._jobs = 0
        self._failures = 0

    # -- a request -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, record: RequestRecord, kept_tokens: int, loaded_tokens: int) -> int:
        """Tokens behind the exact prefix that are claimed; 0 for a request that is not blended. May be asked again.

        kept_tokens: in the engine's own prefix cache. loaded_tokens: behind these, exact, from the tiers: a request
                     that loads some is not blended.
        """
        if self.off is not None or self.pace is None:
            return 0
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._arrive(request, record, kept_tokens + loaded_tokens)
        if known is None or known.job is not None or known.is_settled:
            return 0
        self._cache.release(known.reader)
        known.plan = None
        if loaded_tokens or not self._is_asked_for(record):
            return 0
        planned = self._plan(request, known, kept_tokens)
        if isinstance(planned, Refusal):
            self._cache.release(known.reader)
            known.is_settled = True
            if known.reusable:
                self._cache.stats.blends[planned.value] += 1
            return 0
        known.plan = planned
        return planned.claimed.tokens

    def begin(self, request: Request, blocks: Sequence[int]) -> SpanPlan | None:
        """The engine has blocks for a request: it is blended in them if it was planned, under private names."""
        known = self._requests.get(request.request_id)
        plan = known.plan if known is not None else None
        if known is None or plan is None:
            return None
        known.plan, known.is_settled = None, True
        keys = [_stored_key(reuse.window) for reuse in plan.reused]
        slots = self._cache.begin_load(keys, known.reader)
        for reuse, key in zip(plan.reused, keys, strict=True):
            self._cache.join([Chunk(key, None, IN_RAM_ONLY)], self._reader(known.record, reuse.run))
        nonce = os.urandom(NONCE_BYTES)
        private = isolated(request.block_hashes, plan.first_approximate, self._block_tokens, nonce)
        request.block_hashes[:] = private
        known.record.may_store = False  # neither this prompt's windows nor its chunks: from there on all is approximate
        known.to_store.clear()
        computed = plan.recomputed(self._selected(plan))
        known.job, self._jobs = self._jobs, self._jobs + 1
        counts = {"reused": plan.reused_tokens, "recomputed": token_count(computed) - token_count(plan.fresh)}
        self._loading[known.job] = _Loading(request.request_id, keys, counts | {"fresh": token_count(plan.fresh)})
        pieces = [
            Piece(reuse.run, slot, reuse.skip, reuse.shift) for reuse, slot in zip(plan.reused, slots, strict=True)
        ]
        self._new_jobs.append(BlendJob(known.job, request.request_id, known.tokens, list(blocks), pieces, computed))
        return plan

    def end(self, request_id: str) -> dict[str, Any] | None:
        """A request ended, or was aborted. Returns what its answer says of blending; None if it was not blended."""
        known = self._requests.pop(request_id, None)
        if known is None:
            return None
        self._cache.release(known.reader)
        if known.job in self._loading:
            self._cancelled.append(known.job)
        return known.report

    # -- a step --------------------------------------------------------------------------------------------------------

    def orders(self, scheduled: SchedulerOutput) -> Orders | None:
        """What the worker does in this step; None if there is nothing."""
        stores = self._begin_stores(scheduled)
        if not (stores or self._loading):
            self._cancelled.clear()
            return None
        budget = max(_MIN_BUDGET, self._step_tokens - scheduled.total_num_scheduled_tokens)
        orders = Orders(budget, self._new_jobs, stores, self._cancelled)
        self._new_jobs, self._cancelled = [], []
        return orders

    def note(self, report: Report) -> None:
        """What the worker did."""
        stats = self._cache.stats
        if report.off is not None:
            self._turn_off(report.off)
        if report.speed is not None and self.off is None:
            self.pace, stats.is_blending = Pace(0.0, report.speed.token_s, 0.0, report.speed.move_s), True
        stats.blend_seconds += report.seconds
        for number in report.ended:
            job = self._loading.pop(number)
            if not job.is_stale:
                self._cache.end_load(job.keys)
            self._count(number, job, is_failed=number in report.failed)
        if self._failures >= _MAX_FAILURES:
            self._turn_off(f"{self._failures} blends in a row failed")
        for keys, success in ((report.stored, True), (report.unstored, False)):
            for key in keys:
                self._end_store(key, success=success)

    def invalidate(self, scopes: Iterable[Scope]) -> None:
        """Forget what these scopes may name of windows by their text: all windows of the tenants concerned.

        What scopes match by terms is gone by `TieredCache.invalidate`.
        """
        named = [scope for scope in scopes if scope.keys is not None]
        if named:
            self._cache.forget_in_ram_only({scope.tenant for scope in named})

    def clear(self) -> None:
        """The cache was cleared: what is in flight has nothing to give back any more."""
        self._loading = {number: job._replace(is_stale=True) for number, job in self._loading.items()}
        self._storing = {key: store._replace(is_stale=True) for key, store in self._storing.items()}
        for known in self._requests.values():
            known.plan = None

    @property
    def is_busy(self) -> bool:
        """Whether the worker loads, computes or stores."""
        return bool(self._loading or self._storing)

    @property
    def is_stale(self) -> bool:
        """Whether the worker still uses slots of before the cache was cleared."""
        return any(job.is_stale for job in self._loading.values()) or any(
            store.is_stale for store in self._storing.values()
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _count(self, number: int, job: _Loading, *, is_failed: bool) -> None:
        """A job ended; that of a request which has ended before it was cancelled."""
        known = self._requests.get(job.request_id)
        is_cancelled = known is None or known.job != number
        self._cache.stats.blends["failed" if is_failed else "cancelled" if is_cancelled else "blended"] += 1
        self._failures = self._failures + 1 if is_failed else 0
        if known is not None and not is_cancelled and not is_failed:
            known.report = {"mode": Selector.FIRST_K.value, **job.tokens}
            self._cache.stats.blended_tokens.update(job.tokens)

    def _arrive(self, request: Request, record: RequestRecord, exact_tokens: int) -> _Request | None:
        """Look at a prompt for the first time; None if nothing of it may be found or learnt."""
        ids = request.prompt_token_ids
        if record.keyer is None or not record.may_store or not _is_plain(request) or ids is None:
            return None
        keyer = record.keyer.salted(request.cache_salt) if request.cache_salt else record.keyer
        tokens = as_tokens(ids)
        seen = survey(
            self.index, keyer.owner, tokens, exact_tokens, sections(tokens, self._separators), partial(_named, keyer)
        )
        reusable = tuple(found for found in seen.reusable if self._is_in_ram(found.window))
        lost = [found for found in seen.reusable if not found.window.is_stored and found.run.start >= exact_tokens]
        to_store = sorted([*seen.seen, *lost], key=lambda found: found.run)
        known = self._requests[request.request_id] = _Request(record, tokens, reusable, to_store)
        return known

    def _is_asked_for(self, record: RequestRecord) -> bool:
        if record.blend is not None:
            return record.blend
        return self._settings.mode != "allowed"

    def _plan(self, request: Request, known: _Request, exact_tokens: int) -> SpanPlan | Refusal:
        """Plan with the windows that are in RAM, which stay there from now on."""
        if self.pace is None:
            return Refusal.LITTLE_SAVED
        there = [found for found in known.reusable if self._is_held(found.window, known.reader)]
        share = min(1.0, self._settings.first_k / self.index.width)
        planned = plan_spans(
            len(known.tokens), exact_tokens, there, self.pace, share, min_tokens=self._settings.min_tokens
        )
        if isinstance(planned, SpanPlan) and planned.first_approximate // self._block_tokens >= len(
            request.block_hashes
        ):
            return Refusal.FEW_TOKENS  # the block of the first approximate token has no name yet
        return planned

    def _is_in_ram(self, window: Window) -> bool:
        """Whether RAM has a window that was stored; if it left RAM, it is to be stored again."""
        window.is_stored = bool(self._cache.where(_stored_key(window)))
        return window.is_stored

    def _is_held(self, window: Window, reader: Reader) -> bool:
        """Whether RAM has a window, which is held for the reader from now on."""
        return self._cache.lookup(Chunk(_stored_key(window), None, IN_RAM_ONLY), reader) is Lookup.HIT

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
        """Stores of windows whose last token this step computes."""
        stores: list[StoreJob] = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            known = self._requests.get(request_id)
            if known is None or not known.to_store:
                continue
            computed = known.record.request.num_computed_tokens + count
            ready = [found for found in known.to_store if found.run.stop <= computed]
            known.to_store = [found for found in known.to_store if found.run.stop > computed]
            if known.record.may_store:
                for found in ready[: _STORES_PER_STEP - len(stores)]:
                    stores += self._begin_store(request_id, known.record, found)
        return stores

    def _begin_store(self, request_id: str, record: RequestRecord, found: Found) -> list[StoreJob]:
        window = Window(found.window.key, found.run.start)
        key = _stored_key(window)
        is_known = found.window.is_stored or any(each.window is found.window for each in self._storing.values())
        if is_known or key in self._storing:
            return []
        placements = self._cache.begin_store([Chunk(key, None, IN_RAM_ONLY)], self._reader(record, found.run))
        if not placements:
            return []
        self._storing[key] = _Storing(found.window, found.run.start)
        return [StoreJob(key, request_id, found.run.start, placements[0].slot)]

    def _end_store(self, key: ChunkKey, *, success: bool) -> None:
        store = self._storing.pop(key)
        if store.is_stale:
            return
        self._cache.end_store([Chunk(key, None, IN_RAM_ONLY)], success=success)
        if success:
            store.window.position, store.window.is_stored = store.position, True
            self._cache.stats.windows_stored += 1

    def _turn_off(self, reason: str) -> None:
        if self.off is None:
            self.off, self._cache.stats.is_blending = reason, False
            logger.warning("blending_off: %s; requests are computed without it", reason)


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


def _named(keyer: ChunkKeyer, tokens: Tokens) -> ChunkKey:
    return keyer.window_key(tokens.astype("<u4").tobytes(), 0)


def _stored_key(window: Window) -> ChunkKey:
    """The key of a window's KV in RAM: of its content and the position that its keys have."""
    return ChunkKey(sha256(b"hotspan-window-1" + window.key + window.position.to_bytes(8, "little")).digest())
