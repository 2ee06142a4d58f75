"""Media parts: no client's `uuid` decides whose image is seen, or under which name KV is kept."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import MultiModalDataParser
from vllm.renderers import BaseRenderer
from vllm.utils.counter import AtomicCounter

from hotspan.bench.prose import prose
from hotspan.config.settings import CacheOptions
from hotspan.core.aftermath import Aftermath
from hotspan.core.directives import Directives
from hotspan.engine.guard import RequestGuard
from hotspan.engine.media import bind_media
from hotspan.engine.requests import Admission

from .vision import SIDE, make_vision_model

TENANT: ContextVar[str] = ContextVar("tenant", default="acme")
APART = RequestGuard(TENANT.get)
SHARED = RequestGuard(TENANT.get, is_isolated=False)


A, B = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "lime"))


class Renderer(BaseRenderer[Any]):
    """vLLM's renderer as far as it names media, over a processor that does nothing else."""

    def __init__(self, *, has_caches: bool = True) -> None:
        multimodal = SimpleNamespace(mm_processor_cache_gb=4 if has_caches else 0)
        self.model_config = SimpleNamespace(multimodal_config=multimodal)
        self.config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=has_caches))
        self.api_process_rank = 0
        self._mm_req_counter = AtomicCounter()
        self._mm_processor_cache = self._mm_processor_only_cache = self._mm_cache_stats = None
        self._mm_timing_registry = SimpleNamespace(get=lambda name: nullcontext())
        self._mm_executor = ThreadPoolExecutor(1)
        self.mm_processor = SimpleNamespace(
            info=SimpleNamespace(parse_mm_data=MultiModalDataParser().parse_mm_data),
            apply=lambda inputs, _: inputs.get_mm_hashes("model", "blake3"),
        )

    def render_messages(self, messages: Any, params: Any) -> Any:
        raise NotImplementedError

    def name(self, part: Any, uuid: str | None = None) -> str:
        """The identity of one image."""
        uuids = None if uuid is None else {"image": [uuid]}
        (found,) = self._process_multimodal([1], {"image": [part]}, uuids, None)["image"]
        return found


def bound(guard: RequestGuard = APART, *, has_caches: bool = True) -> Renderer:
    renderer = Renderer(has_caches=has_caches)
    bind_media(renderer, lambda: guard.salt(TENANT.get(), None) or "")
    return renderer


@pytest.mark.parametrize("guard", [APART, SHARED])
def test_a_uuid_names_nothing(guard: RequestGuard) -> None:
    """A part has the identity of its content under any uuid and none, tenants shared or apart."""
    renderer = bound(guard)
    assert renderer.name(A) == renderer.name(A, "u") == renderer.name(A, renderer.name(B))
    assert renderer.name(B, "u") == renderer.name(B) != renderer.name(A)


@pytest.mark.parametrize("uuid", ["u", None])
def test_a_part_without_content_is_refused(uuid: str | None) -> None:
    """Nobody reads what another has put under a uuid."""
    renderer = bound()
    renderer.name(A, "u")
    with pytest.raises(VLLMValidationError, match="send its content with every request"):
        renderer.name(None, uuid)
    with pytest.raises(VLLMValidationError):
        renderer._process_multimodal([1], {"image": [A, None]}, {"image": ["u", "u"]}, None)


def test_tenants_have_their_own() -> None:
    """Two tenants' equal images are two in every cache, so that no time tells of the other's; shared, they are one."""
    own, shared = bound(), bound(SHARED)
    mine = own.name(A), shared.name(A)
    token = TENANT.set("globex")
    try:
        assert (own.name(A) == mine[0], shared.name(A) == mine[1]) == (False, True)
    finally:
        TENANT.reset(token)


def test_without_vllms_caches_parts_are_named_alike_in_every_process() -> None:
    """vLLM would number them anew in each process, and a tier that outlives it would confuse them."""
    first, second = bound(has_caches=False), bound(has_caches=False)
    assert first.name(A) == second.name(A) != second.name(B) != first.name(A)


async def test_a_thread_works_for_who_asked() -> None:
    """Prompts that are processed on the renderer's thread get the tenant of the task that sent them."""
    renderer = bound()

    async def ask(tenant: str) -> str:
        TENANT.set(tenant)
        await asyncio.sleep(0)
        return (await renderer._process_multimodal_async([1], {"image": [A]}, mm_uuids=None, mm_processor_kwargs=None))[
            "image"
        ][0]

    names = await asyncio.gather(*(asyncio.create_task(ask(tenant)) for tenant in ("acme", "globex", "acme")))
    assert names[0] == names[2] == renderer.name(A) != names[1]


def test_processors_elsewhere_are_left_alone() -> None:
    """Only a renderer behind the guard salts: another engine's in this process has vLLM's own identities."""
    bound()
    assert Renderer().name(A, "u") == "u"


def served() -> Admission:
    """Of an engine that hotspan's server starts."""
    return Admission(replace(CacheOptions(ram_gib=0.1).settings(), is_served=True), bytes(32), [], 256)


def asked(params: Any, features: list[Any], *, resumable: bool = False) -> Any:
    """A request with these media."""
    return SimpleNamespace(
        request_id="asked", kv_transfer_params=params, mm_features=features, lora_request=None, resumable=resumable
    )


@pytest.mark.parametrize(("params", "is_cached"), [({"hotspan": Directives().to_json()}, True), ({}, False)])
def test_media_of_another_server_are_not_cached(params: dict[str, Any], is_cached: bool) -> None:
    """Where no server of hotspan's has named a part, its identity may be what a client said."""
    admission = served()
    for features in ([], [object()]):
        state = admission.admit(asked(params, features))
        assert (state.keyer is not None and state.may_store) == (is_cached or not features)


@pytest.mark.parametrize(
    ("params", "resumable"),
    [
        ({}, False),
        ("no object", False),
        ({"hotspan": {"tenant": 7}}, False),
        ({"hotspan": Directives().to_json()}, True),
    ],
)
def test_outputs_of_who_is_not_cached_are_not_used_for_other_weights(params: Any, resumable: bool) -> None:
    """The engine keeps the encoder's output of any request: after its weights changed, no KV is made of it.

    A request whose text comes in parts may have media in a later one.
    """
    named, admission = {"hotspan": Directives().to_json()}, served()
    admission.admit(asked(params, [] if resumable else [object()], resumable=resumable))
    admission.end()
    admission.is_open = True
    assert admission.admit(asked(named, [object()])).left_out == "weights"
    assert admission.admit(asked(named, [])).left_out is None
    admission.reset_outputs(is_used=False)
    assert admission.admit(asked(named, [object()])).left_out is None


# -- a model that sees -------------------------------------------------------------------------------------------------

OPTIONS = (
    *("--dtype", "float32", "--block-size", "128", "--max-model-len", "2048", "--num-gpu-blocks-override", "48"),
    *("--gpu-memory-utilization", "0.2", "--enforce-eager", "--served-model-name", "base", "--enable-scale-out"),
    *("--chat-template", "{% for m in messages %}{{ m['content'] }} {% endfor %}"),
)
TEXT = prose(3, 130)
on_one_loop = pytest.mark.asyncio(loop_scope="module")


class Seeing:
    """Asks a server's app, as a tenant, about an image."""

    def __init__(self, app: Any) -> None:
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=120)

    async def post(self, path: str, tenant: str, **body: Any) -> httpx.Response:
        token = TENANT.set(tenant)
        try:
            return await self.http.post(path, json={"model": "base", "temperature": 0, **body})
        finally:
            TENANT.reset(token)

    async def ask(self, tenant: str, *parts: dict[str, Any]) -> tuple[str, int]:
        """What the model says, and how many of the prompt's tokens were cached."""
        body = {"messages": chat(*parts), "max_tokens": 12, "ignore_eos": True}
        reply = await self.post("/v1/chat/completions", tenant, **body)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        details = found["usage"]["prompt_tokens_details"] or {}
        return found["choices"][0]["message"]["content"], details.get("cached_tokens") or 0


def chat(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": TEXT}, *parts]}]


def part(picture: Image.Image | None, uuid: str | None = None) -> dict[str, Any]:
    """A part of a chat message."""
    named: dict[str, Any] = {"type": "image_url", "image_url": None} | ({} if uuid is None else {"uuid": uuid})
    if picture is not None:
        data = io.BytesIO()
        picture.save(data, "png")
        named["image_url"] = {"url": f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"}
    return named


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seeing]:
    from hotspan.engine.arguments import add_cache, parse_engine_arguments
    from hotspan.engine.launch import launch

    model = make_vision_model(tmp_path_factory.mktemp("vision"))
    arguments = parse_engine_arguments(str(model), OPTIONS)
    add_cache(arguments, CacheOptions(ram_gib=0.05).settings())
    with Aftermath() as aftermath:
        async with launch(arguments, APART, aftermath) as engine:
            yield Seeing(engine.app)


@pytest.mark.engine
@on_one_loop
async def test_nobody_sees_or_poisons_anothers_image(seeing: Seeing) -> None:
    """Over a real model: under one uuid each image is described as itself, by each tenant, cached or not."""
    plain = {name: (await seeing.ask("alone", part(picture)))[0] for name, picture in (("a", A), ("b", B))}
    assert plain["a"] != plain["b"], "the answer must depend on the image"
    assert await seeing.ask("acme", part(A, "u")) == (plain["a"], 0)
    assert await seeing.ask("globex", part(B, "u")) == (plain["b"], 0)
    assert await seeing.ask("acme", part(B, "u")) == (plain["b"], 0)
    again, cached = await seeing.ask("acme", part(A, "v"))
    assert again == plain["a"] and cached >= 256


@pytest.mark.engine
@on_one_loop
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": chat(part(None, "u"))}),
        ("/v1/chat/completions/render", {"messages": chat(part(None, "u"))}),
        ("/v1/chat/completions/batch", {"messages": [chat(part(None, "u"))]}),
        ("/invocations", {"messages": chat(part(None, "u"))}),
        ("/tokenize", {"messages": chat(part(None, "u"))}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "content_parts": [{"type": "image_url", "uuid": "u"}]}),
        (
            "/inference/v1/generate",
            {
                "token_ids": [768] * 4 + [5],
                "features": {"mm_hashes": {"image": ["u"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 4}]}},
            },
        ),
    ],
)
async def test_no_route_takes_a_part_without_content(seeing: Seeing, path: str, body: dict[str, Any]) -> None:
    """A known uuid alone is the client's mistake on every route, and shows nobody's image."""
    await seeing.ask("acme", part(A, "u"))
    if path.startswith("/inference"):
        body = body | {"sampling_params": {"max_tokens": 2}}
    reply = await seeing.post(path, "globex", **body)
    assert reply.status_code == 400, (reply.status_code, reply.text)
