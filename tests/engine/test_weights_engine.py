"""Weights that change in a real engine: its answers are those of the weights that it has."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hotspan.demo import model as demo
from hotspan.demo.model import make_demo_model
from kit.engine import Engine, Rig, engine_alone, rig

pytestmark = pytest.mark.engine

LENGTH, TOKENS = 1500, 12
SEEDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    first = make_demo_model(tmp_path_factory.mktemp("models") / "first", "tiny").path
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "VERSION", 1000)
        return first, make_demo_model(tmp_path_factory.mktemp("models") / "second", "tiny").path


Answers = list[list[int]]


@pytest.fixture(scope="module")
def answers(models: tuple[Path, Path]) -> tuple[Answers, Answers, Answers]:
    """What engines without hotspan answer: with each checkpoint, and with the first once it has reloaded the second."""
    first, second = models
    with engine_alone(second) as engine:
        other = asked(engine)
    with engine_alone(first) as engine:
        before = asked(engine)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        engine.llm.reset_prefix_cache()
        after = asked(engine)
    assert before != after != other != before
    return before, other, after


def asked(engine: Engine) -> list[list[int]]:
    """Its answers to all prompts."""
    return [engine.ask(engine.text(seed, LENGTH), TOKENS).tokens for seed in SEEDS]


def named(engine: Rig) -> str:
    """Wait until the weights have a name; what that is made of."""
    state = lambda: engine.connector.weights.state  # noqa: E731
    engine.until(lambda: state().source is not None, engine.connector.administrator.run_waiting)
    return str(state().source)


def test_answers_are_those_of_the_weights(
    models: tuple[Path, Path], answers: tuple[Answers, Answers, Answers], tmp_path: Path
) -> None:
    """Weights are reloaded and the prefix cache is reset: answers are the new weights'. After a restart with the old
    files they are the old weights' again; an engine that starts with the new ones finds nothing of that one."""
    first, second = models
    with rig(first, disk=tmp_path / "disk") as engine:
        assert asked(engine) == answers[0]
        engine.settle()
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        assert named(engine) == "random", "it does not compute what an engine does that starts with these files"
        engine.llm.reset_prefix_cache()
        assert asked(engine) == answers[2]
        engine.forget_gpu()
        assert asked(engine) == answers[2]
        assert engine.digests.loaded > 0 and not engine.digests.wrong
        engine.settle()
    with rig(second, disk=tmp_path / "disk") as engine:
        assert asked(engine) == answers[1]
        assert not engine.digests.hit_tokens
    with rig(first, disk=tmp_path / "disk") as engine:
        assert asked(engine) == answers[0]
        assert engine.digests.hit_tokens > 0, "what was stored with these weights is found"


def test_what_a_program_does_to_the_model(models: tuple[Path, Path], tmp_path: Path) -> None:
    """By `apply_model`, or with the model itself, as trainers in the same process do: nothing of before is found."""

    def scale(model: Any) -> None:
        for weights in model.parameters():
            weights.data.mul_(1.5)

    def scale_in_place(model: Any) -> None:
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(1.1)

    with rig(models[0], disk=tmp_path / "disk") as engine:
        prompt = engine.text(1, LENGTH)
        first = engine.ask(prompt, TOKENS).tokens
        engine.settle()
        engine.llm.apply_model(scale)
        assert named(engine) == "random"
        second = engine.ask(prompt, TOKENS)
        assert second.cached == 0 and second.tokens != first
        model = engine.llm.llm_engine.model_executor.driver_worker.worker.get_model()
        model.load_state_dict(model.state_dict())
        assert engine.connector.weights.state.changes == 2
        third = engine.ask(prompt, TOKENS)
        assert third.cached == 0 and third.tokens == second.tokens
        assert engine.ask(prompt, TOKENS).cached > 0, "a model that nobody writes into keeps its name"
        for write in (scale, scale_in_place):
            before = engine.connector.weights.state.changes
            write(model)
            changed = engine.ask(prompt, TOKENS)
            assert changed.cached == 0 and engine.connector.weights.state.last == "a write into the model"
            assert engine.connector.weights.state.changes == before + 1
            assert engine.ask(prompt, TOKENS).cached > 0


PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
import hotspan
first, second, prompts, tokens, disk = json.loads(sys.argv[1])
llm = LLM(first, **hotspan.engine_options(ram="256MiB", disk=disk, disk_size="512MiB"), dtype="float32",
          max_model_len=4096, block_size=128, num_gpu_blocks_override=48, max_num_batched_tokens=1024,
          gpu_memory_utilization=0.2, enforce_eager=True)
options = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
def asked():
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]
before = asked()
llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
llm.reset_prefix_cache()
print("ANSWERS", json.dumps([before, asked(), asked()]))
"""


@pytest.mark.slow
def test_an_engine_core_of_its_own_process(
    models: tuple[Path, Path], answers: tuple[Answers, Answers, Answers], tmp_path: Path
) -> None:
    """`LLM()` whose engine core is another process: the calls come over its wire."""
    import json

    with engine_alone(models[0]) as engine:
        prompts = [engine.text(seed, LENGTH) for seed in SEEDS]
    given = json.dumps([str(models[0]), str(models[1]), prompts, TOKENS, str(tmp_path / "disk")])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("ANSWERS ")] or [ran.stderr[-3000:]]
    before, after, again = json.loads(line.removeprefix("ANSWERS "))
    assert (before, after, again) == (answers[0], answers[2], answers[2])
