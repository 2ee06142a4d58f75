"""Replicas with different models and adapters: each request goes to one that has what it names."""

from typing import Any

import orjson
import pytest
from aiohttp import web

from hotspan.http.head import ADAPTER_HEADER
from hotspan.router.models import Listed, ServedModels, named_by, union
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async

from .rig import Fake, Routed, replicas, routed, say_ok

ALIKE = 6
"""Requests for one model, which go to different replicas if any may take them."""


def serving(fake: Fake, *names: str, lists: bool = True) -> None:
    """Let a replica have these models, and answer as vLLM does for others. lists: it tells the router."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": name, "of": fake.url} for name in names]})
        asked = orjson.loads(body) if body else {}
        given = request.headers.get(ADAPTER_HEADER) or asked.get("adapters") or asked.get("model")
        wanted = given or named_by(request.path)
        if wanted and wanted not in names:
            error = {"message": f"The model `{wanted}` does not exist.", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        return web.json_response({"replica": fake.url})

    fake.answer = answer
    fake.models = list(names) if lists else None


async def where(at: Routed, body: dict[str, Any], **more: Any) -> set[str]:
    """The replicas that answer such requests; each of them is answered."""
    found = set()
    for number in range(ALIKE):
        async with at.post({"prompt": f"{number}"} | body, **more) as answer:
            assert answer.status == 200, await answer.text()
            found.add((await answer.json())["replica"])
    return found


async def test_a_request_goes_where_its_model_is() -> None:
    """By the body's model, an adapter of a field or a header, or the path; without one to any; none is tried twice."""
    async with replicas(*[say_ok] * 3) as (one, two, three):
        serving(one, "a", "sql")
        serving(two, "b")
        serving(three, "a")
        async with routed([one, two, three]) as at:
            assert await where(at, {"model": "a"}) == {one.url, three.url}
            assert await where(at, {"model": "b"}) == {two.url}
            assert await where(at, {"model": "sql"}) == {one.url}
            assert await where(at, {"adapters": "sql"}) == {one.url}
            assert await where(at, {}, headers={ADAPTER_HEADER: "sql"}) == {one.url}
            assert await where(at, {}, path="/models/b/invoke") == {two.url}
            assert len(await where(at, {})) > 1
            assert await at.metric("retries_total") == 0


async def test_a_name_that_nobody_has_is_a_404() -> None:
    """The answer is a replica's own, and the lists were asked again before long."""
    async with replicas(say_ok) as (one,):
        serving(one, "a")
        async with routed([one]) as at, at.post({"model": "nosuch"}) as answer:
            assert answer.status == 404 and (await answer.json())["error"]["param"] == "model"


async def test_the_list_is_that_of_all() -> None:
    """Each name once; the administrator is told who has what; one model is asked of a replica that has it."""
    async with replicas(*[say_ok] * 2) as (one, two):
        serving(one, "a", "sql")
        serving(two, "a", "b")
        async with routed([one, two]) as at:
            async with at.client.get(at.url + "/v1/models", headers={"accept-encoding": "gzip"}) as answer:
                rows = (await answer.json())["data"]
            assert [row["id"] for row in rows] == ["a", "sql", "b"]
            async with at.client.get(at.url + "/router/models") as answer:
                assert await answer.json() == {"models": {"a": [one.url, two.url], "b": [two.url], "sql": [one.url]}}
            async with at.client.get(at.url + "/router/replicas") as answer:
                shown = {row["replica"]: row["models"] for row in (await answer.json())["replicas"]}
            assert shown == {one.url: ["a", "sql"], two.url: ["a", "b"]}
            for name, has in (("b", two), ("sql", one)):
                async with at.client.get(f"{at.url}/v1/models/{name}") as answer:
                    assert (await answer.json())["replica"] == has.url


async def test_an_adapter_that_is_loaded_is_known_at_once() -> None:
    """What is sent to all replicas may change what they serve: their lists are asked behind it."""
    async with replicas(*[say_ok] * 2) as (one, two):
        serving(one, "a")
        serving(two, "a")
        async with routed([one, two]) as at:
            serving(two, "a", "new")
            async with at.post({"name": "new"}, path="/adapters") as answer:
                await answer.read()
            await until_async(lambda: at.router._models.shown().get("new") == [two.url])
            assert await where(at, {"model": "new"}) == {two.url}
            assert await at.metric("retries_total") == 0


async def test_a_replica_that_does_not_list_is_tried() -> None:
    """One that has no such model says so, and the request goes on; the next ones avoid it."""
    async with replicas(*[say_ok] * 2) as (one, two):
        serving(one, "a", lists=False)
        serving(two, "b", lists=False)
        async with routed([one, two]) as at:
            assert await where(at, {"model": "b"}) == {two.url}
            assert await where(at, {"model": "a"}) == {one.url}
            assert await at.metric("retries_total", why="404") <= 2
            assert at.router.fleet.up == {one.url, two.url}


async def test_a_list_that_is_out_of_date_costs_no_answer() -> None:
    """A model that moved to another replica behind the router's back is found there."""
    async with replicas(*[say_ok] * 2) as (one, two):
        serving(one, "a", "moved")
        serving(two, "a")
        async with routed([one, two]) as at:
            serving(one, "a")
            serving(two, "a", "moved")
            assert await where(at, {"model": "moved"}) == {two.url}


async def test_no_replica_without_the_model_takes_over() -> None:
    """While those that have it are down its requests are 503, and others' are answered."""
    async with replicas(*[say_ok] * 2) as (one, two):
        serving(one, "a")
        serving(two, "b")
        async with routed([one, two]) as at:
            one.ping = (500, {})
            await until_async(lambda: at.router.fleet.up == {two.url})
            assert await at.status({"model": "a"}) == 503
            assert await where(at, {"model": "b"}) == {two.url}
            assert not [path for _, path, _, body in two.asked if b'"a"' in body]


async def test_a_group_of_a_split_gives_way_to_the_model() -> None:
    """A session whose group has no replica with its model goes to another group's."""
    async with replicas(*[say_ok] * 2) as (one, two):
        serving(one, "a")
        serving(two, "a", "b")
        groups = {one.url: "canary", two.url: "stable"}
        async with routed([one, two], groups, shares={"canary": 0.9}) as at:
            assert await where(at, {"model": "b"}) == {two.url}


class Answers:
    """An upstream whose lists are given by replica."""

    def __init__(self, **lists: list[str] | int) -> None:
        self.lists, self.asked = lists, 0

    async def fetch(self, server: str, target: str, **_: Any) -> tuple[int, bytes]:
        self.asked += 1
        found = self.lists[server]
        if isinstance(found, int):
            return found, b"no"
        return 200, orjson.dumps({"data": [{"id": name} for name in found]})


def served(upstream: Answers) -> ServedModels:
    return ServedModels(upstream.lists, upstream, SimulatedClock())  # type: ignore[arg-type]


async def test_one_that_tells_nothing_may_serve_any() -> None:
    """Those that refuse to list are left in; a name that nobody lists leaves out nobody; two names leave few."""
    upstream = Answers(one=["a", "x"], two=["a"], three=401)
    models = served(upstream)
    await models.ask()
    assert models.serving(["a"]) is None
    assert models.serving(["x"]) == {"one", "three"}
    assert models.serving(["a", "x"]) == {"one", "three"}
    assert models.serving(["nosuch"]) is None and models.serving(["", ""]) is None
    assert models.of("three") is None


async def test_a_client_s_list_is_not_the_router_s() -> None:
    """What a client may see with its key says nothing of what others may ask for."""
    upstream = Answers(one=["a"], two=["b"])
    models = served(upstream)
    answers = await models.ask([("authorization", "Bearer key")])
    assert models.of("one") is None and len(answers) == 2


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Listed("r", 0), Listed("s", 401, b"no")], (401, b"no")),
        ([Listed("r", 500, b"ill"), Listed("s", 200, b"", [{"id": "a"}])], (200, None)),
        ([Listed("r", 0)], None),
    ],
)
def test_lists_that_fail(answers: list[Listed], expected: tuple[int, bytes | None] | None) -> None:
    """One that lists is enough; if none does, the answer of one is passed on; without any there is none."""
    found = union(answers)
    assert (found and found.status) == (expected and expected[0])
    if found is not None and expected is not None and expected[1] is not None:
        assert found.body == expected[1]


async def test_names_that_clients_make_up_have_them_asked_once_a_second_at_most() -> None:
    """However many there are: a name is looked for again as soon as a second has passed since the last answers."""
    upstream, clock = Answers(one=["a"], two=["a"]), SimulatedClock()
    models = ServedModels(upstream.lists, upstream, clock)  # type: ignore[arg-type]
    await models.ask()
    for passed_s, is_wanted in ((0.0, False), (0.99, False), (0.01, True)):
        clock.advance(passed_s)
        models.serving([f"nosuch-{passed_s}"])
        assert models._is_wanted.is_set() is is_wanted
    await models.ask()
    models.serving(["a"])
    assert not models._is_wanted.is_set() and upstream.asked == 4
