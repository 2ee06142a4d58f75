"""Is what comes back what was stored? Digests at store and at load, over tier, restart, adapter, salt, ranks and dtype.

usage: python -m benchmarks.identity [--tokens 16000] [--fabricated 1000000] [--output benchmarks/results/identity.json]

Through the engine: each text is computed, comes back from RAM, from disk, and from disk in a new engine; every slot of
the slab is digested when the workers have filled it and again when they are about to read it. With one rank the blocks
inside the engine are digested too. Beyond what the engine computes in reasonable time, fabricated chunks take the same
way through the cache and the disk tier, plain and encrypted.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.harness import arguments
from kit.environment import prepare_environment

prepare_environment()

from hotspan.bench.storage import BenchKeys  # noqa: E402
from hotspan.cache.entry import Reader  # noqa: E402
from hotspan.cache.tiered import TieredCache  # noqa: E402
from hotspan.core.types import Lookup  # noqa: E402
from hotspan.demo.model import make_demo_model  # noqa: E402
from hotspan.testing.chunks import chain, content  # noqa: E402
from hotspan.tiers.disk import DiskOptions, DiskTier  # noqa: E402
from hotspan.tiers.lower import LowerTier  # noqa: E402
from hotspan.tiers.slab import SharedSlab  # noqa: E402
from kit.demo_adapter import make_demo_adapter  # noqa: E402
from kit.engine import CHUNK, rig  # noqa: E402
from kit.proof import Proof, write_proof  # noqa: E402


@dataclass
class Comparison:
    """Digests of chunks when they were stored, and how many were compared when they were loaded."""

    stored: dict[bytes, bytes] = field(default_factory=dict)
    compared: int = 0
    wrong: int = 0
    unknown: int = 0

    def load(self, key: bytes, digest: bytes) -> None:
        self.compared += 1
        self.unknown += key not in self.stored
        self.wrong += self.stored.get(key, digest) != digest


@contextlib.contextmanager
def watching(found: Comparison) -> Iterator[None]:
    """Digest the slab's slots as the workers leave and find them."""
    from hotspan.engine.manager import HotspanManager

    complete_store, prepare_load = HotspanManager.complete_store, HotspanManager.prepare_load

    def digest(manager: Any, key: Any) -> bytes:
        ram = manager.cache.ram
        return xxhash.xxh3_128_digest(ram.slab.slot(ram.entries[key].slot))

    @wraps(complete_store)
    def store(self: Any, keys: Any, context: Any, success: bool = True) -> None:
        for chunk in self._chunks(keys, context):
            if chunk.key in self.cache.ram.entries:
                found.stored[chunk.key] = digest(self, chunk.key)
        complete_store(self, keys, context, success)

    @wraps(prepare_load)
    def load(self: Any, keys: Any, context: Any) -> Any:
        for chunk in self._chunks(keys, context):
            found.load(chunk.key, digest(self, chunk.key))
        return prepare_load(self, keys, context)

    HotspanManager.complete_store, HotspanManager.prepare_load = store, load
    try:
        yield
    finally:
        HotspanManager.complete_store, HotspanManager.prepare_load = complete_store, prepare_load


def through_engine(scratch: Path, tokens: int, dtype: str, ranks: int) -> dict[str, Any]:
    """Every way back, for the base model and an adapter, with and without a salt."""
    from vllm.lora.request import LoRARequest

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if ranks == 2 else "0-1"
    model = make_demo_model(scratch / "tiny", "tiny").path
    adapter = LoRARequest("a", 1, str(make_demo_adapter(scratch / "a", model, seed=1)))
    options: dict[str, Any] = {
        "dtype": dtype,
        "tensor_parallel_size": ranks,
        "max_model_len": tokens + 512,
        "num_gpu_blocks_override": tokens // 128 + 16,
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 8,
    }
    ram_gib = (tokens // CHUNK + 8) / 1024
    found, cached = Comparison(), []
    asks = [(lora, salt) for lora in (None, adapter) for salt in (None, "salt")]
    with watching(found):
        with rig(model, ram_gib=ram_gib, disk=scratch / "kv", disk_gib=5 * ram_gib, **options) as engine:
            text = engine.text(1, tokens)
            for lora, salt in asks:
                engine.ask(text, 1, lora=lora, salt=salt)
                engine.settle(60)
                engine.forget_gpu()
                cached.append(engine.ask(text, 1, lora=lora, salt=salt).cached)
                engine.settle(60)
                engine.evict_ram()
                engine.forget_gpu()
                cached.append(engine.ask(text, 1, lora=lora, salt=salt).cached)
                engine.evict_ram()
                engine.forget_gpu()
            inside = (engine.digests.loaded, engine.digests.wrong)
        with rig(model, ram_gib=ram_gib, disk=scratch / "kv", disk_gib=5 * ram_gib, **options) as engine:
            for lora, salt in asks:
                cached.append(engine.ask(text, 1, lora=lora, salt=salt).cached)
                engine.settle(60)
                engine.evict_ram()
                engine.forget_gpu()
    whole = tokens // CHUNK * CHUNK
    return {
        "dtype": dtype,
        "ranks": ranks,
        "tokens": tokens,
        "ways": "(RAM, disk, disk after a restart) x (base, adapter) x (no salt, salt)",
        "full_hits": sum(each == whole for each in cached),
        "asked": len(cached),
        "chunks_compared": found.compared,
        "chunks_wrong": found.wrong + found.unknown,
        "blocks_compared_in_engine": inside[0],
        "blocks_wrong_in_engine": inside[1],
    }


def fabricated(scratch: Path, tokens: int, *, sealed: bool) -> dict[str, Any]:
    """One text of so many tokens through RAM, disk and a restart; its chunks are 64 KiB and follow from their names."""
    size, chunks = 64 * 1024, chain("long", tokens // CHUNK)
    keys = BenchKeys() if sealed else None
    options = DiskOptions(scratch / f"sealed-{sealed}", (len(chunks) + 8) * (size + 4096), keys=keys)
    compared = wrong = 0
    for turn in range(2):
        slab = SharedSlab(f"identity-{uuid.uuid4().hex}", 256, size)
        slab.unlink()
        cache = TieredCache(slab, LowerTier(lambda again: DiskTier(options, bytes(32), size)), patience_s=30.0)
        for start in range(0, len(chunks), 128):
            part = chunks[start : start + 128]
            if turn == 0:
                for placement in cache.begin_store(part):
                    slab.slot(placement.slot)[:] = content(placement.chunk.key, size)
                cache.end_store(part)
                while cache.is_persisting:
                    cache.wait(0.1)
                    cache.step()
                continue
            reader = Reader()
            while any(answer is Lookup.RETRY for answer in [cache.lookup(chunk, reader) for chunk in part]):
                cache.wait(0.1)
                cache.step()
            slots = cache.begin_load([chunk.key for chunk in part], reader)
            compared += len(part)
            wrong += sum(slab.slot(slot) != content(chunk.key, size) for slot, chunk in zip(slots, part, strict=True))
            cache.end_load([chunk.key for chunk in part])
        cache.close(30)
    return {"tokens": tokens, "encrypted": sealed, "chunks_compared": compared, "chunks_wrong": wrong}


def main() -> int:
    options = arguments(__doc__, tokens=16_000, fabricated=1_000_000)
    started = time.monotonic()
    engines: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory(dir=".") as scratch:
                engines.append(through_engine(Path(scratch), options.tokens, dtype, ranks))
            print(json.dumps(engines[-1]), flush=True)
    for sealed in (False, True):
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            blocks.append(fabricated(Path(scratch), options.fabricated, sealed=sealed))
        print(json.dumps(blocks[-1]), flush=True)
    passed = all(
        each["chunks_wrong"] == 0 and each["full_hits"] == each["asked"] and each["blocks_wrong_in_engine"] == 0
        for each in engines
    ) and all(each["chunks_wrong"] == 0 and each["chunks_compared"] for each in blocks)
    print(f"all equal: {'yes' if passed else 'NO'} ({time.monotonic() - started:.0f} s)")
    proof = Proof(
        "identity", "the digest at load is the digest at store", {"engine": engines, "fabricated": blocks}, passed
    )
    if options.output is not None:
        write_proof(
            options.output,
            proof,
            {"tokens": options.tokens, "fabricated": options.fabricated},
            f"python -m benchmarks.identity --tokens {options.tokens} --fabricated {options.fabricated}",
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
