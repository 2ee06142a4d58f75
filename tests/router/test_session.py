"""Sessions: one name in one order of sources, and homes that several routers agree on."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.router.session import NEW_SESSION, Overrides, Rendezvous, session_key

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


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_first_source_names_the_session(first: int) -> None:
    """What comes later in the order changes nothing, and what comes first everything."""
    alone = session_key(*SOURCES[first], "X-My-Key")
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for more_headers, more_body in SOURCES[first:]:
        headers |= more_headers
        body |= more_body
    assert session_key(headers, body, "X-My-Key") == alone
    assert len(alone) == 16
    if first:
        headers, body = headers | SOURCES[first - 1][0], body | SOURCES[first - 1][1]
        assert session_key(headers, body, "X-My-Key") != alone


def test_configured_key_may_be_a_field() -> None:
    """A field of the body goes before all headers if it is the one that was configured."""
    headers = {"x-session-id": "c"}
    assert session_key(headers, {"user": "u"}, "user") == session_key({}, {"user": "u"}, "user")
    assert session_key(headers, {"user": "u"}, "user") != session_key(headers, {"user": "v"}, "user")
    assert session_key(headers, {}, "user") == session_key(headers, {})


def test_a_wish_for_a_session_is_no_session() -> None:
    """NEW_SESSION names none: it would be one for everybody."""
    assert session_key({"x-amzn-sagemaker-session-id": NEW_SESSION}, CHAT) == session_key({}, CHAT)
    assert session_key({}, {**CHAT, "session_id": NEW_SESSION}) == session_key({}, CHAT)
    assert session_key({"x-amzn-sagemaker-session-id": NEW_SESSION}, {}) == b""


def test_a_chat_stays_one_session_as_it_grows() -> None:
    """Later turns do not rename it; another first message does, and so does another system prompt."""
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "More"},
    ]
    assert session_key({}, {"messages": messages}) == session_key({}, CHAT)
    assert session_key({}, {"messages": messages[1:]}) != session_key({}, CHAT)
    other = [CHAT["messages"][0], {"role": "user", "content": "Good day"}]
    assert session_key({}, {"messages": other}) != session_key({}, CHAT)


def test_responses_have_sessions_too() -> None:
    """As chats have: by their instructions and the first message, whichever way that is written."""
    asks = {"instructions": "Be brief.", "input": "Hello"}
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    assert session_key({}, asks) == session_key({}, asks | {"input": turns}) != b""
    assert session_key({}, asks) != session_key({}, asks | {"instructions": "Be long."})
    assert session_key({}, asks) != session_key({}, asks | {"input": "Good day"})


def test_completions_have_sessions_too() -> None:
    """By the beginning of their prompt: text, a list of texts, token ids, or parts of text."""
    prompts: list[Any] = ["long " * 3000, ["long " * 3000], list(range(5000)), "other"]
    keys = [session_key({}, {"prompt": prompt}) for prompt in prompts]
    assert keys[0] == keys[1] == session_key({}, {"prompt": "long " * 4000})
    assert len({*keys}) == 3
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}
    assert session_key({}, parts) != b""


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.dictionaries(st.sampled_from(["messages", "prompt", "session_id", "prompt_cache_key", "inputs"]), json),
    headers=st.dictionaries(st.sampled_from(["x-session-id", "x-correlation-id"]), st.text()),
)
def test_any_body_has_a_key_or_none(body: dict[str, Any], headers: dict[str, str]) -> None:
    """Whatever a client sends: 16 bytes or none, and always the same."""
    key = session_key(headers, body)
    assert len(key) in (0, 16)
    assert key == session_key(headers, body)


@given(
    messages=st.lists(
        st.one_of(json, st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": json})),
        max_size=4,
    )
)
def test_any_messages_have_a_key_or_none(messages: list[Any]) -> None:
    """Messages of any form."""
    assert len(session_key({}, {"messages": messages})) in (0, 16)


def sessions(count: int) -> list[bytes]:
    """Names of sessions."""
    return [random.Random(n).randbytes(16) for n in range(count)]


def homes(names: list[str], weights: dict[str, float] | None = None) -> Rendezvous:
    """A router's, which heard of the replicas in this order."""
    made = Rendezvous()
    for name in names:
        made.add(name, (weights or {}).get(name, 1.0))
    return made


def test_routers_agree() -> None:
    """Two routers that share nothing but the names of the replicas send a session to the same one."""
    one, other = homes(REPLICAS), homes(REPLICAS[::-1])
    for session in sessions(500):
        assert one.home(session, REPLICAS) == other.home(session, REPLICAS[::-1])


def test_only_the_sessions_of_a_lost_replica_move() -> None:
    """And they spread over all others."""
    rendezvous, left = homes(REPLICAS), REPLICAS[1:]
    moved = Counter[str | None]()
    for session in sessions(4000):
        before, after = rendezvous.home(session, REPLICAS), rendezvous.home(session, left)
        if before == REPLICAS[0]:
            moved[after] += 1
        else:
            assert after == before
    assert set(moved) == set(left)
    assert max(moved.values()) < 2 * min(moved.values())


def test_homes_follow_the_weights() -> None:
    """Evenly without, and in proportion with them."""
    for weights in ({}, {REPLICAS[0]: 3.0}):
        rendezvous = homes(REPLICAS, weights)
        count = Counter(rendezvous.home(session, REPLICAS) for session in sessions(8000))
        share = weights.get(REPLICAS[0], 1.0) / (7 + weights.get(REPLICAS[0], 1.0))
        assert count[REPLICAS[0]] / 8000 == pytest.approx(share, rel=0.15)
        assert min(count.values()) > 500


def test_nowhere_is_no_home() -> None:
    """Without replicas there is none, and a weight of nothing is refused."""
    assert homes(REPLICAS).home(b"x" * 16, []) is None
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="weight"):
            Rendezvous().add("r", weight)


def test_overrides_are_bounded() -> None:
    """The longest unused go, and what is lost of it is only that a session goes home."""
    table = Overrides(3)
    for n in range(5):
        table.set(b"%d" % n, "r")
        table.get(b"0")
    assert [table.get(b"%d" % n) for n in range(5)] == ["r", None, None, "r", "r"]
    table.drop(b"4")
    table.set(b"5", "other")
    table.drop_replica("r")
    assert len(table) == 1
    assert table.get(b"5") == "other"
    with pytest.raises(ConfigError, match="0 or more"):
        Overrides(-1)
