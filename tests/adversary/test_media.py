"""A tenant that knows how another one names an image, against a real server, its gate and a model that sees."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.test_media import A, B, chat, part
from tests.engine.vision import make_vision_model
from tests.server.conftest import Server, serving

from .conftest import KEYS, TENANTS, Asked

pytestmark = pytest.mark.engine

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("seeing")
    (directory / "tenants.yaml").write_text(TENANTS)
    (directory / "tenants.yaml").chmod(0o600)
    options = ("--max-model-len", "2048", "--chat-template", TEMPLATE, "--ram-gib", "0.05")
    options += ("--tenants", str(directory / "tenants.yaml"))
    with serving(make_vision_model(directory / "model"), directory / "log", *options) as server:
        yield server


def post(server: Server, who: str, *parts: dict[str, Any]) -> httpx.Response:
    body = {"model": server.model, "messages": chat(*parts), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEYS[who]}"}
    return httpx.post(server.url + "/v1/chat/completions", headers=headers, json=body, timeout=120)


def ask(server: Server, who: str, *parts: dict[str, Any]) -> Asked:
    answer = post(server, who, *parts)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    details = said["usage"]["prompt_tokens_details"] or {}
    return Asked(said["choices"][0]["message"]["content"], details.get("cached_tokens") or 0)


def test_a_name_of_another_tenants_image_shows_and_poisons_nothing(seeing: Server) -> None:
    """Under one uuid each tenant's image is described as itself, and computed as if nobody had sent it."""
    red, lime = ask(seeing, "acme", part(A, "u")), ask(seeing, "globex", part(B, "u"))
    assert red.text != lime.text, "the answer must depend on the image"
    assert red.cached == lime.cached == 0
    assert ask(seeing, "globex", part(A, "u")) == red
    assert ask(seeing, "acme", part(A, "v")).text == red.text
    assert ask(seeing, "acme", part(A, "w")).cached >= 256


def test_a_name_without_an_image_is_refused(seeing: Server) -> None:
    """A uuid alone would be answered from what somebody sent before."""
    ask(seeing, "acme", part(A, "u"))
    for who in KEYS:
        assert post(seeing, who, part(None, "u")).status_code == 400
