"""What fetches keys: it takes no more than it can remember, and tries again after a pause or when somebody waits."""

import threading
from collections.abc import Callable, Iterator

import pytest

from hotspan.keyring import fetcher as module
from hotspan.keyring.fetcher import RETRY_S, Fetcher, Ticket
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until
from tests.keyring.rig import PATIENCE_S


class Source:
    """Has the keys of all tenants, while it is up and let on. tried: whose it was asked for."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.go_on = threading.Event()
        self.is_up = True

    def fetch(self, ticket: Ticket) -> bool:
        self.tried.append(ticket.tenant)
        assert self.go_on.wait(PATIENCE_S)
        return self.is_up


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.go_on.set()


@pytest.fixture
def started(source: Source) -> Iterator[Callable[[], tuple[Fetcher, SimulatedClock]]]:
    fetchers: list[Fetcher] = []

    def start() -> tuple[Fetcher, SimulatedClock]:
        clock = SimulatedClock()
        fetchers.append(Fetcher(source.fetch, clock))
        return fetchers[-1], clock

    yield start
    source.go_on.set()
    for fetcher in fetchers:
        fetcher.close()


def test_a_full_queue_takes_nobody_else(
    source: Source, started: Callable[[], tuple[Fetcher, SimulatedClock]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is asked for while the queue is full waits for nothing; asked again when there is room, it is fetched."""
    monkeypatch.setattr(module, "_MAX_WAITING", 2)
    fetcher, _ = started()
    for tenant in ("a", "b", "c", "a"):
        fetcher.ask(tenant)
        assert len(fetcher) <= 2
    fetcher.fetch_now(["c"], PATIENCE_S)  # returns, since nothing can be waited for
    until(lambda: len(source.tried) == 2)
    source.go_on.set()
    until(lambda: not len(fetcher))
    assert sorted(source.tried) == ["a", "b"]
    fetcher.fetch_now(["c"], PATIENCE_S)
    assert source.tried[2:] == ["c"] and not len(fetcher)


def test_a_failure_is_tried_again_after_a_pause_or_when_somebody_waits(
    source: Source, started: Callable[[], tuple[Fetcher, SimulatedClock]]
) -> None:
    """What failed is due again after 5 s; `fetch_now` tries it at once, and returns after one more failure."""
    fetcher, clock = started()
    source.is_up = False
    source.go_on.set()
    fetcher.fetch_now(["a"], PATIENCE_S)
    (ticket,) = fetcher._waiting.values()
    assert ticket.failures == 1 and ticket.due_s == clock.monotonic() + RETRY_S
    fetcher.fetch_now(["a"], PATIENCE_S)
    assert ticket.failures == 2 and source.tried == ["a", "a"]
    source.is_up = True
    clock.advance(RETRY_S)
    until(lambda: not len(fetcher))
    assert source.tried == ["a"] * 3
