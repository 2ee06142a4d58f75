"""All access to the engine's model runner: compute any runs of a text, read and write the K and V of its tokens.

    blocks     [ 7 ][ 3 ][ 9 ]         block table of one request
    runs       [..]   [.]  [....]      each is a row: its tokens attend to all tokens before them in the blocks

Every layer writes the K and V of all rows before it attends. So computing any set of runs is causal attention over what
the blocks have of the other tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar, cast

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from hotspan.engine.blend.runs import Run, rows
from hotspan.engine.blend.windows import Tokens

_DIGIT = 128
"""Numbers below it are exact in every type of KV."""


Function = TypeVar("Function", bound=Callable[..., Any])


def inference(function: Function) -> Function:
    """A function whose tensors need no gradients."""
    return cast(Function, torch.inference_mode()(function))


class EngineForward:
    """The forward of one engine's model over its own KV cache, for models with one KV cache group.

    Of several tensor-parallel workers each has its own heads, and all compute the same at the same time.
    Layer, in arguments and results: its place in the group.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._group = runner.kv_cache_config.kv_cache_groups[0]
        known = runner.vllm_config.compilation_config.static_forward_context
        self.layers: list[Any] = [known[name] for name in self._group.layer_names]
        self.block_tokens: int = self._group.kv_cache_spec.block_size
        self._places = [_places(layer, self.block_tokens) for layer in self.layers]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values in the KV cache."""
        found: torch.dtype = self.layers[0].kv_cache.dtype
        return found

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """Of one token in one layer: K and V, KV heads, head size. Raises: ValueError if layers differ."""
        shapes = {tuple(places.shape[1:]) for places in self._places}
        if len(shapes) != 1:
            raise ValueError("the model's layers have KV of different shapes")
        kinds, heads, size = shapes.pop()
        return kinds, heads, size

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all workers, which have the same shape and ask together. Blocks until all have asked."""
        group = get_tp_group()
        if group.world_size == 1:
            return values
        summed = values.cpu().clone()
        torch.distributed.all_reduce(summed, group=group.cpu_group)
        return summed

    def is_any(self, is_so: bool) -> bool:
        """Whether it is so in any worker; all of them ask together. What one does alone would let the others wait."""
        return bool(self.total(torch.tensor([float(is_so)])) > 0)

    def blocks_of(self, request_id: str) -> list[int]:
        """The blocks of a request that runs. Raises: KeyError for another one."""
        blocks: list[int] = self._runner.requests[request_id].block_ids[0]
        return blocks

    @inference
    def compute(self, tokens: Tokens, blocks: Sequence[int], runs: Sequence[Run], shift: int = 0) -> torch.Tensor:
        """Compute runs of a text into its blocks. Returns the last hidden states, row by row.

        shift:  added to the positions that the model is told, but not to the places in the blocks.
        Raises: ValueError as `runs.rows`.
        """
        batch = rows(runs)
        runner, device = self._runner, self._runner.device
        places = torch.from_numpy(batch.positions)
        table = torch.tensor(blocks, dtype=torch.int32)
        slots = self._slots(table, places).to(device)
        seq_lens = torch.from_numpy(batch.seq_lens)
        positions = (places + shift).to(device)
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(batch.query_start_locs).to(device),
            query_start_loc_cpu=torch.from_numpy(batch.query_start_locs),
            seq_lens=seq_lens.to(device),
            num_reqs=len(seq_lens),
            num_actual_tokens=len(places),
            max_query_len=int(batch.query_lens.max()),
            max_seq_len=int(batch.seq_lens.max()),
            block_table_tensor=table.expand(len(seq_lens), -1).contiguous().to(device),
            slot_mapping=slots,
            causal=True,
            is_prefilling=torch.ones(len(seq_lens), dtype=torch.bool),
            positions=positions,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        attention: dict[str, Any] = {}
        for group in runner.attn_groups[0]:
            attention |= dict.fromkeys(group.layer_names, group.build_metadata(common))
        context = set_forward_context(
            attention,
            runner.vllm_config,
            num_tokens=len(places),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(attention, slots),
            skip_compiled=True,
        )
        ids = torch.from_numpy(tokens[batch.positions].astype(np.int32)).to(device)
        with context:
            hidden: torch.Tensor = runner.model(input_ids=ids, positions=positions)
        return hidden

    def compute_to(self, layer: int, tokens: Tokens, blocks: Sequence[int], runs: Sequence[Run]) -> torch.Tensor:
        """Compute runs of a text up to the K and V of a layer, which are written; those behind it are left as they are.

        Returns the keys of that layer, row by row. Shape: [tokens, KV heads, head size].
        """
        target, taken = self.layers[layer], list[torch.Tensor]()
        update = target.impl.do_kv_cache_update

        def stop(layer: Any, keys: torch.Tensor, *rest: Any) -> None:
            update(layer, keys, *rest)
            taken.append(keys.clone())
            raise _Stopped

        with _instead(target.impl, "do_kv_cache_update", stop), suppress(_Stopped):
            self.compute(tokens, blocks, runs)
        return taken[0]

    def queries_of(self, tokens: Tokens, blocks: Sequence[int], runs: Sequence[Run]) -> dict[int, torch.Tensor]:
        """Compute runs as `compute`. Returns their queries by layer, row by row. Shape: [tokens, heads, head size]."""
        taken: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:
            for layer, target in enumerate(self.layers):
                hooks.enter_context(_instead(target.impl, "forward", _noting(taken, layer, target.impl.forward)))
            self.compute(tokens, blocks, runs)
        return {layer: queries.view(len(queries), -1, self.token_shape[2]) for layer, queries in taken.items()}

    @inference
    def first_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the token behind one with these hidden states. Shape: [1, hidden size]; float32[n]."""
        logits: torch.Tensor = self._runner.model.compute_logits(hidden)
        return logits[0].float().log_softmax(-1).cpu()

    @inference
    def read(self, blocks: Sequence[int], run: Run, layer: int) -> torch.Tensor:
        """A copy of the K and V of a run in one layer. Shape: [tokens, 2, KV heads, head size]."""
        cache = self.layers[layer].kv_cache
        places = torch.arange(run.start, run.stop, device=cache.device)
        table = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
        block = table[places // self.block_tokens].view(-1, 1, 1, 1)
        found: torch.Tensor = cache.reshape(cache.shape[0], -1)[block, self._places[layer][places % self.block_tokens]]
        return found

    @inference
    def keys(self, blocks: Sequence[int], stop: int, layer: int) -> torch.Tensor:
        """A copy of the keys of the first tokens in one layer. Shape: [stop, KV heads, head size]."""
        cache = self.layers[layer].kv_cache
        table = torch.tensor(blocks[: -(-stop // self.block_tokens)], dtype=torch.int64, device=cache.device)
        whole = cache.reshape(cache.shape[0], -1).index_select(0, table)
        found = whole.index_select(1, self._places[layer][:, 0].reshape(-1))
        return found.view(-1, *self._places[layer].shape[2:])[:stop]

    @inference
    def write(self, blocks: Sequence[int], run: Run, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the K and V of a run in one layer, as the engine does. Shape of each: [tokens, KV heads, head size]."""
        target = self.layers[layer]
        slots = self._slots(torch.tensor(blocks, dtype=torch.int32), torch.arange(run.start, run.stop))
        slots = slots.to(target.kv_cache.device)
        target.impl.do_kv_cache_update(target, keys.contiguous(), values.contiguous(), target.kv_cache, slots)

    @inference
    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Set all of these blocks to one number."""
        for layer in self.layers:
            layer.kv_cache[torch.tensor(blocks, device=layer.kv_cache.device)] = value

    def _slots(self, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Where tokens are in the whole KV cache, counted in tokens."""
        return table[places // self.block_tokens].to(torch.int64) * self.block_tokens + places % self.block_tokens


class _Stopped(Exception):
    """A forward went far enough."""


@contextmanager
def _instead(target: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """A method of one object is another one, for a while."""
    setattr(target, name, other)
    try:
        yield
    finally:
        delattr(target, name)


def _noting(taken: dict[int, torch.Tensor], layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's attention, whose queries are noted."""

    def noting(target: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        taken[layer] = query.clone()
        return forward(target, query, *rest, **named)

    return noting


@inference
def _places(layer: Any, block_tokens: int) -> torch.Tensor:
    """Where in a block each element of a token is: the backend writes coded numbers into scratch, and they are found.

    Shape: int64[block_tokens, 2, KV heads, head size], of offsets in elements.
    Raises: ValueError if an element is lost.
    """
    cache = layer.kv_cache
    shape = (block_tokens, 2, layer.num_kv_heads, layer.head_size)
    count = int(np.prod(shape))
    codes = torch.arange(1, count + 1, dtype=torch.int64).view(shape)
    scratch = torch.zeros((2, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
    slots = torch.arange(block_tokens, 2 * block_tokens, device=cache.device)
    found = torch.zeros(scratch[1].numel(), dtype=torch.int64)
    unit = 1
    while unit <= count:
        digits = (codes // unit % _DIGIT).to(cache.device, cache.dtype)
        scratch.zero_()
        layer.impl.do_kv_cache_update(layer, digits[:, 0].contiguous(), digits[:, 1].contiguous(), scratch, slots)
        found += scratch[1].reshape(-1).to(torch.int64).cpu() * unit
        unit *= _DIGIT
    if not torch.equal(found.sort().values[-count:], torch.arange(1, count + 1)):
        raise ValueError("the engine's layout of KV can't be read")
    places = torch.empty(found.numel() + 1, dtype=torch.int64)
    places[found] = torch.arange(found.numel())
    return places[1 : count + 1].view(shape).to(cache.device)
