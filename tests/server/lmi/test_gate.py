"""The front behind the policy of routes: keys first, then everything else."""

from pathlib import Path
from typing import Any

from hotspan.http.paths import BY_NAME, INVOCATIONS
from hotspan.server.front import PING
from hotspan.server.policy import Access, Gate, access_table
from hotspan.server.principal import Credentials
from tests.server.test_principal import ADMIN_TOKEN, known

from .fake_engine import FakeEngine
from .serving import client, front, invoke

SESSION = "X-Amzn-SageMaker-Session-Id"
ACME, GLOBEX = "Bearer key-a", "Bearer key-b"


def gated(engine: FakeEngine, **settings: Any) -> Gate:
    table = {**access_table(has_keys=True, has_given_token=False), **dict.fromkeys(BY_NAME, Access.CLIENT)}
    return Gate(front(engine, **settings), table, Credentials(known(acme="key-a", globex="key-b"), ADMIN_TOKEN))


async def test_keys_come_first() -> None:
    """Without a key nothing of a request is read, on any route but /ping."""
    engine = FakeEngine()
    app = gated(engine, max_request_bytes=10)
    for path in (INVOCATIONS, "/predictions/lmi", "/models/lmi/invoke", "/v1/completions"):
        assert (await invoke(app, {"inputs": "a" * 100}, path)).status_code == 401
    async with client(app) as http:
        assert (await http.get(PING)).status_code == 200
    assert not engine.seen


async def test_a_key_is_a_tenant() -> None:
    """With a key the engine works for its tenant, on each of our routes."""
    engine = FakeEngine()
    for path in (INVOCATIONS, "/predictions/lmi", "/models/lmi/invoke"):
        assert (await invoke(gated(engine), {"inputs": "Say"}, path, Authorization=GLOBEX)).status_code == 200
        assert engine.seen[-1][3] == "globex"


async def test_sessions_of_two_tenants(tmp_path: Path) -> None:
    """A session id that another tenant has got hold of is unknown to it."""
    app = gated(FakeEngine(), sessions_path=tmp_path / "s", strict_sessions=True)
    made = (await invoke(app, {"requestType": "NEW_SESSION"}, Authorization=ACME)).json()["session_id"]
    for body in ({"inputs": "Say"}, {"requestType": "CLOSE"}):
        theirs = await invoke(app, body, Authorization=GLOBEX, **{SESSION: made})
        assert theirs.status_code == 400 and "no session" in theirs.json()["error"]["message"]
    assert (await invoke(app, {"inputs": "Say"}, Authorization=ACME, **{SESSION: made})).status_code == 200
