"""What blending costs in answers and gains in time: modes and shares beside a full prefill and beside naive reuse.

usage: python -m benchmarks.blend_quality [--texts 30] [--tokens 400 1600] [--repetitions 3] [--parts quality speed]
       [--output FILE]

Quality: the recall model (benchmarks/recall.py) answers questions about five documents whose order it has not seen, of
--tokens tokens each. Every prompt is asked in full and in each mode, in one engine. A question is right if the answer
is; the share of right answers by kind of question stands beside the share of answers that equal those of the full
prefill. Speed: CPU-seconds and time to first token on the demo's model with random weights, whose layers are as wide as
a small real model's, over prompts of the same lengths; modes take turns, medians. With --output, parts and lengths that
were not asked for stay as the file has them, each with the commit that it was measured at.

Naive reuse computes no reused token again. The recall model is trained on these kinds of questions alone: its figures
say how modes compare, and on what kinds reuse fails, not what another model loses.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import arguments
from benchmarks.recall import ASSETS, DOC, KIND, KINDS, ORDINAL, SEED, WORDS, Texts, make_texts

DOCUMENTS, WINDOW, BLOCK = 5, 128, 128
ORDERS = 3
"""Asked, of each text, beyond the two that it is learnt from."""

QUESTIONS = {"one": 2, "two": 2, "nth": 2, "last": 2}
_SEPARATOR = "\n\n----\n\n"
_HANG_S = 60.0
_SHORT = 400
"""Tokens of a document in contexts of which there are --texts; of longer ones there are fewer."""


class Way(NamedTuple):
    """A mode, the share of the reused tokens that it computes again, and its check layer: `blend` of a request."""

    name: str
    blend: Any


WAYS = (
    Way("full", False),
    Way("naive", {"mode": "deviation", "recompute_ratio": 0.0}),
    Way("first_k 16", {"mode": "first_k"}),
    *(
        Way(f"{mode} {share:.0%}, layer {layer}", {"mode": mode, "recompute_ratio": share, "check_layer": layer})
        for mode in ("deviation", "query")
        for layer, shares in ((1, (0.05, 0.15)), (2, (0.05, 0.15)))
        for share in shares
    ),
)


class Asked(NamedTuple):
    """An answer's first token, what it says of blending, CPU-seconds of the process, and seconds to the answer."""

    token: int
    blend: dict[str, int] | None
    cpu_s: float
    wall_s: float


class Engine:
    """An engine with blending in this process. What it plans does not depend on its speed."""

    def __init__(self, llm: Any) -> None:
        from hotspan.engine.blend.plan import Pace

        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self.ask([1] * 40, blend=False)  # the self-test is reported with the first step
        self._blending = self._core.scheduler.connector.manager.blending
        if self._blending.pace is None:
            raise SystemExit(f"blending is off: {self._blending.off}")
        self._blending.pace = Pace(0.0, 1.0, 0.0, 0.001)

    def ask(self, prompt: list[int], *, blend: Any, no_store: bool = False) -> Asked:
        from vllm import SamplingParams

        directives = {"blend": blend} | ({"no_store": True} if no_store else {})
        sampling = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": directives}
        )
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        took = time.process_time() - cpu_s, time.perf_counter() - wall_s
        self._settle()
        return Asked(output.outputs[0].token_ids[0], (output.kv_transfer_params or {}).get("blend"), *took)

    def encode(self, text: str) -> list[int]:
        return list(self._llm.get_tokenizer().encode(text, add_special_tokens=False))

    def learn(self, *prompts: list[int]) -> None:
        """Let the windows be stored, of what is in all of these prompts."""
        for prompt in prompts:
            self.ask(prompt, blend=False)

    def _settle(self) -> None:
        """Let copies end, and forget the engine's own prefix cache."""
        deadline = time.monotonic() + _HANG_S
        while self._core.scheduler.connector.has_pending_push_work():
            if time.monotonic() > deadline:
                raise SystemExit("the engine does not come to rest")
            self._core.step_fn()
        if not self._llm.reset_prefix_cache():
            raise SystemExit("the engine's prefix cache is in use")


@contextmanager
def engine(model: Path, separator: str, tokens: int, dtype: str) -> Iterator[Engine]:
    """An engine for prompts of five documents of so many tokens."""
    from vllm import LLM

    from hotspan.config.connector import transfer_config
    from hotspan.config.settings import CacheOptions

    longest = -(-(DOCUMENTS * (tokens + 16) + 128) // BLOCK) * BLOCK
    options = CacheOptions(
        ram_gib=3.0,
        chunk_tokens=WINDOW,
        blend="allowed",
        blend_min_tokens=WINDOW,
        blend_separator=(separator,),
        blend_check_every=0,
    )
    llm = LLM(
        str(model),
        dtype=dtype,
        block_size=BLOCK,
        max_model_len=longest,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=3 * longest // BLOCK + 8,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        kv_transfer_config=transfer_config(options.settings()),
        prefix_caching_hash_algo="sha256_cbor",
    )
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


# -- quality -----------------------------------------------------------------------------------------------------------


def ordered(rng: np.random.Generator, random: Random, tokens: int) -> Iterator[Texts]:
    """One text in different orders, each with questions of its own: the first two are those that it is learnt from."""
    text = make_texts(rng, 1, DOCUMENTS, tokens, QUESTIONS)
    for order in drawn(random, ORDERS):
        yield reordered(text, order)


def drawn(random: Random, count: int) -> list[tuple[int, ...]]:
    """Two orders to learn from, and `count` others, none of which begins as one of these: no prefix helps them."""
    orders: list[tuple[int, ...]] = []
    while len(orders) < 2 + count:
        order = tuple(random.sample(range(DOCUMENTS), DOCUMENTS))
        if order not in orders and order[0] not in [each[0] for each in orders[:2]]:
            orders.append(order)
    return orders


def reordered(text: Texts, order: tuple[int, ...]) -> Texts:
    """The same documents in another order. Its questions keep their keys; ordinals, or answers, are those of the order.

    A question for the n-th document is for the same document, wherever it is now.
    """
    documents, questions = text.documents[:, list(order)], text.questions.copy()
    for question in questions[0]:
        kind, _, key, answer = question
        if kind < KIND + KINDS.index("nth"):
            continue
        words = [document.tolist() for document in documents[0]]
        values = {place: found[found.index(key) + 1] for place, found in enumerate(words) if key in found}
        if kind == KIND + KINDS.index("nth"):
            question[1] = ORDINAL + next(place for place, value in values.items() if value == answer)
        else:
            question[3] = values[max(values)]
    return Texts(documents, questions)


def quality(texts: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each answer, on contexts of documents of so many tokens."""
    rows: list[dict[str, Any]] = []
    rng, random = np.random.default_rng(SEED + 2), Random(SEED + 2)
    with engine(ASSETS, WORDS[DOC], tokens, "float32") as asked:
        for _ in range(texts):
            first, second, *others = ordered(rng, random, tokens)
            asked.learn(first.prompt(0, 0), second.prompt(0, 0))
            for text in others:
                for number in range(text.questions.shape[1]):
                    rows += answers(asked, text, number, tokens)
    return rows


def answers(asked: Engine, text: Texts, number: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each way's answer to one question."""
    kind, _, _, right = text.questions[0, number].tolist()
    found = {way.name: asked.ask(text.prompt(0, number), blend=way.blend, no_store=not way.blend) for way in WAYS}
    return [
        {
            "tokens": tokens,
            "kind": KINDS[kind - KIND],
            "way": name,
            "is right": answer.token == right,
            "is as in full": answer.token == found["full"].token,
            "blend": answer.blend,
        }
        for name, answer in found.items()
    ]


def frontier(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By length, way and kind: the share of right answers, of those equal to the full prefill's, of tokens recomputed.

    Of answers that were blended only; of the full prefill, of all.
    """
    table: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        for way in WAYS:
            own = [row for row in rows if row["tokens"] == tokens and row["way"] == way.name]
            blended = [row for row in own if row["blend"] or way.name == "full"]
            shares = [row["blend"]["recomputed"] / row["blend"]["reused"] for row in blended if row["blend"]]
            cell = table[f"{DOCUMENTS} x {tokens}"][way.name]
            cell["blended"] = round(len(blended) / len(own), 3)
            if shares:
                cell["recomputed"] = round(statistics.mean(shares), 3)
            for kind in (*KINDS, "all"):
                these = [row for row in blended if kind in (row["kind"], "all")]
                for what in ("is right", "is as in full"):
                    cell[f"{kind}: {what}"] = round(statistics.mean(row[what] for row in these), 4) if these else None
    return table


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(model: Path, tokens: int, repetitions: int, dtype: str) -> dict[str, Any]:
    """By way: medians of CPU-seconds and seconds of a prompt of five documents of so many tokens, and over full's."""
    from hotspan.bench.prose import prose

    found: dict[str, list[Asked]] = defaultdict(list)
    random = Random(SEED + 3)
    with engine(model, _SEPARATOR, tokens, dtype) as asked:
        for number in range(repetitions):
            documents = [asked.encode(prose(100 * number + place, tokens))[:tokens] for place in range(DOCUMENTS)]
            cut = asked.encode(_SEPARATOR)
            learnt: list[list[int]] = []
            for order in drawn(random, 1):
                question = asked.encode(prose(7000 + 10 * number + len(learnt), 30))
                learnt.append([token for place in order for token in [*cut, *documents[place]]] + [*cut, *question])
            asked.learn(*learnt[:2])
            for way in WAYS[number % 2 :] + WAYS[: number % 2]:
                found[way.name].append(asked.ask(learnt[2], blend=way.blend, no_store=not way.blend))
    cpu_s = {name: statistics.median(each.cpu_s for each in asks) for name, asks in found.items()}
    wall_s = {name: statistics.median(each.wall_s for each in asks) for name, asks in found.items()}
    return {
        name: {
            "CPU-seconds": round(cpu_s[name], 3),
            "full's CPU-seconds over it": round(cpu_s["full"] / cpu_s[name], 2),
            "TTFT, s": round(wall_s[name], 3),
            "full's TTFT over it": round(wall_s["full"] / wall_s[name], 2),
            "blend": asks[-1].blend,
        }
        for name, asks in found.items()
    }


def main() -> None:
    options = arguments(__doc__, texts=30, tokens=[400, 1600], repetitions=3, size="demo", parts=["quality", "speed"])
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from hotspan.bench.machine import write_results
    from hotspan.demo.model import make_demo_model
    from hotspan.demo.plan import EngineSettings, usable_threads

    settings = EngineSettings(max_model_len=4096, threads=usable_threads())
    os.environ |= settings.environment()
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens if "quality" in options.parts else ():
        rows += quality(max(2, options.texts * _SHORT // tokens), tokens)
        print(json.dumps(frontier(rows), indent=1), flush=True)
    speeds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hotspan-blend-quality-") as work:
        model = make_demo_model(Path(work) / "model", options.size).path
        for tokens in options.tokens if "speed" in options.parts else ():
            speeds[f"{DOCUMENTS} x {tokens}"] = speed(model, tokens, options.repetitions, settings.dtype)
    print(json.dumps(speeds, indent=1))
    if options.output:
        command = f"python -m benchmarks.blend_quality --texts {options.texts} --repetitions {options.repetitions} "
        command += f"--size {options.size}"
        summary = merged(options.output, {"quality": frontier(rows), "speed": speeds})
        write_results(
            options.output, "blend-quality", command=command, summary=summary | {"dtype of speed": settings.dtype}
        )


def merged(path: Path, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was found, beside what a file of results has of other parts and lengths; and at which commit each was."""
    from hotspan.bench.machine import machine_facts

    before = json.loads(path.read_text())["summary"] if path.exists() else {}
    commits = before.get("commits", {})
    for part, lengths in found.items():
        commits |= {f"{part}, {length}": machine_facts()["Commit"] for length in lengths}
    return {part: before.get(part, {}) | found[part] for part in found} | {"commits": commits}


if __name__ == "__main__":
    main()
