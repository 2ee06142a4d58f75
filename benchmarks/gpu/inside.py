"""The parts that run the engine in this process: identity and transfers. Import it once the environment is prepared."""

import gc
import multiprocessing
import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from benchmarks.gpu.record import Deadline, OutOfTime, Result, say
from benchmarks.gpu.servers import Setting, fresh
from benchmarks.gpu.watch import Watch, watched
from hotspan.config.connector import transfer_config
from hotspan.config.settings import CacheOptions
from hotspan.core.errors import EngineError
from hotspan.core.types import GIB
from kit.engine import CHUNK, OPTIONS, Digests, Rig

LOAD_FORMAT: Final = "hotspan_random"
ANSWER_TOKENS: Final = 16

_POLL_S: Final = 20e-6


def register_weights() -> None:
    """Teach the engine in this process `load_format="hotspan_random"`: weights as in a trained model's proportions.

    "dummy" weights are so small that the answer hardly depends on the KV. These are normal, scaled by their inputs, and
    queries and keys twice that, so that attention is peaked; each is seeded by its name, so that every start has the
    same.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    _fill(name, weight)


def _fill(name: str, weight: torch.Tensor) -> None:
    """One weight, in place, on the device where it lies."""
    if "norm" in name:
        weight.fill_(1.0)
        return
    generator = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
    std = 0.02 if weight.dim() < 2 else weight.shape[-1] ** -0.5
    if "embed" in name:
        std = 1.0
    elif "qkv" in name and weight.dim() == 2:
        std *= 2
    weight.normal_(0.0, std, generator=generator)


def _options(setting: Setting, tokens: int, pool_tokens: int) -> dict[str, Any]:
    """The engine's options; on CPUs float32, where equal hits compute equal answers."""
    return {
        "dtype": "float32" if setting.is_cpu else "bfloat16",
        "block_size": setting.block_tokens,
        "max_model_len": setting.blocks(tokens),
        "num_gpu_blocks_override": setting.blocks(pool_tokens) // setting.block_tokens,
        "max_num_batched_tokens": 1024 if setting.is_cpu else 8192,
        "gpu_memory_utilization": 0.2 if setting.is_cpu else 0.9,
    }


@contextmanager
def engine_with(model: Path, cache: dict[str, Any], options: dict[str, Any]) -> Iterator[Rig]:
    """A running engine with hotspan's tiers, whose worker nobody looks at but `watched`.

    Raises: OSError, RuntimeError or what else the engine raises when it can't start.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = replace(CacheOptions(**cache).settings(), patience_s=10.0)
    told = {"kv_transfer_config": transfer_config(settings), "prefix_caching_hash_algo": "sha256_cbor"}
    llm = LLM(str(model), **(OPTIONS | options | told))
    try:
        yield Rig(llm, Digests())
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


# -- identity --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Questions:
    """What both engines of the identity part are asked, with what options and tiers."""

    model: Path
    texts: int
    tokens: int
    cache: dict[str, Any]
    options: dict[str, Any]


@dataclass(slots=True)
class Found:
    """Answers and cached tokens by the way they came, and what was digested."""

    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    hits: dict[str, list[int]] = field(default_factory=dict)
    stored: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    compared: int = 0
    wrong: int = 0
    unknown: int = 0

    def ask(self, engine: Rig, way: str, text: list[int]) -> None:
        answer = engine.ask(text, ANSWER_TOKENS)
        self.answers.setdefault(way, []).append(answer.tokens)
        self.hits.setdefault(way, []).append(answer.cached)

    def take(self, watch: Watch) -> None:
        """The digests of an engine that has ended."""
        self.stored = watch.stored
        self.compared, self.wrong, self.unknown = watch.compared, watch.wrong, watch.unknown


def identity(setting: Setting, result: Result) -> None:
    """KV and tokens that come back from RAM, disk, and disk in a new engine, against the engine's own prefix cache.

    The texts are a few tokens longer than whole chunks, so that the engine's own hit and ours are equally long: then
    equal KV computes equal answers. Each engine has a process of its own, and the GPU to itself.
    """
    texts, chunks = (3, 6) if setting.is_cpu else (4, 39)
    tokens = chunks * CHUNK + 8
    size = setting.shape.kv_bytes_per_token * (2 if setting.is_cpu else 1)
    ram_gib = (texts + 1) * (tokens + CHUNK) * size / GIB
    options = _options(setting, tokens + ANSWER_TOKENS, (texts + 2) * (tokens + CHUNK)) | {"load_format": LOAD_FORMAT}
    cache = {"ram_gib": ram_gib, "disk": fresh(setting.work / "kv"), "disk_gib": 2 * ram_gib}
    questions = Questions(setting.model, texts, tokens, cache, options)
    found: Found = apart(setting.deadline, first_engine, questions)
    result.put("first engine", compared(found, chunks * CHUNK))
    found = apart(setting.deadline, second_engine, questions, found)
    result.put("identity", {"texts": texts, "tokens": tokens} | compared(found, chunks * CHUNK))


def first_engine(questions: Questions) -> Found:
    """Each text computed, then from the engine's own cache, from RAM and from disk."""
    register_weights()
    found = Found()
    with watched(digests=True) as watch, engine_with(questions.model, questions.cache, questions.options) as engine:
        say("identity: the first engine runs")
        for seed in range(questions.texts):
            text = engine.text(seed, questions.tokens)
            engine.ask(text, ANSWER_TOKENS)
            engine.settle(60)
            found.ask(engine, "own", text)
            engine.forget_gpu()
            found.ask(engine, "RAM", text)
            engine.settle(60)
            engine.evict_ram()
            engine.forget_gpu()
            found.ask(engine, "disk", text)
            say(
                f"identity: text {seed + 1} of {questions.texts}: {watch.compared} blocks compared, {watch.wrong} wrong"
            )
    found.take(watch)
    return found


def second_engine(questions: Questions, found: Found) -> Found:
    """Each text from the disk that the first engine left."""
    register_weights()
    with watched(digests=True) as watch, engine_with(questions.model, questions.cache, questions.options) as engine:
        watch.stored = found.stored
        watch.compared, watch.wrong, watch.unknown = found.compared, found.wrong, found.unknown
        say("identity: the second engine runs")
        for seed in range(questions.texts):
            found.ask(engine, "restart", engine.text(seed, questions.tokens))
    found.take(watch)
    return found


def compared(found: Found, whole: int) -> dict[str, Any]:
    """What was equal; `whole` is how many tokens a full hit has."""
    own = found.answers["own"]
    same = {way: sum(a == b for a, b in zip(said, own, strict=False)) for way, said in found.answers.items()}
    full = {way: sum(cached == whole for cached in hits) for way, hits in found.hits.items()}
    asked = {way: len(hits) for way, hits in found.hits.items()}
    distinct = len({tuple(answer) for answer in own})  # 1 would say that answers do not depend on the text
    is_same = found.compared > 0 and found.wrong == found.unknown == 0
    return {
        "blocks": {"compared": found.compared, "wrong": found.wrong, "never_stored": found.unknown},
        "asked": asked,
        "full_hits": full,
        "same_tokens_as_own_hit": same,
        "distinct_answers": distinct,
        "passed": is_same and same == asked == full and distinct == len(own),
    }


def apart(deadline: Deadline, job: Callable[..., Any], *given: Any) -> Any:
    """What `job` returns, from a new process that ends with it: nothing of an engine stays on the GPU.

    Raises: OutOfTime, and EngineError if the process ends without an answer (it has said why on stderr).
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, job, given))
    process.start()
    theirs.close()
    try:
        if not ours.poll(max(1.0, deadline.left_s)):
            raise OutOfTime(f"{job.__name__} was cut off")
        answer = ours.recv()
        process.join(30)
        return answer
    except EOFError as error:
        process.join(30)
        raise EngineError(f"{job.__name__} ended with status {process.exitcode}: see what it printed") from error
    finally:
        process.kill()
        process.join()


def _answer(pipe: Any, job: Callable[..., Any], given: tuple[Any, ...]) -> None:
    pipe.send(job(*given))
    pipe.close()


# -- transfers -------------------------------------------------------------------------------------------------------


def transfers(setting: Setting, result: Result) -> None:
    """GB/s of the worker between the engine's own KV cache and the slab, by chunks a job, against a plain pinned copy.

    Both sides move the same bytes, in turn, round by round; the engine computes nothing meanwhile.
    """
    most, rounds = (8, 5) if setting.is_cpu else (64, 9)
    counts = [n for n in (1, 8, 64) if n <= most]
    tokens = 2 * most * CHUNK
    size = 2 * setting.shape.kv_bytes_per_token if setting.is_cpu else setting.shape.kv_bytes_per_token
    options = _options(setting, 4096, tokens + 4096) | {"load_format": "dummy"}
    cache = {"ram_gib": 1.1 * tokens * size / GIB}
    with watched(digests=False) as watch, engine_with(setting.model, cache, options) as engine:
        engine.ask(engine.text(0, 300), 1)
        engine.settle(60)
        say(f"transfers: the engine runs; layout {_layout(watch)}")
        result.put("layout", _layout(watch))
        for count in counts:
            setting.deadline.check()
            found = _rates(watch, count, rounds)
            result.put(f"{count} chunks", found)
            for way in ("store", "load"):
                figures = found[way]
                say(f"{count} chunks, {way}: {figures['gb_s']:.1f} GB/s, {figures['to_plain']:.2f} of a plain copy")


def _layout(watch: Watch) -> dict[str, Any]:
    """Tensors of the first group, bytes of a page in each, blocks a chunk."""
    if watch.kv_caches is None or watch.spec is None:
        raise RuntimeError("no engine started")
    pages = [ref.page_size_bytes for ref in watch.kv_caches.group_data_refs[0]]
    chunk = sum(pages) * watch.spec.blocks_per_chunk
    return {
        "tensors": len(pages),
        "page_bytes": pages[0],
        "blocks_per_chunk": watch.spec.blocks_per_chunk,
        "chunk_bytes": chunk,
    }


def _rates(watch: Watch, count: int, rounds: int) -> dict[str, Any]:
    """Median GB/s of stores and loads of so many chunks, of plain copies of as many bytes, and their ratios."""
    if watch.spec is None or watch.worker is None or watch.kv_caches is None:
        raise RuntimeError("no engine started")
    rng, per_chunk, groups = random.Random(count), watch.spec.blocks_per_chunk, len(watch.kv_caches.group_data_refs)
    last = watch.kv_caches.tensors[0].tensor.shape[0] - 1
    blocks = rng.sample(range(1, last), count * per_chunk)
    slots = CPULoadStoreSpec(rng.sample(range(watch.spec.slots), count))
    gpu = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)] + [0] * (groups - 1), block_indices=[0] * groups)
    moved = count * _layout(watch)["chunk_bytes"]
    down, up = _plain(moved)
    worker, jobs = watch.worker, iter(range(1_000_000 + count, 1_000_000_000, 64))
    work: dict[str, Callable[[], None]] = {
        "store": lambda: _run(worker, next(jobs), lambda job: worker.submit_store(job, gpu, slots)),
        "plain down": down,
        "load": lambda: _run(worker, next(jobs), lambda job: worker.submit_load(job, slots, gpu)),
        "plain up": up,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(-2, rounds):
        for name in reversed(list(work)) if turn % 2 else work:
            started = time.perf_counter()
            work[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    rates = {name: moved / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    return {"bytes": moved, "rounds": rounds} | {
        way: {"gb_s": rates[way], "plain_gb_s": rates[plain], "to_plain": rates[way] / rates[plain]}
        for way, plain in (("store", "plain down"), ("load", "plain up"))
    }


def _run(worker: OffloadingWorker, job: int, submit: Callable[[int], bool]) -> None:
    """One job, until the worker reports it."""
    if not submit(job):
        raise RuntimeError("the worker refused a job")
    while True:
        results = worker.get_finished()
        for result in results:
            if result.job_id == job:
                if not result.success:
                    raise RuntimeError("a transfer failed")
                return
        time.sleep(_POLL_S)


def _plain(size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """One copy of so many bytes, down and up: between the GPU and pinned memory, or within host memory."""
    on_gpu = torch.cuda.is_available()
    host = torch.ones(size, dtype=torch.int8, pin_memory=on_gpu)
    device = torch.ones(size, dtype=torch.int8, device="cuda" if on_gpu else "cpu")

    def copy(into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    return lambda: copy(host, device), lambda: copy(device, host)
