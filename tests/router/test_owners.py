"""What two owners send has different names in every index of the router: nobody learns what another one sent."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from aiohttp import web

from hotspan.core.credentials import key_digest
from hotspan.core.namespace import engine_salt
from hotspan.router.access import Access
from hotspan.router.text import Prompts, Roots
from hotspan.router.types import ANYBODY, Ask, Owner

from .rig import Routed, replicas, routed, say_ok

KEYS = {key_digest("key-a"): "a", key_digest("key-b"): "b", key_digest("key-b-2"): "b"}
A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
CUT = "\n# # #\n"
TEXT = CUT.join("a document about one thing. " * 40 + str(n) for n in range(4))

SAME = {
    "tokens": "a length",
    "piece_tokens": "a mean of all answers",
    "answer_tokens": "a mean of all answers",
    "model": "of the replicas, not of a text",
    "adapter": "of the replicas, not of a text",
    "response": "looked up under the owner's mark",
}
"""Fields of an Ask that may be the same for two owners, and why. All others are names of what an owner sent."""


def names(value: Any) -> set[Any]:
    """All names in a field's value."""
    if isinstance(value, str | bytes | int | float):
        return {value}
    return {getattr(each, "key", each) for each in value}


@pytest.mark.parametrize("access", [Access(keys=KEYS), Access(), Access("x-team")])
@pytest.mark.parametrize("is_salted", [False, True])
def test_no_name_of_a_request_is_another_owners(access: Access, is_salted: bool) -> None:
    """Of one body by two owners no field of the Ask is equal that names what was sent: pieces, sections, sessions."""
    reader = Prompts(owner_of=access.owner_of_texts, separators=[CUT], secret=7)
    reader.roots.is_salted = is_salted
    of_a = A | {"x-team": "a"}
    for body in ({"prompt": TEXT}, {"prompt": TEXT, "session_id": "s"}, {"prompt": TEXT, "cache_salt": "s"}):
        first, again, other = (
            reader.ask("/v1/completions", headers, body, tenant=access.tenant(headers))
            for headers in (of_a, dict(of_a), B | {"x-team": "b"})
        )
        assert first == again
        for field in fields(Ask):
            mine, theirs = (names(getattr(ask, field.name)) for ask in (first, other))
            assert mine and (field.name in SAME or not mine & theirs), field.name


def test_who_is_one_owner() -> None:
    """Keys of one tenant are one owner, in every router; unknown credentials are one each; nobody is told apart where
    texts are shared, and clients that show nothing are one."""

    def owner(access: Access, **headers: str) -> Owner:
        return access.owner_of_texts({name.replace("_", "-"): value for name, value in headers.items()})

    known, strange = Access(keys=KEYS), Access()
    assert owner(known, authorization="Bearer key-b") == owner(Access(keys=KEYS), x_api_key="key-b-2")
    assert owner(known, authorization="Bearer key-b").tenant == "b"
    assert owner(strange, authorization="Bearer x") == owner(Access(), x_api_key="x") != owner(strange, x_api_key="y")
    assert owner(strange) == ANYBODY == owner(Access(is_shared=True), authorization="Bearer x")
    named = Access("X-Team")
    marks = {owner(named, x_team=team, x_api_key=key).mark for team in ("", "a", "b") for key in ("", "a", "b")}
    assert len(marks) == 9


def test_events_are_compared_with_the_requests_of_their_tenant() -> None:
    """Roots of events are those of the tenant that they belong to, and of no client whose tenant is not known."""
    roots = Roots(secret=3)
    of_a, of_default = roots.of_engine("", engine_salt("a")), roots.of_engine("", engine_salt("default"))
    assert roots.of_request("", "", Owner("a", b"m")) == of_a and roots.of_request("", "") == of_default
    assert roots.of_request("", "", Owner("", b"m")) not in (of_a, of_default)
    assert Roots(secret=4).of_request("", "") != of_default


async def cached(at: Routed, headers: Mapping[str, str], text: str) -> int:
    """The tokens of a text that the router tells a client to expect."""
    async with at.post({"prompt": text}, headers=headers) as answer:
        return int(answer.headers["x-hotspan-cached-tokens"])


@pytest.mark.parametrize("keys", [KEYS, {}])
async def test_nobody_reads_from_the_router_what_others_sent(keys: dict[bytes, str]) -> None:
    """With --expose a text that another one sent looks like one that nobody sent, with the router's keys and with
    those of replicas; its own is seen. --share-across-tenants joins them."""
    async with replicas(say_ok) as fakes:
        async with routed(fakes, is_exposing=True, keys=keys) as at:
            assert await cached(at, B, TEXT) == 0
            assert await cached(at, A, TEXT) == await cached(at, A, TEXT.upper()) == 0
            assert await cached(at, B, TEXT) > 500 and await cached(at, A, TEXT) > 500
        async with routed(fakes, is_exposing=True, keys=keys, share_across_tenants=True) as at:
            assert await cached(at, B, TEXT) == 0 and await cached(at, A, TEXT) > 500


async def test_ids_of_others_are_unknown_ids() -> None:
    """A request with the id of another owner's session or stored response changes nothing for that owner, whose
    requests go on to the replica that has it, also while that one is not up for a moment."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"id": "resp_of_a"}, headers={"x-amzn-sagemaker-new-session-id": "s-of-a"})

    named = {"x-amzn-sagemaker-session-id": "s-of-a"}
    async with replicas(answer, answer) as fakes, routed(fakes) as at:
        new = {"x-amzn-sagemaker-session-id": "NEW_SESSION"}
        assert await at.status({"input": "x"}, "/v1/responses", headers=A | new) == 200
        home = next(fake for fake in fakes if fake.works)
        proxy, owner = at.router._proxy, at.router._access.owner_of_texts
        assert proxy._responses.home("resp_of_a", owner(A).mark) == home.url
        assert proxy._sessions.home("s-of-a", owner(A).mark) == home.url
        assert (
            proxy._responses.home("resp_of_a", owner(B).mark) is proxy._sessions.home("s-of-a", owner(B).mark) is None
        )
        other = next(fake for fake in fakes if fake is not home)
        await at.client.post(at.url + "/router/replicas/drain", json={"replica": home.url})
        for path, headers in (("/v1/responses/resp_of_a", {}), ("/v1/responses", named)):
            call = at.client.get if path.endswith("_a") else at.client.post
            async with call(at.url + path, headers=B | headers) as said:
                await said.read()
        assert other.works == 2
        await at.client.post(at.url + "/router/replicas/resume", json={"replica": home.url})
        works = home.works
        for _ in range(6):
            async with at.client.get(at.url + "/v1/responses/resp_of_a", headers=A) as said:
                await said.read()
        assert home.works == works + 6 and proxy._sessions.home("s-of-a", owner(A).mark) == home.url
