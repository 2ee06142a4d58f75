"""Sessions: one name in one order of sources, homes that several routers agree on, and those that a replica made."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotspan.router.parted import Parted
from hotspan.router.prompt import prompt_of
from hotspan.router.session import NEW_SESSION, REST, Recent, Split, StatefulSessions, home, session_key
from hotspan.testing.clock import SimulatedClock

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
SOURCES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"x-my-key": "a"}, {}),
    ({"x-amzn-sagemaker-session-id": "b"}, {}),
    ({"x-session-id": "c"}, {}),
    ({"x-correlation-id": "d"}, {}),
    ({}, {"session_id": "e"}),
    ({}, {"prompt_cache_key": "f"}),
    ({}, CHAT),
]
REPLICAS = [f"http://10.0.0.{n}:8000" for n in range(8)]
SESSIONS = [random.Random(n).randbytes(16) for n in range(4000)]


def key_of(headers: dict[str, str], body: dict[str, Any], configured: str = "") -> bytes:
    """The session of a request, whose path is the one that its body fits."""
    paths = {"input": "/v1/responses", "messages": "/v1/chat/completions"}
    path = next((path for name, path in paths.items() if name in body), "/v1/completions")
    return session_key(headers, body, prompt_of(path, body), configured)


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_first_source_names_the_session(first: int) -> None:
    """What comes later in the order changes nothing, and what comes first everything."""
    alone = key_of(*SOURCES[first], "X-My-Key")
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for more_headers, more_body in SOURCES[first:]:
        headers |= more_headers
        body |= more_body
    assert key_of(headers, body, "X-My-Key") == alone
    assert len(alone) == 16
    if first:
        headers, body = headers | SOURCES[first - 1][0], body | SOURCES[first - 1][1]
        assert key_of(headers, body, "X-My-Key") != alone


def test_configured_key_may_be_a_field() -> None:
    """A field of the body goes before all headers if it is the one that was configured."""
    headers = {"x-session-id": "c"}
    assert key_of(headers, {"user": "u"}, "user") == key_of({}, {"user": "u"}, "user")
    assert key_of(headers, {"user": "u"}, "user") != key_of(headers, {"user": "v"}, "user")
    assert key_of(headers, {}, "user") == key_of(headers, {})


def test_a_wish_for_a_session_is_no_session() -> None:
    """NEW_SESSION names none: it would be one for everybody."""
    assert key_of({"x-amzn-sagemaker-session-id": NEW_SESSION}, CHAT) == key_of({}, CHAT)
    assert key_of({}, {**CHAT, "session_id": NEW_SESSION}) == key_of({}, CHAT)
    assert key_of({"x-amzn-sagemaker-session-id": NEW_SESSION}, {}) == b""


def test_a_chat_stays_one_session_as_it_grows() -> None:
    """Later turns do not rename it; another first message does, and so does another system prompt."""
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "More"},
    ]
    assert key_of({}, {"messages": messages}) == key_of({}, CHAT)
    assert key_of({}, {"messages": messages[1:]}) != key_of({}, CHAT)
    other = [CHAT["messages"][0], {"role": "user", "content": "Good day"}]
    assert key_of({}, {"messages": other}) != key_of({}, CHAT)


def test_responses_have_sessions_too() -> None:
    """As chats have: by their instructions and the first message, whichever way that is written."""
    asks = {"instructions": "Be brief.", "input": "Hello"}
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    assert key_of({}, asks) == key_of({}, asks | {"input": turns}) != b""
    assert key_of({}, asks) != key_of({}, asks | {"instructions": "Be long."})
    assert key_of({}, asks) != key_of({}, asks | {"input": "Good day"})


def test_a_batch_of_chats_has_the_session_of_its_first() -> None:
    """Replicas take each conversation by itself; what the first begins with is where the batch is at home."""
    others = [[{"role": "user", "content": "Good day"}], "odd"]
    assert key_of({}, {"messages": [CHAT["messages"], *others]}) == key_of({}, CHAT) != b""
    assert key_of({}, {"messages": others}) != key_of({}, CHAT)


def test_completions_have_sessions_too() -> None:
    """By the beginning of their prompt: text, a list of texts, token ids, or parts of text."""
    prompts: list[Any] = ["long " * 3000, ["long " * 3000], list(range(5000)), "other"]
    keys = [key_of({}, {"prompt": prompt}) for prompt in prompts]
    assert keys[0] == keys[1] == key_of({}, {"prompt": "long " * 4000})
    assert len({*keys}) == 3
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}
    assert key_of({}, parts) != b""


def test_routers_agree_and_only_the_sessions_of_a_lost_replica_move() -> None:
    """Routers that share nothing but names send a session to the same replica; those of a lost one spread evenly."""
    moved = Counter[str | None]()
    for session in SESSIONS:
        before, after = home(session, REPLICAS), home(session, REPLICAS[:0:-1])
        assert before == home(session, REPLICAS[::-1])
        if before == REPLICAS[0]:
            moved[after] += 1
        else:
            assert after == before
    assert set(moved) == set(REPLICAS[1:])
    assert max(moved.values()) < 2 * min(moved.values())
    assert home(SESSIONS[0], []) is None


@given(st.floats(0.02, 0.9), st.floats(0.02, 0.9))
def test_only_sessions_move_that_have_to(before: float, after: float) -> None:
    """When a canary's share grows, nobody leaves it; when it shrinks, nobody joins."""
    first, second = Split({"canary": before}), Split({"canary": after})
    moved = {(first.group(name), second.group(name)) for name in SESSIONS[:400]}
    assert (REST, "canary") not in moved if after < before else ("canary", REST) not in moved


def test_shares_are_what_was_asked_for() -> None:
    """Of 4,000 sessions 10 % and 30 % go to two groups, the others to the rest, whatever order a router has them in."""
    split, other = Split({"a": 0.1, "b": 0.3}), Split({"b": 0.3, "a": 0.1})
    groups = [split.group(name) for name in SESSIONS]
    assert groups == [other.group(name) for name in SESSIONS]
    for group, share in (("a", 0.1), ("b", 0.3), (REST, 0.6)):
        spread = (share * (1 - share) / len(SESSIONS)) ** 0.5
        assert abs(groups.count(group) / len(SESSIONS) - share) < 3.5 * spread
    for share, expected in ((0.0, REST), (1.0, "a")):
        assert {Split({"a": share}).group(name) for name in SESSIONS[:200]} == {expected}


def test_tables_are_bounded() -> None:
    """The longest unused entries go."""
    table = Recent[int, str](3)
    for n in range(5):
        table[n] = "r"
        table.used(0)
    assert [table.used(n) for n in range(5)] == ["r", None, None, "r", "r"]


def test_a_stateful_session_lives_until_it_expires() -> None:
    """It is known from the response that made it until the time that the response named."""
    clock = SimulatedClock(unix_s=1_700_000_000)  # 2023-11-14T22:13:20Z
    sessions = StatefulSessions(clock)
    sessions.note("r1", "abc; Expires=2023-11-14T22:14:20Z", "")
    assert sessions.home("abc") == "r1" and sessions.home("other") is None
    clock.advance(59)
    assert sessions.home("abc") == "r1"
    clock.advance(1)
    assert sessions.home("abc") is None and len(sessions) == 0


def test_closing_and_losing_forget_a_stateful_session() -> None:
    """A session that was closed is gone; one whose replica is gone is counted."""
    sessions = StatefulSessions(SimulatedClock())
    sessions.note("r1", "a", "")
    sessions.note("r1", "", "a")
    assert sessions.home("a") is None and sessions.lost == 0
    sessions.note("r1", "b", "")
    sessions.lose("b")
    sessions.lose("b")
    assert sessions.home("b") is None and sessions.lost == 1


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=30)), max_size=50))
def test_stateful_sessions_are_bounded(noted: list[tuple[str, str]]) -> None:
    """Whatever replicas say, at most so many sessions are kept, and NEW_SESSION is never one of them."""
    sessions = StatefulSessions(SimulatedClock(), max_sessions=5)
    for name, attributes in [*noted, (NEW_SESSION, "")]:
        sessions.note("r", f"{name};{attributes}", "")
        assert len(sessions) <= 5
    assert sessions.home(NEW_SESSION) is None and sessions.home("") is None and sessions.home(None) is None


def test_a_tenants_sessions_push_out_no_other_tenants() -> None:
    """However many one owner makes: of a full table the longest unused goes of the owner who has most."""
    sessions = StatefulSessions(SimulatedClock(), max_sessions=100)
    sessions.note("r2", "theirs", "", b"b")
    for number in range(1000):
        sessions.note("r1", f"{number}", "", b"a")
    assert sessions.home("theirs", b"b") == "r2" and len(sessions) == 100
    assert sessions.home("999", b"a") == "r1" and sessions.home("900", b"a") is None
    for number in range(1000):  # owners that are made up take from the one who has most, until it has as few as they
        sessions.note("r3", "one", "", b"%d" % number)
    assert len(sessions) == 100


class PartedMachine(RuleBasedStateMachine):
    """Against a plain model: what each owner has, longest unused first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Parted[int, int](6)
        self.known: dict[bytes, dict[int, int]] = {}

    owners = st.sampled_from((b"a", b"b", b"c", b"d"))

    @rule(owner=owners, key=st.integers(0, 9), value=st.integers())
    def put(self, owner: bytes, key: int, value: int) -> None:
        self.table.put(owner, key, value)
        mine = self.known.setdefault(owner, {})
        mine.pop(key, None)
        mine[key] = value
        if sum(map(len, self.known.values())) > 6:
            most = max(map(len, self.known.values()))
            (gone,) = [
                (each, next(iter(keys)))
                for each, keys in self.known.items()
                if keys and self.table.get(each, next(iter(keys))) is None
            ]
            assert len(self.known[gone[0]]) == most
            del self.known[gone[0]][gone[1]]

    @rule(owner=owners, key=st.integers(0, 9))
    def use(self, owner: bytes, key: int) -> None:
        mine = self.known.get(owner, {})
        assert self.table.used(owner, key) == mine.get(key)
        if key in mine:
            mine[key] = mine.pop(key)

    @rule(owner=owners, key=st.integers(0, 9))
    def pop(self, owner: bytes, key: int) -> None:
        assert self.table.pop(owner, key) == self.known.get(owner, {}).pop(key, None)

    @invariant()
    def agree(self) -> None:
        self.table.check()
        for owner, keys in self.known.items():
            assert {key: self.table.get(owner, key) for key in keys} == keys


TestParted = PartedMachine.TestCase
