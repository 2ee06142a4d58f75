"""The requests that are here, what their chunks are called, and what takes them out again.

    they come    `Admission` names their chunks (engine/requests.py)
    they go      an invalidation, another adapter under their adapter's name, other weights, a mistake of ours

A request that is taken out goes on, and leaves nothing in the cache.
"""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from hotspan.cache.history import History
from hotspan.cache.savings import SavedText, Savings
from hotspan.cache.tiered import TieredCache
from hotspan.cache.withdrawals import Withdrawals
from hotspan.core.clock import Clock
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, adapter_label
from hotspan.core.types import Chunk
from hotspan.engine.adapters import registered_name
from hotspan.engine.blend.admission import Blending
from hotspan.engine.blend.orders import Report
from hotspan.engine.encoder.outputs import EncoderOutputs
from hotspan.engine.explaining import Explainer
from hotspan.engine.net import Unfinished, netted
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.requests import Admission, RequestRecord
from hotspan.tiers.base import Durable

logger = logging.getLogger(__name__)


class Removed(NamedTuple):
    """What an invalidation removed here: blocks and chunks by where, and how many requests keep nothing any more."""

    counts: dict[str, int]
    requests: int


class PresentRequests:
    """Requests by their names, under the name that the engine's weights have now.

    prefixes: the engine's own cache. blending, outputs: where there are any.
    former:   other names that this engine's chunks may have in lower tiers.
    """

    def __init__(
        self,
        cache: TieredCache,
        admission: Admission,
        prefixes: GpuPrefixes,
        clock: Clock,
        blending: Blending | None,
        outputs: EncoderOutputs | None,
    ) -> None:
        self.cache = cache
        self.prefixes = prefixes
        self.blending = blending
        self.outputs = outputs
        self.savings = Savings()
        self.namespace = admission.namespace
        self.former: set[bytes] = set()
        self._admission = admission
        self._clock = clock
        self._records: dict[str, RequestRecord] = {}
        self._ended: list[RequestRecord] = []
        self._unfinished = Unfinished()
        self._withdrawals = Withdrawals()
        self._ended_s = -math.inf  # when the last namespace ended
        self.explainer: Explainer | None = None
        self._process = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this process made it: a child of os.fork() has a copy, without threads, of its parent's files."""
        return os.getpid() == self._process

    def has_failed_load(self, request_id: str) -> bool:
        """Whether a request's load could not be prepared, or not begin."""
        record = self._records.get(request_id)
        return record is not None and record.has_failed_load

    def _withdraw(self, record: RequestRecord) -> None:
        """Let a request leave nothing whose text was invalidated while somebody held it."""
        if record.held_since_s is None:
            return
        if record.held_since_s <= self._ended_s:  # what was invalidated before has other names
            record.may_store = False
            self.prefixes.withdraw(record, 0)
            return
        chunks = None if record.keyer is None else record.all_chunks()
        first = self._withdrawals.first_of(record, chunks, self.namespace, record.held_since_s)
        if first is not None:
            record.may_store = False
            self.prefixes.withdraw(record, first)

    @property
    def group_count(self) -> int:
        """Number of KV cache groups whose chunks are kept."""
        return len(self._admission.groups)

    def load_adapter(self, lora: LoRARequest, *, anew: bool) -> None:
        """The engine is about to load an adapter. Blocks: for one pass over its files.

        anew: also if it has one of that id. What was computed with another content under its name is not found then.
        """
        self._admission.adapters.load(lora.lora_int_id, lora.lora_path, anew=anew)
        self._note_adapter(lora, None)

    def unload_adapter(self, adapter_id: int) -> None:
        """The engine has dropped an adapter."""
        self._admission.adapters.unload(adapter_id)

    def _note_adapter(self, lora: LoRARequest, but: RequestRecord | None) -> None:
        """Know an adapter's name by its content: the engine's own cache knows blocks by the name alone.

        but: a request that comes with it.
        """
        if not self._admission.adapters.is_other(lora.lora_name, lora.lora_int_id, lora.lora_path):
            return
        records = (*self._ended, *self._records.values())
        users = [
            record
            for record in records
            if record is not but
            and (mine := record.request.lora_request) is not None
            and (mine.lora_name == lora.lora_name or mine.lora_int_id == lora.lora_int_id)
        ]
        self._disown(users, "adapter")
        label = adapter_label(registered_name(lora.lora_name))
        hit = {record.request.request_id: 0 for record in users}
        blocks, _ = self.prefixes.invalidate([Scope(adapter=label)], self.namespace, hit)
        logger.warning("adapter_changed name=%s blocks=%d requests=%d", lora.lora_name, blocks, len(users))

    def keyer(self, tenant: str, lora: LoRARequest | None, namespace: bytes | None = None) -> ChunkKeyer | None:
        """What names the chunks of a tenant and an adapter; None if that is not known now.

        namespace: another than that of the weights which the engine has now.
        """
        return self._admission.keyer(tenant, lora, namespace)

    def named(self, request: Request, keyer: ChunkKeyer | None) -> RequestRecord:
        """The chunks of a text that is not about to run."""
        return RequestRecord(request=request, keyer=keyer, groups=self._admission.groups)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable, *, is_foreign: bool = False) -> Removed:
        """Delete what any of these scopes takes, with its descendants, from the engine's own cache and every tier.

        Requests that it concerns go on, and keep nothing. durable: called as `TieredCache.invalidate` says.
        """
        hit, known = dict[str, int](), ScopeSet(scopes)
        self._withdrawals.note(scopes, self._clock.monotonic())
        for record in (*self._ended, *self._records.values()):
            first = record.matched_from(known, self.namespace)
            if first is not None:
                record.may_store = False
                hit[record.request.request_id] = first
        self.savings.invalidate(scopes, self.namespace)
        blocks, stale = self.prefixes.invalidate(scopes, self.namespace, hit)
        for name in stale & self._records.keys():
            self._records[name].may_store = False
        tiers = self.cache.invalidate(scopes, durable, is_foreign=is_foreign)
        return Removed({"gpu_blocks": blocks} | {f"{tier.value}_chunks": n for tier, n in tiers.items()}, len(stale))

    def end_namespace(self, nobody: bytes | None, *, forget: bool) -> None:
        """The weights are about to change, or may: nothing that was computed so far is found or kept from now on.

        Requests that are here go on, in part with other weights: nothing of them is kept. Those that come are not
        cached until `begin_namespace`.

        nobody: a name that nothing has; None if nothing has the present one. forget: nobody will look for what is there
        under the present one.
        """
        self._disown((*self._ended, *self._records.values()), "weights")
        if self._admission.is_open and not forget:
            self.former.add(self.namespace)
        self._ended_s = self._clock.monotonic()
        self._admission.end()
        self.prefixes.forget_all()
        self.savings.clear()
        if self.outputs is not None:
            self.outputs.forget_all()
        if self.blending is not None:
            self.blending.forget_all()
        if nobody is not None:
            self._rename(nobody, forget=forget)
        self.cache.stats.weights_known = False

    def begin_namespace(self, namespace: bytes, *, source: str) -> None:
        """Cache requests that come from now on under a name of the weights that the engine has now.

        source: what the name is made of, for the metrics.
        """
        self._rename(namespace, forget=True)
        self.former.discard(namespace)
        self._admission.is_open = True
        self.cache.stats.weights_known = True
        self.cache.stats.namespaces[source] += 1

    @property
    def named_requests(self) -> int:
        """How many requests so far had names for their chunks."""
        return self._admission.named

    def reset_outputs(self) -> None:
        """The engine forgot all outputs of its encoder."""
        self._admission.reset_outputs(any(record.request.mm_features for record in self._records.values()))

    def _rename(self, namespace: bytes, *, forget: bool) -> None:
        self.cache.rename(namespace, forget=forget)
        self.namespace = self._admission.namespace = namespace

    @staticmethod
    def _disown(records: Iterable[RequestRecord], why: str) -> None:
        """What these requests compute has no name any more."""
        for record in records:
            record.may_store, record.keyer, record.left_out = False, None, why

    @netted(lambda: None)
    def forget_ended(self) -> None:
        """A step is built: nothing more is stored of the requests that had ended before.

        vLLM 0.26 says that a request has ended before it stores its last chunks, which an invalidation in between must
        find.
        """
        for record in self._ended:
            if self._records.get(record.request.request_id) is record:
                del self._records[record.request.request_id]
        self._ended.clear()

    def leave_out(self, subject: object) -> None:
        """Find and store nothing of a request any more, which is named as vLLM's calls name it."""
        name = subject if isinstance(subject, str) else getattr(subject, "request_id", getattr(subject, "req_id", None))
        if isinstance(name, str) and (record := self._records.get(name)) is not None:
            record.may_store, record.keyer, record.left_out = False, None, "error"
        elif isinstance(subject, Request):
            self._records[subject.request_id] = self._admission.left_out(subject)

    def _pace_prefetches(self) -> None:
        self.cache.prefetches.is_busy = len(self._records) > len(self._ended)

    def engine_tokens(self, request_id: str) -> int:
        """How many tokens of a request the engine's own cache had, when it looked last."""
        record = self._records.get(request_id)
        return record.engine_tokens if record is not None else 0

    @netted(lambda: None)
    def note_report(self, report: Report) -> None:
        """What the worker did of blends."""
        if self.blending is not None:
            self._unfinished.do("blends", partial(self.blending.note, report))

    def explain_requests(self, count: int, *, keeps_answers: bool) -> None:
        """Keep the chunk names of each tenant's last requests, to explain later ones."""
        self.explainer = Explainer(
            History(count), self.cache, self._withdrawals, self._clock, keeps_answers=keeps_answers
        )

    def _keep(self, record: RequestRecord) -> None:
        """A request begins to run: what it computes may stay in the engine's own cache, and why it does is told."""
        self.prefixes.keep(record)
        if record.holds and record.may_store:
            self._hold(record)
        if self.explainer is not None:
            self.explainer.begin(record)

    def _hold(self, record: RequestRecord) -> None:
        """Pin the prefixes of a request that it asks for, as far as they are whole chunks."""
        group, slot_bytes = record.ranked[0], self.cache.ram.slab.slot_bytes
        chain, tokens = record.chain(group.index), record.request.num_prompt_tokens
        for share, hold_s in record.holds:
            chunks = min(round(share * tokens) // group.tokens, len(chain))
            if chunks > 0:
                size = chunks * slot_bytes * len(record.groups)
                self.cache.pins.hold(record.terms.tenant, chain[chunks - 1].key, size, hold_s)

    def _end(self, record: RequestRecord) -> None:
        """A request ended."""
        self.prefixes.end(record)
        if self.explainer is not None:
            self.explainer.end(record)

    def _note_refused(self, record: RequestRecord, chunks: Sequence[Chunk], placed: int) -> None:
        """Of the chunks that were to be stored so many got a place."""
        if self.explainer is not None and placed < len(chunks):
            self.explainer.refuse(record, chunks)

    def _clear_texts(self) -> None:
        """RAM is about to be emptied."""
        self.savings.clear()
        if self.explainer is not None:
            self.explainer.cleared_s = self._clock.monotonic()

    @netted(lambda: None)
    def objection(self, request_id: str) -> str | None:
        """A request ended; what was wrong with its directives, None if nothing was."""
        record = self._records.get(request_id)
        return None if record is None else record.objection or None

    @netted(lambda: None)
    def explained(self, request_id: str) -> dict[str, Any] | None:
        """A request ended; what its answer says of why its tokens were computed, if it asked for that."""
        record = self._records.get(request_id)
        if record is None or not record.explains or record.past is None:
            return None
        shown: dict[str, Any] = record.past.explained.to_json(is_client=True)
        return shown

    @netted(lambda: None)
    def end_blend(self, request_id: str) -> dict[str, Any] | None:
        """A request ended; what its answer says of blending, None if it was not blended."""
        said: list[dict[str, Any] | None] = []
        if (blending := self.blending) is not None:
            self._unfinished.do("end_blend", lambda: said.append(blending.end(request_id)))
        return said[0] if said else None

    def _note_saved(self, record: RequestRecord, load_s: float) -> None:
        """A request's load is complete: its text has saved what computing it would have taken more."""
        chunks = record.all_chunks()
        if chunks and record.loaded_tokens and not record.request.num_preemptions:  # it is counted once
            begin, end = record.kept_tokens - record.loaded_tokens, record.kept_tokens
            cost = self.cache.cost
            saved_s = cost.prefill_s(begin, end) - load_s if cost is not None else 0.0
            self.savings.note(SavedText(record.tags, chunks[0].key, record.terms), record.loaded_tokens, saved_s)
