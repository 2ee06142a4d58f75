"""From settings to a running cache: the tiers of one engine under its namespace, and what answers from them."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from hotspan.cache.cost import CostModel
from hotspan.cache.rhythm import Rhythm
from hotspan.cache.tiered import PATIENCE_S, TieredCache
from hotspan.config.environment import cache_directory, environment
from hotspan.config.secrets import resolved
from hotspan.config.settings import CacheSettings, DiskSettings, L2Settings
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.namespace import namespace_digest
from hotspan.core.redaction import redacted_text
from hotspan.core.terms import DEFAULT_TENANT, tenant_label
from hotspan.core.types import Tier
from hotspan.engine.admin import Administrator, replica_name
from hotspan.engine.blend.admission import Blending
from hotspan.engine.blend.cuts import cuts
from hotspan.engine.compat import block_hasher, offloaded_groups
from hotspan.engine.core_traces import CoreTraces
from hotspan.engine.encoder.outputs import EncoderOutputs, keeps_outputs
from hotspan.engine.events import ChunkEvents, offer_publisher
from hotspan.engine.fingerprint import FileDigests
from hotspan.engine.identity import Fields, checkpoint_of, is_private, namespace_fields
from hotspan.engine.manager import HotspanManager
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.requests import Admission, ChunkGroup
from hotspan.engine.spec import HotspanSpec
from hotspan.engine.start_files import of_same_files
from hotspan.engine.steps import StepWatch
from hotspan.engine.weights import WeightsWatch
from hotspan.keyring.keyring import Keyring, open_keyring
from hotspan.l2.follower import LogFollower
from hotspan.l2.log import VolatileLog
from hotspan.l2.node import NodeStore
from hotspan.l2.open import open_store
from hotspan.l2.position import read_position
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.l2.written_under import StoreNames
from hotspan.tiers.directory import replica_directory
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.pace import Pace
from hotspan.tiers.packer import Packer
from hotspan.tiers.pins import Pins
from hotspan.tiers.room import RESERVE_BYTES, step_bytes
from hotspan.tiers.shares import Share, Shares
from hotspan.tiers.slab import sweep_dead_slabs
from hotspan.tiers.written_under import name_of, note_directory

if TYPE_CHECKING:
    from hotspan.engine.tracing import CacheTracing

logger = logging.getLogger(__name__)

_CLOSE_S = 1.0
_REST_S = 5.0
"""What an engine's end takes besides: connections to a store that hangs, keys, the engine's own memory."""

_KEYS_S = 10.0
"""How long a start waits for the keys of the tenants that are known; the others' come later."""


class Opened(NamedTuple):
    """What answers the engine, what carries out commands of cache administration, and what follows its weights."""

    manager: HotspanManager
    administrator: Administrator
    weights: WeightsWatch


def open_cache(spec: HotspanSpec, config: VllmConfig, kv_cache: KVCacheConfig) -> Opened:
    """Open the tiers that the spec's settings name. `manager.shutdown` closes them.

    Blocks: for the namespace (engine/identity.py), and up to 10 s for the keys of known tenants.
    Raises: HotspanError; whatever had been opened is closed then.
    """
    settings = spec.settings
    groups = _groups(spec, kv_cache)
    chunk_tokens, largest = min(group.tokens for group in groups), max(group.tokens for group in groups)
    digests = FileDigests(cache_directory(environment()) / "digests")
    is_full = settings.model_digest == "full"
    fields = of_same_files(config, namespace_fields(config, kv_cache, chunk_tokens, digests, full=is_full))
    namespace = namespace_digest(fields)
    clock = SystemClock()  # the one that all parts use
    checkpoint = checkpoint_of(config, fields, digests, clock, full=is_full)
    sweep_dead_slabs()
    offer_publisher(settings.events_key)  # the scheduler makes its publisher after its connector
    with contextlib.ExitStack() as closing:
        keyring = _open_keyring(settings, clock)
        if keyring is not None:
            closing.callback(keyring.close)
        opening = _Opening(spec, config, namespace, clock, keyring, Pins(clock), Pace())
        follower = opening.follower()
        if follower is not None:
            closing.callback(follower.close)
        cost = opening.cost_model()
        cache, disk = opening.cache(cost, follower)
        has_outputs = keeps_outputs(settings, config) and not spec.is_over_hosts
        steps = None if cost is None else StepWatch(cost, config.scheduler_config.max_num_batched_tokens, clock)
        blending = _blending(settings, cache, config, groups)
        traces = CoreTraces(clock, () if blending is None else blending.separators)
        manager = HotspanManager(
            cache,
            Admission(settings, namespace, groups, largest, keyring, clock),
            GpuPrefixes(len(kv_cache.kv_cache_groups), largest // spec.tokens_per_hash, spec.tokens_per_hash),
            chunk_tokens,
            clock,
            steps=steps,
            blending=blending,
            outputs=EncoderOutputs(cache, clock, _patience_s(settings), steps) if has_outputs else None,
            events=_events(cache, config, groups),
            watchers=[traces, *_tracing(cache, config, clock)],
            rhythm=Rhythm(clock, cache.stats) if settings.prefetch_sessions else None,
            follower=follower,
            keyring=keyring,
        )
        if settings.explain_requests:
            manager.explain_requests(settings.explain_requests, keeps_answers=not settings.prompts_only)
        directory = opening.disk_directory() if follower is not None else None
        hasher = partial(block_hasher, config, spec.tokens_per_hash)
        administrator = Administrator(manager, disk, follower, directory, keyring, hasher, traces, clock)
        files = None if spec.is_over_hosts else checkpoint  # other hosts have files of their own
        weights = WeightsWatch(manager, files, administrator.later, clock, is_private=is_private(fields))
        administrator.weights = weights
        closing.callback(administrator.close)
        # First of all: it writes what waits to be written.
        closing.callback(cache.close, _drain_s(settings.drain_s, config.shutdown_timeout))
        closing.callback(opening.begin(follower, fields))
        manager.closing = closing.pop_all()
    return Opened(manager, administrator, weights)


def _tracing(cache: TieredCache, config: VllmConfig, clock: Clock) -> "Iterator[CacheTracing]":
    """What makes spans of requests, where vLLM does."""
    endpoint = config.observability_config.otlp_traces_endpoint
    if not endpoint:
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import get_tracer_provider
    from vllm.tracing import init_tracer

    from hotspan.engine.tracing import CacheTracing

    if not isinstance(get_tracer_provider(), TracerProvider):  # this process has no exporter yet
        init_tracer("hotspan.cache", endpoint)
    yield CacheTracing(cache, clock)


@dataclass(frozen=True, slots=True)
class _Opening:
    """What the tiers of one engine have in common."""

    spec: HotspanSpec
    config: VllmConfig
    namespace: bytes
    clock: Clock
    keyring: Keyring | None
    pins: Pins
    pace: Pace

    def cache(self, cost: CostModel | None, follower: LogFollower | None) -> tuple[TieredCache, LowerTier | None]:
        """The cache over its tiers, and the disk among these."""
        settings, slab = self.spec.settings, self.spec.open_slab()
        with contextlib.ExitStack() as opened:
            opened.callback(slab.close)
            opened.callback(slab.unlink)  # every worker has mapped it by now
            self.spec.find_ranks(slab)
            tiers = []
            for opener in (self._disk_opener(settings.disk), self._l2_opener(settings.l2, follower)):
                if opener is not None:
                    tiers.append(LowerTier(opener, self.clock))
                    opened.callback(tiers[-1].close, _CLOSE_S)
            slab.unlink()
            opened.pop_all()
        cache = TieredCache(
            slab,
            *tiers,
            namespace=self.namespace,
            shares=_shares(settings),
            patience_s=_patience_s(settings),
            cost=cost,
            clock=self.clock,
            pins=self.pins,
            pace=self.pace if current_platform.is_cpu() else None,
        )
        disk = tiers[0] if settings.disk is not None else None
        if disk is not None and follower is not None:
            disk.distrust()  # until the log was read: the last process may have read further in it than its disk knows
        return cache, disk

    def cost_model(self) -> CostModel | None:
        """What decides between loading and computing, unless a patience was set, or nothing lies below RAM."""
        settings = self.spec.settings
        tiers = {Tier.DISK: settings.disk, Tier.L2: settings.l2}
        lanes = {tier: lower.threads for tier, lower in tiers.items() if lower is not None}
        if settings.patience_s is not None or not lanes:
            return None
        step_tokens = self.config.scheduler_config.max_num_batched_tokens
        is_cpu = current_platform.is_cpu()  # else the device's own engines copy
        return CostModel(step_tokens, lanes, self.clock, self.spec.slots, copies_hold=is_cpu)

    def disk_directory(self) -> Path | None:
        """Where the disk tier of this engine is: data-parallel replicas of one server have one each."""
        disk, parallel = self.spec.settings.disk, self.config.parallel_config
        if disk is None:
            return None
        directory, number = Path(disk.directory), parallel.data_parallel_index
        # In the replicas of a dense model vLLM sets the size to 1; the engine's id always has the replica's number.
        is_one_of_several = parallel.data_parallel_size > 1 or self.spec.config.engine_id.endswith(f"_dp{number}")
        return replica_directory(directory, number if is_one_of_several else None)

    def begin(self, follower: LogFollower | None, fields: Fields) -> Callable[[], None]:
        """Follow the log; say what the tiers were written under, and note what they are from now on.

        fields: of the namespace. Returns what ends the noting.
        """
        if follower is not None:
            follower.start()
            if self.spec.settings.disk is not None and follower.position is None:
                logger.warning("disk_waits_for_l2_log: what is on disk is found once the log of the L2 was read")
        if is_private(fields):  # whoever has such a name finds nothing of an earlier start
            return lambda: None
        directory, l2, own = self.disk_directory(), self.spec.settings.l2, name_of(self.namespace, fields)
        if directory is not None:
            note_directory(directory, own)
        if l2 is None:
            return lambda: None
        options = resolved(l2.store_options, environment())
        names = StoreNames(lambda: open_store("--l2", l2.url, options), own, redacted_text(l2.url))
        names.start()
        return names.close

    def follower(self) -> LogFollower | None:
        """The reader of the L2's log, with a connection of its own."""
        settings, directory = self.spec.settings.l2, self.disk_directory()
        if settings is None:
            return None
        if settings.log is not None:
            store = open_store("--l2-log", settings.log, resolved(settings.log_options, environment()))
        else:
            store = open_store("--l2", settings.url, resolved(settings.store_options, environment()))
        since = read_position(directory) if directory is not None else None
        if store.log is None:
            store.close()
            return LogFollower(VolatileLog(self.clock), replica_name(), self.clock, since=since)
        return LogFollower(store.log, replica_name(), self.clock, since=since, store=store)

    def _disk_opener(self, disk: DiskSettings | None) -> Callable[[bool], DiskTier] | None:
        """What opens the disk tier, and opens it again after trouble."""
        if disk is None:
            return None
        options = DiskOptions(
            self.disk_directory() or Path(disk.directory),
            disk.bytes,
            disk.threads,
            store_depth=max(8, self.spec.slots // 2),
            keys=self.keyring,
            shares=_shares(self.spec.settings),
            step_bytes=step_bytes(disk.bytes),
            reserve_bytes=RESERVE_BYTES,
            pins=self.pins,
            pace=self.pace,
            packer=Packer(disk.compress, disk.threads, self.clock),
        )
        size = self.spec.slot_bytes
        return lambda again: DiskTier(replace(options, is_new=not again), self.namespace, size, self.clock)

    def _l2_opener(self, l2: L2Settings | None, follower: LogFollower | None) -> Callable[[bool], RemoteTier] | None:
        """What opens the L2 tier, and opens it again after trouble."""
        if l2 is None or follower is None:
            return None
        options = resolved(l2.store_options, environment())
        if l2.url.startswith("s3:") and not self.spec.settings.is_isolated:
            options |= {"is_per_tenant": "false"}

        def opened(again: bool) -> RemoteTier:
            store, depth = open_store("--l2", l2.url, options), max(4, self.spec.slots // 4)
            if isinstance(store, NodeStore):
                store.follows = lambda: follower.is_shared
            remote = RemoteOptions(
                store, follower, l2.threads, store_depth=depth, keys=self.keyring, compress=l2.compress
            )
            return RemoteTier(remote, self.namespace, self.spec.slot_bytes, self.clock)

        return opened


def _groups(spec: HotspanSpec, kv_cache: KVCacheConfig) -> list[ChunkGroup]:
    return [
        ChunkGroup(
            group.index,
            group.tokens_per_block * spec.blocks_per_chunk // spec.tokens_per_hash,
            group.tokens_per_block * spec.blocks_per_chunk,
            isinstance(kv_cache.kv_cache_groups[group.index].kv_cache_spec, FullAttentionSpec),
        )
        for group in offloaded_groups(spec.config)
    ]


def _shares(settings: CacheSettings) -> Shares:
    return Shares(by_tenant={tenant_label(share.tenant): Share(share.floor, share.quota) for share in settings.tenants})


def _drain_s(drain_s: float, grace_s: float) -> float:
    """How long a stopping engine may write: vLLM kills it `grace_s` after it was told to stop, and the rest ends, too.

    grace_s: 0 where nobody has set it: vLLM then kills its own server's engine at once, and that of `LLM()` after 5 s.
    """
    return min(drain_s, max(grace_s - _REST_S, grace_s / 2)) if grace_s else drain_s


def _patience_s(settings: CacheSettings) -> float:
    return PATIENCE_S if settings.patience_s is None else settings.patience_s


def _events(cache: TieredCache, config: VllmConfig, groups: list[ChunkGroup]) -> ChunkEvents | None:
    """What routers are told of chunks, where vLLM publishes events."""
    chain = next((group for group in groups if group.is_chain), None)
    asked = config.kv_events_config
    is_told = asked is not None and asked.enable_kv_cache_events
    return ChunkEvents(cache, chain) if chain is not None and is_told else None


def _blending(
    settings: CacheSettings, cache: TieredCache, config: VllmConfig, groups: list[ChunkGroup]
) -> Blending | None:
    """Reuse of text that is no prefix, if it is asked for."""
    if settings.blend is None:
        return None
    separators = []
    if not config.model_config.skip_tokenizer_init:
        separators = cuts(cached_tokenizer_from_config(config.model_config), settings.blend.separators)
    return Blending(
        settings.blend,
        cache,
        groups[0].tokens,
        config.cache_config.block_size,
        config.scheduler_config.max_num_batched_tokens,
        separators,
    )


def _open_keyring(settings: CacheSettings, clock: Clock) -> Keyring | None:
    """The tenants' keys, those of the known tenants unwrapped."""
    if settings.encryption is None:
        return None
    keyring = open_keyring(Path(settings.encryption.store), settings.encryption.kek, environment(), clock)
    keyring.prepare({DEFAULT_TENANT, *(share.tenant for share in settings.tenants)}, _KEYS_S)
    return keyring
