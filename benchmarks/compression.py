"""How far KV shrinks without loss, how fast, and what that saves on a slow link.

usage: python -m benchmarks.compression [--mib 16] [--repetitions 7] [--output FILE]

The KV is that of a trained model (SmolLM2-135M-Instruct, as `hotspan demo` fetches it, over Python's language
reference), of shapes of several families with random weights, and of noise. Each model computes it in its own type; fp8
is the bfloat16 KV as vLLM stores it with a scale of 1. A chunk has the keys and then the values of each layer.

codec:  hotspan's, and others where they are installed (numcodecs, Zstandard over all bytes): ratio, and GB of KV a
        second of CPU time, best of the repetitions, on one thread. `baseline` is the same with AVX-512 switched off in
        NumPy, in a process of its own.
links:  chunks of the trained model, loaded by the L2 tier over a link of a given rate that its transfers share
        (a store in memory that sleeps), all at once and one alone: compressed and plain, in turns; the median of the
        ratios. `auto` is what the tier chose after it had loaded chunks.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.bench.manual import manual
from hotspan.core.compression import compress, decompress
from hotspan.core.terms import Terms
from hotspan.core.types import MIB, Chunk, Compress
from hotspan.demo.trained import NAME, trained_model
from hotspan.l2.base import Found, Landed
from hotspan.l2.follower import LogFollower
from hotspan.l2.objects import BlobStore
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, chain
from hotspan.tiers.base import Transfer
from kit.families.table import FAMILIES
from kit.simulated.memory_store import MemoryServer

NAMESPACE = bytes(32)
RATES = {"50 MB/s": 50e6, "200 MB/s": 200e6, "500 MB/s": 500e6, "1 GB/s": 1e9, "2 GB/s": 2e9}
CHUNKS, CHUNK_BYTES = 12, 4 * MIB
TEXT_TOKENS = 320
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PLAIN_FAMILIES = ("Llama", "Qwen2", "Gemma", "Phi", "Mistral", "GPT")
BASELINE = {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"}
WIRE_BYTES = 1 << 18


# -- KV ----------------------------------------------------------------------------------------------------------------


def kv_of(model: Any, texts: Iterator[list[int]], size: int) -> bytes:
    """`size` bytes of chunks' KV: for each text, keys and values of each layer."""
    parts: list[bytes] = []
    while sum(map(len, parts)) < size:
        with torch.no_grad():
            cache = model(torch.tensor([next(texts)]), use_cache=True).past_key_values
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                parts.append(tensor.transpose(1, 2).contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(parts)[:size]


def trained(dtype: torch.dtype, size: int) -> bytes:
    """Of the trained model, over texts that people wrote."""
    path = trained_model().path
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = (tokenizer.encode(manual(seed, TEXT_TOKENS))[:TEXT_TOKENS] for seed in range(10_000))
    return kv_of(model, texts, size)


def random_weights(fields: dict[str, Any], config: str, dtype: torch.dtype, size: int) -> bytes:
    """Of a family's shape with random weights, over random tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields)).to(dtype).eval()
    rng = np.random.default_rng(0)
    return kv_of(model, iter(lambda: rng.integers(2, 1000, TEXT_TOKENS).tolist(), None), size)


def kv_sets(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, type and bytes of all KV that is measured."""
    for name, dtype in DTYPES.items():
        data = trained(dtype, size)
        yield NAME, name, data
        if dtype is torch.bfloat16:
            numbers = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
            yield NAME, "fp8", numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    for family in FAMILIES:
        if not family.name.startswith(PLAIN_FAMILIES) or family.has_experts or "fp8" in family.name:
            continue
        try:
            data = random_weights(dict(family.fields), family.config, torch.bfloat16, size // 4)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            print(f"{family.name}: left out ({error})", file=sys.stderr)
            continue
        yield f"random weights, {family.name}", "bfloat16", data
    yield "noise", "bytes", np.random.default_rng(0).bytes(size)


# -- codecs ------------------------------------------------------------------------------------------------------------


def cpu_seconds(job: Callable[[], object], repetitions: int) -> float:
    """The least CPU time of this thread that a job took."""
    taken = []
    for _ in range(repetitions):
        started = time.thread_time()
        job()
        taken.append(time.thread_time() - started)
    return min(taken)


def own_codec(data: bytes, repetitions: int) -> dict[str, Any]:
    """hotspan's: ratio and rates; every bit is compared."""
    payload, room, into = memoryview(data), aligned(len(data)), aligned(len(data))
    size = compress(payload, room)
    figures: dict[str, Any] = {
        "ratio": len(data) / size if size else 1.0,
        "encode_gb_s": len(data) / cpu_seconds(lambda: compress(payload, room), repetitions) / 1e9,
    }
    if size:
        figures["decode_gb_s"] = len(data) / cpu_seconds(lambda: decompress(room[:size], into), repetitions) / 1e9
        if into != payload:
            raise SystemExit("a bit was lost: the figures would mean nothing")
    return figures


def other_codecs(data: bytes, width: int, repetitions: int) -> dict[str, Any]:
    """What libraries make of it whose own planes or none are used; those that are installed."""
    import zstandard

    coder, decoder = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    codecs: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "zstandard level 1, no planes": (lambda: coder.compress(data), decoder.decompress)
    }
    with contextlib.suppress(ImportError):
        from numcodecs import Blosc, blosc

        blosc.use_threads = False
        numbers, into = np.frombuffer(data, f"<u{width}"), np.empty(len(data) // width, f"<u{width}")
        for name in ("zstd", "lz4"):
            one = Blosc(name, 1, Blosc.SHUFFLE, 512 * 1024)
            codecs[f"blosc {name} level 1, shuffled"] = (
                lambda one=one: one.encode(numbers),
                lambda stored, one=one: one.decode(stored, out=into),
            )
    found = {}
    for name, (encode, decode) in codecs.items():
        stored = encode()
        found[name] = {
            "ratio": len(data) / len(stored),
            "encode_gb_s": len(data) / cpu_seconds(encode, repetitions) / 1e9,
            "decode_gb_s": len(data) / cpu_seconds(lambda: decode(stored), repetitions) / 1e9,  # noqa: B023
        }
    return found


# -- links -------------------------------------------------------------------------------------------------------------


class Wire:
    """A link whose rate all transfers share, in parts that take turns; carries at any rate while that is 0."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried_bytes = 0
        self._free_s = 0.0
        self._turns = threading.Lock()

    def carry(self, size: int) -> None:
        """Blocks until so many bytes have crossed."""
        for first in range(0, size if self.bytes_per_s else 0, WIRE_BYTES):
            part = min(size - first, WIRE_BYTES)
            with self._turns:
                now_s = time.monotonic()
                self._free_s = max(self._free_s, now_s) + part / self.bytes_per_s
                self.carried_bytes += part
                until_s = self._free_s - now_s
            time.sleep(until_s)


class WiredStore(BlobStore):
    """A store in memory behind such a link."""

    def __init__(self, server: MemoryServer, bytes_per_s: float) -> None:
        super().__init__(server, server.log())
        self.wire = Wire(bytes_per_s)

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        is_there = super().get(found, into, landed)
        self.wire.carry(sum(map(len, into)))
        return is_there


class Replica:
    """A tier behind such a link."""

    def __init__(self, server: MemoryServer, rate: float, compress: Compress) -> None:
        self._follower = LogFollower(server.log(), compress)
        self._follower.poll()
        self._follower.foreign()
        self.store = WiredStore(server, rate)
        self.tier = RemoteTier(RemoteOptions(self.store, self._follower, compress=compress), NAMESPACE, CHUNK_BYTES)
        self._slots = [aligned(CHUNK_BYTES) for _ in range(CHUNKS)]

    def put(self, chunks: Sequence[Chunk], data: bytes) -> list[Transfer]:
        ended = []
        for nth, chunk in enumerate(chunks):
            self.poll()
            if not self.tier.submit_store(chunk, Terms(tenant=1), aligned(CHUNK_BYTES, _part(data, nth))):
                raise SystemExit("the store takes no chunk")
            ended += self._ended(1)
        return ended

    def load(self, chunks: Sequence[Chunk], data: bytes) -> float:
        """Seconds until all are in RAM; every bit is compared."""
        self.poll()
        self.tier.ask(chunks, 1)
        while self.tier.asking:
            self.tier.wait(1.0)
            self.tier.finished()
        started_s = time.perf_counter()
        for chunk, slot in zip(chunks, self._slots, strict=False):
            if not self.tier.submit_load(chunk.key, slot):
                raise SystemExit("a chunk is not there")
        ended = self._ended(len(chunks))
        seconds = time.perf_counter() - started_s
        if any(each.fault for each in ended) or any(
            slot != _part(data, nth) for nth, slot in enumerate(self._slots[: len(chunks)])
        ):
            raise SystemExit("a chunk came wrong")
        return seconds

    def poll(self) -> None:
        """Follow the log."""
        self._follower.poll()
        self._follower.foreign()

    def close(self) -> None:
        self.tier.close(5.0)

    def _ended(self, count: int) -> list[Transfer]:
        ended: list[Transfer] = []
        while len(ended) < count:
            self.tier.wait(1.0)
            ended += self.tier.finished()
        return ended


def _part(data: bytes, nth: int) -> bytes:
    return data[nth * CHUNK_BYTES : (nth + 1) * CHUNK_BYTES]


def over_a_link(data: bytes, rate: float, repetitions: int) -> dict[str, Any]:
    """Compressed against plain, in turns."""
    chunks, replicas = chain("text", CHUNKS), {}
    for compress_ in ("never", "always"):
        replicas[compress_] = Replica(MemoryServer(), rate, compress_)  # type: ignore[arg-type]
        replicas[compress_].put(chunks, data)
    found: dict[str, Any] = {}
    for name, some in (("all", chunks), ("one", chunks[:1])):
        seconds: dict[str, list[float]] = {"never": [], "always": []}
        for turn in range(repetitions + 1):
            for compress_, replica in replicas.items():
                taken = replica.load(some, data)
                if turn:
                    seconds[compress_].append(taken)
        ratios = [plain / packed for plain, packed in zip(seconds["never"], seconds["always"], strict=True)]
        found[name] = {"speedup": statistics.median(ratios)} | {
            f"{label}_s": statistics.median(seconds[mode]) for label, mode in (("plain", "never"), ("packed", "always"))
        }
    auto = Replica(MemoryServer(), rate, "auto")
    auto.put(chunks, data)
    auto.load(chunks, data)
    (transfer,) = auto.put(chain("another", 1), data)
    found["auto"] = transfer.packing.choice if transfer.packing is not None else ""
    found["bytes"] = {mode: each.store.wire.carried_bytes for mode, each in replicas.items()}
    for replica in (*replicas.values(), auto):
        replica.close()
    return found


def main() -> int:
    options = arguments(__doc__, mib=16, repetitions=7, part=("all", "codec"))
    torch.set_num_threads(1)
    codec: list[dict[str, Any]] = []
    link_data = b""
    for kv, dtype, data in kv_sets(options.mib * MIB):
        figures = {"kv": kv, "dtype": dtype, "mib": len(data) / MIB, "hotspan": own_codec(data, options.repetitions)}
        if (kv, dtype) == (NAME, "bfloat16"):
            figures["others"] = other_codecs(data, 2, options.repetitions)
            link_data = (data * (CHUNKS * CHUNK_BYTES // len(data) + 1))[: CHUNKS * CHUNK_BYTES]
        codec.append(figures)
        print(json.dumps(figures), file=sys.stderr, flush=True)
    if options.part == "codec":
        print(json.dumps(codec))
        return 0
    again = [sys.executable, "-m", "benchmarks.compression", "--part", "codec", "--mib", str(options.mib)]
    done = subprocess.run(
        [*again, "--repetitions", str(options.repetitions)],
        env=os.environ | BASELINE,
        stdout=subprocess.PIPE,
        check=True,
    )
    links = {}
    for name, rate in RATES.items():
        links[name] = over_a_link(link_data, rate, options.repetitions)
        print(f"{name}: {json.dumps(links[name])}", file=sys.stderr, flush=True)
    if options.output is not None:
        write_results(
            options.output,
            "compression",
            command=f"python -m benchmarks.compression --mib {options.mib} --repetitions {options.repetitions}",
            codec=codec,
            baseline=json.loads(done.stdout),
            links=links,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
