"""The record of one request: its chunks, named once from the engine's hashes, and what it holds in the cache.

`Admission` makes it: whose the request is, what its chunks are called, and on what terms they are kept.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key
from vllm.v1.request import Request

from hotspan.cache.entry import Reader
from hotspan.cache.history import Past
from hotspan.cache.rhythm import SessionId
from hotspan.config.settings import CacheSettings
from hotspan.core.breakpoints import Holds
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.directives import CLIENT_DIRECTIVES, BlendDirective, Directives, Places, governed, parse_directives
from hotspan.core.errors import MALFORMED
from hotspan.core.namespace import NO_ADAPTER, NO_TENANT, ChunkKeyer, tenant_digest
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Terms, tag_labels, tenant_label
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.engine.adapters import registered_name
from hotspan.engine.fingerprint import AdapterDigests
from hotspan.engine.net import LEFT_OUT
from hotspan.keyring.keyring import Keyring

logger = logging.getLogger(__name__)

_NO_KEY = ChunkKey(bytes(32))

SERVER_DIRECTIVES = "hotspan"
"""The key of `kv_transfer_params` under which the server hands down what it found out about a request."""


def in_order(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Chunks of a text in all its groups, each behind its parent."""
    return sorted(chunks, key=lambda chunk: chunk.index)


class ChunkGroup(NamedTuple):
    """One KV cache group.

    hashes_per_chunk: of the engine's block hashes, one each so many ends a chunk.
    tokens:           of a chunk.
    is_chain:         a chunk needs all its ancestors (full attention); in sliding windows and state-space layers it
                      stands alone.
    """

    index: int  # type: ignore[assignment]
    hashes_per_chunk: int
    tokens: int
    is_chain: bool


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord(Reader):
    """All that is known of one request. The cache writes what `Reader` has, `Admission` the request's identity and
    terms, `GpuPrefixes` the fields about spans, the manager the rest.

    keyer:     None when nothing of this request may be cached (its adapter's files changed or can't be read).
    session:   the conversation that it belongs to, if it names one.
    tags:      the documents it names.
    may_store: False if nothing that it computes may be kept: it asked for that, or it was invalidated meanwhile.
    blend:       whether, or how, it asks for blending; None if it does not say.
    kept_tokens: tokens of its prompt that were cached when it came. loaded_tokens: those of them that were loaded.
    engine_tokens: tokens that the engine's own cache had when it looked last; its own are among them if it had begun.
    is_begun:    it runs. is_answered: the engine knows what is cached, and has not begun with it.
    store_tries: how often its chunks found no room while others were copied.
    published:   number of its chunks that were published to routers. keys: of its chunks so far.
    spans:       names of the complete spans of its text. spans_kept: how many of them the prefix cache may have.
    is_renamed:  it was invalidated while it ran, or while its text was held: its blocks have random names.
    held_since_s: since when its text is held, by the monotonic clock; None if that is not known.
    left_out:    why nothing of it is found or kept, by the names of the reasons (cache/reasons.py); None if all may be.
    objection:   what is wrong with its directives, which its answer says.
    explains:    its answer says why its tokens were computed. places, form, holds: as `Directives` has them.
    past:        itself, as later requests are compared with it.
    sources:     tokens of the chunks that it loads, by tier; the end of its text last. is_blended: it is blended.
    has_failed_load: its load could not be prepared: it is computed. failed_load: what that was of, until vLLM ends it.
    """

    request: Request
    keyer: ChunkKeyer | None
    groups: tuple[ChunkGroup, ...]
    session: SessionId | None = None
    tags: tuple[str, ...] = ()
    may_store: bool = True
    blend: bool | BlendDirective | None = None
    kept_tokens: int = 0
    engine_tokens: int = 0
    loaded_tokens: int = 0
    chunks: dict[OffloadKey, Chunk] = field(default_factory=dict)
    is_begun: bool = False
    is_answered: bool = False
    load_began_s: float = 0.0
    store_tries: int = 0
    published: int = 0
    keys: set[ChunkKey] = field(default_factory=set)
    spans: list[bytes] = field(default_factory=list)
    spans_kept: int = 0
    is_renamed: bool = False
    held_since_s: float | None = None
    sources: dict[Tier, int] = field(default_factory=dict)
    is_blended: bool = False
    has_failed_load: bool = False
    failed_load: frozenset[OffloadKey] | None = None
    left_out: str | None = None
    objection: str = ""
    explains: bool = False
    places: Places = ()
    form: int = 0
    holds: Holds = ()
    changed_line: int = 0
    past: Past | None = None
    _hashes_done: int = 0
    _chains: dict[int, list[Chunk]] = field(default_factory=dict)

    def chunk(self, key: OffloadKey) -> Chunk | None:
        """The chunk of one engine key; None when nothing of this request may be cached."""
        found = self.chunks.get(key)
        if found is None and self.keyer is not None:
            self._extend(self.keyer)
            found = self.chunks.get(key)
            if found is None:  # a boundary inside a chunk (recurrent state): it stands alone
                found = Chunk(self.keyer.key(get_offload_block_hash(key), get_offload_group_idx(key)), None)
                self.chunks[key] = found
                self.keys.add(found.key)
        return found

    def matched_from(self, scopes: ScopeSet, namespace: bytes) -> int | None:
        """Index of the first chunk of its text that an invalidation matches; None if it matches none."""
        if scopes.takes(_NO_KEY, namespace, self.bare_terms):
            return 0
        first = [self.tags_from] if scopes.takes(_NO_KEY, namespace, self.terms) else []
        if scopes.keys:
            self.all_chunks()
        if self.keyer is None:  # the names of its chunks are unknown: it may be any
            first += [0] if scopes.may_name(namespace, self.terms) else []
        elif not self.keys.isdisjoint(scopes.keys):
            first += [
                chunk.index
                for chunk in self.chunks.values()
                if chunk.key in scopes.keys and scopes.takes(chunk.key, namespace, self.terms)
            ]
        return min(first, default=None)

    def keys_at(self, indexes: range) -> Iterator[tuple[ChunkKey, ...] | None]:
        """For each index the keys of the chunks within that chunk of the largest group; None if they are unknown."""
        if self.keyer is None:
            yield from (None for _ in indexes)
            return
        self._extend(self.keyer)
        largest = max(group.hashes_per_chunk for group in self.groups)
        chains = [(self.chain(group.index), largest // group.hashes_per_chunk) for group in self.groups]
        for index in indexes:
            yield tuple(chunk.key for chain, each in chains for chunk in chain[index * each : (index + 1) * each])

    def keys_from(self, token: int) -> frozenset[ChunkKey]:
        """The keys of its complete chunks from a token on, but at least of the last one in each group.

        What follows is their descendant, and so is what a longer text has in the same chunk. Empty for a text that is
        shorter than a chunk: what is stored of it has a name that depends on what follows.
        """
        self.all_chunks()
        chains = [(group, self.chain(group.index)) for group in self.groups]
        if any(group.is_chain and not chain for group, chain in chains):
            return frozenset()
        return frozenset(
            chunk.key for group, chain in chains for chunk in chain[min(token // group.tokens, len(chain) - 1) :]
        )

    def inherit(self, index: int, known: Iterable[Terms | None]) -> Terms:
        """Others use the chunk at `index`, or its ancestors, on `known` terms; returns the terms from now on.

        Descendants get the labels, too, so that an invalidation finds them also where a chunk in between is gone.
        """
        own = joined = self.terms_at(index)
        for terms in known:
            if terms is not None and terms is not own and (terms.labels or terms.expires_s or terms.is_wild):
                joined = joined.joined(terms)
        if joined is own:
            return own
        if self.renews:
            joined = joined.until(own.expires_s)
        if joined != own:
            self.inherited[index] = joined
        return joined

    def all_chunks(self) -> list[Chunk]:
        """The chunks of all its tokens so far, in every group."""
        if self.keyer is None:
            return []
        self._extend(self.keyer)
        return list(self.chunks.values())

    def by_group(self) -> list[list[Chunk]]:
        """The chunks of all its tokens so far by group, those that are chains first; not to be changed."""
        if self.keyer is not None:
            self._extend(self.keyer)
        return [self.chain(group.index) for group in self.ranked]

    def chain(self, group: int) -> list[Chunk]:
        """Those of one group that were derived so far, in order; not to be changed."""
        return self._chains.get(group, [])

    @property
    def adapter(self) -> str | None:
        """What the engine calls its adapter; None without one."""
        return self.request.lora_request.lora_name if self.request.lora_request is not None else None

    @property
    def ranked(self) -> list[ChunkGroup]:
        """The groups, those that are chains first."""
        return sorted(self.groups, key=lambda group: not group.is_chain)

    def _extend(self, keyer: ChunkKeyer) -> None:
        """Derive the chunks of block hashes that came since the last call."""
        hashes = self.request.block_hashes
        for group in self.groups:
            step = group.hashes_per_chunk
            chain = self._chains.setdefault(group.index, [])
            for end in range((self._hashes_done // step + 1) * step, len(hashes) + 1, step):
                engine_hash = bytes(hashes[end - 1])
                key = keyer.key(engine_hash, group.index)
                parent = chain[-1].key if group.is_chain and chain else None
                chunk = Chunk(key, parent, end // step - 1)
                self.chunks[make_offload_key(engine_hash, group.index)] = chunk
                self.keys.add(key)
                chain.append(chunk)
        self._hashes_done = len(hashes)


class Admission:
    """Decides for each request whose it is, what its chunks are called and how long they may live.

    is_open: whether `namespace` is that of the weights which the engine has; while it is not, nothing is cached.
    named:   how many requests it gave names.
    """

    def __init__(
        self,
        settings: CacheSettings,
        namespace: bytes,
        groups: Sequence[ChunkGroup],
        chunk_tokens: int,
        keyring: Keyring | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.namespace = namespace
        self.is_open = True
        self.named = 0
        self._has_outputs = self._has_old_outputs = False
        self._settings = settings
        self.groups = tuple(groups)
        self._chunk_tokens = chunk_tokens
        self._keyring = keyring
        self._clock = clock or SystemClock()
        self.adapters = AdapterDigests()

    def admit(self, request: Request) -> RequestRecord:
        """What is to be known of a request. Blocks: for one pass over an adapter's files when it is first named."""
        self._has_outputs |= bool(request.mm_features) or request.resumable  # later parts may have media, too
        if not isinstance(request.kv_transfer_params, dict | None):
            request.kv_transfer_params = None  # the engine would fail on it, too
            LEFT_OUT.note("directives")
            return self.left_out(request, "directives", objection="kv_transfer_params is no object")
        directives = self._directives(request)
        if isinstance(directives, str):
            return self.left_out(request, "directives", objection=directives)
        if request.resumable or self._has_unnamed_media(request):
            return self.left_out(request, "parts" if request.resumable else "media", directives)
        if not self.is_open or (request.mm_features and self._has_old_outputs):
            LEFT_OUT.note("weights")
            return self.left_out(request, "weights", directives)
        self.named += 1
        directives = governed(directives, self._settings.retention)
        lora = request.lora_request
        adapter, now_s = None if lora is None else registered_name(lora.lora_name), self._clock.unix()
        keyer = self.keyer(directives.tenant, lora) if self._is_as_loaded(lora) else None
        left_out = "no_store" if directives.no_store else None
        if keyer is None:
            left_out = "adapter" if lora is not None and not self._is_named(lora) else "keys"
        return RequestRecord(
            request=request,
            keyer=keyer,
            groups=self.groups,
            session=_session(directives),
            tags=directives.tags,
            may_store=not directives.no_store,
            blend=directives.blend,
            terms=directives.terms(adapter, now_s),
            bare_terms=replace(directives, tags=()).terms(adapter, now_s),
            tags_from=directives.tags_from // self._chunk_tokens,
            renews=directives.renew,
            held_since_s=directives.held_since_s,
            left_out=left_out,
            explains=directives.explain,
            places=directives.places,
            form=directives.form,
            holds=directives.holds,
            changed_line=directives.changed_line,
        )

    def end(self) -> None:
        """The weights may change: nothing is cached while `is_open` is not set again.

        Media are not cached either while the engine's own cache may have outputs of before: KV would come from those.
        """
        self.is_open = False
        self._has_old_outputs |= self._has_outputs

    def reset_outputs(self, is_used: bool) -> None:
        """The engine forgot the outputs of its encoder. is_used: requests are there that it computes some for."""
        self._has_old_outputs, self._has_outputs = False, is_used

    def may_keep(self, record: RequestRecord) -> bool:
        """Whether what a request has computed may be stored: not if the files of an adapter changed that the engine
        reads in each step.
        """
        lora = record.request.lora_request
        if lora is None or not lora.load_inplace or self.adapters.of(lora.lora_int_id, lora.lora_path) is not None:
            return True
        record.may_store, record.keyer, record.left_out = False, None, "adapter"
        return False

    def _is_as_loaded(self, lora: LoRARequest | None) -> bool:
        return lora is None or self.adapters.is_as_loaded(lora.lora_int_id, lora.lora_path)

    def _is_named(self, lora: LoRARequest) -> bool:
        return self._is_as_loaded(lora) and self.adapters.of(lora.lora_int_id, lora.lora_path) is not None

    def left_out(
        self, request: Request, why: str = "error", directives: Directives | None = None, objection: str = ""
    ) -> RequestRecord:
        """The record of a request of which nothing is cached, and why; its directives where they are known."""
        known = directives or Directives()
        return RequestRecord(
            request=request,
            keyer=None,
            groups=self.groups,
            may_store=False,
            terms=Terms() if directives is None else Terms(tenant=tenant_label(known.tenant)),
            left_out=why,
            objection=objection,
            explains=known.explain,
        )

    def keyer(self, tenant: str, lora: LoRARequest | None, namespace: bytes | None = None) -> ChunkKeyer | None:
        """Names for the chunks of a tenant and an adapter; None if nothing of them can be cached now.

        namespace: another than that of the weights which the engine has now.
        """
        if not self.is_open and namespace is None:
            return None
        adapter: bytes | None = NO_ADAPTER
        if lora is not None:
            adapter = self.adapters.of(lora.lora_int_id, lora.lora_path)
            if adapter is None:
                logger.warning(
                    "adapter_unknown name=%s: its files changed or can't be read: not cached", lora.lora_name
                )
                return None
        secret = tenant_digest(tenant) if self._keyring is None else self._keyring.names(tenant)
        if secret is not None and not self._settings.is_isolated:
            secret = NO_TENANT
        return None if secret is None or adapter is None else ChunkKeyer(namespace or self.namespace, adapter, secret)

    def _has_unnamed_media(self, request: Request) -> bool:
        """Whether media came through another server than hotspan's, where a client's `uuid` is their identity."""
        is_named = self._settings.is_served and SERVER_DIRECTIVES in (request.kv_transfer_params or {})
        return bool(request.mm_features) and not is_named

    def _directives(self, request: Request) -> Directives | str:
        """The server's directives for the request, or the request's own where there is no hotspan server; or why they
        can't be told or trusted: what only hotspan's server may say, and it does not stand there.
        """
        params = request.kv_transfer_params or {}
        given = params.get(SERVER_DIRECTIVES)
        try:
            if given is not None:
                if not self._settings.is_served:
                    raise ValueError(f"only `hotspan serve` may send {SERVER_DIRECTIVES!r}")
                return Directives.from_json(given)
            if self._settings.is_strict:
                return "no server has named its tenant"
            return parse_directives({name: params[name] for name in CLIENT_DIRECTIVES if name in params})
        except (*MALFORMED, AttributeError) as error:
            LEFT_OUT.note("directives")
            logger.warning("directives_refused request=%s: it is not cached: %.200s", request.request_id, error)
            return f"{error}"[:200] or type(error).__name__


def _session(directives: Directives) -> SessionId | None:
    if directives.session is None:
        return None
    return SessionId(tenant_label(directives.tenant), *tag_labels((), directives.session))
