"""Each family that sees, behind the server's guard: an image's KV is found by its content, and by its tenant alone."""

import base64
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
import pytest_asyncio
from PIL import Image
from transformers.utils import is_torchvision_available

from hotspan.bench.prose import prose
from hotspan.config.settings import CacheOptions
from hotspan.core.aftermath import Aftermath
from hotspan.core.types import CHUNK_TOKENS
from hotspan.engine.guard import RequestGuard
from kit.families.vision import SIGHTS, Sight, make_sight
from tests.engine.test_media import TENANT, part

pytestmark = [pytest.mark.engine, pytest.mark.slow]
on_one_loop = pytest.mark.asyncio(loop_scope="module")

CHUNK = CHUNK_TOKENS
SIDE = 112
RED, LIME = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "lime"))
BEFORE, AFTER = prose(5, 450), prose(6, 400)
"""Texts of more than a chunk each: of the chunks before an image and of those after it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was answered, and how many of the prompt's tokens were cached."""

    text: str
    cached: int
    tokens: int


class Seeing:
    """A server's app over a model that sees; the engine's own prefix cache is empty at each question."""

    def __init__(self, engine: Any, sight: Sight) -> None:
        self.sight = sight
        self._engine = engine
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app=engine.app), base_url="http://x", timeout=120)

    async def ask(self, *parts: dict[str, Any] | str, tenant: str = "acme") -> Seen:
        """An answer to a message of these parts."""
        await self._engine.client.reset_prefix_cache()
        content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
        body = {"model": "base", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        token = TENANT.set(tenant)
        try:
            reply = await self._http.post(
                "/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": content}]}
            )
        finally:
            TENANT.reset(token)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        usage = found["usage"]
        details = usage["prompt_tokens_details"] or {}
        text = found["choices"][0]["message"]["content"]
        return Seen(text, details.get("cached_tokens") or 0, usage["prompt_tokens"])


def whole(seen: Seen) -> int:
    """Tokens of a prompt's whole chunks."""
    return (seen.tokens - 1) // CHUNK * CHUNK


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(
            sight,
            id=str(sight),
            marks=pytest.mark.skipif(
                sight.needs_torchvision and not is_torchvision_available(),
                reason="its processor needs torchvision, which can't be imported here",
            ),
        )
        for sight in SIGHTS
    ],
)
async def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seeing]:
    from hotspan.engine.arguments import add_cache, parse_engine_arguments
    from hotspan.engine.launch import launch

    sight: Sight = request.param
    model = make_sight(sight, tmp_path_factory.mktemp("sight"))
    options = (
        *("--dtype", "float32", "--block-size", "128", "--max-model-len", "4096", "--served-model-name", "base"),
        *("--kv-cache-memory-bytes", str(1 << 26), "--max-num-batched-tokens", "512", "--enforce-eager"),
        *("--allowed-media-domains", "127.0.0.1", "--limit-mm-per-prompt", '{"image": 3, "video": 1}'),
        *("--chat-template", sight.chat_template, "--chat-template-content-format", "openai"),
    )
    arguments = parse_engine_arguments(str(model), options)
    add_cache(arguments, CacheOptions(ram_gib=0.1).settings())
    with Aftermath() as aftermath:
        async with launch(arguments, RequestGuard(TENANT.get), aftermath) as engine:
            yield Seeing(engine, sight)


@on_one_loop
async def test_the_same_image_hits_and_no_other_does(seeing: Seeing) -> None:
    """All whole chunks of a prompt with the same image are loaded; with another one only those before it."""
    red = await seeing.ask(BEFORE, part(RED), AFTER)
    assert red.cached == 0
    assert await seeing.ask(BEFORE, part(RED), AFTER) == Seen(red.text, whole(red), red.tokens)
    lime = await seeing.ask(BEFORE, part(LIME), AFTER)
    assert lime.text != red.text and 0 < lime.cached < whole(red)
    assert await seeing.ask(BEFORE, part(LIME), AFTER) == Seen(lime.text, whole(lime), lime.tokens)


@on_one_loop
async def test_another_tenants_image_is_a_miss(seeing: Seeing) -> None:
    """Another tenant's same prompt is computed, with the same answer."""
    mine = await seeing.ask(part(RED), BEFORE)
    theirs = await seeing.ask(part(RED), BEFORE, tenant="globex")
    assert theirs == Seen(mine.text, 0, mine.tokens)
    assert (await seeing.ask(part(RED), BEFORE)).cached == whole(mine)


@on_one_loop
async def test_several_images(seeing: Seeing) -> None:
    """Images count each in its place: in another order nothing after the first difference is found."""
    both = await seeing.ask(part(RED), part(LIME), BEFORE)
    assert (both.cached, whole(both) > 0) == (0, True)
    swapped = await seeing.ask(part(LIME), part(RED), BEFORE)
    assert swapped.cached == 0 and swapped.text != both.text
    assert (await seeing.ask(part(RED), part(RED), BEFORE)).cached == 0
    assert await seeing.ask(part(RED), part(LIME), BEFORE) == Seen(both.text, whole(both), both.tokens)


@on_one_loop
async def test_a_resized_image_is_another(seeing: Seeing) -> None:
    """The same picture in another size is other content."""
    first = await seeing.ask(BEFORE, part(RED.resize((84, 84))), AFTER)
    other = await seeing.ask(BEFORE, part(RED.resize((56, 56))), AFTER)
    assert other.cached < min(whole(first), whole(other))
    again = await seeing.ask(BEFORE, part(RED.resize((84, 84))), AFTER)
    assert again == Seen(first.text, whole(first), first.tokens)


@on_one_loop
async def test_an_image_by_its_url_is_its_content(seeing: Seeing) -> None:
    """What a URL of an allowed domain holds is the same image as one sent in base64, until it changes."""
    picture = Image.new("RGB", (SIDE, SIDE), "blue")
    with Images(picture) as images:
        url = {"type": "image_url", "image_url": {"url": images.url}}
        sent = await seeing.ask(part(picture), BEFORE)
        assert await seeing.ask(url, BEFORE) == Seen(sent.text, whole(sent), sent.tokens)
        images.picture = Image.new("RGB", (SIDE, SIDE), "yellow")
        changed = await seeing.ask(url, BEFORE)
        assert changed.cached == 0 and changed.text != sent.text


@on_one_loop
async def test_video_frames(seeing: Seeing) -> None:
    """A video is found by its frames, all of them and in their order."""
    if seeing.sight.video is None:
        pytest.skip("the family takes no video")
    film = await seeing.ask(video(RED, RED, LIME, LIME), BEFORE)
    assert film.cached == 0
    assert (await seeing.ask(video(LIME, LIME, RED, RED), BEFORE)).cached == 0
    assert await seeing.ask(video(RED, RED, LIME, LIME), BEFORE) == Seen(film.text, whole(film), film.tokens)


def video(*frames: Image.Image) -> dict[str, Any]:
    """A part of a chat message."""
    coded = []
    for frame in frames:
        data = io.BytesIO()
        frame.save(data, "jpeg")
        coded.append(base64.b64encode(data.getvalue()).decode())
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(coded)}"}}


class Images:
    """A server of one image, on loopback."""

    def __init__(self, picture: Image.Image) -> None:
        self.picture = picture
        images = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "image/png")
                self.end_headers()
                images.picture.save(self.wfile, "png")

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/a.png"

    def __enter__(self) -> "Images":
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
