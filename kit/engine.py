"""A real engine in this process, with every chunk's bytes digested when they are stored and when they are loaded."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import xxhash

from hotspan.bench.prose import prose
from hotspan.config.settings import CacheOptions

CHUNK = 256
HANG_S = 60.0
HANG_TURNS = 60_000
"""An engine core hangs after so many, half a millisecond apart: on a busy machine a turn takes longer."""

SPECULATIVE = Path(__file__).parents[1] / "benchmarks" / "assets" / "speculative"
"""A small trained model and its trained draft heads (benchmarks/speculators.py)."""

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "block_size": 128,
    "num_gpu_blocks_override": 48,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.2,
    "enforce_eager": True,
    "disable_log_stats": False,
}


@dataclass
class Answer:
    """One request's outcome."""

    tokens: list[int]
    cached: int
    speculation: Any = None
    """What vLLM counted of it, with per_request_spec_decode_metrics."""


@dataclass
class Digests:
    """xxh3 of each block's bytes in the engine, by chunk and place in it.

    loaded: blocks. hit_tokens: as the metrics count them.
    """

    stored: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    loaded: int = 0
    wrong: int = 0
    hit_tokens: int = 0


class Engine:
    """An engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self._encode = llm.get_tokenizer().encode

    def text(self, seed: int, tokens: int) -> list[int]:
        """`tokens` tokens of varied text."""
        found: list[int] = self._encode(prose(seed, tokens))[:tokens]
        return found

    def ask(
        self, prompt: list[int], tokens: int = 8, *, salt: str | None = None, lora: Any = None, **directives: Any
    ) -> Answer:
        return self.ask_all([prompt], tokens, salt=salt, lora=lora, **directives)[0]

    def ask_all(
        self, prompts: list[list[int]], tokens: int, *, salt: str | None = None, lora: Any = None, **directives: Any
    ) -> list[Answer]:
        """Answers to requests that run together, greedy."""
        asked = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        outputs = self.llm.generate(asked, sampling(tokens, directives), use_tqdm=False, lora_request=lora)
        return [
            Answer(list(first.token_ids), output.num_cached_tokens, getattr(first, "spec_decode_metrics", None))
            for output in outputs
            for first in output.outputs[:1]
        ]

    def is_same(self, prompt: list[int], tokens: list[int], tie: float = 1e-3) -> bool:
        """Whether the engine, asked alone, gives these tokens; from a numerical tie on it may go another way.

        Requests that run together are computed in other batches, whose sums are rounded otherwise: two candidates less
        than `tie` apart in log-probability may change places.
        """
        from vllm import SamplingParams

        options = SamplingParams(max_tokens=len(tokens), temperature=0, ignore_eos=True, logprobs=2)
        output = self.llm.generate([{"prompt_token_ids": prompt}], options, use_tqdm=False)[0].outputs[0]
        for have, want, best in zip(tokens, output.token_ids, output.logprobs, strict=True):
            if have != want:
                return have in best and best[want].logprob - best[have].logprob < tie
        return True

    def start(self, name: str, prompt: list[int], tokens: int, **directives: Any) -> None:
        """Hand a request to the engine, which runs as far as it is stepped."""
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling(tokens, directives))

    def step(self, times: int = 1) -> dict[str, int]:
        """Cached tokens of the requests that ended, by name."""
        outputs = [output for _ in range(times) for output in self.llm.llm_engine.step()]
        return {output.request_id: output.num_cached_tokens for output in outputs if output.finished}

    def forget_gpu(self) -> None:
        """Empty the engine's own prefix cache, and leave the tiers alone."""
        assert self.llm.reset_prefix_cache()


class Tiers:
    """What there is of hotspan in an engine core of this process, whatever computes its steps (`step`)."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self.connector = core.scheduler.connector
        self.manager = self.connector.manager
        self.cache = self.manager.cache

    def step(self, times: int = 1) -> dict[str, int]:
        """Let the engine compute; cached tokens of the requests that ended, by name."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let copies end, and what they stored reach the tiers below."""

        def turn() -> None:
            self.step()
            self.cache.step()

        turn()
        self.until(lambda: not self.connector.has_pending_push_work() and not self.cache.is_persisting, turn)

    def evict_ram(self) -> None:
        """Leave the chunks to the tiers below."""
        self.settle()
        self.forget_ram()

    def forget_ram(self) -> None:
        """Drop the chunks in RAM, whether or not a tier below has them yet."""
        while self.cache.ram.entries:
            self.cache._forget(next(iter(self.cache.ram.entries.values())))

    def until(self, is_so: Callable[[], bool], turn: Callable[[], object], turns: int = HANG_TURNS) -> None:
        """Turn until it is so. Raises: AssertionError if it is not after so many turns."""
        for _ in range(turns):
            if is_so():
                return
            turn()
            time.sleep(0.0005)
        assert is_so(), f"it hangs: {self._waits()}"

    def _waits(self) -> str:
        """What there is to wait for, for a message."""
        states = {name: request.status.name for name, request in self.scheduler.requests.items()}
        is_copying, cache = self.connector.has_pending_push_work(), self.cache
        return f"requests {states}, copies {is_copying}, writes {cache.is_persisting}, RAM {len(cache.ram.entries)}"


class Rig(Engine, Tiers):
    """An engine with hotspan's tiers."""

    def __init__(self, llm: Any, digests: Digests) -> None:
        Engine.__init__(self, llm)
        Tiers.__init__(self, self.core)
        self.digests = digests


def sampling(tokens: int, directives: dict[str, Any]) -> Any:
    """Greedy, with a request's directives to the cache."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": directives} if directives else None
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, extra_args=extra)


@contextmanager
def engine_alone(model: Path, **engine: Any) -> Iterator[Engine]:
    """The same engine without hotspan."""
    from vllm import LLM

    llm = LLM(str(model), **(OPTIONS | engine))
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextmanager
def rig(
    model: Path,
    *,
    ram_gib: float = 0.25,
    disk: Path | None = None,
    disk_gib: float = 0.5,
    cache: dict[str, Any] | None = None,
    **engine: Any,
) -> Iterator[Rig]:
    """A running engine; float32, so that tokens are comparable, unless `engine` says otherwise.

    cache: fields of CacheSettings.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from hotspan.config.connector import transfer_config

    settings = CacheOptions(ram_gib=ram_gib, disk=disk, disk_gib=disk_gib if disk is not None else None).settings()
    # Whether a late chunk is a miss is tested with a simulated clock; here a stall of a busy machine must not decide.
    settings = dataclasses.replace(
        settings, **({"patience_s": 10.0, "chunk_tokens": CHUNK, "is_served": True} | (cache or {}))
    )
    with recorded() as digests:
        llm = LLM(
            str(model),
            **(OPTIONS | engine),
            kv_transfer_config=transfer_config(settings),
            prefix_caching_hash_algo="sha256_cbor",
        )
        try:
            # The first short request pays for what is made once.
            yield Rig(llm, digests)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
            gc.collect()


@contextmanager
def recorded() -> Iterator[Digests]:
    """Digest what hotspan's worker copies, in the engine's own memory, named by the chunk that the slot held."""
    from hotspan.engine.manager import HotspanManager
    from hotspan.engine.worker import HostWorker

    digests, names = Digests(), {}
    prepare_store, prepare_load, copy = HotspanManager.prepare_store, HotspanManager.prepare_load, HostWorker._copy
    begin = HotspanManager.begin

    def named(manager: HotspanManager, keys: Any, context: Any, slots: Any) -> None:
        for chunk, slot in zip(manager._chunks(keys, context), slots.block_ids.tolist(), strict=True):
            names[slot] = chunk.key

    @wraps(prepare_store)
    def store(self: HotspanManager, keys: Any, context: Any) -> Any:
        output = prepare_store(self, keys, context)
        if output is not None:
            named(self, output.keys_to_store, context, output.store_spec)
        return output

    @wraps(prepare_load)
    def load(self: HotspanManager, keys: Any, context: Any) -> Any:
        slots = prepare_load(self, keys, context)
        named(self, keys, context, slots)
        return slots

    @wraps(begin)
    def begun(self: HotspanManager, *given: Any) -> None:
        before = self.cache.stats.hit_tokens.total()
        begin(self, *given)
        digests.hit_tokens += self.cache.stats.hit_tokens.total() - before

    def copied(self: HostWorker, job: Any, places: Any) -> int:
        moved = copy(self, job, places)
        for group, block, slot, nth in places:
            data = b"".join(np.ascontiguousarray(stack.engine[:, block]).tobytes() for stack in self._groups[group])
            digest, name = xxhash.xxh3_128_digest(data), (names[slot], nth)
            if job.is_store:
                digests.stored[name] = digest
            else:
                digests.loaded += 1
                digests.wrong += digests.stored.get(name, digest) != digest
        return moved

    with (
        patch.object(HotspanManager, "prepare_store", store),
        patch.object(HotspanManager, "prepare_load", load),
        patch.object(HotspanManager, "begin", begun),
        patch.object(HostWorker, "_copy", copied),
    ):
        yield digests
