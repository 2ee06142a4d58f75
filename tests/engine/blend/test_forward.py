"""The forward over any runs in a real engine: the bits of a prefill, in blocks that nobody reads from any more."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotspan.engine.blend.runs import Run, as_runs, without
from hotspan.engine.worker import HostWorker

from .engine import Library, ask, blending, forward

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2e-5), ("bfloat16", 0.0)])
def test_any_runs_give_what_the_engines_own_prefill_gives(tiny_model: Path, dtype: str, rounding: float) -> None:
    """Everything in 1, 3, 40 or 256 runs, into blocks full of garbage, and a part over the rest as it was. In bfloat16
    to the bit; in float32 too up to 480 tokens, and in one run: behind that attention is summed in tiles that depend on
    what is computed together."""
    with blending(tiny_model, dtype=dtype) as engine:
        tokens = engine.text(1, 900)
        engine.start("whole", tokens, 4)
        while not engine.scheduler.running or not engine.scheduler.running[0].num_output_tokens:
            engine.step()
        requests = forward()._runner.requests
        own, whole = forward().blocks_of(next(iter(requests))), Run(0, len(tokens))
        scratch = [block for block in range(1, 48) if block not in own][: len(own)]
        layers = range(len(forward().layers))
        exact = [forward().read(own, whole, layer) for layer in layers]

        def check(blocks: list[int], rounding: float) -> None:
            for layer in layers:
                off = (forward().read(blocks, whole, layer) - exact[layer]).abs()
                assert float(off.max()) <= rounding and float(off[:480].max()) == 0.0

        ids, rng = np.array(tokens, np.uint32), np.random.default_rng(0)
        for count in (1, 3, 40, 256):
            ends = sorted({*rng.choice(np.arange(1, 900), count - 1, replace=False).tolist(), 900})
            forward().fill(scratch, 7.0)
            forward().compute(ids, scratch, [Run(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)])
            check(scratch, 0.0 if count == 1 else rounding)
        some = as_runs(position for position in range(900) if position // 50 % 3 == 0)
        forward().fill(scratch, 7.0)
        for rest in without(whole, some):
            for layer in layers:
                read = exact[layer][rest.start : rest.stop]
                forward().write(scratch, rest, layer, read[:, 0], read[:, 1])
        forward().compute(ids, scratch, some)
        check(scratch, rounding)
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step()


def test_copies_out_of_blocks_end_before_they_are_blended_into(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that still reads a block of an earlier request is waited for: what is stored is what was computed."""
    with blending(tiny_model, num_gpu_blocks_override=20, max_model_len=2304) as engine:
        library = Library(engine, 9000, 3)
        library.learn()
        engine.settle()
        held, copy, wait = threading.Event(), HostWorker._copy, HostWorker.wait
        waited: list[set[int]] = []

        def holding(self: HostWorker, job: Any, piece: Any) -> int:
            assert held.wait(60)
            return copy(self, job, piece)

        def waiting(self: HostWorker, jobs: set[int]) -> None:
            waited.append(set(jobs))
            held.set()
            wait(self, jobs)

        monkeypatch.setattr(HostWorker, "_copy", holding)
        monkeypatch.setattr(HostWorker, "wait", waiting)
        text = engine.text(9500, 2000)
        computed = ask(engine, text, blend=False)[0].logprobs
        assert ask(engine, library.prompt(2, 1, 0))[0].blend is not None
        held.set()
        assert waited
        engine.settle()
        monkeypatch.undo()
        engine.forget_gpu()
        loaded = ask(engine, text, blend=False)[0]
        assert loaded.cached > 1000 and loaded.logprobs == pytest.approx(computed, abs=1e-4)
