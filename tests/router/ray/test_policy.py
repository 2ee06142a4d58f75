"""hotspan's policy as Ray Serve's request router, with replicas that are only names."""

import asyncio
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from hotspan.router.types import Ask
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'hotspan[ray]'")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import PendingRequest

from hotspan.router.ray import policy as module
from hotspan.router.ray.policy import ASKED, Asked, FleetRouter
from hotspan.router.ray.reports import Kind, Report


class Id(NamedTuple):
    """As much of Ray's ReplicaID."""

    unique_id: str


class Named:
    """As much of Ray's RunningReplica as the router looks at."""

    def __init__(self, name: str) -> None:
        self.replica_id = Id(name)
        self.max_ongoing_requests = 100

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def ask(*keys: int, tokens: int = 10_000, session: bytes = b"") -> Ask:
    return Ask(keys, tokens, tokens / max(len(keys), 1), session=session)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose time the tests turn, and that leaves replicas alone for longer than a test."""
    monkeypatch.setattr(module, "_AWAY_S", 600.0)
    made = FleetRouter(DeploymentID("replica", "app"), DeploymentHandleSource.REPLICA)
    made.initialize_state(host="127.0.0.1", max_s=60)
    made.fleet.clock = made.tickets._clock = SimulatedClock()
    made.update_replicas([Named("one"), Named("two")])
    return made


async def place(router: Any, asked: Asked | None) -> list[str]:
    pending = PendingRequest([], {} if asked is None else {ASKED: asked}, metadata=SimpleNamespace())
    ranks = await router.choose_replicas(router._replicas_list, pending)
    return [replica.replica_id.unique_id for replica in ranks[0]]


async def report(router: Any, asked: Asked, kind: Kind, replica: str) -> None:
    """Send a report the way that a replica does, 50 ms later; once one of an end was read, all before it were."""
    assert asked.assignment is not None
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, remote_addr=(asked.assignment.host, asked.assignment.port)
    )
    router.fleet.clock.advance(0.05)
    transport.sendto(bytes(Report(asked.assignment.number, kind, replica)))
    number = asked.assignment.number
    await until_async(lambda: kind is Kind.FIRST or number not in router.tickets._open)
    transport.close()


async def test_a_request_that_is_placed_again_is_reserved_once(router: Any) -> None:
    """Ray asks again until a replica answers in time: the request stays where its session is, and counts once."""
    keys = tuple(range(1, 80))
    first = Asked(ask(*keys, session=b"s"))
    [home] = await place(router, first)
    await report(router, first, Kind.FIRST, home)
    await report(router, first, Kind.END, home)
    again = Asked(ask(*keys, 80, session=b"s"))
    assert [await place(router, again) for _ in range(20)] == [[home]] * 20
    assert len(router.tickets) == 1 and router.fleet.replicas[home].load.in_flight == 1


async def test_a_prompt_goes_where_it_is(router: Any) -> None:
    """A long prompt that one replica has seen goes there again, though another has nothing to do."""
    keys = tuple(range(1, 80))
    first = Asked(ask(*keys))
    [home] = await place(router, first)
    await report(router, first, Kind.FIRST, home)
    await report(router, first, Kind.END, home)
    for _ in range(5):
        again = Asked(ask(*keys))
        assert await place(router, again) == [home]
        assert again.assignment is not None and again.assignment.work_s < first.assignment.work_s / 10  # type: ignore[union-attr]
        await report(router, again, Kind.END, home)


async def test_work_is_reserved_until_it_is_reported(router: Any) -> None:
    """Requests without a common prefix alternate while none has ended, and what has ended counts for nothing."""
    asked = [Asked(ask(n, tokens=50_000)) for n in range(1, 5)]
    placed = [(await place(router, each))[0] for each in asked]
    assert sorted(placed) == ["one", "one", "two", "two"] and placed[0] != placed[1]
    for each, name in zip(asked, placed, strict=True):
        await report(router, each, Kind.FIRST, name)
        await report(router, each, Kind.END, name)
    assert len(router.tickets) == 0
    assert all(each.load.in_flight == 0 for each in router.fleet.replicas.values())


async def test_who_did_not_get_it_is_left_alone(router: Any) -> None:
    """When another replica says that it took a request, the chosen one gets none for a while."""
    asked = Asked(ask(1))
    [chosen] = await place(router, asked)
    other = {"one": "two", "two": "one"}[chosen]
    await report(router, asked, Kind.END, other)
    assert {(await place(router, Asked(ask(n))))[0] for n in range(2, 20)} == {other}
    router._return(chosen)
    assert {(await place(router, Asked(ask(n))))[0] for n in range(20, 60)} == {"one", "two"}


async def test_with_all_left_alone_one_is_tried(router: Any) -> None:
    """No request waits because every replica failed to take one lately."""
    for name in ("one", "two"):
        router._leave_alone(name)
    assert (await place(router, Asked(ask(1))))[0] in ("one", "two")


async def test_replicas_come_and_go(router: Any) -> None:
    """What Ray says there is can be chosen, and what is gone is not; reports about it do no harm."""
    asked = [Asked(ask(n)) for n in range(8)]
    placed = [(await place(router, each))[0] for each in asked]
    router.update_replicas([Named("two"), Named("three")])
    assert set(router.fleet.replicas) == {"two", "three"}
    for each, name in zip(asked, placed, strict=True):
        await report(router, each, Kind.END, name)
    assert {(await place(router, Asked(ask(n))))[0] for n in range(8, 40)} == {"two", "three"}
    router.fleet.check()


async def test_a_session_stays(router: Any) -> None:
    """Under `session` all requests of a session go to one replica, also after another was added and lost."""
    made = FleetRouter(DeploymentID("replica", "app"), DeploymentHandleSource.REPLICA)
    made.initialize_state(strategy="session", host="127.0.0.1")
    made.update_replicas([Named("one"), Named("two")])
    [home] = await place(made, Asked(ask(1, session=b"s")))
    assert {(await place(made, Asked(ask(n, session=b"s"))))[0] for n in range(20)} == {home}
    made.update_replicas([Named(home)])
    assert await place(made, Asked(ask(1, session=b"s"))) == [home]


async def test_other_calls_go_anywhere(router: Any) -> None:
    """A call without a request has all replicas to choose from, and reserves nothing."""
    assert sorted(await place(router, None)) == ["one", "two"]
    assert len(router.tickets) == 0


async def test_nobody_says_that_it_ended(router: Any) -> None:
    """Work whose end no replica reports is given up once no request can be so old."""
    asked = Asked(ask(1))
    [name] = await place(router, asked)
    assert asked.assignment is not None
    router.tickets.told(Report(asked.assignment.number, Kind.RECEIVED, name))
    router.fleet.clock.advance(59)
    await place(router, Asked(ask(3)))
    assert len(router.tickets) == 2 and router.tickets.expired == 0
    router.fleet.clock.advance(61)
    await place(router, Asked(ask(2)))
    assert len(router.tickets) == 1 and router.tickets.expired == 2


async def test_nobody_says_that_it_came(router: Any) -> None:
    """Work that no replica received within 2 s is no longer reserved, and its replica is left alone for a while.

    HAProxy, while it does not know a replica yet, hands requests for it to another without their assignment.
    """
    asked = Asked(ask(1, tokens=1_000_000))
    [chosen] = await place(router, asked)
    router.fleet.clock.advance(1.9)
    await place(router, Asked(ask(2)))
    assert router.fleet.replicas[chosen].load.in_flight == 1 and not router._away
    router.fleet.clock.advance(0.2)
    assert {(await place(router, Asked(ask(n))))[0] for n in range(3, 20)} == {"one", "two"} - {chosen}
    assert router.fleet.replicas[chosen].load.in_flight == 0
    router._return(chosen)
    assert (await place(router, Asked(ask(20)))) == [chosen]


async def test_one_that_was_lost_before_others_came(router: Any) -> None:
    """A replica that has received later requests is not left alone for one that it never got."""
    lost, later = Asked(ask(1)), Asked(ask(1))
    [chosen] = await place(router, lost)
    router.fleet.clock.advance(1)
    assert await place(router, later) == [chosen]
    await report(router, later, Kind.END, chosen)
    router.fleet.clock.advance(1.5)
    router.tickets.expire()
    assert len(router.tickets) == 0 and not router._away


async def test_its_type_does_not_count(router: Any) -> None:
    """Ray copies the router's module to where it uses it: a request is known by what it has, not by its class."""
    asked: Any = SimpleNamespace(ask=ask(1), assignment=None)
    assert len(await place(router, asked)) == 1
    assert asked.assignment.port > 0
