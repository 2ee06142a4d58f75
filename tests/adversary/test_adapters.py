"""A tenant that lists, invokes, updates, replaces and deletes another tenant's adapters, on a real server."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hotspan.bench.prose import prose
from hotspan.engine.adapters import engine_name

from .conftest import ADMIN_TOKEN, KEYS, MAX_ADAPTERS, House

pytestmark = pytest.mark.engine

NAME = "legal"
TEXT = prose(9800, 700)


class Registered:
    """An adapter of acme's, and the answer that it gives."""

    def __init__(self, house: House) -> None:
        self.house = house
        listed = house.call("GET", f"/adapters/{NAME}", KEYS["acme"])
        assert listed.status_code == 200, listed.text
        self.engine_name = engine_name(NAME, listed.json()["digest"], "acme")
        self.answer = house.ask("acme", TEXT, model=NAME)

    def is_untouched(self) -> None:
        """Raises AssertionError unless its owner has it as before."""
        again = self.house.ask("acme", TEXT, model=NAME)
        assert again.text == self.answer.text and again.cached > 256


def register(house: House, who: str, name: str) -> httpx.Response:
    return house.call("POST", "/adapters", KEYS[who], {"name": name, "src": "mine"})


@pytest.fixture(scope="module")
def registered(house: House) -> Iterator[Registered]:
    answer = register(house, "acme", NAME)
    assert answer.status_code == 200, answer.text
    yield Registered(house)
    assert house.call("DELETE", f"/adapters/{NAME}", KEYS["acme"]).status_code == 200


def test_an_adapter_answers_as_itself(house: House, registered: Registered) -> None:
    """The adapter changes the answers, or the attacks below would show nothing."""
    assert registered.answer.text != house.ask("acme", TEXT).text
    registered.is_untouched()


def test_nobody_else_sees_it(house: House, registered: Registered) -> None:
    """No list of the other tenant's, nor of whom has no key, names it."""
    for path in ("/adapters", "/adapters?limit=1000", "/v1/models", f"/models/{house.server.model}/adapters"):
        for port in (house.server.port, house.router_port):
            url = f"http://127.0.0.1:{port}{path}"
            answer = httpx.get(url, headers={"authorization": f"Bearer {KEYS['globex']}"}, timeout=60)
            assert NAME not in answer.text, (path, answer.text)
            assert httpx.get(url, timeout=60).status_code in (401, 404)


@pytest.mark.parametrize("tenant", ["", "?tenant=acme", "?tenant="])
@pytest.mark.parametrize("which", ["name", "key", "engine"])
def test_nobody_else_changes_it(house: House, registered: Registered, which: str, tenant: str) -> None:
    """By its name, by what the registry or the engine call it, or in its owner's name: 403 or 404, and it stays."""
    name = {"name": NAME, "key": f"{NAME}@acme", "engine": registered.engine_name}[which]
    for method, path, body in (
        ("GET", f"/adapters/{name}{tenant}", None),
        ("POST", f"/adapters/{name}/update{tenant}", {"src": "mine"}),
        ("POST", f"/adapters/{name}/update{tenant}", {"preload": False}),
        ("DELETE", f"/adapters/{name}{tenant}", None),
    ):
        for key in (KEYS["globex"], None):
            answer = house.call(method, path, key, body)
            assert answer.status_code == (401 if key is None else 403 if tenant else 404), (method, path, answer.text)
    registered.is_untouched()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
INVOCATIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/invocations": CHAT,
}


@pytest.mark.parametrize("path", INVOCATIONS)
def test_nobody_else_invokes_it(house: House, registered: Registered, path: str) -> None:
    """As a model it does not exist for the other tenant, on any route and under any of its names."""
    for name in (NAME, f"{NAME}@acme", registered.engine_name):
        answer = house.call("POST", path, KEYS["globex"], INVOCATIONS[path] | {"model": name})
        assert answer.status_code == 404, (name, answer.text)


@pytest.mark.parametrize("header", [False, True])
def test_nobody_else_names_it_as_lmi_does(house: House, registered: Registered, header: bool) -> None:
    """Neither in the body nor in SageMaker's header."""
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}} | ({} if header else {"adapters": NAME})
    headers = {"authorization": f"Bearer {KEYS['globex']}"}
    headers |= {"x-amzn-sagemaker-adapter-identifier": NAME} if header else {}
    answer = httpx.post(house.server.url + "/invocations", headers=headers, json=body, timeout=60)
    assert answer.status_code == 404, answer.text


def test_equal_names_and_bytes_are_two_adapters(house: House, registered: Registered) -> None:
    """The other tenant's adapter of this name is another one: it computes, and is deleted alone."""
    assert register(house, "globex", NAME).status_code == 200
    assert house.ask("globex", TEXT, model=NAME).cached == 0
    assert house.call("DELETE", f"/adapters/{NAME}", KEYS["globex"]).status_code == 200
    registered.is_untouched()


def test_a_tenant_that_registers_without_end(house: House, registered: Registered) -> None:
    """It gets as many as a tenant may have; the other tenant and the administrator register theirs."""
    names = [f"n{n}" for n in range(MAX_ADAPTERS + 1)]
    body = {"preload": False, "src": "mine"}
    status = [house.call("POST", "/adapters", KEYS["globex"], body | {"name": name}).status_code for name in names]
    assert status == [200] * MAX_ADAPTERS + [400]
    assert house.call("POST", "/adapters", KEYS["acme"], body | {"name": "more"}).status_code == 200
    own = body | {"name": "admins", "tenant": "globex"}
    assert house.call("POST", "/adapters", ADMIN_TOKEN, own).status_code == 200
    for who, made in (("acme", ["more"]), ("globex", [*names[:-1], "admins"])):
        for name in made:
            assert house.call("DELETE", f"/adapters/{name}", KEYS[who]).status_code == 200
    registered.is_untouched()


@pytest.mark.parametrize("src", ["../acme/mine", "/etc", "..", "s3://bucket/mine", "mine/../../acme/mine"])
def test_nobody_registers_anothers_files(house: House, src: str) -> None:
    """No spelling of a path leads to another tenant's directory; an absolute one neither."""
    for asked in (src, str(house.directory / "adapters" / "acme" / "mine")):
        answer = house.call("POST", "/adapters", KEYS["globex"], {"name": "x", "src": asked})
        assert answer.status_code == 400, answer.text
