"""What routers and replicas tell each other, and how long a replica's queue is."""

import random
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hotspan.router.ray.reports import Assignment, Kind, Report, Tickets, parse_assignment, parse_report
from hotspan.router.ray.scaling import Waiting
from hotspan.testing.clock import SimulatedClock


class Ended:
    """As much of a Ticket as is used here."""

    def __init__(self, name: str, sent_s: float) -> None:
        self.decision = SimpleNamespace(name=name)
        self.sent_s = sent_s
        self.said: list[str] = []

    def first_byte(self) -> None:
        self.said.append("first")

    def end(self, *, failed: bool = False, **_: Any) -> None:
        self.said.append("failed" if failed else "end")


@given(st.integers(1, 65535), st.integers(0, 2**64 - 1), st.floats(0, 9e5))
def test_assignments_come_back(port: int, number: int, work_s: float) -> None:
    """An assignment is read as it was written, its seconds to six digits."""
    found = parse_assignment(str(Assignment("10.0.0.1", port, number, work_s)))
    assert found is not None and found[:3] == ("10.0.0.1", port, number)
    assert abs(found.work_s - work_s) <= 1e-5 * work_s


@given(st.binary(max_size=600), st.text(max_size=80))
def test_what_is_no_assignment_is_none(data: bytes, text: str) -> None:
    """Anything may come over the network: what can't be read is dropped, and nothing raises."""
    parse_report(data)
    parse_assignment(text)
    assert parse_assignment("host 70000 a 1") is None and parse_assignment("host 1 a -1") is None
    assert parse_report(b"1 gone r") is None and parse_report(b"1 end r" + b"r" * 600) is None


@given(st.integers(0, 2**64 - 1), st.sampled_from(Kind))
def test_reports_come_back(number: int, kind: Kind) -> None:
    """A report is read as it was written."""
    report = Report(number, kind, "abc123")
    assert parse_report(bytes(report)) == report


@given(st.integers(0, 10_000))
def test_tickets_end_once(seed: int) -> None:
    """Whatever is reported in whatever order, each ticket ends exactly once, and at the latest when it is too old."""
    rng, clock, missed = random.Random(seed), SimulatedClock(), []
    tickets = Tickets(clock, 30.0, missed.append)
    open_, all_ = [], []
    for _ in range(60):
        if rng.random() < 0.4:
            ticket = Ended(rng.choice("ab"), clock.monotonic())
            open_.append((tickets.open(ticket), ticket))  # type: ignore[arg-type]
            all_.append(ticket)
        elif open_:
            number, ticket = rng.choice(open_)
            replica = rng.choice(["a", "b"])
            was_over = any(each != "first" for each in ticket.said)
            before = len(missed)
            tickets.told(Report(number, rng.choice(list(Kind)), replica))
            assert (len(missed) > before) == (not was_over and replica != ticket.decision.name)
        clock.advance(rng.random())
    clock.advance(31)
    tickets.expire()
    assert len(tickets) == 0
    assert all(sum(each != "first" for each in ticket.said) == 1 for ticket in all_)


def test_queue_seconds() -> None:
    """A replica's queue is the work of what waits for its first byte, less what passed of the first; never below 0."""
    clock = SimulatedClock()
    waiting = Waiting(clock)
    assert waiting.seconds == 0
    assignments = [Assignment("h", 1, n, 2.0) for n in range(3)]
    for each in assignments:
        waiting.begin(each)
    assert waiting.seconds == 6
    clock.advance(1.5)
    assert waiting.seconds == 4.5
    clock.advance(60)
    assert waiting.seconds == 4, "only the first can have been computed meanwhile"
    waiting.end(assignments[0])
    waiting.end(assignments[0])
    assert waiting.seconds == 4
    for each in assignments:
        waiting.end(each)
    assert waiting.seconds == 0
