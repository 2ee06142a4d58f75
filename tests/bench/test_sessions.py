import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import run_simulated

from hotspan.bench.records import Loop, RequestRecord, RoundName
from hotspan.bench.workloads.base import Message, Prompt
from hotspan.bench.workloads.sessions import ChatRound, due_times


@dataclass
class Server:
    """Answers the nth request after the nth of these seconds (again from the first), and notes what it saw when."""

    clock: Callable[[], float]
    takes_s: Sequence[float]
    fails: frozenset[int] = frozenset()
    prompts: list[Prompt] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)

    async def send(self, prompt: Prompt, due_time: float | None = None) -> RequestRecord:
        number, sent_at = len(self.prompts), self.clock()
        self.prompts.append(prompt)
        await asyncio.sleep(self.takes_s[number % len(self.takes_s)])
        is_good = number not in self.fails
        answer = f"answer {number}" if is_good else ""
        now = self.clock()
        record = RequestRecord(prompt.request_id, number, is_good, sent_at, now, now, answer=answer, due_time=due_time)
        self.records.append(record)
        return record

    @property
    def times(self) -> list[tuple[str, float]]:
        return [(r.request_id, r.submit_time) for r in sorted(self.records, key=lambda r: r.order)]


def chat(sessions: int, due_s: Sequence[float], loop: Loop, stops_after_s: float | None = None) -> ChatRound:
    return ChatRound(
        name=RoundName.QUERY,
        openings=tuple((Message("system", f"session {i}"),) for i in range(sessions)),
        questions=("first", "second", "third"),
        due_s=tuple(due_s),
        max_tokens=5,
        loop=loop,
        stops_after_s=stops_after_s,
    )


def play(round: ChatRound, takes_s: Sequence[float], fails: frozenset[int] = frozenset()) -> tuple[Server, float]:
    """The server after the round, and when the round ended."""
    servers = []

    async def main(clock: Callable[[], float]) -> None:
        servers.append(Server(clock, takes_s, fails))
        await round.play(servers[0].send, clock)

    ended = run_simulated(main)
    return servers[0], ended


SLOW_S1 = (0.5, 6.0, 0.5, 0.5, 0.5, 0.5, 0.5)
"""Seven turns, the second of which takes six seconds."""


def test_a_busy_session_holds_back_all_turns_of_a_closed_loop() -> None:
    """Turns wait for the busy session's answer in their order; once it is there, what is overdue goes out at once."""
    server, ended = play(chat(3, range(7), Loop.CLOSED), SLOW_S1)
    sent = [0, 1, 2, 3, 7, 7, 7]
    assert server.times == [(f"s{k % 3}_r{k}", pytest.approx(at)) for k, at in enumerate(sent)]
    assert [r.late_s for r in sorted(server.records, key=lambda r: r.order)] == pytest.approx([0, 0, 0, 0, 3, 2, 1])
    assert ended == pytest.approx(7.5)


def test_a_busy_session_holds_back_its_own_turns_of_an_open_loop() -> None:
    """The busy session's turn waits for its answer; the turns of the others are sent when they are due."""
    server, ended = play(chat(3, range(7), Loop.OPEN), SLOW_S1)
    sent = {"s0_r0": 0, "s1_r1": 1, "s2_r2": 2, "s0_r3": 3, "s2_r5": 5, "s0_r6": 6, "s1_r4": 7}
    assert server.times == [(name, pytest.approx(at)) for name, at in sent.items()]
    late = {r.request_id: r.late_s for r in server.records}
    assert late.pop("s1_r4") == pytest.approx(3)
    assert list(late.values()) == pytest.approx([0] * 6)
    assert ended == pytest.approx(7.5)


def test_a_closed_loop_stops_sending_at_its_duration() -> None:
    """Turns that the stall pushed to the duration or beyond are never sent; what was sent before is answered."""
    server, ended = play(chat(3, range(7), Loop.CLOSED, stops_after_s=7.0), SLOW_S1)
    assert [name for name, _ in server.times] == ["s0_r0", "s1_r1", "s2_r2", "s0_r3"]
    assert len(server.records) == 4 and ended == pytest.approx(7.0)
    late, _ = play(chat(3, range(7), Loop.CLOSED, stops_after_s=7.1), SLOW_S1)
    assert len(late.records) == 7


def test_an_open_loop_sends_all_that_was_due() -> None:
    """What was due before the duration is sent, however long its session's answers take, and the round waits for it."""
    server, ended = play(chat(1, (0.0, 1.0, 2.0), Loop.OPEN, stops_after_s=3.0), (10.0,))
    assert [at for _, at in server.times] == pytest.approx([0, 10, 20])
    assert ended == pytest.approx(30)


@given(
    sessions=st.integers(1, 4),
    gaps=st.lists(st.floats(0, 3), max_size=12),
    takes_s=st.lists(st.floats(0.01, 9), min_size=1, max_size=6),
    loop=st.sampled_from(Loop),
    stops_after_s=st.one_of(st.none(), st.floats(1, 20)),
)
def test_turns_are_sent_as_the_rule_of_their_loop_says(
    sessions: int, gaps: list[float], takes_s: list[float], loop: Loop, stops_after_s: float | None
) -> None:
    """A turn goes out once it is due, its session is free and, in a closed loop, every turn before it has gone out."""
    due_s = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    server, ended = play(chat(sessions, due_s, loop, stops_after_s), takes_s)
    by_number = {int(r.request_id.rpartition("_r")[2]): r for r in server.records}
    for number, record in by_number.items():
        before = by_number.get(number - sessions)
        earliest = max(due_s[number], before.finish_time if before else 0.0)
        if loop is Loop.CLOSED and number:
            earliest = max(earliest, by_number[number - 1].submit_time)
        assert record.submit_time == pytest.approx(earliest, abs=1e-6)
        assert record.due_time == pytest.approx(due_s[number])
    if loop is Loop.OPEN or stops_after_s is None:
        assert sorted(by_number) == list(range(len(due_s)))
    else:
        assert sorted(by_number) == list(range(len(by_number))), "what was not sent is the end"
        assert all(r.submit_time < stops_after_s for r in server.records)
    assert ended >= max((r.finish_time for r in server.records), default=0.0) - 1e-6


def test_a_turn_holds_what_was_said_before() -> None:
    """The next turn of a session has its opening, each earlier question with its answer, and then the next question."""
    server, _ = play(chat(2, range(8), Loop.CLOSED), (0.1,))
    assert [m.content for m in server.prompts[1].messages] == ["session 1", "first"]
    assert server.prompts[5].messages == (
        Message("system", "session 1"),
        Message("user", "first"),
        Message("assistant", "answer 1"),
        Message("user", "second"),
        Message("assistant", "answer 3"),
        Message("user", "third"),
    )
    assert server.prompts[7].content == "first", "the questions begin again"
    assert {p.max_tokens for p in server.prompts} == {5}


@pytest.mark.parametrize("loop", Loop)
def test_a_failed_turn_leaves_no_trace_in_the_history(loop: Loop) -> None:
    """After a failure the session goes on as if that question hadn't been asked; there is no empty answer."""
    server, _ = play(chat(1, range(4), loop), (0.1,), fails=frozenset({1}))
    assert [m.content for m in server.prompts[2].messages] == ["session 0", "first", "answer 0", "third"]
    assert [m.content for m in server.prompts[3].messages][3:] == ["third", "answer 2", "first"]
    assert all(m.content for p in server.prompts for m in p.messages)


def test_a_round_starts_from_its_openings_each_time() -> None:
    """What one playing of a round was answered is in no other playing of it."""
    round = chat(1, range(2), Loop.CLOSED)
    first, second = (play(round, (0.1,))[0].prompts for _ in range(2))
    assert first == second


def test_even_arrivals_are_due_at_k_over_qps() -> None:
    """The kth turn is due at k/qps, without a drift from adding up."""
    assert list(islice(due_times(3.0, "even", 1), 400)) == [k / 3.0 for k in range(400)]


def test_poisson_arrivals_have_their_rate_and_their_seed() -> None:
    """Gaps are exponential with mean 1/qps; a seed gives the same times everywhere, another one others."""
    times = list(islice(due_times(4.0, "poisson", 42), 20_000))
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)
    assert times[:3] == pytest.approx([0.2550, 0.2614, 0.3418], abs=1e-4), "figures of old runs don't compare"
    assert times[:3] != list(islice(due_times(4.0, "poisson", 43), 3))
