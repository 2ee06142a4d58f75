import asyncio
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from openai_server import OpenAIServer

from conftest import StartServer
from hotspan.bench import runner
from hotspan.bench.config import BenchConfig
from hotspan.bench.records import Loop, RoundName
from hotspan.bench.runner import run_rounds
from hotspan.bench.workloads.base import CountTokens, Message, Scale
from hotspan.bench.workloads.multi_round_chat import ACKNOWLEDGEMENT, MultiRoundChatOptions
from hotspan.bench.workloads.sessions import ChatRound
from hotspan.core.errors import ConfigError


async def no_tokenizer(text: str) -> int | None:
    return None


async def two_a_word(text: str) -> int | None:
    return 2 * len(text.split())


def prepared(
    options: MultiRoundChatOptions, scale: Scale | None = None, seed: int = 42, count: CountTokens = no_tokenizer
) -> dict[RoundName, Any]:
    rounds = asyncio.run(options.rounds(scale or Scale(1.0, None), seed, count))
    return {each.name: each for each in rounds}


def turns(
    options: MultiRoundChatOptions, scale: Scale | None = None, seed: int = 42, count: CountTokens = no_tokenizer
) -> ChatRound:
    """The query round."""
    found = prepared(options, scale, seed, count)[RoundName.QUERY]
    assert isinstance(found, ChatRound)
    return found


SMALL = {"shared_prompt_length": 12, "chat_history_length": 8, "user_input_length": 3, "output_length": 3}


def test_sessions_are_as_many_as_fill_the_volume() -> None:
    """Volume times tokens per GiB over a session's opening, rounded down, at least one: 100 in the published run."""
    published = MultiRoundChatOptions(qps=8.0, duration=180.0)
    assert published.count(Scale(400.0, 3000)) == 100
    assert published.count(Scale(400.0, 2999)) == 99
    assert published.count(Scale(0.001, 10)) == 1
    assert MultiRoundChatOptions(num_sessions=7).count(Scale(400.0, None)) == 7
    assert len(turns(published, Scale(4.0, 3000)).due_s) == 8 * 180


def test_openings_are_the_filler_that_users_know() -> None:
    """System prompt and history begin with the session's number and have as many words as were asked for."""
    workload = turns(MultiRoundChatOptions(**SMALL, num_sessions=2))
    assert workload.openings[1] == (
        Message("system", "Session 1. You are a helpful assistant. help help help help help"),
        Message("user", "[Session 1 history] hi hi hi hi hi"),
        Message("assistant", ACKNOWLEDGEMENT),
    )
    assert workload.questions[0] == "tell tell tell"
    assert workload.openings[0][0].content.startswith("Session 0. ")


def test_texts_shorter_than_their_openings_are_the_openings() -> None:
    """A length that the opening words exceed gives those words and no filler."""
    opening = turns(MultiRoundChatOptions(shared_prompt_length=1, chat_history_length=1, num_sessions=1)).openings[0]
    assert [m.content for m in opening][:2] == ["Session 0. You are a helpful assistant. ", "[Session 0 history] "]


def test_each_session_is_warmed_up_once_alone() -> None:
    """The warm-up asks each session for one token after its opening, one session after the other."""
    warm_up = prepared(MultiRoundChatOptions(**SMALL, num_sessions=3))[RoundName.WARM_UP]
    assert [(p.request_id, p.content, p.max_tokens) for p in warm_up.prompts] == [
        (f"warmup_s{i}", "Hello", 1) for i in range(3)
    ]
    assert [p.history[0].content[:10] for p in warm_up.prompts] == [f"Session {i}." for i in range(3)]
    assert warm_up.in_flight == 1


def test_the_check_asks_each_sessions_first_turn() -> None:
    """The check round has the ids and the texts of the first turns, which no earlier answer is part of."""
    rounds = prepared(MultiRoundChatOptions(**SMALL, num_sessions=3, text="prose"))
    workload, check = rounds[RoundName.QUERY], rounds[RoundName.CHECK]
    assert [(p.request_id, p.content) for p in check.prompts] == [
        (f"s{i}_r{i}", workload.questions[0]) for i in range(3)
    ]
    assert [p.history for p in check.prompts] == list(workload.openings)


def test_turns_are_due_until_the_duration_or_for_their_number() -> None:
    """k/qps below the duration; with a number of requests that many, however long they take."""
    assert turns(MultiRoundChatOptions(**SMALL, num_sessions=1, qps=2.0, duration=2.0)).due_s == (0, 0.5, 1, 1.5)
    counted = turns(MultiRoundChatOptions(**SMALL, num_sessions=2, qps=2.0, duration=1.0, num_requests=5))
    assert counted.due_s == (0, 0.5, 1, 1.5, 2)
    assert counted.stops_after_s is None
    assert len(counted.questions) == 3, "turns of the session that has the most"


def test_a_shared_system_prompt_is_shared() -> None:
    """With `shared` all sessions have one system prompt and differ from their history on, in filler and in prose."""
    for text in ("filler", "prose"):
        options = MultiRoundChatOptions(**SMALL, num_sessions=3, system_prompt="shared", text=text)  # type: ignore[arg-type]
        openings = turns(options).openings
        assert len({opening[0] for opening in openings}) == 1
        assert "Session" not in openings[0][0].content
        assert len({opening[1] for opening in openings}) == 3


def test_prose_has_the_lengths_in_the_servers_tokens_and_repeats_nothing() -> None:
    """Every text of prose is as long as asked in the server's tokens, from the seed alone, and unlike every other."""
    options = MultiRoundChatOptions(
        shared_prompt_length=200, chat_history_length=400, user_input_length=40, num_sessions=3, num_requests=9,
        text="prose",
    )  # fmt: skip
    one, again, other = (turns(options, seed=seed, count=two_a_word) for seed in (1, 1, 2))
    assert (one.openings, one.questions) == (again.openings, again.questions)
    lengths = {m.role: asyncio.run(two_a_word(m.content)) for m in one.openings[2]}
    assert lengths["system"] == 200 and lengths["user"] == 400
    assert {asyncio.run(two_a_word(q)) for q in one.questions} == {40} and len(one.questions) == 3
    texts = [m.content for w in (one, other) for o in w.openings for m in o[:2]] + [*one.questions, *other.questions]
    bodies = [re.sub(r"^(Session \d+\. You are a helpful assistant\. |\[Session \d+ history\] )", "", t) for t in texts]
    assert len({body[:40] for body in bodies}) == len(texts) == 18


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 0} for name in ("shared_prompt_length", "chat_history_length", "user_input_length", "output_length")),
        *({name: value} for name in ("qps", "duration") for value in (0.0, -1.0, float("nan"), float("inf"))),
        *({"num_sessions": -1}, {"num_requests": -1}),
        *({"loop": "half-open"}, {"arrivals": "bursty"}, {"system_prompt": "none"}, {"text": "poem"}),
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    """An option that can't work is a ConfigError that names the flag."""
    with pytest.raises(ConfigError, match=f"--mrc-{next(iter(wrong)).replace('_', '-')}"):
        MultiRoundChatOptions(**wrong)


def test_volume_needs_tokens_per_gib() -> None:
    """Without a number of sessions and without tokens per GiB, building says which flags are missing."""
    with pytest.raises(ConfigError, match="--mrc-num-sessions or --tokens-per-gb-kvcache"):
        MultiRoundChatOptions().count(BenchConfig(options=MultiRoundChatOptions()).scale)


def config(server: OpenAIServer, *, warm: bool = False, **options: Any) -> BenchConfig:
    chosen = MultiRoundChatOptions(**SMALL | {"num_sessions": 3, "qps": 50.0, "num_requests": 7} | options)
    return BenchConfig(options=chosen, engine_url=server.url, no_warmup=not warm)


def test_the_server_gets_whole_conversations(serve: StartServer) -> None:
    """Requests carry role and content of every message so far, the server's own answers among them."""
    server = serve()
    result = run_rounds(config(server, warm=True))
    assert [(r.name, r.summary.requests) for r in result.rounds] == [
        (RoundName.PRE_WARM_UP, 4),
        (RoundName.WARM_UP, 3),
        (RoundName.QUERY, 7),
    ]
    by_session = defaultdict(list)
    for body in server.served.bodies[7:]:
        assert body["max_tokens"] == 3 and body["temperature"] == 0 and body["stream"] is True
        by_session[body["messages"][0]["content"]].append(body["messages"])
    assert [len(of_session) for of_session in by_session.values()] == [3, 2, 2]
    first, _, third = by_session["Session 0. You are a helpful assistant. help help help help help"]
    asked = {"role": "user", "content": "tell tell tell"}
    answered = {"role": "assistant", "content": "An answer."}
    assert first[1]["role"] == "user" and first[2] == {"role": "assistant", "content": ACKNOWLEDGEMENT}
    assert third == [*first[:3], asked, answered, asked, answered, asked]


def test_records_say_when_turns_were_due_and_what_the_loop_was(serve: StartServer) -> None:
    """Times due are on the clock of the other times, and the loop and what it held back are in the result."""

    def is_slow(body: dict[str, Any]) -> bool:
        return bool(body["messages"][0]["content"].startswith("Session 1."))

    slow: dict[str, Any] = {"waits": lambda body: 0.6 if is_slow(body) else 0.0}
    closed = run_rounds(config(serve(**slow))).query
    slow["holds"] = lambda served, body: is_slow(body) and len(served.bodies) < 6  # all but its own next turn
    opened = run_rounds(config(serve(**slow), loop="open")).query
    assert (closed.loop, opened.loop) == (Loop.CLOSED, Loop.OPEN)
    for query in (closed, opened):
        due = [r.due_time for r in sorted(query.records, key=lambda r: int(r.request_id.partition("_r")[2]))]
        steps = [b - a for a, b in pairwise(due)]  # type: ignore[operator]
        assert steps == pytest.approx([1 / 50.0] * 6)
        assert all(r.late_s == pytest.approx(r.submit_time - (r.due_time or 0), abs=1e-6) for r in query.records)
        assert all(r.submit_time >= (r.due_time or 0) - 1e-6 for r in query.records)
    for query, held_back in ((closed, {"s1_r4", "s2_r5", "s0_r6"}), (opened, {"s1_r4"})):
        by_id = {r.request_id: r for r in query.records}
        after = {name for name, r in by_id.items() if r.submit_time >= by_id["s1_r1"].finish_time}
        assert after == held_back and all((by_id[name].late_s or 0) > 0.3 for name in held_back)
    assert closed.summary.ttft_from_due_s is not None and closed.summary.ttft_s is not None
    assert closed.summary.ttft_from_due_s.mean > closed.summary.ttft_s.mean + 0.2
    assert "Closed loop" in closed.pacing and "coordinated omission" in closed.pacing
    assert "Open loop" in opened.pacing and "coordinated omission" not in opened.pacing


def test_what_a_closed_loop_never_sent_is_counted(serve: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that were due and not sent when the time was over are in the summary and in the sentence about pacing."""
    server = serve()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_run_clock", lambda: lambda: 1.0 if server.served.bodies else 0.0)
        query = run_rounds(config(server, num_sessions=1, num_requests=0, duration=0.2)).query
    assert (query.summary.requests, query.summary.unsent) == (1, 9)
    assert "9 that were due were not sent" in query.pacing
    assert run_rounds(config(serve(), num_sessions=3)).query.summary.unsent == 0


def test_a_refused_turn_is_asked_past(serve: StartServer) -> None:
    """A turn that the server refuses is a failed record, and the session's next turn is sent without it."""
    server = serve(refuses=lambda body: 500 if len(body["messages"]) == 6 and "Session 0." in str(body) else 0)
    query = run_rounds(config(server)).query
    assert [r.request_id for r in query.records if not r.successful] == ["s0_r3", "s0_r6"]
    lengths = [len(b["messages"]) for b in server.served.bodies if b["messages"][0]["content"].startswith("Session 0.")]
    assert lengths == [4, 6, 6]
    assert query.summary.success_rate == pytest.approx(5 / 7)


def test_tokens_per_gib_that_nobody_knows_are_asked_for(serve: StartServer) -> None:
    """The error for a model that isn't here names this workload's own way out."""
    with pytest.raises(ConfigError, match="--mrc-num-sessions"):
        run_rounds(config(serve(root="org/model"), num_sessions=0))
