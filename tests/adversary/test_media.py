"""A tenant that knows how another one names an image, on each route of the server that takes images."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from PIL import Image

from hotspan.bench.prose import prose
from tests.engine.test_media import A, B, part

from .conftest import KEYS, Asked, House, as_json

pytestmark = pytest.mark.engine

WORDS = {"max_tokens": 12, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Route:
    """A route that takes images.

    body:       of a request with a text and an image, or none, under a `uuid`. answer: of what it gives.
    has_cached: the answer says how many tokens were cached.
    """

    path: str
    body: Callable[[str, Image.Image | None, str], dict[str, Any]]
    answer: Callable[[Any], Asked]
    has_cached: bool = True


def chat(text: str, image: Image.Image | None, uuid: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text}, part(image, uuid)]
    return WORDS | {"messages": [{"role": "user", "content": content}], "ignore_eos": True}


def batch(text: str, image: Image.Image | None, uuid: str) -> dict[str, Any]:
    return chat(text, image, uuid) | {"messages": [chat(text, image, uuid)["messages"]]}


def responses(text: str, image: Image.Image | None, uuid: str) -> dict[str, Any]:
    url = {} if image is None else {"image_url": part(image)["image_url"]["url"]}
    content = [{"type": "input_text", "text": text}, {"type": "input_image", "detail": "auto", "uuid": uuid, **url}]
    return {"input": [{"role": "user", "content": content}], "max_output_tokens": 12, "temperature": 0}


def messages(text: str, image: Image.Image | None, uuid: str) -> dict[str, Any]:
    source = {}
    if image is not None:
        data = io.BytesIO()
        image.save(data, "png")
        coded = base64.b64encode(data.getvalue()).decode()
        source = {"source": {"type": "base64", "media_type": "image/png", "data": coded}}
    content = [{"type": "text", "text": text}, {"type": "image", "uuid": uuid, **source}]
    return WORDS | {"messages": [{"role": "user", "content": content}]}


def _without_images(body: dict[str, Any]) -> dict[str, Any]:
    (message,) = body["messages"]
    return body | {"messages": [message | {"content": message["content"][:1]}]}


def of_chat(said: Any) -> Asked:
    details = said["usage"]["prompt_tokens_details"] or {}
    return Asked(said["choices"][0]["message"]["content"], details.get("cached_tokens") or 0)


def of_responses(said: Any) -> Asked:
    return Asked(said["output"][0]["content"][0]["text"], said["usage"]["input_tokens_details"]["cached_tokens"])


def of_messages(said: Any) -> Asked:
    return Asked(said["content"][0]["text"], said["usage"].get("cache_read_input_tokens") or 0)


ROUTES = {
    route.path: route
    for route in (
        Route("/v1/chat/completions", chat, of_chat),
        Route("/v1/chat/completions/batch", batch, of_chat, has_cached=False),
        Route("/invocations", chat, of_chat),
        Route("/v1/responses", responses, of_responses),
        Route("/v1/messages", messages, of_messages),
    )
}
OTHERS = ("/tokenize",)
"""Routes that take a chat and answer nothing."""

NOT_SERVED = ("/pooling", "/v1/embeddings", "/v2/embed", "/score", "/rerank", "/classify", "/v1/audio/transcriptions")
"""Routes that take media too, of other models than this one."""


def post(house: House, who: str, route: Route, image: Image.Image | None, uuid: str) -> httpx.Response:
    text = prose(9900 + [*ROUTES, *OTHERS].index(route.path), 130)  # of its own, so that no other route has cached it
    body = route.body(text, image, uuid) | {"model": house.server.model}
    return house.call("POST", route.path, KEYS[who], body)


@pytest.mark.parametrize("path", ROUTES)
def test_a_name_of_another_tenants_image_shows_and_poisons_nothing(house: House, path: str) -> None:
    """Under one uuid each tenant's image is described as itself, and computed as if nobody had sent it."""
    route = ROUTES[path]

    def ask(who: str, image: Image.Image, uuid: str) -> Asked:
        answer = post(house, who, route, image, uuid)
        assert answer.status_code == 200, answer.text
        return route.answer(as_json(answer))

    red, lime = ask("acme", A, "u"), ask("globex", B, "u")
    assert red.text != lime.text, "the answer must depend on the image"
    assert red.cached == lime.cached == 0
    assert ask("globex", A, "u") == red
    assert ask("acme", A, "v").text == red.text
    assert ask("acme", A, "w").cached >= 256 or not route.has_cached


@pytest.mark.parametrize("path", ROUTES)
def test_a_name_without_an_image_is_refused(house: House, path: str) -> None:
    """A uuid alone would be answered from what somebody sent before. /v1/messages answers as if nothing was there."""
    route = ROUTES[path]
    assert post(house, "acme", route, A, "u").status_code == 200
    for who in KEYS:
        answer = post(house, who, route, None, "u")
        if path != "/v1/messages":
            assert answer.status_code == 400, answer.text
            continue
        text = replace(route, body=lambda *given: _without_images(messages(*given)))
        assert answer.status_code == 200, answer.text
        assert of_messages(answer.json()).text == of_messages(post(house, who, text, None, "u").json()).text


@pytest.mark.parametrize("path", OTHERS)
def test_no_other_route_takes_a_name_without_an_image(house: House, path: str) -> None:
    """What only renders or counts a chat refuses it, too."""
    for who in KEYS:
        answer = post(house, who, Route(path, chat, of_chat), None, "u")
        assert answer.status_code == 400, answer.text


def test_no_further_route_takes_media(house: House) -> None:
    """Routes for media of other models are not served by this one: where they are, they belong above."""
    for path in NOT_SERVED:
        assert house.call("POST", path, KEYS["acme"], {"model": house.server.model}).status_code == 404, path
