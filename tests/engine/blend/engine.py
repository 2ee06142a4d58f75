"""A real engine that blends, and prompts for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from hotspan.config.settings import BlendSettings
from hotspan.engine.blend.admission import Blending
from hotspan.engine.blend.forward import EngineForward
from hotspan.engine.blend.plan import Pace
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.steps import BlendSteps
from kit.engine import Rig, rig

PACE = Pace(0.0, 1.0, 0.0, 0.001)
"""So that what is planned does not depend on the machine's speed."""

WINDOW = 256
SEPARATOR = "\n\n----\n\n"


def settings(**given: Any) -> BlendSettings:
    """Blending with separators between documents."""
    return BlendSettings(**({"separators": (SEPARATOR,)} | given))


@contextmanager
def blending(
    model: Path, *, blend: dict[str, Any] | None = None, cache: dict[str, Any] | None = None, **options: Any
) -> Iterator[Rig]:
    """An engine whose self-test has passed. cache: further fields of CacheSettings."""
    with rig(model, cache={"blend": settings(**(blend or {}))} | (cache or {}), **options) as engine:
        engine.ask(engine.text(999, 40), 2)
        assert of(engine).off is None and of(engine).pace is not None
        of(engine).pace = PACE
        yield engine


def of(engine: Rig) -> Blending:
    """The scheduler's half."""
    return engine.manager.blending


def worker() -> BlendSteps:
    """The worker's half, of the engine of this process."""
    return get_kv_transfer_group()._blends


def forward() -> EngineForward:
    """The forward of the engine of this process."""
    return worker()._forward


def empty(engine: Rig) -> None:
    """Leave nothing in the engine's prefix cache, the tiers and the index."""
    engine.settle()
    engine.forget_gpu()
    engine.forget_ram()
    for owner in list(of(engine).index._owners):
        of(engine).index.forget_owner(owner)


def blended_and_exact(
    engine: Rig, prompt: list[int], **directives: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """KV of each layer of all tokens but the last: as a blended request has it, and as a prefill gives it."""
    ids, claimed, layers = np.array(prompt, np.uint32), Run(0, len(prompt) - 1), range(len(forward().layers))
    engine.settle()
    engine.forget_gpu()
    engine.start("blended", prompt, 4, **directives)
    while not engine.scheduler.running:
        engine.step()
    own = forward().blocks_of(next(iter(forward()._runner.requests)))
    found = [forward().read(own, claimed, layer) for layer in layers]
    scratch = [block for block in range(1, 48) if block not in own][: len(own)]
    forward().compute(ids, scratch, [claimed])
    exact = [forward().read(scratch, claimed, layer) for layer in layers]
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.step()
    return found, exact


@dataclass
class Blended:
    """One answer. blend: what it says of blending. logprob: of each of its tokens."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    blend: dict[str, Any] | None


def ask(engine: Rig, *prompts: list[int], salt: str | None = None, **directives: Any) -> list[Blended]:
    """Answers to requests that run together, greedy."""
    asked = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    extra = {"kv_transfer_params": directives} if directives else None
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, extra_args=extra, logprobs=1)
    return [
        Blended(
            list(first.token_ids),
            [best[token].logprob for best, token in zip(first.logprobs, first.token_ids, strict=True)],
            output.num_cached_tokens,
            (output.kv_transfer_params or {}).get("blend"),
        )
        for output in engine.llm.generate(asked, sampling, use_tqdm=False)
        for first in output.outputs
    ]


class Library:
    """Prompts of a system prompt, documents in some order, and a question; separators between them."""

    def __init__(self, engine: Rig, first: int, count: int, tokens: int = 2 * WINDOW) -> None:
        self._engine = engine
        self._separator = engine._encode(SEPARATOR, add_special_tokens=False)
        self._head = engine.text(first, 60)
        self.documents = [engine.text(first + 1 + number, tokens) for number in range(count)]
        self._asked = first

    def prompt(self, *order: int) -> list[int]:
        """A prompt with these documents, and a question of its own."""
        self._asked += 100
        parts = [self._head, *(self.documents[number] for number in order), self._engine.text(self._asked, 30)]
        return [token for part in parts for token in (*part, *self._separator)]

    def learn(self, **directives: Any) -> None:
        """Let the engine store the windows of all documents, which it sees twice."""
        order = list(range(len(self.documents)))
        for each in (order, order[1:] + order[:1]):
            assert ask(self._engine, self.prompt(*each), **directives)[0].blend is None
