"""A hit is byte-identical to what was stored, and its tokens are those of the engine's own prefix-cache hit."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kit.engine import CHUNK, Rig, rig

pytestmark = pytest.mark.engine


class Engines:
    """Engines over RAM and one disk, one after the other."""

    def __init__(self, model: Path, disk: Path) -> None:
        self._start = lambda: rig(model, disk=disk)
        self._stack = ExitStack()
        self.running = self._stack.enter_context(self._start())

    def restart(self) -> Rig:
        stored = self.running.digests.stored
        self.close()
        self.running = self._stack.enter_context(self._start())
        self.running.digests.stored.update(stored)
        return self.running

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tiny_model, tmp_path_factory.mktemp("identity") / "kv")
    yield engines
    engines.close()


@pytest.fixture
def ram(engines: Engines) -> Rig:
    return engines.running


def check(engine: Rig) -> None:
    assert engine.digests.wrong == 0
    engine.cache.check()


def test_ram_hit_equals_own_prefix_hit(ram: Rig) -> None:
    """A hit from RAM gives the tokens of the engine's own prefix-cache hit, and all its whole chunks are hits."""
    prompt = ram.text(1, 3000)
    ram.ask(prompt, 16)
    own = ram.ask(prompt, 16)
    assert own.cached == 2944
    ram.settle()
    ram.forget_gpu()
    loaded_before = ram.digests.loaded
    hit = ram.ask(prompt, 16)
    assert (hit.cached, hit.tokens) == (3000 // CHUNK * CHUNK, own.tokens)
    assert ram.digests.loaded - loaded_before == 2 * (3000 // CHUNK)
    check(ram)


def test_partial_hit_loads_the_longest_prefix(ram: Rig) -> None:
    """A prompt that shares 1,300 tokens with a stored one loads the five whole chunks of them and computes the rest."""
    shared = ram.text(2, 1300)
    ram.ask(shared + ram.text(3, 700), 4)
    ram.settle()
    other = shared + ram.text(4, 900)
    ram.forget_gpu()
    hit = ram.ask(other, 16)
    assert hit.cached == 1300 // CHUNK * CHUNK
    assert ram.ask(other, 16, salt="recomputed").tokens == hit.tokens
    check(ram)


def test_decoded_tokens_are_kept(ram: Rig) -> None:
    """The next turn of a chat finds the KV of the answer, not only that of the prompt."""
    prompt = ram.text(5, 500)
    answer = ram.ask(prompt, 300)
    ram.settle()
    ram.forget_gpu()
    turn = prompt + answer.tokens + ram.text(6, 40)
    hit = ram.ask(turn, 8)
    assert hit.cached == (500 + 300 - 1) // CHUNK * CHUNK
    assert ram.ask(turn, 8).tokens == hit.tokens
    check(ram)


def test_the_last_token_of_an_answer_is_not_kept(ram: Rig) -> None:
    """A chunk that ends with an answer's last token, whose KV nobody computed, is no hit for the next turn."""
    prompt = ram.text(9, 500)
    answer = ram.ask(prompt, 3 * CHUNK - 500)
    ram.settle()
    ram.forget_gpu()
    turn = prompt + answer.tokens + ram.text(6, 40)
    hit = ram.ask(turn, 8)
    assert hit.cached == 2 * CHUNK
    assert ram.ask(turn, 8, salt="recomputed").tokens == hit.tokens
    check(ram)


def test_whole_prompt_hit_computes_the_last_token(ram: Rig) -> None:
    """A prompt of whole chunks only is a hit too, and still gives the right first token."""
    prompt = ram.text(7, 4 * CHUNK)
    own = [ram.ask(prompt, 8), ram.ask(prompt, 8)][1]
    ram.settle()
    ram.forget_gpu()
    hit = ram.ask(prompt, 8)
    assert hit.tokens == own.tokens
    assert hit.cached >= 3 * CHUNK
    check(ram)


def test_salt_separates(ram: Rig) -> None:
    """A prompt under another salt, or under none, never hits."""
    prompt = ram.text(8, 1500)
    first = ram.ask(prompt, 8, salt="a")
    ram.settle()
    ram.forget_gpu()
    assert ram.ask(prompt, 8, salt="b").cached == 0
    assert ram.ask(prompt, 8).cached == 0
    ram.settle()
    ram.forget_gpu()
    again = ram.ask(prompt, 8, salt="a")
    assert (again.cached, again.tokens) == (1500 // CHUNK * CHUNK, first.tokens)
    check(ram)


def test_requests_that_run_together(ram: Rig) -> None:
    """Several requests that load, compute and decode in the same steps each get their own answer."""
    prompts = [ram.text(20 + n, 1100 + 64 * n) for n in range(3)]
    alone = [ram.ask(prompt, 12).tokens for prompt in prompts]
    ram.settle()
    ram.forget_gpu()
    fresh = ram.text(30, 700)
    together = ram.ask_all([prompts[0], fresh, prompts[1], prompts[2], prompts[0]], 12)
    assert [a.tokens for a in together if a is not together[1]] == [alone[0], alone[1], alone[2], alone[0]]
    assert all(a.cached >= 1024 for n, a in enumerate(together) if n != 1)
    assert ram.ask(fresh, 12, salt="recomputed").tokens == together[1].tokens
    check(ram)


def test_preemption(ram: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that the engine preempts and resumes give the tokens that they give alone."""
    prompts = [ram.text(40 + n, 1900) for n in range(3)]  # 15 of 47 blocks each, and soon 16
    seen = []
    original = ram.core.scheduler._preempt_request
    with monkeypatch.context() as patched:
        patched.setattr(ram.core.scheduler, "_preempt_request", lambda *a, **k: (seen.append(1), original(*a, **k))[1])
        together = ram.ask_all(prompts, 200)
    assert seen, "the pool was large enough: nothing was preempted"
    ram.settle()
    ram.forget_gpu()
    assert all(ram.is_same(prompt, answer.tokens) for prompt, answer in zip(prompts, together, strict=True))
    check(ram)


def test_abort_in_the_middle_of_a_load(ram: Rig) -> None:
    """A request that is aborted while its chunks are loaded leaves nothing pinned and harms no other."""
    from vllm import SamplingParams

    prompt = ram.text(50, 3000)
    own = [ram.ask(prompt, 8), ram.ask(prompt, 8)][1]
    ram.settle()
    ram.forget_gpu()
    engine = ram.llm.llm_engine
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    request = engine.add_request("aborted", {"prompt_token_ids": prompt}, greedy)
    engine.step()
    assert ram.core.scheduler.requests, "the request ended before it could be aborted"
    engine.abort_request([request if isinstance(request, str) else "aborted"], internal=isinstance(request, str))
    ram.settle()
    assert not ram.core.scheduler.requests
    assert not ram.cache.ram.is_pinned
    hit = ram.ask(prompt, 8)
    assert hit.tokens == own.tokens
    check(ram)


@pytest.mark.parametrize("steps", [1, 2])
def test_abort_in_the_middle_of_a_prompt(ram: Rig, steps: int) -> None:
    """Of a request that is aborted, what it had computed is kept, and nothing else."""
    prompt = ram.text(54 + steps, 3000)
    ram.start(f"5{steps}", prompt, 8)
    ram.step(steps)
    (request,) = ram.core.scheduler.requests.values()
    ram.llm.llm_engine.abort_request([request.request_id], internal=True)
    assert not ram.core.scheduler.requests
    ram.settle()
    ram.forget_gpu()
    hit = ram.ask(prompt, 8)
    assert hit.cached <= steps * 1024
    assert ram.ask(prompt, 8, salt="recomputed").tokens == hit.tokens
    check(ram)


def test_reset_empties_ram(ram: Rig) -> None:
    """The engine's reset with its connector leaves no chunk in RAM; the disk keeps its own, and new stores work."""
    prompt = ram.text(60, 1000)
    answer = ram.ask(prompt, 4)
    ram.settle()
    assert ram.llm.llm_engine.reset_prefix_cache(False, True)
    ram.settle()
    assert not ram.cache.ram.entries
    for _ in range(2):
        again = ram.ask(prompt, 4)
        assert (again.tokens, again.cached) == (answer.tokens, 1000 // CHUNK * CHUNK)
        ram.settle()
        ram.forget_gpu()
    check(ram)


def test_reset_beside_copies_in_flight(ram: Rig) -> None:
    """A reset while the workers still copy holds those slots back until they have ended, and loses nothing else."""
    from vllm import SamplingParams

    engine, connector = ram.llm.llm_engine, ram.core.scheduler.connector
    engine.add_request(
        "reset", {"prompt_token_ids": ram.text(70, 1500)}, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    )
    while not connector.connector_scheduler._jobs:
        engine.step()
    engine.reset_prefix_cache(True, True)
    assert connector._stale
    ram.cache.check()
    ram.settle()
    while ram.core.scheduler.requests:
        engine.step()
    ram.settle()
    assert not connector._stale and not ram.cache.ram.is_pinned
    check(ram)


def test_disk_hits_and_restart(engines: Engines) -> None:
    """Texts that have left the engine's pool and RAM come back from disk byte-identical, also in a new engine."""
    engine, whole = engines.running, 2900 // CHUNK * CHUNK
    prompts, own = [engine.text(80 + n, 2900) for n in range(2)], []
    for prompt in prompts:
        engine.ask(prompt, 16)
        own.append(engine.ask(prompt, 16).tokens)
        engine.settle()
    for is_new in (False, True):
        engine = engines.restart() if is_new else engine
        loaded = engine.digests.loaded
        for prompt, tokens in zip(prompts, own, strict=True):
            engine.evict_ram()
            engine.forget_gpu()
            hit = engine.ask(prompt, 16)
            assert (hit.cached, hit.tokens) == (whole, tokens)
            engine.settle()
        assert engine.digests.loaded >= loaded + 4 * (2900 // CHUNK)
        check(engine)
