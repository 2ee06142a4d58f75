"""Ways to move the router's metrics: real routers before small replicas, as its own tests run them."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client.core import Metric

from hotspan.router.blocks import Blocks
from hotspan.router.event_sync import EventSync
from hotspan.router.events import EventFeed
from hotspan.router.gateway import Gateway
from hotspan.router.health import ReplicaHealth
from hotspan.router.index import LEAST_BYTES, PrefixIndex
from hotspan.router.metrics import State
from hotspan.router.settings import Replica, RouterSettings, parse_replica
from hotspan.router.text import Roots
from hotspan.router.types import Medium, Strategy
from tests.router import test_events, test_failures, test_gateway, test_models, test_shadow
from tests.router.engine import join, message, removed, stored
from tests.router.rig import replicas, routed, say, say_ok
from tests.router.test_tokens import made

from .pages import Pages


def declared() -> Pages:
    """All that routers with a candidate and KV events show, before anything has happened."""
    candidate = Replica("http://127.0.0.1:2", "canary")
    replicas = (parse_replica("http://127.0.0.1:1"), candidate)
    upstream: Any = None  # nothing is asked
    shown = list[Metric](_events(_feed()))
    for strategy in Strategy:
        settings = RouterSettings(replicas=replicas, strategy=strategy, shares={"canary": 0.5}, shadow={"canary": 1.0})
        found = Gateway(settings, upstream)._metrics.registry.collect()
        shown += [metric for metric in found if "_events_" not in metric.name]
    return Pages(shown)


def _feed(cap: int = 1 << 13) -> EventFeed:
    sync = EventSync(0, Blocks(join, Roots().of_engine, cap), PrefixIndex(1 << 20), lambda *state: None)
    return EventFeed(sync, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")


def _events(*feeds: EventFeed) -> Iterable[Metric]:
    """What a page has of replicas with these feeds, and of one without."""
    named: Any = {f"r{number}": feed for number, feed in enumerate(feeds)}
    nothing: Any = None
    health: Any = {**named, "without": None}
    return State(nothing, health, nothing, nothing, nothing, named)._of_feeds()


@contextmanager
def watching(pages: Pages) -> Iterator[None]:
    """Read each router's page before and after each request, after each health check, and whenever events change."""
    call, check, made = Gateway.__call__, ReplicaHealth.check, Gateway.__init__
    feed_made, tell, live = EventFeed.__init__, EventSync._tell, EventSync.live
    routers, feeds = list[Gateway](), list[EventFeed]()

    def note() -> None:
        for router in routers[-1:]:
            pages.note(router._metrics.registry.collect())

    def make(self: Gateway, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        routers.append(self)

    def make_feed(self: EventFeed, *given: Any, **options: Any) -> None:
        feed_made(self, *given, **options)
        feeds.append(self)

    async def answer(self: Gateway, scope: Any, receive: Any, send: Any) -> None:
        note()
        await call(self, scope, receive, send)
        note()

    async def checked(self: ReplicaHealth, *given: Any) -> None:
        await check(self, *given)
        note()

    def follow(sync: EventSync) -> None:
        pages.note(_events(EventFeed(sync, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")))

    def told(self: EventSync, *state: Any) -> None:
        tell(self, *state)
        follow(self)

    def came(self: EventSync, *message: Any) -> int | None:
        start = live(self, *message)
        follow(self)
        return start

    with (
        patch.object(Gateway, "__init__", make),
        patch.object(Gateway, "__call__", answer),
        patch.object(ReplicaHealth, "check", checked),
        patch.object(EventSync, "_tell", told),
        patch.object(EventSync, "live", came),
        patch.object(EventFeed, "__init__", make_feed),
    ):
        yield
        pages.note(_events(*feeds))


async def run(path: Path, caplog: pytest.LogCaptureFixture, patched: pytest.MonkeyPatch) -> None:
    """Routers that answer, refuse, retry, wait, shadow, and follow events."""
    await what_routes_answer()
    await what_each_strategy_chooses()
    await what_texts_do(path)
    for test in (
        test_failures.test_the_breaker_opens_and_closes_again,
        test_failures.test_retries_have_a_budget,
        test_failures.test_a_replica_that_drains_gets_nothing_new,
        test_failures.test_sessions_of_a_dead_replica_go_elsewhere,
        test_failures.test_who_waits_for_a_canary_that_goes_down_goes_to_the_others,
        test_failures.test_the_queue_has_an_end,
        test_gateway.test_hang_up_reaches_the_replica,
        test_gateway.test_broken_streams_do_not_look_whole,
        test_gateway.test_own_answers,
        *[test_models.test_a_list_that_is_out_of_date_costs_no_answer]
        * 4,  # no retry where the list was read anew first
        test_shadow.test_a_candidate_that_hangs_costs_clients_nothing,
        test_shadow.test_failures_of_a_candidate_are_counted_and_not_compared,
        test_shadow.test_a_candidate_answers_copies_that_no_client_sees,
    ):
        await test()
    await test_shadow.test_a_candidate_that_drifts_is_rolled_back(caplog)
    await test_shadow.test_what_can_not_be_compared_is_not_copied(test_shadow.body(n=2), test_shadow.CHAT)
    await test_events.test_over_zmq_a_gap_is_replayed_and_a_restart_is_noticed()
    await test_events.test_over_zmq_without_replay_it_is_approximate_and_says_so()
    await test_events.test_the_gateway_follows_its_replicas(path)
    what_events_say(patched)


async def what_routes_answer() -> None:
    """Each route, with answers of each kind, and each reason to try again."""
    async with replicas(say_ok, say(503), say(502), say(504)) as fakes, routed(fakes) as at:
        for prompt in range(12):
            await at.status({"prompt": f"{prompt} " + "a long text " * 100})
        for path in ("/ping", "/metrics", "/dashboard", "/router/replicas", "/v1/models", "/router/nothing"):
            async with at.client.get(at.url + path) as answer:
                await answer.read()
        for path in ("/hotspan/cache/clear", "/hotspan/cache/prefetch", "/hotspan/cache/warm"):
            await at.status({"tags": ["manual"]}, path)
    async with replicas(say(400), say(500)) as fakes, routed(fakes) as at:
        for prompt in range(8):
            await at.status({"prompt": f"{prompt}"})
    async with replicas(say_ok) as fakes, routed(fakes) as at:
        await at.status({}, "/hotspan/cache/clear")


async def what_each_strategy_chooses() -> None:
    """A replica, by each strategy."""
    for strategy in Strategy:
        async with replicas(say_ok) as fakes, routed(fakes, strategy=strategy) as at:
            assert await at.status() == 200


async def what_texts_do(path: Path) -> None:
    """A text that is sent again, one that lies on a disk, more than the index has room for, and what can't be read."""
    made("byte-level")[0].save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ raise_exception(1) }}"}')
    async with replicas(say_ok) as (fake,), routed([fake], model=path, index_bytes=LEAST_BYTES) as at:
        text = {"prompt": "a long text " * 200}
        for _ in range(2):
            await at.status(text)
        fleet, prompts = at.router.fleet, at.router._prompts
        keys = (await prompts.read("/v1/completions", {}, json.dumps(text).encode())).keys
        fleet.index.clear(0, Medium.GPU)
        fleet.index.add(0, Medium.DISK, keys)
        fleet.set_exact(fake.url, True)
        await at.status(text)
        for number in range(3):
            await at.status({"prompt": "".join(f"{number} {place} " for place in range(200_000))})
        await at.status({"messages": [{"role": "user", "content": "a long text " * 200}]}, "/v1/chat/completions")
        async with at.client.post(at.url + "/v1/completions", data=b"{") as answer:
            await answer.read()
        with patch("hotspan.router.gateway._ANSWERS", {}):  # a mistake of ours
            async with at.client.get(at.url + "/v1/models") as answer:
                assert answer.status == 500


def what_events_say(patched: pytest.MonkeyPatch) -> None:
    """Feeds that lose what they can't follow, and blocks that are ignored, unknown, or too many."""
    test_events.test_a_loss_is_told_with_its_reason_and_mended()
    test_events.test_what_came_too_long_ago_is_not_known_again(patched)
    for number, cap in enumerate((1, 1 << 13)):
        sync = _feed(cap).sync
        sync.connected()
        sync.replay_ended(is_whole=True)
        texts = [test_events.stored(text, 0, 4) for text in test_events.TEXTS[1:3]]
        sync.live(number, message(*texts, removed([1]), stored(test_events.STEM, 0, 12, group_idx=5)))
    sync = _feed().sync
    sync.connected()
    sync.replayed(5, message())
    sync.replay_ended(is_whole=True)
