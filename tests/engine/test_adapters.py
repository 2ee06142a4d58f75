"""Adapters in a real engine: each answers as itself, with KV of its own, by what its files hold."""

import asyncio
import itertools
import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from vllm.lora.request import LoRARequest

from hotspan.bench.prose import prose
from hotspan.config.settings import CacheOptions
from hotspan.core.aftermath import Aftermath
from hotspan.http.errors import HttpError
from hotspan.server.adapters.check import AdapterLimits, model_shapes
from hotspan.server.adapters.registry import AdapterRegistry
from hotspan.server.adapters.routes import adapter_router
from hotspan.server.adapters.snapshots import SnapshotStore
from hotspan.server.adapters.source import CONFIG, WEIGHTS, Sources
from kit.demo_adapter import make_demo_adapter
from tests.bench.simulated import in_simulated_time

from .harness.core import CHUNK, core

on_one_loop = pytest.mark.asyncio(loop_scope="module")

SLOTS, CPU_SLOTS = 2, 3
OPTIONS = (
    *("--dtype", "float32", "--block-size", "128", "--max-model-len", "4096", "--num-gpu-blocks-override", "96"),
    *("--max-num-batched-tokens", "1024", "--gpu-memory-utilization", "0.2", "--enforce-eager"),
    *("--served-model-name", "base", "--enable-lora", "--max-lora-rank", "8"),
    *("--max-loras", str(SLOTS), "--max-cpu-loras", str(CPU_SLOTS)),
)
PROMPT = prose(7, 40)
LONG = prose(8, 1200)


def test_adapters_do_not_share(tiny_model: Path, tmp_path: Path) -> None:
    """Base model, two adapters, and a third that takes over the first one's name and path: none finds another's KV."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(name.encode())
    loras = [None, *(LoRARequest(name, n, str(tmp_path / name)) for n, name in enumerate("ab", 1))]
    with core(tiny_model) as engine:
        prompt, whole = engine.text(1, 1500), 1500 // CHUNK * CHUNK
        for lora in loras:
            assert engine.ask(prompt, lora=lora) == 0
            engine.settle()
        engine.forget_gpu()
        assert [engine.ask(prompt, lora=lora) for lora in loras] == [whole] * 3
        engine.forget_gpu()
        (tmp_path / "a" / WEIGHTS).write_bytes(b"new")
        assert engine.ask(prompt, lora=LoRARequest("a", 3, str(tmp_path / "a"))) == 0
        engine.settle()
        engine.check()


# -- through the app ---------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """A completion."""

    model: str
    text: str
    cached: int


class Hosting:
    """A server's engine, app and registry; adapters `a` to `e` lie in `root`, each of its own seed."""

    def __init__(self, engine: Any, adapters: Any, registry: AdapterRegistry, root: Path) -> None:
        self.engine = engine
        self.adapters = adapters
        self.registry = registry
        self.root = root
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(engine.app), base_url="http://x", timeout=60)
        self.loads: list[str] = []
        add_lora = engine.client.add_lora

        async def counted(request: Any) -> bool:
            self.loads.append(request.lora_name)
            return await add_lora(request)

        engine.client.add_lora = counted

    async def ask(self, model: str, prompt: str = PROMPT, tokens: int = 6) -> Answer:
        """What the engine answers to who asks for an adapter, as a server would hand it on."""
        return await self.ask_engine(await self.registry.resolve(model), prompt, tokens)

    async def ask_engine(self, model: str, prompt: str = PROMPT, tokens: int = 6) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        reply = await self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Answer(found["model"], found["choices"][0]["text"], cached)

    async def until_computing(self, name: str) -> None:
        """Wait until the engine has a request of what an adapter is now."""
        adapter = self.registry.engine_adapter(name)
        assert adapter is not None
        while not self.adapters._gate._users[adapter.name]:
            await asyncio.sleep(0.001)

    @asynccontextmanager
    async def fresh(self, *names: str, preload: bool = False, pin: bool = False) -> AsyncIterator[None]:
        """Adapters of these names, and none afterwards."""
        for name in names:
            await self.registry.register(name, name, preload=preload, pin=pin)
        try:
            yield
        finally:
            for adapter in self.registry.seen_by(""):
                await self.registry.delete(adapter.name)
            await asyncio.gather(*self.registry._loader._tasks)
            self.loads.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosting]:
    from hotspan.engine.adapters import EngineAdapters
    from hotspan.engine.arguments import add_cache, parse_engine_arguments
    from hotspan.engine.guard import RequestGuard
    from hotspan.engine.launch import launch

    path = tmp_path_factory.mktemp("hosting")
    for seed, name in enumerate("abcde", 1):
        make_demo_adapter(path / "adapters" / name, tiny_model, seed=seed)
    arguments = parse_engine_arguments(str(tiny_model), OPTIONS)
    add_cache(arguments, CacheOptions(ram_gib=0.1).settings())
    with Aftermath() as aftermath:
        async with launch(arguments, RequestGuard(lambda: "default"), aftermath) as engine:
            adapters = EngineAdapters(engine.client, engine.app.state.openai_serving_models, grace_s=0.1, pin_s=20)
            limits = AdapterLimits(adapters.max_rank, model_shapes(tiny_model))
            store = SnapshotStore(path / "copies")
            registry = AdapterRegistry(adapters, Sources([path / "adapters"]), store, limits)
            adapters.publish(lambda: [one.name for one in registry.seen_by("")])
            engine.app.include_router(adapter_router(registry, {"base"}))
            yield Hosting(engine, adapters, registry, path / "adapters")
    await registry.close()
    assert list((path / "copies").iterdir()) == []


@pytest.mark.engine
@on_one_loop
async def test_each_answers_as_itself(hosting: Hosting) -> None:
    """Base and two adapters say three things, under the names that were registered; all are listed, loaded or not."""
    async with hosting.fresh("a", "b", "c"):
        answers = [await hosting.ask(name) for name in ("base", "a", "b", "a")]
        assert len({answer.text for answer in answers}) == 3 and answers[1].text == answers[3].text
        assert [answer.model for answer in answers] == ["base", "a", "b", "a"]
        listed = (await hosting.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["base", "a", "b", "c"]


@pytest.mark.engine
@on_one_loop
async def test_a_hundred_first_calls_load_once(hosting: Hosting) -> None:
    """A hundred requests at once to an adapter that is not loaded: the engine loads it once, and it answers all."""
    base = await hosting.ask("base")
    async with hosting.fresh("a"):
        assert hosting.loads == []
        answers = await asyncio.gather(*(hosting.ask("a") for _ in range(100)))
        assert len(hosting.loads) == 1
        assert {answer.model for answer in answers} == {"a"} and all(answer.text != base.text for answer in answers)


@pytest.mark.engine
@on_one_loop
async def test_an_update_never_reuses_kv(hosting: Hosting) -> None:
    """The same name with other files finds no KV of before, not even on the GPU; with the old files it finds it."""
    async with hosting.fresh("a"):
        shutil.copytree(hosting.root / "a", hosting.root / "moving")
        await hosting.registry.register("moving", "moving")
        first = await hosting.ask("moving", LONG)
        again = await hosting.ask("moving", LONG)
        assert first.cached == 0 and again.cached > 256 and again.text == first.text
        shutil.copyfile(hosting.root / "b" / WEIGHTS, hosting.root / "moving" / WEIGHTS)
        assert (await hosting.ask("moving", LONG)).text == first.text, "files changed, and nobody asked for an update"
        await hosting.registry.update("moving")
        changed = await hosting.ask("moving", LONG)
        assert changed.cached == 0 and changed.text != first.text
        await hosting.registry.register("b", "b")
        assert changed.text == (await hosting.ask("b", LONG)).text
        await hosting.registry.update("moving", src="a")
        back = await hosting.ask("moving", LONG)
        assert back.cached > 256 and back.text == first.text


@pytest.mark.engine
@on_one_loop
async def test_requests_in_flight_end_with_what_they_began(hosting: Hosting) -> None:
    """Old and new content compute side by side in one batch; after the old one's last request its files go."""
    async with hosting.fresh("a", "b"):
        wanted = [(await hosting.ask(name, tokens=100)).text for name in ("a", "b")]
        await hosting.registry.register("c", "a")
        old = asyncio.create_task(hosting.ask("c", tokens=100))
        await hosting.until_computing("c")
        updated = await hosting.registry.update("c", src="b")
        assert not old.done()
        new = asyncio.create_task(hosting.ask("c", tokens=100))
        await hosting.until_computing("c")
        await hosting.registry.delete("c")
        assert updated.digest == hosting.registry.describe("b").digest
        assert [(await old).text, (await new).text] == wanted


@pytest.mark.engine
@on_one_loop
async def test_more_adapters_than_slots(hosting: Hosting) -> None:
    """Five adapters in two slots and three places: what was evicted comes back as itself, alone and all at once."""
    async with hosting.fresh(*"abcde"):
        alone = {name: (await hosting.ask(name)).text for name in "abcde"}
        assert len(set(alone.values())) == 5 and len(await hosting.engine.client.list_loras()) == CPU_SLOTS
        assert {name: (await hosting.ask(name)).text for name in "edcba"} == {**alone}
        together = await asyncio.gather(*(hosting.ask(name) for name in "abcdeabcde"))
        assert [answer.text for answer in together] == [alone[name] for name in "abcdeabcde"]
        assert len(hosting.loads) == 5, "the engine brings evicted adapters back by itself"


@pytest.mark.engine
@on_one_loop
async def test_a_pinned_adapter_stays(hosting: Hosting) -> None:
    """With one slot pinned the others take turns in the rest: all are answered, and the pinned one is never evicted.

    Without turns two others in one batch would find one slot, and the engine would end.
    """
    async with hosting.fresh("a", preload=True, pin=True), hosting.fresh(*"bcde"):
        (pinned,) = await hosting.engine.client.list_loras()
        asked = [random.Random(n).choice("abcde") for n in range(40)]
        answers = await asyncio.gather(*(hosting.ask(name, prose(n, 30)) for n, name in enumerate(asked)))
        assert [answer.model for answer in answers] == asked
        assert pinned in await hosting.engine.client.list_loras()
        hosting.adapters._gate.check()
        with pytest.raises(HttpError, match="no slot is free"):
            await hosting.registry.update("b", preload=True, pin=True)
        await hosting.registry.update("a", pin=False)
        await hosting.registry.update("b", preload=True, pin=True)
        assert (await hosting.ask("a")).model == "a" and (await hosting.ask("b")).model == "b"


@pytest.mark.engine
@on_one_loop
async def test_what_can_not_be_loaded(hosting: Hosting, tmp_path: Path) -> None:
    """An adapter that passes the checks and that the engine refuses: an error with its name for each call, no answer
    of the base model, and an engine that serves on."""
    from safetensors.torch import load_file, save_file

    broken = hosting.root / "broken"
    broken.mkdir()
    weights = load_file(hosting.root / "a" / WEIGHTS)
    save_file({name.replace("q_proj", "zz_proj"): data for name, data in weights.items()}, broken / WEIGHTS)
    shutil.copyfile(hosting.root / "a" / CONFIG, broken / CONFIG)
    async with hosting.fresh("a", "broken"):
        for _ in range(2):
            with pytest.raises(HttpError, match=r"'broken' can't be loaded: .*zz_proj") as caught:
                await hosting.ask("broken")
            assert caught.value.status == 500
        assert (await hosting.ask("a")).model == "a"
        reply = await hosting.http.post("/adapters", json={"name": "eager", "src": "broken"})
        assert reply.status_code == 400 and "zz_proj" in reply.json()["error"]["message"]
        assert hosting.registry.engine_adapter("eager") is None


@pytest.mark.engine
@on_one_loop
async def test_weights_that_do_not_fit_leave_no_slot_taken(hosting: Hosting, tmp_path: Path) -> None:
    """The engine keeps a slot for what it could read and not apply; it is given back, and the adapter never answers."""
    from safetensors.torch import load_file, save_file

    from hotspan.core.errors import EngineError

    weights = {name: data.repeat_interleave(2, dim=0) for name, data in load_file(hosting.root / "a" / WEIGHTS).items()}
    save_file(weights, tmp_path / WEIGHTS)
    config = json.loads((hosting.root / "a" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config))
    before = await hosting.engine.client.list_loras()
    with pytest.raises(EngineError):
        await hosting.adapters.load("misfit@000000000000", tmp_path)
    assert await hosting.engine.client.list_loras() == before
    async with hosting.fresh("a"):
        assert (await hosting.ask("a")).model == "a"


@pytest.mark.engine
@on_one_loop
async def test_delete(hosting: Hosting) -> None:
    """A deleted adapter is 404 at once, by its own name and, once its requests have ended, by the engine's."""
    async with hosting.fresh("a"):
        name = await hosting.registry.resolve("a")
        await hosting.ask("a")
        reply = await hosting.http.delete("/adapters/a")
        assert reply.status_code == 200
        with pytest.raises(HttpError) as caught:
            await hosting.ask("a")
        assert caught.value.status == 404
        await asyncio.gather(*hosting.registry._loader._tasks)
        body = {"model": name, "prompt": PROMPT, "max_tokens": 1}
        assert (await hosting.http.post("/v1/completions", json=body)).status_code == 404
        assert hosting.adapters._held == {} and not hosting.adapters._gate._users


@pytest.mark.engine
@on_one_loop
async def test_a_request_that_comes_too_late(hosting: Hosting) -> None:
    """Who was given an adapter before it went, and comes after, gets an error; the engine never hears of it."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMNotFoundError

    async with hosting.fresh("a", preload=True):
        late = hosting.engine.app.state.openai_serving_models.lora_requests[await hosting.registry.resolve("a")]
    with pytest.raises(VLLMNotFoundError, match="'a' was updated or deleted"):
        async for _ in hosting.engine.client.generate(PROMPT, SamplingParams(max_tokens=1), "late", lora_request=late):
            pass
    assert (await hosting.ask("base")).model == "base"


# -- lives, without an engine ------------------------------------------------------------------------------------------


class FakeClient:
    """What EngineAdapters asks of vLLM: adapters by number, and requests that last as long as `going` is not set."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=2, max_lora_rank=8))
        self.loras: set[int] = set()
        self.going = asyncio.Event()

    async def add_lora(self, request: Any) -> bool:
        self.loras.add(request.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.loras.discard(number)
        return True

    async def generate(self, *rest: Any, lora_request: Any = None) -> AsyncIterator[str]:
        await self.going.wait()
        yield "done"

    encode = generate


def fake_adapters(grace_s: float) -> tuple[Any, FakeClient, Any]:
    from hotspan.engine.adapters import EngineAdapters

    client, numbers = FakeClient(), itertools.count(1)
    models = SimpleNamespace(lora_requests={}, lora_id_counter=SimpleNamespace(inc=lambda n: next(numbers)))
    return EngineAdapters(client, models, grace_s=grace_s), client, models  # type: ignore[arg-type]


@in_simulated_time
async def test_who_was_told_a_name_may_still_come(tmp_path: Path) -> None:
    """For the grace an adapter that was given up is found; then no more; and it goes after its last request."""
    adapters, client, models = fake_adapters(grace_s=10.0)
    await adapters.load("a@0", tmp_path)
    lora = models.lora_requests["a@0"]
    unloading = asyncio.create_task(adapters.unload("a@0"))
    await asyncio.sleep(0)
    assert models.lora_requests["a@0"] is lora
    answers = client.generate("text", lora_request=lora)
    request = asyncio.create_task(anext(answers))
    await asyncio.sleep(10.1)
    assert models.lora_requests == {} and client.loras and not unloading.done()
    client.going.set()
    assert await request == "done"
    await answers.aclose()
    await asyncio.wait_for(unloading, 5)
    assert client.loras == set()


@in_simulated_time
async def test_given_up_and_taken_again(tmp_path: Path) -> None:
    """An adapter that is loaded again while it goes stays; given up twice, it goes once."""
    adapters, client, models = fake_adapters(grace_s=10.0)
    await adapters.load("a@0", tmp_path)
    first = asyncio.create_task(adapters.unload("a@0"))
    await asyncio.sleep(0)
    await adapters.load("a@0", tmp_path)
    await first
    assert list(models.lora_requests) == ["a@0"] and len(client.loras) == 1
    third = asyncio.create_task(adapters.unload("a@0"))
    await asyncio.sleep(5.0)
    await adapters.load("a@0", tmp_path)
    await asyncio.gather(third, adapters.unload("a@0"))
    await adapters.unload("a@0")
    assert models.lora_requests == {} and client.loras == set()


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
async def test_slots_suffice_whatever_happens(seed: int) -> None:
    """Requests, pins and unpins in any order never need a slot too many, and all end."""
    from hotspan.engine.adapters import SlotGate

    chance = random.Random(seed)
    slots = chance.randint(2, 4)
    gate, pinned, served = SlotGate(slots), [], []

    async def request(name: str) -> None:
        await gate.enter(name)
        try:
            gate.check()
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)
        finally:
            gate.leave(name)
        served.append(name)

    async def pin(name: str) -> None:
        async with gate.pinning(name):
            await asyncio.sleep(0)
        gate.check()

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        what = chance.random()
        if what < 0.05 and len(pinned) + 1 < slots:
            pinned.append(name := chance.choice([name for name in "abcdef" if name not in pinned]))
            await pin(name)
        elif what < 0.1 and pinned:
            gate.unpin(pinned.pop())
        elif what < 0.15 and tasks:
            chance.choice(tasks).cancel()
        else:
            tasks.append(asyncio.create_task(request(chance.choice("abcdef"))))
        gate.check()
        await asyncio.sleep(0)
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert len(served) == sum(outcome is None for outcome in outcomes) > 100
    await gate.drain("a")


@in_simulated_time
async def test_turns() -> None:
    """While somebody waits for a slot, who comes later waits too, even where there is one; pinned ones never."""
    from hotspan.engine.adapters import SlotGate

    gate = SlotGate(2)
    async with gate.pinning("p"):
        pass
    await gate.enter("a")
    order: list[str] = []

    async def request(name: str) -> None:
        await gate.enter(name)
        order.append(name)

    tasks = [asyncio.create_task(request(name)) for name in ("b", "a", "p")]
    await asyncio.sleep(0.01)
    assert order == ["p"]
    gate.leave("a")
    await asyncio.sleep(0.01)
    assert order == ["p", "b"]
    gate.leave("b")
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert order == ["p", "b", "a"]


def test_names() -> None:
    """The registered name comes back from the engine's; names that are not of that kind stay as they are."""
    from hotspan.engine.adapters import engine_name, registered_name

    assert engine_name("a", "0123456789abcdef") == "a@0123456789ab"
    for name in ("a", "x.y-z", "a@b"):
        assert registered_name(engine_name(name, "0" * 64)) == name == registered_name(name)
