"""hotspan's own routes over a fake engine: what they ask of it, and what they make of its answers."""

from typing import Any

import pytest
from fastapi import FastAPI

from hotspan.config.settings import CacheOptions, EncryptionSettings, L2Settings
from hotspan.config.tenants import Tenants
from hotspan.core.errors import EngineError
from hotspan.core.terms import tenant_label
from hotspan.server.admin import CacheAdmin, admin_router
from hotspan.server.policy import Gate, access_table
from hotspan.server.principal import Credentials
from hotspan.server.receipts import merged
from hotspan.testing.clock import SimulatedClock

from .asgi import Reply, call
from .test_principal import ADMIN_TOKEN, known

ROUTES = (
    ("GET", "/hotspan/cache", None),
    ("POST", "/hotspan/cache/check", None),
    ("POST", "/hotspan/cache/clear", None),
    ("POST", "/hotspan/cache/invalidate", {"tags": ["x"]}),
    ("POST", "/hotspan/cache/prefetch", {"tags": ["x"]}),
    ("POST", "/hotspan/cache/pin", {"tags": ["x"], "gib": 1.0}),
    ("POST", "/hotspan/cache/explain", {"request": "chatcmpl-1"}),
    ("POST", "/hotspan/keys/shred", {"tenant": "acme"}),
    ("POST", "/hotspan/keys/rotate", {"tenant": "acme"}),
    ("POST", "/hotspan/trace", {"recording": "mine-0123456789ab"}),
)


def receipt(name: str, ram: int, durable: bool = True) -> dict[str, Any]:
    return {
        "receipt": name,
        "at": 1.0,
        "scope": {"adapter_path": "/secret/place"},
        "replicas": [f"host/{name}"],
        "removed": {"gpu_blocks": 1, "ram_chunks": ram},
        "requests_in_flight": 2,
        "is_durable": durable,
    }


class FakeEngine:
    """Answers with what it was given, and remembers what it was asked."""

    def __init__(self, *answers: dict[str, Any], fails: Exception | None = None) -> None:
        self.answers = list(answers) or [receipt("a", 3)]
        self.fails = fails
        self.asked: list[dict[str, Any]] = []

    async def administer(self, command: dict[str, Any], timeout_s: float | None = None) -> list[dict[str, Any]]:
        self.asked.append(command)
        if self.fails is not None:
            raise self.fails
        return self.answers

    def salt(self, tenant: str, salt: str | None) -> str | None:
        return f"salt of {tenant} and {salt}"

    async def trace(self, recording: str, block_tokens: int, *, is_last: bool) -> dict[str, Any] | None:
        return {"rows": [], "running": 0, "dropped": 0} if recording == "mine-0123456789ab" else None

    max_tokens = 4096
    max_chars = 4096 * 10
    names = frozenset({"model"})

    async def chat_tokens(self, body: dict[str, Any]) -> list[int]:
        if "chat_template" in body:
            raise ValueError("the template is refused")
        return [len(body["messages"]), *sorted(map(len, body))]

    async def tokens(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def adapter_path(self, name: str) -> str | None:
        return "/adapters/known" if name == "known" else None


def ask(
    engine: FakeEngine,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = ADMIN_TOKEN,
    keyed: bool = True,
    cached: bool = True,
    encrypted: bool = True,
    said: dict[str, str] | None = None,
) -> Reply:
    tenants = known(acme="key-a", globex="key-b") if keyed else Tenants()
    settings = CacheOptions(ram_gib=1).settings()
    if encrypted:
        object.__setattr__(settings, "encryption", EncryptionSettings("env:KEK", "/keys"))
    app = FastAPI()
    app.include_router(admin_router(CacheAdmin(engine, settings if cached else None, tenants)))
    table = access_table(has_keys=keyed, has_given_token=False)
    headers = ({"authorization": f"Bearer {key}"} if key else {}) | (said or {})
    return call(Gate(app, table, Credentials(tenants, ADMIN_TOKEN)), method, path, headers, body)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_a_client_is_confined_to_its_tenant() -> None:
    """Whatever it asks to forget, the engine is told its own tenant; another one's name stops it."""
    engine = FakeEngine()
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"tags": ["x"]}, key="key-a").status == 200
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"tenant": "acme"}, key="key-a").status == 200
    assert [command["tenant"] for command in engine.asked] == ["acme", "acme"]
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"tenant": "globex"}, key="key-a").status == 403
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {}, key="key-a").status == 400
    assert len(engine.asked) == 2


def test_the_administrator_names_anybody_or_nobody() -> None:
    """Without a tenant it is everybody's; with nothing at all it is an error, and /clear is there for that."""
    engine = FakeEngine()
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"tags": ["x"]}).status == 200
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"model": True}).status == 200
    assert ask(engine, "POST", "/hotspan/cache/clear").status == 200
    assert engine.asked[0]["tenant"] is None and engine.asked[1]["model"] is True
    assert engine.asked[2] == {"do": "invalidate"}
    reply = ask(engine, "POST", "/hotspan/cache/invalidate", {"tags": []})
    assert reply.status == 400 and "/hotspan/cache/clear" in reply.json["error"]["message"] and len(engine.asked) == 3


PREFETCH = ("POST", "/hotspan/cache/prefetch")


def test_an_announcement_reaches_its_own_tenant_alone(engine: FakeEngine) -> None:
    """An API key announces for its tenant, whatever it says; the administrator for any."""
    assert ask(engine, *PREFETCH, {"session": "chat"}, key="key-a").status == 200
    assert ask(engine, *PREFETCH, {"tags": ["x"], "tenant": "globex"}).status == 200
    assert [command["tenant"] for command in engine.asked] == ["acme", "globex"]
    assert ask(engine, *PREFETCH, {"tags": ["x"], "tenant": "globex"}, key="key-a").status == 403
    assert ask(engine, *PREFETCH, {"tags": ["x"]}, key=None).status == 401
    assert len(engine.asked) == 2


def test_an_announced_request_is_tokenised_as_it_will_be(engine: FakeEngine) -> None:
    """Its body as it will be sent: what has no part in the prompt is ignored, adapter and salt name its chunks."""
    body = {"model": "known", "prompt": "ab", "cache_salt": "s", "max_tokens": 5, "hold_s": 5.0}
    assert ask(engine, *PREFETCH, body, key="key-a").status == 200
    wanted = {"do": "prefetch", "tenant": "acme", "hold_s": 5.0, "tokens": [97, 98], "cache_salt": "salt of acme and s"}
    assert engine.asked[-1] == wanted | {"adapter_name": "known", "adapter_path": "/adapters/known"}
    assert ask(engine, *PREFETCH, {"prompt": [1, 2], "model": "model"}).status == 200
    assert engine.asked[-1]["tokens"] == [1, 2] and "adapter_name" not in engine.asked[-1]
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{}], "stream": True}
    assert ask(engine, *PREFETCH, chat).status == 200
    assert engine.asked[-1]["tokens"] == [1, 5, 8]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "tags": ["x"]},
        {"prompt": [-1]},
        {"prompt": "a" * 5000},
        {"tags": [""]},
        {"messages": [{}], "chat_template": "x"},
        {"tags": ["x"], "hold_s": 0.0},
        {"prompt": "a", "model": "unknown"},
    ],
)
def test_announcements_that_name_nothing_are_refused(engine: FakeEngine, body: dict[str, Any]) -> None:
    """Nothing, two things, and what no request could ask; the engine is not asked."""
    assert ask(engine, *PREFETCH, body, key="key-a").status in (400, 404, 422) and not engine.asked


def test_a_pin_has_tags_a_quota_and_an_end() -> None:
    """Of the own tenant; a pin too many is a 409, and what is no pin never reaches the engine."""
    engine, pin = FakeEngine({"replica": "r"}), ("POST", "/hotspan/cache/pin")
    assert ask(engine, *pin, {"tags": ["x"], "gib": 0.5, "hold_s": 60.0}, key="key-a").status == 200
    assert engine.asked == [{"do": "pin", "tenant": "acme", "tags": ["x"], "bytes": 1 << 29, "hold_s": 60.0}]
    assert ask(engine, *pin, {"tags": ["x"], "gib": 1.0, "tenant": "globex"}, key="key-a").status == 403
    for body in ({"gib": 1.0}, {"tags": [], "gib": 1.0}, {"tags": ["x"]}, {"tags": [""], "gib": 1.0}):
        assert ask(engine, *pin, body, key="key-a").status in (400, 422)
    assert len(engine.asked) == 1
    full = FakeEngine({"replica": "r", "refused": "too many"})
    assert ask(full, *pin, {"tags": ["x"], "gib": 1.0}, key="key-a").status == 409


def test_a_client_asks_for_its_own_requests_alone() -> None:
    """Its key names the tenant, and the engine knows that a client asks; the administrator asks for all, or one."""
    engine, route = FakeEngine({"replica": "r", "requests": []}), ("POST", "/hotspan/cache/explain")
    assert ask(engine, *route, {"request": "x"}, key="key-a").json == {"replicas": engine.answers}
    assert ask(engine, *route, {"tenant": "globex"}, key="key-a").status == 403
    for body in ({}, {"tenant": "globex"}):
        assert ask(engine, *route, body).status == 200
    assert [(each["request"], each["tenant"], each["is_client"]) for each in engine.asked] == [
        *(("x", "acme", True), (None, None, False)),
        (None, "globex", False),
    ]
    off = FakeEngine({"replica": "r", "refused": "nothing is explained"})
    assert ask(off, *route, {}).status == 409


def test_without_keys_only_the_administrator_forgets() -> None:
    """Where everybody is the default tenant, nobody is without the token."""
    engine = FakeEngine()
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"tags": ["x"]}, key=None, keyed=False).status == 401
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"prompt": "ab"}, keyed=False).status == 200
    (command,) = engine.asked
    assert command["tenant"] == "default" and command["tokens"] == [97, 98]


def test_a_text_is_named_as_its_requests_named_it() -> None:
    """Tokens go to the engine with their tenant, the final salt, and the adapter's place; the receipt tells none."""
    engine = FakeEngine()
    body = {"tenant": "acme", "tokens": [1, 2], "tokens_from": 1, "cache_salt": "s", "adapter": "known"}
    reply = ask(engine, "POST", "/hotspan/cache/invalidate", body)
    (command,) = engine.asked
    assert command["tokens"] == [1, 2] and command["tokens_from"] == 1 and command["adapter"] == "known"
    assert command["cache_salt"] == "salt of acme and s" and command["adapter_path"] == "/adapters/known"
    assert reply.json["scope"] == {"tenant": "acme", "adapter": "known", "tokens": 2, "tokens_from": 1}
    assert "salt" not in reply.body.decode() and "/adapters" not in reply.body.decode()
    assert ask(engine, "POST", "/hotspan/cache/invalidate", body | {"adapter": "gone"}).status == 404
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"tokens": [1]}).status == 400


def test_a_batch_is_one_command(engine: FakeEngine) -> None:
    """Documents of one request go to the engine together, each confined to the caller's tenant; one receipt."""
    batch = [{"tags": ["a", "b"]}, {"session": "s"}, {"tokens": [1, 2, 3]}]
    reply = ask(engine, "POST", "/hotspan/cache/invalidate", {"batch": batch}, key="key-a")
    (command,) = engine.asked
    assert command["do"] == "invalidate" and [each["tenant"] for each in command["batch"]] == ["acme"] * 3
    assert command["batch"][0]["tags"] == ["a", "b"] and command["batch"][2]["tokens"] == [1, 2, 3]
    assert reply.json["receipt"] == "a" and reply.json["scope"]["batch"][1] == {"tenant": "acme", "session": "s"}
    ask(engine, "POST", "/hotspan/cache/invalidate", {"tenant": "globex", "batch": [{"tags": ["a"]}]})
    assert engine.asked[-1]["batch"][0]["tenant"] == "globex"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"batch": [{"tags": ["x"]}, {}]}, "names nothing"),
        ({"batch": [{"tags": ["x"]}], "tags": ["y"]}, "only its tenant"),
        ({"batch": [{"tags": [f"{n}-{m}" for m in range(64)]} for n in range(65)]}, "at most 4096"),
        ({"batch": [{"tokens": [1] * 3000}, {"tokens": [2] * 3000}]}, "takes 4096"),
        ({"tokens": [1] * 4097}, "takes 4096"),
        ({"tokens": [1] * 10, "tokens_from": 10}, "names nothing"),
        ({"prompt": "x" * 5000}, "takes 4096"),
    ],
)
def test_what_is_too_much_or_nothing_is_refused(engine: FakeEngine, body: dict[str, Any], says: str) -> None:
    """400 that says what would do; the engine is not asked."""
    reply = ask(engine, "POST", "/hotspan/cache/invalidate", body, key="key-a")
    assert reply.status == 400 and says in reply.json["error"]["message"] and not engine.asked


@pytest.mark.parametrize(
    "body",
    [
        {"tag": "x"},
        {"tags": "x"},
        {"tokens": ["a"]},
        {"tokens": [-1]},
        {"tokens": [2**40]},
        {"tokens": [1], "prompt": "x"},
        {"tags": ["x"], "cache_salt": "y"},
        {"tags": [""]},
        {"session": ""},
        [],
    ],
)
def test_what_is_no_invalidation_is_refused(engine: FakeEngine, body: Any) -> None:
    """An unknown field, a wrong type, a text named twice, a salt without a text; the engine is not asked."""
    assert ask(engine, "POST", "/hotspan/cache/invalidate", body, key="key-a").status in (400, 422)
    assert not engine.asked


def test_a_batch_reaches_nobody_else(engine: FakeEngine) -> None:
    """One item of another tenant's stops all of it."""
    batch = [{"tags": ["a"]}, {"tenant": "globex", "tags": ["a"]}]
    assert ask(engine, "POST", "/hotspan/cache/invalidate", {"batch": batch}, key="key-a").status == 403
    body = {"tenant": "globex", "batch": [{"tags": ["a"]}]}
    assert ask(engine, "POST", "/hotspan/cache/invalidate", body, key="key-a").status == 403
    many = {"batch": [{"tags": ["a"]}] * 1001}
    assert ask(engine, "POST", "/hotspan/cache/invalidate", many, key="key-a").status == 422
    assert not engine.asked


def test_an_entry_that_is_in_the_log_is_named_to_the_engine(engine: FakeEngine) -> None:
    """The router says where the entry is; a header that says anything else is as none."""
    place = f"{'ab' * 8}:7:{'cd' * 32}"
    for path, body in (("/hotspan/cache/invalidate", {"tags": ["x"]}), ("/hotspan/cache/clear", None)):
        assert ask(engine, "POST", path, body, said={"x-hotspan-logged": place}).status == 200
        logged = {"epoch": "ab" * 8, "generation": "7", "namespace": "cd" * 32}
        assert engine.asked[-1]["logged"] == logged
        assert ask(engine, "POST", path, body, said={"x-hotspan-logged": "7"}).status == 200
        assert "logged" not in engine.asked[-1]


def test_what_the_engine_refuses_is_the_caller_s_mistake() -> None:
    """A text that the engine can't name is a 400 with its reason."""
    engine = FakeEngine({"refused": "a text of 2 tokens is shorter than a chunk"})
    reply = ask(engine, "POST", "/hotspan/cache/invalidate", {"tokens": [1, 2]}, key="key-a")
    assert reply.status == 400 and "shorter than a chunk" in reply.json["error"]["message"]


def test_a_prompt_that_no_request_may_have_is_refused() -> None:
    """The engine's tokenizer takes no text that is longer than the model's context: 400 with what it says."""

    class Strict(FakeEngine):
        async def tokens(self, prompt: str) -> list[int]:
            raise ValueError("the prompt is too long")

    reply = ask(Strict(), "POST", "/hotspan/cache/invalidate", {"prompt": "x"}, key="key-a")
    assert reply.status == 400 and reply.json["error"]["message"] == "the prompt is too long"


def test_a_shred_is_one_command() -> None:
    """What came between the invalidation and the end of the keys is the engine's to see to."""
    engine = FakeEngine(receipt("a", 3) | {"shredded": {"tenant": "acme", "roots": ["r"], "at": 1.0}})
    assert ask(engine, "POST", "/hotspan/keys/shred", {"tenant": "acme"}).json["shredded"]["roots"] == ["r"]
    assert [command["do"] for command in engine.asked] == ["shred"]


def test_receipts_of_several_cores_are_one() -> None:
    """Counts add up, replicas are listed, and it is durable if it is everywhere."""
    one = merged([receipt("a", 3), receipt("b", 4)])
    assert one["removed"] == {"gpu_blocks": 2, "ram_chunks": 7} and one["requests_in_flight"] == 4
    assert one["replicas"] == ["host/a", "host/b"] and one["receipt"] == "a+b" and one["is_durable"]
    assert not merged([receipt("a", 3), receipt("b", 4, durable=False)])["is_durable"]
    late = receipt("b", 4) | {"replicas_missing": ["third"], "widened": ["acme"]}
    keys = {"tenant": "t", "roots": [], "at": 1.0, "had_keys": False}
    cores = [
        receipt("a", 3) | {"shredded": keys},
        receipt("b", 4) | {"shredded": keys | {"roots": ["r"], "had_keys": True}},
    ]
    for order in (cores, cores[::-1]):
        assert merged(order)["shredded"] == keys | {"roots": ["r"], "had_keys": True}
    both = merged([receipt("a", 3) | {"replicas_missing": []}, late])
    assert both["replicas_missing"] == ["third"] and both["widened"] == ["acme"]


def test_what_is_not_durable_is_no_success() -> None:
    """503 with the receipt if it holds in memory only, 503 without one if the engine is silent or fails."""
    reply = ask(FakeEngine(receipt("a", 3, durable=False)), "POST", "/hotspan/cache/clear")
    assert reply.status == 503 and reply.json["receipt"]["removed"]["ram_chunks"] == 3
    assert "in memory" in reply.json["error"]["message"] and "repeat" in reply.json["error"]["message"]
    reply = ask(FakeEngine(fails=TimeoutError()), "POST", "/hotspan/cache/clear")
    assert reply.status == 503 and reply.json["receipt"]["is_durable"] is False
    reply = ask(FakeEngine(fails=EngineError("the engine did not: x")), "POST", "/hotspan/cache/clear")
    assert reply.status == 503 and "did not: x" in reply.json["error"]["message"]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES[:-1])
def test_without_tiers_or_keys(method: str, path: str, body: Any) -> None:
    """With --no-cache, and for keys without encryption: 409 and what to do; the engine is not asked."""
    engine = FakeEngine()
    reply = ask(engine, method, path, body, cached=False)
    assert reply.status == 409 and "--no-cache" in reply.json["error"]["message"] and not engine.asked
    if "keys" in path:
        reply = ask(engine, method, path, body, encrypted=False)
        assert reply.status == 409 and "--kek" in reply.json["error"]["message"] and not engine.asked


def test_requests_are_recorded_without_tiers_too() -> None:
    """The engine's own pool is worth a simulation as well; a second recording is refused while one goes on."""
    engine = FakeEngine()
    assert ask(engine, *ROUTES[-1], cached=False).json == {"rows": [], "running": 0, "dropped": 0}
    reply = ask(engine, "POST", "/hotspan/trace", {"recording": "theirs-0123456789"})
    assert reply.status == 409 and "another recording" in reply.json["error"]["message"]
    assert ask(engine, "POST", "/hotspan/trace", {"recording": "guessed"}).status == 422


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_who_reaches_the_routes(method: str, path: str, body: Any) -> None:
    """Nobody without a credential, a client only what is its own."""
    engine = FakeEngine()
    assert ask(engine, method, path, body, key=None).status == 401
    if not path.endswith(("/invalidate", "/prefetch", "/pin", "/explain")):
        assert ask(engine, method, path, body, key="key-a").status == 403
    assert not engine.asked


def test_stats_have_names() -> None:
    """Labels of known tenants are shown as names, others as they are."""
    tenants = {f"{tenant_label('acme'):016x}": 5, "00000000000000ff": 1}
    texts = [{"tags": ["manual"], "tenant": label} for label in tenants]
    tiers = {"ram": {"chunks": 6, "tenants": tenants}}
    told = {"replica": "r", "tiers": tiers, "texts": texts, "hit_tokens": dict(tenants), "is_encrypted": True}
    engine = FakeEngine(told)
    (replica,) = ask(engine, "GET", "/hotspan/cache").json["replicas"]
    assert [text["tenant"] for text in replica["texts"]] == ["acme", "00000000000000ff"]
    assert replica["tiers"]["ram"]["tenants"] == replica["hit_tokens"] == {"acme": 5, "00000000000000ff": 1}


async def test_which_log_is_read_is_asked_until_it_is_known() -> None:
    """Of all engine cores the one that has read least counts; without an L2, or while the engine says nothing, None."""
    settings = CacheOptions(ram_gib=1).settings()
    silent = FakeEngine(fails=EngineError("gone"))
    assert await CacheAdmin(silent, settings, Tenants()).log(is_asked=True) is None and not silent.asked
    object.__setattr__(settings, "l2", L2Settings("redis://l2"))
    clock = SimulatedClock()
    admin = CacheAdmin(silent, settings, Tenants(), clock=clock)
    assert await admin.log() is None and silent.asked == [{"do": "log"}]
    assert await admin.log() is None and len(silent.asked) == 1, "not at each health check"
    clock.advance(1.0)
    assert await admin.log(is_asked=True) is None
    clock.advance(1.0)
    silent.fails, silent.answers = None, [{"log": {"name": "a", "generation": at}} for at in (9, 7, 8)]
    assert await admin.log(is_asked=True) == {"name": "a", "generation": 7}
    assert await admin.log() == {"name": "a"} and len(silent.asked) == 3
    assert await admin.log(is_asked=True) == {"name": "a", "generation": 7} and len(silent.asked) == 3, "just asked"
    clock.advance(1.0)
    silent.answers = [{"log": None}, {"log": {"name": "a", "generation": 9}}]
    assert await admin.log(is_asked=True) is None, "one core has not read it yet"
