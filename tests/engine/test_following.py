"""What other replicas invalidate reaches an engine that runs or idles, all of it at once, and nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hotspan.core.credentials import log_name
from hotspan.core.errors import ConfigError
from hotspan.core.terms import Scope, tag_labels, tenant_label
from hotspan.core.types import Tier
from hotspan.engine import opening
from hotspan.l2.follower import LogFollower
from kit.simulated.memory_store import MemoryServer

from .harness.core import BLOCK, CHUNK, Core, IdleCore, core

pytestmark = pytest.mark.usefixtures("books_agree")

LENGTH = 900
OWN = LENGTH // BLOCK * BLOCK
WHOLE = LENGTH // CHUNK * CHUNK


@pytest.fixture(scope="module")
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, server: MemoryServer) -> Iterator[Core]:
    with core(tiny_model, disk=tmp_path_factory.mktemp("following") / "kv", l2=server) as engine:
        yield engine


class Another:
    """A replica that invalidates."""

    def __init__(self, engine: Core, server: MemoryServer) -> None:
        self._engine = engine
        self._log = server.log()

    def invalidates(self, *scopes: Scope) -> None:
        """One entry each, which the engine's follower has read when this returns."""
        for scope in scopes:
            self._log.append([scope], "another")
        assert self._engine.follower.poll()


@pytest.fixture
def another(engine: Core, server: MemoryServer) -> Another:
    return Another(engine, server)


def of(tenant: str, tag: str | None = None) -> Scope:
    return Scope(tenant=tenant_label(tenant), labels=tag_labels([tag] if tag else []))


def as_(tenant: str, *tags: str) -> dict[str, dict[str, Any]]:
    """What the server says of a tenant's request."""
    return {"hotspan": {"tenant": tenant, "tags": list(tags)}}


def test_which_log_is_read_and_how_far(engine: Core, another: Another) -> None:
    """What an engine says of its log has been done in its own tiers, also while it idles."""
    before = engine.administer(do="log")["log"]
    another.invalidates(of("nobody"))
    after = engine.administer(do="log")["log"]
    assert after["name"] == before["name"] == log_name(engine.follower.position.epoch.hex())
    assert after["generation"] == before["generation"] + 1 == engine.follower.applied


def test_it_binds_the_next_request(engine: Core, another: Another) -> None:
    """What another replica invalidated is found on no tier of this one; another document of the tenant's is."""
    gone, kept = engine.text(1, LENGTH), engine.text(2, LENGTH)
    engine.stored(gone, **as_("acme", "gone"))
    engine.stored(kept, **as_("acme", "kept"))
    another.invalidates(of("acme", "gone"))
    assert (engine.ask(gone, **as_("acme")), engine.ask(kept, **as_("acme"))) == (0, OWN)
    engine.forget_gpu()
    assert engine.ask(kept, **as_("acme")) == WHOLE


def test_it_reaches_requests_that_run_and_wait(engine: Core, another: Another) -> None:
    """They end as they would have, and leave nothing."""
    running, waiting = engine.text(3, LENGTH), engine.text(4, LENGTH)
    engine.start("running", running, 30, **as_("acme", "moving"))
    engine.step()
    engine.start("waiting", waiting, **as_("acme", "moving"))
    another.invalidates(of("acme", "moving"))
    assert engine.finish() == {"running": 0, "waiting": 0}
    engine.settle()
    assert [engine.ask(text, **as_("acme")) for text in (running, waiting)] == [0, 0]


def test_a_text_that_is_named_by_its_chunks_goes_alone(engine: Core, another: Another) -> None:
    """An entry by keys takes that text from the engine's own cache, too, and the tenant's others stay there."""
    gone, kept = engine.text(5, LENGTH), engine.text(6, LENGTH)
    request = engine.start("named", gone, **as_("acme"))
    keys = frozenset(engine.manager._records["named"].keys)
    engine.finish()
    engine.stored(kept, **as_("acme"))
    assert len(keys) == request.num_prompt_tokens // CHUNK
    another.invalidates(Scope(tenant=tenant_label("acme"), keys=keys))
    assert (engine.ask(gone, **as_("acme")), engine.ask(kept, **as_("acme"))) == (0, OWN)


def test_another_model_s_is_none_of_this_one_s(engine: Core, another: Another) -> None:
    """Models that share a log: an entry for the namespace of another one drops nothing."""
    prompt = engine.stored(engine.text(7, LENGTH))
    another.invalidates(Scope(namespace=bytes(range(32))))
    assert engine.ask(prompt) == OWN


def test_an_idle_engine_follows(engine: Core, another: Another) -> None:
    """Without a request or a step what was invalidated is gone from all its tiers, and so it is on what is unread."""
    engine.stored(engine.text(8, LENGTH), **as_("idle", "idle"))
    label = tenant_label("idle")
    with IdleCore(engine):
        another.invalidates(of("idle", "idle"))
        engine.until(lambda: not engine.follower._queued, lambda: None)
        engine.until(lambda: all(label not in tier.tenants for tier in engine.cache.usage().values()), lambda: None)


def test_an_idle_engine_finishes_what_it_was_told(engine: Core) -> None:
    """A text is hashed on another thread and forgotten on the scheduler's, which sleeps: the answer comes."""
    prompt = engine.stored(engine.text(9, LENGTH))
    with IdleCore(engine) as idle:
        receipt = idle.call("hotspan", {"do": "invalidate", "tenant": "default", "tokens": prompt})
    assert receipt["is_durable"] and receipt["removed"]["ram_chunks"] == LENGTH // CHUNK
    assert engine.ask(prompt) == 0


def test_an_idle_engine_prefetches(engine: Core) -> None:
    """What lower tiers have of a text comes to RAM while nothing else happens, and goes when nobody comes."""
    prompt = engine.stored(engine.text(11, LENGTH))
    engine.forget_gpu()
    engine.evict_ram()
    tokens = {"do": "prefetch", "tenant": "default", "tokens": prompt}
    with IdleCore(engine) as idle:
        told = idle.call("hotspan", tokens | {"hold_s": 60.0})
        assert sum(each["tokens"] for each in told["found"].values()) == told["started"]["tokens"] == WHOLE
        engine.until(lambda: not engine.cache.prefetches.is_moving, lambda: None)
        assert engine.cache.usage()[Tier.RAM].chunks == LENGTH // CHUNK
        told = idle.call("hotspan", tokens | {"hold_s": 0.001})
        assert told["found"]["ram"]["tokens"] == WHOLE
        engine.until(lambda: not engine.cache.usage()[Tier.RAM].chunks, lambda: None)


def test_a_burst_is_one_pass_and_stays_with_its_tenant(
    engine: Core, another: Another, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand unread entries of one tenant, and one of another: the first loses what it has here, the second the
    document that was named, a third nothing. RAM is gone through once, the engine's own cache by what is found."""
    texts = {tenant: engine.text(20 + n, LENGTH) for n, tenant in enumerate(("noisy", "quiet", "third"))}
    for tenant, text in texts.items():
        engine.stored(text, **as_(tenant, "own"))
    kept = engine.stored(engine.text(30, LENGTH), **as_("quiet", "kept"))
    passes, matched = [], engine.cache.ram.matched
    monkeypatch.setattr(engine.cache.ram, "matched", lambda *scopes: passes.append(scopes) or matched(*scopes))
    looked_at = engine.prefixes.spans.looked_at
    another.invalidates(*(of("noisy", f"doc-{n}") for n in range(10_000)), of("quiet", "own"))
    assert len(engine.follower._queued) < 2000
    assert engine.ask(texts["third"], **as_("third")) == OWN
    assert len(passes) == 1
    assert engine.prefixes.spans.looked_at - looked_at <= 4 * len(engine.prefixes.spans)
    here = [engine.cache.usage()[tier].tenants for tier in (Tier.RAM, Tier.DISK)]
    assert all(tenant_label("noisy") not in tenants and tenant_label("quiet") in tenants for tenants in here)
    assert engine.ask(texts["quiet"], **as_("quiet")) == 0 and engine.ask(kept, **as_("quiet")) == OWN


def test_replicas_that_are_asked_for_the_same_write_one_entry(
    engine: Core, server: MemoryServer, tiny_model: Path
) -> None:
    """The second replica is told where the first one's entry is: it forgets on every tier as the first does, reads the
    log that far, and writes none. For another model's entry, or another log's, it writes its own."""
    gone, kept = engine.text(40, LENGTH), engine.text(41, LENGTH)
    with core(tiny_model, l2=server) as second:
        for replica in (engine, second):
            replica.stored(gone, **as_("acme", "asked"))
            replica.stored(kept, **as_("acme"))
        asked = {"do": "invalidate", "tenant": "acme", "tags": ["asked"]}
        first = engine.administer(**asked)
        written = len(server.entries)
        receipt = second.administer(**asked, logged=first["log"])
        assert receipt["is_durable"]  # which of the two removed its chunks, this or having read the entry, is not said
        assert len(server.entries) == written and receipt["log"] == first["log"]
        leaves_nothing = {"hotspan": {"tenant": "acme", "no_store": True}}
        for replica in (second, engine):
            assert (replica.ask(gone, **leaves_nothing), replica.ask(kept, **leaves_nothing)) == (0, OWN)
        second.settle()
        for other in ({"namespace": "00" * 32}, {"epoch": "ff" * 16}):
            second.administer(**asked, logged=first["log"] | other)
        assert len(server.entries) == written + 2
        second.check()


def test_a_disk_waits_for_a_log_that_can_t_be_read(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that starts while its L2 is away finds nothing that was on its disk: another replica may have
    invalidated it, and the last engine read so. Once the log is read, it finds what nobody took."""
    server = MemoryServer()
    acme: dict[str, Any] = {"hotspan": {"tenant": "acme", "no_store": True}}
    with core(tiny_model, disk=tmp_path / "kv", l2=server) as engine:
        gone = engine.stored(engine.text(1, LENGTH), **as_("acme", "gone"))
        kept = engine.stored(engine.text(2, LENGTH), **as_("acme"))
    server.log().append([of("acme", "gone")], "another")

    def is_away(call: str) -> None:
        raise ConnectionError("the L2 is away")

    server.before = is_away
    with core(tiny_model, disk=tmp_path / "kv", l2=server) as engine:
        assert "disk_waits_for_l2_log" in caplog.text
        assert (engine.ask(gone, **acme), engine.ask(kept, **acme)) == (0, 0)
        server.before = lambda call: None
        assert engine.follower.poll()
        assert (engine.ask(gone, **acme), engine.ask(kept, **acme)) == (0, WHOLE)
        engine.check()


def test_an_l2_that_can_t_be_opened_leaves_nothing_open(tiny_model: Path, tmp_path: Path) -> None:
    """The start fails, and the next one finds the disk's directory free and the log without a reader."""
    server = MemoryServer()
    before = {thread.ident for thread in threading.enumerate()}
    with (
        patch.object(opening, "RemoteTier", side_effect=ConfigError("the L2 is of another make")),
        pytest.raises(ConfigError, match="another make"),
        core(tiny_model, disk=tmp_path / "kv", l2=server),
    ):
        raise AssertionError("it started")
    assert not any(name.startswith("replicas/") for name in server.data)
    left = [thread for thread in threading.enumerate() if thread.ident not in before and "hotspan" in thread.name]
    assert [thread.name for thread in left if not thread.name.startswith("hotspan-copy")] == []
    with core(tiny_model, disk=tmp_path / "kv", l2=server) as engine:
        prompt = engine.stored(engine.text(1, LENGTH))
        assert engine.ask(prompt) == OWN


def test_replicas_with_one_l2_give_it_one_name(engine: Core, server: MemoryServer) -> None:
    """That of the log that all of them read; another store has another, and one without a shared log has none."""
    names = []
    for store in (server, server, MemoryServer()):
        follower = LogFollower(store.log(), "another")
        assert follower.poll() and follower.foreign() is not None and follower.position is not None
        names.append(follower.position.epoch.hex())
    assert engine.follower.poll()
    told = engine.administer(do="stats")["tiers"]
    assert told["l2"]["store"] == names[0] == names[1] != names[2] and "store" not in told["ram"]
    with patch.object(LogFollower, "is_shared", False):
        assert engine.administer(do="stats")["tiers"]["l2"]["store"] is None
