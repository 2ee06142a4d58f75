"""On which hosts the ranks of an engine are, and what hotspan refuses where they are not all on the scheduler's.

The slab is a file of one host. The scheduler's process moves chunks between its own host's slab and the tiers below
RAM; of a rank on another host it would write zeros, and verify them as what was stored. So an engine over hosts has RAM
alone, where each rank copies its own part of a chunk within its own host, and nobody reads another's.

Three checks, each of which needs no other:

    check_shape     by the engine's configuration, before anything is opened
    ranks_here      by the slab itself: whose marks are in the scheduler's mapping, whatever executor made the ranks
    check_reports   by what each rank reports: one may have been started with other options, or without hotspan
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.tiers.slab import SharedSlab

NODES = "hotspan_nodes"
"""In the connector's extra config: how many hosts share the engine's ranks evenly, as far as it was configured."""

START = "hotspan_start"
"""There, too: what vLLM calls this start of the engine. An `engine_id` may be given, and be that of others as well."""

ADAPTERS = "hotspan_adapters"
"""There, too: whether the engine takes adapters."""

_MARK = b"hotspan"
_EXTERNAL = "external_launcher"


@dataclass(frozen=True, slots=True)
class RankReport(KVConnectorHandshakeMetadata):
    """What a rank tells the scheduler of the slab that it copies to, once it has mapped it."""

    rank: int
    slots: int
    slot_bytes: int
    rank_bytes: int
    blocks_per_chunk: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.slots, self.slot_bytes, self.rank_bytes, self.blocks_per_chunk


def nodes(parallel: Any) -> int:
    """Over how many hosts the ranks of one engine are, as far as vLLM's ParallelConfig tells."""
    return max(1, parallel.nnodes_within_dp)  # 0 with an external load balancer, until 0.28


def moved_by_the_scheduler(settings: CacheSettings) -> list[str]:
    """What these settings ask for that moves, or looks at, bytes of chunks in the scheduler's process.

    Outputs of encoders are kept in one worker only, and are left out where it is elsewhere.
    """
    asked = {
        "a disk tier (--disk)": settings.disk is not None,
        "an L2 (--l2)": settings.l2 is not None,
        "blending (--blend)": settings.blend is not None,
    }
    return [words for words, is_asked in asked.items() if is_asked]


def over_hosts_refused(settings: CacheSettings, how: str, *, has_adapters: bool = False) -> None:
    """Raise ConfigError if an engine over several hosts can't have what these settings ask for.

    how:          what makes it one, for the message.
    has_adapters: whether it takes adapters: their KV is named by files of the scheduler's host, and each rank loads
                  those of its own host, which may be others.
    """
    if has_adapters:
        raise ConfigError(
            f"adapters (--enable-lora) can't be had by an engine over several hosts ({how}): each host loads its own "
            "files, and only those of the scheduler's host name the KV. Leave them out, or give each host an engine of "
            "its own, as with --data-parallel-size, or with replicas behind `hotspan route`"
        )
    asked = moved_by_the_scheduler(settings)
    if asked:
        raise ConfigError(
            f"{' and '.join(asked)} can't be had by an engine over several hosts ({how}): only the scheduler's host "
            "would be read and written. Serve with RAM alone (--ram-gib, the same on each host), or give each host an "
            "engine of its own, as with --data-parallel-size, or with replicas behind `hotspan route`"
        )


def check_shape(parallel: Any, settings: CacheSettings, *, has_adapters: bool = False) -> None:
    """Raise ConfigError for an engine whose configuration already tells that hotspan can't serve it.

    parallel: vLLM's ParallelConfig.
    """
    if parallel.world_size > 1 and parallel.distributed_executor_backend == _EXTERNAL:
        raise ConfigError(
            "the external launcher runs a scheduler beside each rank, and these must decide alike in each step, which "
            "they do not with a cache that is filled meanwhile: use --distributed-executor-backend mp or ray, or "
            "leave hotspan out"
        )
    if nodes(parallel) > 1:
        over_hosts_refused(settings, f"--nnodes {parallel.nnodes}", has_adapters=has_adapters)


def mark(slab: SharedSlab, offset: int) -> None:
    """A rank whose part of each slot begins at `offset` can be seen by who maps the same slab (`ranks_here`)."""
    slab.slot(0)[offset : offset + len(_MARK)] = _MARK


def ranks_here(slab: SharedSlab, rank_bytes: int, ranks: int) -> list[int]:
    """Which of a slab's ranks, by their places in a slot, share it with this process. All have mapped it by now.

    Mutates: the slab, which is without marks then.
    """
    first = slab.slot(0)
    places = [slice(rank * rank_bytes, rank * rank_bytes + len(_MARK)) for rank in range(ranks)]
    found = [rank for rank, place in enumerate(places) if first[place] == _MARK]
    for rank in found:
        first[places[rank]] = bytes(len(_MARK))
    return found


def check_reports(reports: Iterable[RankReport], own: RankReport, ranks: int | None) -> None:
    """Raise ConfigError unless all ranks have slabs of one shape, whose slots mean the same to all.

    own:   of the scheduler; its rank means nothing.
    ranks: how many there must be; None where vLLM does not pass on what each of them reports.
    """
    by_rank = {report.rank: report for report in reports}
    missing = sorted(set(range(ranks)) - by_rank.keys()) if ranks is not None else []
    if missing:
        raise ConfigError(
            f"{_named(missing)} of this engine runs without hotspan's connector: start the engine on each host with "
            "the same options"
        )
    for report in by_rank.values():
        if report.shape != own.shape:
            raise ConfigError(
                f"rank {report.rank} has other slots than the scheduler ({_said(report)} beside {_said(own)}): give "
                "each host the same --ram-gib and --chunk-tokens, and each rank equally many layers"
            )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {', '.join(map(str, ranks))}"


def _said(report: RankReport) -> str:
    return f"{report.slots} of {report.slot_bytes} bytes, {report.rank_bytes} of them its own"
