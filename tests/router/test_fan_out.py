"""What all replicas must hear while one of them is down: who reads the log of a shared L2 follows it first."""

import json
import random
from typing import Any, cast

from aiohttp import web

from hotspan.core.clock import SystemClock
from hotspan.core.credentials import key_digest, log_name
from hotspan.http.upstream import Upstream
from hotspan.router.health import ReplicaHealth
from kit.waiting import until_async

from .rig import QUICK, die, replicas, routed, say_ok


async def test_a_replica_that_is_down_follows_the_log_before_it_answers() -> None:
    """An invalidation that is durable in a log is complete without a replica that reads it: this one gets no request
    until it has read that far. One that is not known to read that log is a failure, by name."""
    place = {"epoch": "ab" * 8, "generation": 7, "namespace": "cd" * 32}
    name = log_name(place["epoch"])

    async def receipt(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"is_durable": True, "log": place})

    async with replicas(receipt, receipt) as fakes, routed(fakes) as at:
        away = fakes[1]
        for fake in fakes:
            fake.ping = (200, {"status": "Healthy", "log": {"name": name}})
        health = at.router.health[away.url]
        await until_async(lambda: health.log == name)
        away.answer, away.ping = die, (503, {})
        async with at.post({}, "/hotspan/cache/clear") as answer:
            said = await answer.json()
        assert answer.status == 200 and said["is_complete"] and said["follows"] == [away.url]
        assert (said["log"], said["generation"]) == (name, 7)
        away.answer, away.ping = say_ok, (200, {"status": "Healthy", "log": {"name": name, "generation": 6}})
        await health.check(at.router._upstream)
        assert not health.can_take, "it has not read it yet"
        away.ping = (200, {"status": "Healthy", "log": {"name": name, "generation": 7}})
        await until_async(lambda: health.can_take)
        away.answer, away.ping = die, (200, {"status": "Healthy", "log": {"name": log_name("another")}})
        await until_async(lambda: health.log != name)
        async with at.post({}, "/hotspan/cache/clear") as answer:
            said = await answer.json()
        assert answer.status == 502 and not said["follows"] and away.url in said["error"]["message"]
        assert "not known to read the log" in said["error"]["message"]


async def test_a_replica_that_lost_its_log_stays_out() -> None:
    """Who must read a log and tells of none gets nothing; who reads another one has forgotten all, and is taken."""
    told: dict[str, Any] = {"name": "a"}
    health = ReplicaHealth("r", QUICK, SystemClock(), random.Random(1))

    class Replica:
        async def fetch(self, name: str, path: str, **how: Any) -> tuple[int, bytes]:
            return 200, json.dumps({"log": told} if told else {}).encode()

    async def check() -> bool:
        await health.check(cast(Upstream, Replica()))
        return health.can_take

    assert await check() and health.log == "a"
    health.must_read(3)
    assert not health.can_take
    told = {}
    assert not await check()
    told = {"name": "a", "generation": "3"}
    assert not await check()
    told = {"name": "b"}
    assert await check() and health.log == "b"


async def test_the_administrator_reaches_all_replicas() -> None:
    """With keys, the admin token is taken for what every replica gets, and passed on; for no other route."""
    keys = {key_digest("sk-a"): "a"}
    admin = {"authorization": "Bearer admin-token"}
    async with replicas(say_ok, say_ok) as fakes, routed(fakes, keys=keys, admin_token="admin-token") as at:
        assert await at.status({}, "/hotspan/cache/clear", headers=admin) == 200
        assert [fake.asked[0][2]["authorization"] for fake in fakes] == ["Bearer admin-token"] * 2
        assert await at.status(headers=admin) == 401
        assert await at.status({}, "/hotspan/cache/clear", headers={"authorization": "Bearer other"}) == 401
