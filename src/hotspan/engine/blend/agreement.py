"""Whether blends say what full prefills say: some blended prompts are computed in full, once their requests ended.

    blend --is_due--> job keeps its first token's distribution --request ends--> check in free blocks --> agreed, or not

Of the last checks so many must agree (the same most likely first token); where that is certainly not so, blending is
turned off. A check takes blocks that nobody uses, and gives them back as soon as the engine is short of them.
"""

from collections import deque
from collections.abc import Collection
from itertools import count

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from hotspan.cache.stats import CacheStats
from hotspan.core.statistics import at_most
from hotspan.engine.blend.orders import Checked, CheckJob
from hotspan.engine.blend.windows import Tokens

MEMORY = 500
"""So many of the last checks count."""

LEAST = 10
"""Checks before blending may be turned off."""

_MAX_WAITING = 4
_ROOM = 2
"""A check begins while so many times the blocks that it needs are free."""

_LEFT = 0.5
"""It is cancelled when fewer blocks are free than this share of those that it has."""


class Checks:
    """The checks of one engine, one at a time. The scheduler's thread calls it.

    every:     one in so many blends is checked; none for 0.
    agreement: the share of checks that has to agree.
    """

    def __init__(self, every: int, agreement: float, block_tokens: int, stats: CacheStats) -> None:
        self._every = every
        self._agreement = agreement
        self._block_tokens = block_tokens
        self._stats = stats
        self._found: deque[Checked] = deque(maxlen=MEMORY)
        self._blends = count(1)
        self._waiting: dict[int, tuple[Tokens, bool]] = {}  # by number; whether their requests have ended
        self._running: int | None = None
        self._ordered = 0  # by which orders
        self._blocks: list[KVCacheBlock] = []
        self._cancelled: list[int] = []
        self._is_cancelled = False
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._pool = pool

    def is_due(self, number: int, tokens: Tokens, blocks: int) -> bool:
        """Whether a blend that begins is to be checked. blocks: that it has, without which its last token can't be."""
        if self._pool is None or not self._every or next(self._blends) % self._every:
            return False
        needed = self._needed(tokens)
        if blocks < needed or self._pool.num_gpu_blocks < _ROOM * needed or len(self._waiting) >= _MAX_WAITING:
            self._stats.blend_checks["left_out"] += 1
            return False
        self._waiting[number] = tokens, False
        return True

    def allow(self, number: int) -> None:
        """Its request has ended."""
        if number in self._waiting:
            self._waiting[number] = self._waiting[number][0], True

    def drop(self, number: int) -> None:
        """There is nothing to check: the blend failed, or was cancelled."""
        self._waiting.pop(number, None)

    def begin(self, number_of_orders: int = 0) -> list[CheckJob]:
        """The check that begins with these orders, if there is room for one."""
        if self._pool is None:
            return []
        free = self._pool.get_num_free_blocks()
        if self._running is not None:
            if not self._is_cancelled and free < _LEFT * len(self._blocks):
                self._is_cancelled = True
                self._cancelled.append(self._running)
            return []
        number = self._next(free)
        if number is None:
            return []
        tokens, _ = self._waiting.pop(number)
        self._running, self._ordered, self._is_cancelled = number, number_of_orders, False
        self._blocks = self._pool.get_new_blocks(self._needed(tokens))
        return [CheckJob(number, tokens, [block.block_id for block in self._blocks])]

    def take_cancelled(self) -> list[int]:
        """Numbers that the worker is to forget."""
        taken, self._cancelled = self._cancelled, []
        return taken

    def end(self, number: int, checked: Checked | None) -> str | None:
        """The worker is done with a check; one that does not run is not counted.

        Returns: why blending is to be turned off, if it is.
        """
        if number != self._running or self._pool is None:
            return None
        self._pool.free_blocks(self._blocks)
        self._running, self._blocks = None, []
        if checked is None:
            self._stats.blend_checks["left_out"] += 1
            return None
        self._found.append(checked)
        agreed, checks = sum(each.agrees for each in self._found), len(self._found)
        self._stats.blend_checks["agreed" if checked.agrees else "differed"] += 1
        self._stats.blend_agreement = agreed / checks
        self._stats.blend_kl = sum(each.kl for each in self._found) / checks
        if checks < LEAST or at_most(agreed, checks) >= self._agreement:
            return None
        return (
            f"only {agreed} of {checks} blended answers began as after a full prefill "
            f"(--blend-min-agreement {self._agreement:g})"
        )

    def give_up(self, done: int, running: Collection[int]) -> None:
        """The worker had carried out these orders, and no other checks were running then: another was lost."""
        if self._running is not None and self._ordered <= done and self._running not in running:
            self.end(self._running, None)

    @property
    def is_busy(self) -> bool:
        """Whether a check runs, or could begin now."""
        free = self._pool.get_num_free_blocks() if self._pool is not None else 0
        return self._running is not None or self._next(free) is not None

    def _next(self, free: int) -> int | None:
        """A check that may begin with so many free blocks."""
        ended = ((number, tokens) for number, (tokens, has_ended) in self._waiting.items() if has_ended)
        return next((number for number, tokens in ended if _ROOM * self._needed(tokens) <= free), None)

    def _needed(self, tokens: Tokens) -> int:
        return -(-len(tokens) // self._block_tokens)
