"""What several tenants wait for is done in turns between them, within a budget of each; invalidations come first."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.config.tenants import Tenants
from hotspan.http.errors import HttpError
from hotspan.http.exchange import note_read
from hotspan.http.paths import LOOKUP, PREFETCH, STATELESS
from hotspan.server.admin import CacheAdmin
from hotspan.server.admission import Admission
from hotspan.server.announce import Announcement
from hotspan.server.exchange import AppExchange
from hotspan.server.front import _COUNTED
from hotspan.server.invalidation import Invalidations
from hotspan.server.policy import ADMIN, CLIENT
from hotspan.server.principal import Principal, asking
from hotspan.server.sizes import TextLimit
from hotspan.server.turns import Turns
from kit.waiting import until_async

from .lmi.fake_engine import FakeEngine
from .lmi.serving import client, front, split
from .lmi.test_gate import gated
from .test_admin_routes import FakeEngine as CacheEngine

A, B = Principal("a", has_key=True), Principal("b", has_key=True)


async def test_owners_are_served_in_turn_and_what_is_urgent_first() -> None:
    """However many one owner has waiting, another's next one has the next turn; an urgent one goes before all."""
    turns, order = Turns(1, 3, 100), list[str]()
    go = asyncio.Event()

    async def work(owner: str, name: str, *, is_urgent: bool = False) -> None:
        async with turns.turn(owner, is_urgent=is_urgent):
            await go.wait()
            order.append(name)

    works = [work("a", f"a{n}") for n in range(20)] + [work("b", "b0"), work("c", "c0"), work("c", "c1")]
    tasks = [asyncio.create_task(each) for each in works]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work("b", "b!", is_urgent=True)))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    assert order[:6] == ["a0", "b!", "a1", "b0", "c0", "a2"] and len(order) == 24


LARGE, SMALL = b" " * ((1 << 18) + 1), b" " * (1 << 18)


async def test_large_bodies_are_read_in_turns() -> None:
    """Two are parsed at a time, until their prompts are in the engine; another tenant's is one of the next two.

    What is small waits for nobody, and neither does what another process parses.
    """
    admission, begun = Admission(*split(principals=4)), list[str]()
    ended = asyncio.Event()
    is_read: dict[str, asyncio.Event] = {}

    async def work(name: str) -> None:
        begun.append(name)
        await is_read.setdefault(name, asyncio.Event()).wait()
        note_read()
        await ended.wait()

    def ask(who: Principal, name: str, body: bytes, **options: Any) -> asyncio.Task[None]:
        with asking(who):
            run = admission.run(coming(body), lambda body: work(name), **({"is_read_here": True} | options))
            return asyncio.create_task(run)

    tasks = [ask(A, f"a{n}", LARGE) for n in range(6)]
    await until_async(lambda: len(begun) == 2)
    tasks += [
        ask(B, "b", LARGE, is_counted=False),
        ask(B, "small", SMALL),
        ask(B, "elsewhere", LARGE, is_read_here=False),
    ]
    await until_async(lambda: len(begun) == 4)
    assert begun == ["a0", "a1", "small", "elsewhere"]
    for name, then in (("a1", "a2"), ("a0", "b"), ("a2", "a3"), ("b", "a4"), ("a3", "a5")):
        is_read[name].set()
        await until_async(lambda then=then: begun[-1] == then)  # type: ignore[misc]
    assert not any(task.done() for task in tasks)
    for each in is_read.values():
        each.set()
    ended.set()
    await asyncio.gather(*tasks)


async def test_a_turn_of_a_large_body_ends_with_its_request() -> None:
    """By its answer, an error, the end of its time, or its client's leave, also of one that still waits."""
    admission, ran = Admission(*split(predict_timeout_s=600)), list[str]()
    never = asyncio.Event()

    async def work(name: str) -> None:
        ran.append(name)
        if name == "error":
            raise HttpError(400, "wrong")
        if name == "hangs":
            await never.wait()

    def ask(name: str, exchange: AppExchange | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(admission.run(exchange or coming(LARGE), lambda body: work(name), is_read_here=True))

    for _ in range(3):
        await ask("fine")
        with pytest.raises(HttpError):
            await ask("error")
    hanging, gone = [ask("hangs"), ask("hangs")], coming(LARGE)
    await until_async(lambda: ran.count("hangs") == 2)
    waiting = ask("gone", gone)
    await until_async(lambda: admission.in_flight == 3)
    gone.gone.set()
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, waiting, return_exceptions=True)
    await ask("last")
    assert "gone" not in ran and ran[-1] == "last" and not admission.in_flight


def coming(body: bytes) -> AppExchange:
    """A request whose client stays."""
    parts: asyncio.Queue[Any] = asyncio.Queue()
    parts.put_nowait({"type": "http.request", "body": body, "more_body": False})
    return AppExchange({"type": "http", "headers": []}, parts.get, asyncio.Queue[Any]().put, is_lmi=False)


async def test_one_turn_is_left_for_what_is_urgent() -> None:
    """However many others have turns: of four they have three."""
    turns = Turns(4, 2, 100, for_urgent=1)
    go = asyncio.Event()

    async def work() -> None:
        async with turns.turn("a"):
            await go.wait()

    tasks = [asyncio.create_task(work()) for _ in range(9)]
    await until_async(lambda: turns._turns.taken == 3)
    async with turns.turn("b", is_urgent=True):
        assert turns._turns.taken == 4
    go.set()
    await asyncio.gather(*tasks)
    assert not turns._turns.taken


async def test_an_owner_beyond_its_budget_is_refused() -> None:
    """With 429; another one still has its own."""
    turns = Turns(1, 2, 8)
    mine, theirs = [turns.turn("a") for _ in range(6)], [turns.turn("b") for _ in range(2)]
    tasks = [asyncio.create_task(each.__aenter__()) for each in mine]
    await asyncio.sleep(0)
    with pytest.raises(HttpError) as refused:
        await turns.turn("a").__aenter__()
    assert refused.value.status == 429
    others = [asyncio.create_task(each.__aenter__()) for each in theirs]
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    for task in (*tasks, *others):
        task.cancel()
    await asyncio.gather(*tasks, *others, return_exceptions=True)


@pytest.mark.parametrize("is_urgent", [True, False])
async def test_one_that_is_cancelled_waits_no_longer(is_urgent: bool) -> None:
    """However many give up while another has the turn, no more is kept than the budget lets wait."""
    turns = Turns(1, 3, 16)
    async with turns.turn("b"):
        for _ in range(1000):
            given_up = asyncio.create_task(turns.turn("a", is_urgent=is_urgent).__aenter__())
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
        assert not turns._turns._waiting and not turns._budget._used.get("a")
    async with turns.turn("a"):
        assert turns._turns.taken == 1


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 3)), max_size=40))
def test_no_turn_is_lost(steps: list[tuple[str, bool, int]]) -> None:
    """Whoever is cancelled, whenever: afterwards all turns and budgets are free."""

    async def run() -> None:
        turns, tasks = Turns(2, 3, 12, for_urgent=1), list[asyncio.Task[None]]()

        async def work(owner: str, is_urgent: bool) -> None:
            async with turns.turn(owner, is_urgent=is_urgent) as end:
                await asyncio.sleep(0)
                end()
                await asyncio.sleep(0)

        for owner, is_urgent, cancelled in steps:
            tasks.append(asyncio.create_task(work(owner, is_urgent)))
            await asyncio.sleep(0)
            if cancelled == 3:
                tasks[len(tasks) // 2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not turns._turns.taken and not turns._turns._taken_by_others and not turns._budget.used
        assert not turns._turns._waiting

    asyncio.run(run())


# -- texts that cannot fit ------------------------------------------------------------------------------------------

LIMIT = TextLimit(tokens=100, chars=1000)
LONG = "x" * 1001


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"prompt": "x" * 1000}, True),
        ({"prompt": ["x" * 1000] * 9}, True),
        ({"tokens": [1] * 100}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG}}]}]}, True),
        ({"prompt": LONG}, False),
        ({"prompt": ["x", LONG]}, False),
        ({"prompt": [1] * 101}, False),
        ({"prompt": [[1] * 101]}, False),
        ({"tokens": [1] * 101}, False),
        ({"messages": [{"role": "user", "content": LONG}]}, False),
        ({"messages": [{"role": "user", "content": "x" * 501}] * 2}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, False),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "image_url", "function": LONG}]}, False),
        ({"input": LONG}, False),
        ({"system": LONG, "messages": []}, False),
    ],
)
def test_what_cannot_fit_is_told_from_its_size(body: dict[str, Any], fits: bool) -> None:
    """By characters and tokens; what is no text does not count."""
    if fits:
        LIMIT.check_body(json.dumps(body).encode())
        return
    with pytest.raises(HttpError) as refused:
        LIMIT.check_body(json.dumps(body).encode())
    assert refused.value.status == 400


@pytest.mark.parametrize("path", STATELESS)
async def test_texts_that_cannot_fit_reach_no_tokenizer(path: str) -> None:
    """On each route that tokenises or renders alone."""
    engine = FakeEngine()
    app = front(engine, plugs={"text_limit": LIMIT})
    async with client(app) as http:
        answer = await http.post(path, json={"prompt": LONG})
    assert answer.status_code == 400 and not engine.seen


async def test_announcements_and_invalidations_that_cannot_fit() -> None:
    """Neither their texts nor their chats are tokenised."""
    engine = CacheEngine()
    admin = CacheAdmin(engine, object(), Tenants())  # type: ignore[arg-type]
    long, chat = "x" * 50_000, [{"role": "user", "content": "x" * 50_000}]
    with asking(Principal(has_key=True, is_admin=True)):
        for asked in ({"prompt": long}, {"messages": chat}, {"messages": chat[:1], "chat_template": "x"}):
            with pytest.raises(HttpError) as refused:
                await admin.prefetch(Announcement.model_validate(asked))
            assert refused.value.status == 400
        with pytest.raises(HttpError) as refused:
            await admin.invalidate(Invalidations.model_validate({"batch": [{"prompt": "x" * 30_000}] * 2}))
        assert refused.value.status == 400
    assert not engine.asked


async def test_an_invalidation_does_not_wait_for_announcements() -> None:
    """Of 60 announcements of one tenant three are with the engine; another's invalidation by text is next to them,
    and beyond its budget the first tenant's are refused."""
    gate, working = asyncio.Event(), list[str]()

    class Slow(CacheEngine):
        async def tokens(self, prompt: str) -> list[int]:
            working.append(prompt)
            await (gate.wait() if prompt == "announced" else asyncio.sleep(0))
            return [1, 2, 3]

    admin = CacheAdmin(Slow(), object(), Tenants())  # type: ignore[arg-type]
    with asking(A):
        announced = Announcement.model_validate({"prompt": "announced"})
        tasks = [asyncio.create_task(admin.prefetch(announced)) for _ in range(300)]
    await until_async(lambda: len(working) == 3)
    with asking(B):
        receipt = await admin.invalidate(Invalidations.model_validate({"prompt": "secret"}))
    assert receipt.status_code == 200 and working == ["announced"] * 3 + ["secret"]
    gate.set()
    said = await asyncio.gather(*tasks, return_exceptions=True)
    assert 0 < sum(isinstance(each, HttpError) and each.status == 429 for each in said) < 300


async def test_tokenising_of_one_tenant_does_not_stop_anothers() -> None:
    """Two texts at a time are with the tokenizer, of however many; another tenant's waits for one more at most."""
    engine = FakeEngine()
    admission = gated(engine, principals=4)._app.admission  # type: ignore[attr-defined]
    turns = admission._turns
    first = [turns.turn(A) for _ in range(40)]
    tasks = [asyncio.create_task(each.__aenter__()) for each in first]
    await until_async(lambda: turns._turns.taken == 2)
    theirs = turns.turn(B)
    other = asyncio.create_task(theirs.__aenter__())
    await asyncio.sleep(0)
    for task in tasks[:2]:
        (await task)()
    await until_async(other.done)
    assert sum(task.done() for task in tasks) == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- which routes have which budget ---------------------------------------------------------------------------------


def test_each_route_that_handles_text_has_a_budget() -> None:
    """A client's POST route takes a place (work), a turn (texts), or has turns of its own (announcements,
    invalidations, warm-ups); one that is new and has none of these is found here."""
    turns = {*STATELESS, PREFETCH, LOOKUP, "/hotspan/cache/invalidate", "/hotspan/cache/explain"}
    jobs = {"/hotspan/cache/warm", "/hotspan/cache/warm/{warm_up_id}"}
    rest = {path for path in CLIENT if path not in _COUNTED | turns | jobs}
    assert rest == WITHOUT
    assert not turns & set(ADMIN) - {"/hotspan/cache/invalidate"}


WITHOUT = {
    *("/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/static", "/version", "/load", "/tokenizer_info"),
    *("/v1/models", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
    "/hotspan/cache/pin",  # tags, at most 64 pins of a tenant
    "/v1/realtime",  # a websocket
}
"""Clients' routes that make nothing of a text."""
