"""Every route with every wrong principal, on the server and through the router."""

from collections.abc import Iterator

import httpx
import pytest

from hotspan.server.policy import Access, access_table

from .conftest import ADMIN_TOKEN, KEYS, House

pytestmark = pytest.mark.engine

WRONG = {
    "nobody": {},
    "a guess": {"authorization": "Bearer sk-somebody-elses"},
    "an empty key": {"authorization": "Bearer"},
    "a key as a password": {"authorization": "Basic c2stYWNtZS0wMTIzNDU2Nzg5Og=="},
    "a key that goes on": {"authorization": f"Bearer {KEYS['acme']}x"},
    "half a key": {"authorization": f"Bearer {KEYS['acme'][:-1]}"},
    "two keys in one": {"authorization": f"Bearer {KEYS['acme']},{KEYS['globex']}"},
    "a tenant's name": {"authorization": "Bearer acme"},
    "half a token": {"authorization": f"Bearer {ADMIN_TOKEN[:-1]}"},
    "a claim": {"x-hotspan-tenant": "acme", "x-tenant": "acme", "x-forwarded-for": "127.0.0.1"},
    "a digest": {"x-api-key": "sha256:0"},
}
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")


def routes(house: House) -> Iterator[tuple[str, str, Access]]:
    """Method, path and access of all that the server serves, by its own OpenAPI document and by the table."""
    table = access_table(has_keys=True, has_given_token=True, has_client_adapters=True)
    served = house.call("GET", "/openapi.json", ADMIN_TOKEN).json()["paths"]
    named = {name.partition(" ")[2] or name for name in table}
    for path in sorted(served.keys() | named):
        for method in METHODS:
            access = table.get(f"{method} {path}", table.get(path, Access.ADMIN))
            yield method, path.replace("{", "").replace("}", ""), access


def is_nowhere(client: httpx.Client, answer: httpx.Response) -> bool:
    """Whether a request was for no route of this engine's: a 404, for the administrator, too."""
    asked = answer.request
    ours = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    return answer.status_code == 404 and client.request(asked.method, asked.url, headers=ours).status_code == 404


@pytest.mark.parametrize("who", WRONG)
def test_no_route_answers_a_wrong_principal(house: House, who: str) -> None:
    """Without a right key or token all that is not public is 401 or 403, in any method; what is no route, 404."""
    with httpx.Client(base_url=house.server.url, timeout=120) as client:
        for method, path, access in routes(house):
            answer = client.request(method, path, headers=WRONG[who])
            if access is not Access.PUBLIC and not is_nowhere(client, answer):
                assert answer.status_code in (401, 403), (method, path, answer.status_code, answer.text[:200])


def test_no_tenant_administers(house: House) -> None:
    """A tenant's key opens no route of the administrator's, in any method."""
    headers = {"authorization": f"Bearer {KEYS['globex']}"}
    with httpx.Client(base_url=house.server.url, timeout=120) as client:
        for method, path, access in routes(house):
            if access is Access.ADMIN:
                answer = client.request(method, path, headers=headers)
                is_closed = answer.status_code == 403 or is_nowhere(client, answer)
                assert is_closed, (method, path, answer.status_code, answer.text[:200])


@pytest.mark.parametrize("who", WRONG)
def test_the_router_lets_nobody_in(house: House, who: str) -> None:
    """Through the router, no route that is not public answers without a key of its file; it holds none of its own."""
    with httpx.Client(base_url=f"http://127.0.0.1:{house.router_port}", timeout=120) as client:
        for method, path, access in routes(house):
            if access is not Access.PUBLIC:
                answer = client.request(method, path, headers=WRONG[who])
                assert 400 <= answer.status_code < 500, (method, path, answer.status_code, answer.text[:200])


@pytest.mark.parametrize(
    "path",
    [
        "/hotspan/cache/clear/",
        "//hotspan/cache/clear",
        "/hotspan//cache/clear",
        "/./hotspan/cache/clear",
        "/health/../hotspan/cache/clear",
        "/health/%2e%2e/hotspan/cache/clear",
        "/hotspan%2fcache%2fclear",
        "/HOTSPAN/CACHE/CLEAR",
        "/hotspan/cache/clear;a=b",
        "/hotspan/cache/clear?access=public",
        "/ping/hotspan/cache/clear",
    ],
)
def test_no_spelling_of_a_path_goes_around_the_gate(house: House, path: str) -> None:
    """Another spelling of a path is another path: refused to those who may not."""
    for headers in ({}, {"authorization": f"Bearer {KEYS['globex']}"}, {"x-original-url": "/health"}):
        for method in ("GET", "POST"):
            url = httpx.URL(house.server.url).copy_with(raw_path=path.encode())
            answer = httpx.request(method, url, headers=headers, timeout=120, follow_redirects=False)
            assert answer.status_code in (401, 403, 404, 405, 307), (method, path, answer.status_code)
            if answer.status_code == 307:  # to the plain path, where the gate is
                assert answer.headers["location"].endswith("/hotspan/cache/clear")


def test_overriding_the_method_does_nothing(house: House) -> None:
    """Headers that other frameworks take for the method are not looked at."""
    headers = {"x-http-method-override": "POST", "x-method-override": "POST"}
    assert house.call("GET", "/hotspan/cache/clear", None).status_code == 401
    answer = httpx.get(house.server.url + "/health", headers=headers, timeout=60)
    assert answer.status_code == 200
