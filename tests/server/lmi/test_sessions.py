"""Sessions: who may use which, how long, and what the client is told."""

import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.settings import CacheOptions
from hotspan.config.tenants import Tenants
from hotspan.core.directives import parse_directives
from hotspan.core.errors import ConfigError, EngineError
from hotspan.http.errors import HttpError
from hotspan.server.admin import CacheAdmin
from hotspan.server.forgetting import forget_sessions
from hotspan.server.lmi import sessions as module
from hotspan.server.lmi.sessions import Sessions
from hotspan.server.principal import Principal, asking
from hotspan.testing.clock import SimulatedClock

from .fake_engine import FakeEngine
from .serving import front, invoke

HEADER, NEW, CLOSED = (f"X-Amzn-SageMaker-{name}" for name in ("Session-Id", "New-Session-Id", "Closed-Session-Id"))


def sessions(directory: Path, clock: SimulatedClock | None = None, *, is_strict: bool = True) -> Sessions:
    return Sessions(directory / "sessions", 1200, is_strict=is_strict, clock=clock or SimulatedClock())


def test_a_session_lives_and_ends(tmp_path: Path) -> None:
    """It is there until its time is over; then a request that names it has none."""
    clock = SimulatedClock()
    known = sessions(tmp_path, clock)
    made = known.create("acme")
    assert made.header.endswith("; Expires=2023-11-14T22:33:20Z")
    clock.advance(1199)
    assert known.use("acme", made.id) == made.id
    clock.advance(1)
    assert known.use("acme", made.id) is None


def test_a_session_outlives_the_server(tmp_path: Path) -> None:
    """Another server over the same directory knows it."""
    made = sessions(tmp_path).create("acme")
    assert sessions(tmp_path).use("acme", made.id) == made.id


@pytest.mark.parametrize("is_strict", [True, False])
def test_of_another_tenant(tmp_path: Path, is_strict: bool) -> None:
    """Another tenant's session is as unknown as one that never was, and can't be closed."""
    known = sessions(tmp_path, is_strict=is_strict)
    theirs = known.create("acme").id
    for name in (theirs, "never-was"):
        if is_strict:
            with pytest.raises(HttpError, match=f"no session {name}"):
                known.use("globex", name)
            with pytest.raises(HttpError, match=f"no session {name}"):
                known.close("globex", name)
        else:
            assert known.use("globex", name) == name
            known.close("globex", name)
    assert sessions(tmp_path).use("acme", theirs) == theirs


def test_closed_is_unknown(tmp_path: Path) -> None:
    """A session that was closed is gone at once."""
    known = sessions(tmp_path)
    made = known.create("acme")
    known.close("acme", made.id)
    with pytest.raises(HttpError, match="no session"):
        known.use("acme", made.id)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    return sessions(tmp_path_factory.mktemp("ids"), is_strict=False)


@given(name=st.text(max_size=300) | st.from_regex(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,300}", fullmatch=True))
def test_ids(known: Sessions, name: str) -> None:
    """What is taken as an id is one by the platform's rule, no path and a directive; all else is refused."""
    try:
        known.use("acme", name)
    except HttpError:
        assert not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", name) or len(name) > 256
    else:
        assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", name) and "/" not in name and "." not in name
        assert parse_directives({"session": name}).session == name


def test_ids_cant_be_guessed(tmp_path: Path) -> None:
    """No two are alike, and each has the randomness of a uuid4."""
    made = {sessions(tmp_path).create("acme").id for _ in range(50)}
    assert len(made) == 50 and all(name[14] == "4" and len(name) == 36 for name in made)


def test_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant can't fill the directory; what has expired makes room, and another tenant is not concerned."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    clock = SimulatedClock()
    known = sessions(tmp_path, clock)
    for _ in range(3):
        known.create("acme")
    with pytest.raises(HttpError, match="close some"):
        known.create("acme")
    known.create("globex")
    clock.advance(1200)
    known.create("acme")
    assert len(list((tmp_path / "sessions").glob("*/*"))) == 2


def test_a_full_place_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused again and again costs the others nothing; closed and expired ones make room as ever."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 50)
    reads: list[Path] = []
    ends_s = module._ends_s
    monkeypatch.setattr(module, "_ends_s", lambda path: (reads.append(path), ends_s(path))[1])
    clock = SimulatedClock()
    known = sessions(tmp_path, clock)
    first = known.create("acme")
    clock.advance(10)
    made = [known.create("acme") for _ in range(49)]
    for _ in range(20):
        with pytest.raises(HttpError, match="close some"):
            known.create("acme")
    assert len(reads) == 50
    known.close("acme", made[0].id)
    newest = known.create("acme")
    clock.advance(1191)
    known.create("acme")  # in the place of the first
    with pytest.raises(HttpError, match="there is no session"):
        known.use("acme", first.id)
    assert known.use("acme", newest.id) == newest.id
    with pytest.raises(HttpError, match="close some"):
        known.create("acme")
    clock.advance(10)
    known.create("acme")
    assert len(list((tmp_path / "sessions").glob("*/*"))) == 2


def test_nobody_else_reads_them(tmp_path: Path) -> None:
    """The directory is the server's alone; one that is open to others, or a link, is refused."""
    sessions(tmp_path).create("acme")
    assert {
        stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "sessions", *(tmp_path / "sessions").iterdir()]
    } == {0o700}
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "sessions")
    (tmp_path / "file").touch(mode=0o600)
    for name in ("open", "link", "file"):
        with pytest.raises(ConfigError, match="sessions can't be kept"):
            Sessions(tmp_path / name, 1200)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def create(app: Any) -> str:
    answer = await invoke(app, {"requestType": "NEW_SESSION"}, **{HEADER: "NEW_SESSION"})
    assert answer.status_code == 200
    made, _, ends = answer.headers[HEADER].partition("; Expires=")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", ends) and answer.headers[NEW] == answer.headers[HEADER]
    assert answer.json() == {"session_id": made}
    return made


@pytest.mark.parametrize("asks", ["CLOSE", "CLOSE_SESSION"])
async def test_a_sessions_life(tmp_path: Path, asks: str) -> None:
    """Made, used as the request's directive, closed; then it is unknown."""
    engine = FakeEngine()
    app = front(engine, sessions_path=tmp_path / "s", strict_sessions=True)
    made = await create(app)
    for body, path in (
        ({"inputs": "Say"}, "/predictions/lmi"),
        ({"messages": []}, "/v1/chat/completions"),
        ({"messages": []}, "/v1/messages"),
        ({"input": "Say"}, "/v1/responses"),
    ):
        assert (await invoke(app, body, path, **{HEADER: made})).status_code == 200
        assert engine.body["kv_transfer_params"] == {"session": made}
        assert HEADER.lower() not in engine.seen[-1][2]
    closed = await invoke(app, {"requestType": asks}, **{HEADER: made})
    assert closed.status_code == 200 and closed.headers[CLOSED] == made
    assert (await invoke(app, {"inputs": "Say"}, **{HEADER: made})).status_code == 400


async def test_a_request_may_begin_its_session(tmp_path: Path) -> None:
    """NEW_SESSION beside a prompt makes the session and uses it."""
    engine = FakeEngine()
    app = front(engine, sessions_path=tmp_path / "s")
    answer = await invoke(app, {"inputs": "Say"}, **{HEADER: "NEW_SESSION"})
    assert answer.json() == {"generated_text": "Hello wide world"}
    assert answer.headers[NEW].startswith(engine.body["kv_transfer_params"]["session"] + "; ")


async def test_the_clients_own_directives_stay(tmp_path: Path) -> None:
    """Other directives stay beside the session, and one that the client names itself wins."""
    engine = FakeEngine()
    app = front(engine, sessions_path=tmp_path / "s")
    for sent, expected in (
        ({"ttl": "1h"}, {"ttl": "1h", "session": "s1"}),
        ({"session": "mine"}, {"session": "mine"}),
    ):
        await invoke(app, {"prompt": "Say", "kv_transfer_params": sent}, **{HEADER: "s1"})
        assert engine.body["kv_transfer_params"] == expected


async def test_expired_is_no_session(tmp_path: Path) -> None:
    """A request of an expired session is answered, without one."""
    engine = FakeEngine()
    app = front(engine, sessions_path=tmp_path / "s", session_expiry_s=0.0, strict_sessions=True)
    made = await create(app)
    assert (await invoke(app, {"inputs": "Say"}, **{HEADER: made})).status_code == 200
    assert "kv_transfer_params" not in engine.body


async def test_closing_forgets(tmp_path: Path) -> None:
    """Where it is asked for, closing a session invalidates what its tenant cached in it."""
    told: list[tuple[str, str]] = []

    async def forget(session: str, tenant: str) -> None:
        told.append((session, tenant))

    for close_forgets in (False, True):
        app = front(
            FakeEngine(), sessions_path=tmp_path / "s", forget_closed_sessions=close_forgets, plugs={"forget": forget}
        )
        with asking(Principal("acme", has_key=True)):
            await invoke(app, {"requestType": "CLOSE"}, **{HEADER: "s1"})
        assert told == ([("s1", "acme")] if close_forgets else [])


class Cores:
    """Engine cores whose answers to commands a test sets. asked: the commands."""

    max_tokens, max_chars = 4096, 4096 * 10

    def __init__(self, answer: list[dict[str, Any]] | Exception) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    async def administer(self, command: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        self.asked.append(command)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def administration(cores: Cores) -> CacheAdmin:
    return CacheAdmin(cores, CacheOptions(ram_gib=1).settings(), Tenants())  # type: ignore[arg-type]


async def test_a_sessions_texts_that_are_held_go_before_its_end_is_told(tmp_path: Path) -> None:
    """Whoever keeps texts for later, as warm-ups do, has let go of the session's before engines are told, and so before
    the session is closed."""
    cores = Cores([{"is_durable": True}])
    admin, told = administration(cores), []

    async def let_go(commands: Any) -> None:
        told.extend((command["tenant"], command["session"], len(cores.asked)) for command in commands)

    admin.holders.append(let_go)
    plugs = {"forget": forget_sessions(admin)}
    app = front(FakeEngine(), sessions_path=tmp_path / "s", forget_closed_sessions=True, plugs=plugs)
    with asking(Principal("acme", has_key=True)):
        answer = await invoke(app, {"requestType": "CLOSE"}, **{HEADER: "s1"})
    assert answer.status_code == 200 and told == [("acme", "s1", 0)] and len(cores.asked) == 1


@pytest.mark.parametrize(
    "failure", [TimeoutError(), EngineError("the engine is gone"), [{"is_durable": True}, {"is_durable": False}]]
)
async def test_a_session_that_is_not_forgotten_can_be_closed_again(tmp_path: Path, failure: Any) -> None:
    """The answer is a 503, the session goes on, in strict mode too; once its texts are invalidated it is closed."""
    engine, cores = FakeEngine(), Cores(failure)
    app = front(
        engine,
        sessions_path=tmp_path / "s",
        strict_sessions=True,
        forget_closed_sessions=True,
        plugs={"forget": forget_sessions(administration(cores))},
    )
    made, close = await create(app), {"requestType": "CLOSE"}
    refused = await invoke(app, close, **{HEADER: made})
    assert refused.status_code == 503 and "close it again" in refused.json()["error"]["message"]
    assert CLOSED not in refused.headers
    assert (await invoke(app, {"inputs": "Say"}, **{HEADER: made})).status_code == 200
    assert engine.body["kv_transfer_params"] == {"session": made}
    cores.answer = [{"is_durable": True}] * 2
    closed = await invoke(app, close, **{HEADER: made})
    assert closed.status_code == 200 and closed.headers[CLOSED] == made
    assert [command["session"] for command in cores.asked] == [made] * 2
    assert (await invoke(app, {"inputs": "Say"}, **{HEADER: made})).status_code == 400


def test_a_session_that_is_open_again_ends_when_it_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing that failed changes neither its end nor which sessions make room in a full place."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    clock = SimulatedClock()
    known = sessions(tmp_path, clock)
    first = known.create("acme")
    clock.advance(10)
    second = known.create("acme")
    with pytest.raises(HttpError, match="close some"):
        known.create("acme")
    with pytest.raises(ZeroDivisionError), known.closing("acme", first.id):
        raise ZeroDivisionError
    clock.advance(1190)
    third = known.create("acme")  # in the place of the first, which is over
    assert [known.use("acme", made.id) for made in (second, third)] == [second.id, third.id]
    with pytest.raises(HttpError, match="there is no session"):
        known.use("acme", first.id)


async def test_a_beam_search_has_no_session(tmp_path: Path) -> None:
    """It can't carry directives: one in a session is answered without, rather than refused."""
    engine = FakeEngine()
    app = front(engine, sessions_path=tmp_path / "s")
    for path, body in (
        ("/v1/completions", {"prompt": "Say"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/invocations", {"inputs": "Say", "parameters": {}}),
    ):
        for beams in (True, False):
            asked = body | {"use_beam_search": beams, "n": 2}
            if "parameters" in body:
                asked = body | {"parameters": {"use_beam_search": beams}}
            assert (await invoke(app, asked, path, **{HEADER: "s1"})).status_code == 200
            assert engine.body.get("kv_transfer_params") == (None if beams else {"session": "s1"})


@pytest.mark.parametrize(
    ("settings", "body", "headers", "hint"),
    [
        ({}, {"requestType": "CLOSE"}, {}, "which session"),
        ({}, {"inputs": "Say"}, {HEADER: "../x"}, "no session id"),
        ({"no_sessions": True}, {"requestType": "NEW_SESSION"}, {}, "keeps no sessions"),
    ],
)
async def test_session_refusals(tmp_path: Path, settings: Any, body: Any, headers: Any, hint: str) -> None:
    """What can't be is a 400 that says so."""
    app = front(FakeEngine(), **({"sessions_path": tmp_path / "s"} | settings))
    answer = await invoke(app, body, **headers)
    assert answer.status_code == 400 and hint in answer.json()["error"]["message"]


async def test_without_sessions_an_id_is_ignored() -> None:
    """Beside a prompt, on a server that keeps none."""
    assert (await invoke(front(FakeEngine(), no_sessions=True), {"inputs": "Say"}, **{HEADER: "any"})).is_success
