"""One request as the manager sees it: the engine's keys turned into chunks, once."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.request import Request

from hotspan.cache.entry import Reader
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.types import Chunk, ChunkKey
from hotspan.engine.compat import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key


class ChunkGroup(NamedTuple):
    """One KV cache group.

    hashes_per_chunk: of the engine's block hashes, one each so many ends a chunk.
    is_chain:         a chunk needs all its ancestors (full attention); in sliding windows and state-space layers it
                      stands alone.
    """

    index: int
    hashes_per_chunk: int
    is_chain: bool


@dataclass(slots=True)
class RequestState:
    """A request's chunks by the engine's keys, and what it holds in the cache.

    keyer: None when nothing of this request may be cached (its adapter's files can't be read).
    """

    request: Request
    keyer: ChunkKeyer | None
    groups: tuple[ChunkGroup, ...]
    reader: Reader = field(default_factory=Reader)
    chunks: dict[OffloadKey, Chunk] = field(default_factory=dict)
    is_counted: bool = False
    load_began_s: float = 0.0
    _hashes_done: int = 0
    _last: dict[int, ChunkKey] = field(default_factory=dict)

    def chunk(self, key: OffloadKey) -> Chunk | None:
        """The chunk of one engine key; None when nothing of this request may be cached."""
        found = self.chunks.get(key)
        if found is None and self.keyer is not None:
            self._extend(self.keyer)
            found = self.chunks.get(key)
            if found is None:  # a boundary inside a chunk (recurrent state): it stands alone
                found = Chunk(self.keyer.key(get_offload_block_hash(key), get_offload_group_idx(key)), None)
                self.chunks[key] = found
        return found

    def _extend(self, keyer: ChunkKeyer) -> None:
        """Derive the chunks of block hashes that came since the last call."""
        hashes = self.request.block_hashes
        for group in self.groups:
            step = group.hashes_per_chunk
            for end in range((self._hashes_done // step + 1) * step, len(hashes) + 1, step):
                engine_hash = bytes(hashes[end - 1])
                key = keyer.key(engine_hash, group.index)
                parent = self._last.get(group.index) if group.is_chain else None
                self.chunks[make_offload_key(engine_hash, group.index)] = Chunk(key, parent, end // step - 1)
                self._last[group.index] = key
        self._hashes_done = len(hashes)
