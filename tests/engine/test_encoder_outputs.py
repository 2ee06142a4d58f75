"""Encoder outputs in the tiers, without a model: both halves of the connector over a real cache, and vLLM's questions.

`Engine` asks as vLLM's scheduler does and encodes as its model runner does. That these do so: by
tests/engine/families/test_encoder_outputs.py.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import ECConnectorOutput

from hotspan.cache.engine_queue import EngineQueue
from hotspan.config.settings import CacheSettings
from hotspan.core.namespace import ChunkKeyer, tenant_digest
from hotspan.core.terms import Scope, Terms, tenant_label
from hotspan.core.types import Tier
from hotspan.engine.contract import ENGINE, TRIED_WITH
from hotspan.engine.encoder import slots
from hotspan.engine.encoder.outputs import EncoderOutputs, keeps_outputs
from hotspan.engine.metrics import CacheMetrics
from hotspan.engine.requests import RequestRecord
from hotspan.tiers.base import Fault
from tests.cache.rig import SIZE, Rig

pytestmark = pytest.mark.skipif(ENGINE != TRIED_WITH, reason="of vLLM's it takes what other releases lack")

ROWS, WIDTH, PATIENCE_S = 6, 16, 0.05
ACME = ChunkKeyer(bytes(32), tenant=tenant_digest("acme"))


def encoded(identifier: str, version: int = 0, *, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a medium is encoded to."""
    chance = torch.Generator().manual_seed(int.from_bytes(identifier.encode(), "big") + version)
    return torch.randn((rows, WIDTH), generator=chance).to(dtype)


class Engine:
    """vLLM's scheduler, model runner and encoder cache, as far as media are concerned.

    own: what the engine's own cache has.
    """

    def __init__(self, rig: Rig, steps: EngineQueue | None = None) -> None:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        from hotspan.engine.encoder import connector

        def half(role: ECConnectorRole, own: Any) -> connector.OutputConnector:
            config: Any = SimpleNamespace()
            connector._configure(config, own)
            return connector.OutputConnector(config, role)

        self.rig = rig
        self.outputs = EncoderOutputs(rig.cache, rig.clock, PATIENCE_S, steps)
        self.scheduler = half(ECConnectorRole.SCHEDULER, self.outputs)
        self.worker = half(ECConnectorRole.WORKER, rig.slab.slot)
        self.own: dict[str, torch.Tensor] = {}
        self.dtype = torch.float32
        self._names = 0

    def request(
        self, *media: str, keyer: ChunkKeyer | None = ACME, salt: str = "", rows: int = ROWS, **fields: Any
    ) -> RequestRecord:
        """A request whose prompt is its media, one behind the other."""
        self._names += 1
        features = [
            SimpleNamespace(
                identifier=identifier,
                modality="image",
                mm_position=SimpleNamespace(offset=place * rows, length=rows, get_num_embeds=lambda: rows),
            )
            for place, identifier in enumerate(media)
        ]
        request: Any = SimpleNamespace(
            request_id=f"r{self._names}", mm_features=features, cache_salt=salt, num_prompt_tokens=rows * len(media)
        )
        record = RequestRecord(request=request, keyer=keyer, groups=(), **({"terms": terms()} | fields))
        self.outputs.admit(record)
        return record

    def forget(self) -> None:
        """The engine's own cache is needed for others."""
        self._build(list(self.own), 0)
        self.own.clear()

    def ask(self, *media: str, **fields: Any) -> list[str]:
        """What had to be encoded for a request, which waits as it is told and then ends."""
        record = self.request(*media, **fields)
        done = self.step(record)
        while done is None:
            self.rig.land()
            done = self.step(record)
        self.outputs.forget(record.request.request_id)
        self.rig.cache.check()
        return done

    def step(self, record: RequestRecord) -> list[str] | None:
        """A step that computes a request whole; what had to be encoded, or None if the request waits."""
        if not self.scheduler.ensure_cache_available(record.request, 0):
            return None
        return self.run(*self.plan(record))

    def plan(self, record: RequestRecord, *, has_room: bool = True) -> tuple[Any, list[str]]:
        """The orders of a step, and what is to be encoded in it."""
        request, found, todo = record.request, list[str](), list[str]()
        self.scheduler.ensure_cache_available(request, 0)
        for index, feature in enumerate(request.mm_features):
            if feature.identifier in {*self.own, *found, *todo}:
                continue
            (found if self.scheduler.has_cache_item(feature.identifier) else todo).append(feature.identifier)
            if has_room:
                self.scheduler.update_state_after_alloc(request, index)
        return self._build([], int(has_room)), todo

    def _build(self, freed: list[str], tokens: int) -> Any:
        step: Any = SimpleNamespace(free_encoder_mm_hashes=freed, total_num_scheduled_tokens=tokens)
        return self.scheduler.build_connector_meta(step)

    def run(self, orders: Any, todo: list[str], version: int = 0) -> list[str]:
        """Carry a step out."""
        self.worker.bind_connector_metadata(orders)
        self.worker.start_load_caches(self.own)
        rows = {identifier: count for identifier, (_, count) in orders.orders.stores.items()}
        for identifier in todo:
            self.own[identifier] = encoded(identifier, version, rows=rows.get(identifier, ROWS), dtype=self.dtype)
            self.worker.save_caches(self.own, identifier)
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=report))
        return todo

    def later(self, *media: str, **fields: Any) -> list[str]:
        """`ask`, when the engine's own cache is empty."""
        self.forget()
        return self.ask(*media, **fields)


def terms(tenant: str = "acme", **fields: Any) -> Terms:
    return Terms(tenant=tenant_label(tenant), **fields)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Rig(ram=4, disk=8) as rig:
        running = Engine(rig)
        yield running
        for name in list(running.outputs._requests):
            running.outputs.forget(name)
        rig.land()
        rig.land()  # what was stored anew while an old write still ran
        assert not rig.cache.ram.is_pinned and not rig.cache.ram.forgotten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_output_is_loaded_as_it_was_encoded(engine: Engine, dtype: torch.dtype) -> None:
    """It is encoded once: what the engine dropped is loaded byte by byte, and nothing else is in the slot."""
    for slot in range(4):
        engine.rig.slab.slot(slot)[:] = b"\xff" * SIZE
    engine.dtype = dtype
    assert engine.ask("a", "b", "a") == ["a", "b"]
    assert engine.ask("b", "a") == []
    assert engine.later("b", "a") == []
    for identifier in "ab":
        assert torch.equal(engine.own[identifier], encoded(identifier, dtype=dtype))
        assert engine.own[identifier].dtype == dtype
    size = ROWS * WIDTH * dtype.itemsize
    (slot,) = (entry.slot for entry in engine.rig.cache.ram.entries.values() if entry.chunk.key == key("a"))
    assert bytes(engine.rig.slab.slot(slot)[64 + size :]) == bytes(SIZE - 64 - size)
    kinds = CacheMetrics(engine.rig.cache, None).report(1.0).data.values()
    counted = {name: by for kind in kinds for name, by in kind.items() if name.startswith("hotspan_encoder_")}
    assert counted == {
        "hotspan_encoder_hits": {("ram",): 2},
        "hotspan_encoder_misses": {(): 2},
        "hotspan_encoder_load_bytes": {(): 2 * size},
        "hotspan_encoder_store_bytes": {(): 2 * size},
    }


def test_where_outputs_are_kept() -> None:
    """Where it was not tried, or another connector has them, nothing is taken over."""

    def config(**changed: Any) -> Any:
        given = {"ec": None, "sees": True, "workers": 1, "ray": False, "v2": False} | changed
        return SimpleNamespace(
            ec_transfer_config=given["ec"] and SimpleNamespace(ec_connector=given["ec"]),
            model_config=SimpleNamespace(is_multimodal_model=given["sees"]),
            parallel_config=SimpleNamespace(world_size=given["workers"], use_ray=given["ray"]),
            use_v2_model_runner=given["v2"],
        )

    settings = CacheSettings(1 << 30)
    assert keeps_outputs(settings, config()) and keeps_outputs(settings, config(ec="OutputConnector"))
    assert not keeps_outputs(CacheSettings(1 << 30, encoder_outputs=False), config())
    for other in ({"ec": "ECExampleConnector"}, {"sees": False}, {"workers": 2}, {"ray": True}, {"v2": True}):
        assert not keeps_outputs(settings, config(**other))


def key(identifier: str, keyer: ChunkKeyer = ACME, salt: str = "") -> bytes:
    return keyer.salted(salt).output_key(identifier)


def test_names_differ_in_all_that_counts(engine: Engine) -> None:
    """Another medium, salt, tenant, adapter or model never hits, and no chunk or window of KV has an output's name."""
    others = {
        "tenant": ChunkKeyer(bytes(32), tenant=tenant_digest("globex")),
        "adapter": ChunkKeyer(bytes(32), b"a" * 32, tenant_digest("acme")),
        "model": ChunkKeyer(b"m" * 32, tenant=tenant_digest("acme")),
    }
    assert engine.ask("a") == ["a"]
    for keyer in others.values():
        assert engine.later("a", keyer=keyer) == ["a"]
    assert engine.later("a", salt="s") == ["a"]
    assert engine.later("b") == ["b"]
    names = {key("a"), key("b"), key("a", salt="s"), *(key("a", keyer) for keyer in others.values())}
    digest = ACME.output_key("a")
    assert len(names | {ACME.key(b"a", 0), ACME.window_key(b"a", 0), digest}) == 9


def test_nothing_without_a_name_is_kept(engine: Engine) -> None:
    """Media that came through another server, and requests that may not store."""
    assert engine.ask("a", keyer=None) == ["a"]
    assert engine.later("a", may_store=False) == ["a"]
    assert not engine.rig.cache.ram.entries
    assert engine.later("a") == ["a"]
    assert engine.later("a", keyer=None) == ["a"]
    assert engine.later("a", may_store=False) == []


def test_an_output_on_disk_is_awaited(engine: Engine) -> None:
    """A request waits for a promotion, others do not; afterwards it loads what was stored."""
    engine.ask("a", "b")
    on_disk(engine)
    record = engine.request("a", "b")
    assert engine.step(record) is None
    assert len(engine.rig.loads) == 2
    assert engine.ask("c") == ["c"]
    engine.rig.land()
    assert engine.step(record) == []
    assert torch.equal(engine.own["a"], encoded("a")) and torch.equal(engine.own["b"], encoded("b"))
    assert engine.rig.cache.stats.encoder_hits == {Tier.DISK: 2}
    engine.outputs.forget(record.request.request_id)


def on_disk(engine: Engine) -> None:
    """What was stored is on disk only, and not in the engine."""
    forget_ram(engine)
    engine.forget()


def forget_ram(engine: Engine) -> None:
    engine.rig.land()
    for entry in list(engine.rig.cache.ram.entries.values()):
        engine.rig.cache._forget(entry)


def test_computed_media_and_those_in_the_engine_are_not_promoted(engine: Engine) -> None:
    """Where their KV is a hit, or the engine's own cache has them, nothing is read."""
    engine.ask("a")
    forget_ram(engine)
    record = engine.request("a")
    assert engine.scheduler.ensure_cache_available(record.request, 0)  # the engine has it
    engine.forget()
    engine.ask("b")
    assert engine.scheduler.ensure_cache_available(record.request, ROWS)
    assert not engine.rig.loads
    assert engine.step(record) is None
    engine.outputs.forget(record.request.request_id)
    engine.rig.land()


def test_what_the_engine_dropped_unnoticed_is_encoded_or_in_ram(engine: Engine) -> None:
    """vLLM's `reset_encoder_cache` tells nobody: the next request loads from RAM, else encodes, and does not wait."""
    engine.ask("a")
    engine.own.clear()
    assert engine.ask("a") == []
    forget_ram(engine)
    engine.own.clear()
    assert engine.ask("a") == ["a"]
    assert engine.later("a") == []


@pytest.mark.parametrize("end", ["late", *(Fault.IO, Fault.CORRUPT, Fault.GONE, Fault.DROPPED)])
def test_a_fault_is_a_miss(engine: Engine, end: Fault | str) -> None:
    """What is late or comes back broken is encoded again, in bounded time."""
    engine.ask("a")
    on_disk(engine)
    record = engine.request("a")
    assert engine.step(record) is None
    if isinstance(end, Fault):
        engine.rig.tier.finish(engine.rig.loads[0], end)
        engine.rig.cache.step()
    else:
        engine.rig.clock.advance(PATIENCE_S * 1.01)
    assert engine.step(record) == ["a"]
    engine.outputs.forget(record.request.request_id)
    engine.rig.land()
    assert engine.later("a") == []


def test_waiting_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the patience, or the time to encode where that is longer. No tier is given up for it: KV may wait longer."""
    blamed: list[None] = []
    monkeypatch.setattr(type(engine.rig.lower), "late", lambda tier: blamed.append(None))
    engine.ask("a", "b")
    on_disk(engine)
    for row_s, bound_s in ((0.0, PATIENCE_S), (0.1 / ROWS, 0.1)):
        engine.outputs._row_s = row_s
        record = engine.request("a")
        waited_s = 0.0
        while engine.step(record) is None:
            waited_s += 0.01
            assert waited_s < 1
            engine.rig.clock.advance(0.01)
        assert bound_s <= waited_s <= bound_s + 0.02
        engine.outputs.forget(record.request.request_id)
        on_disk(engine)
    assert not blamed


def test_bytes_that_are_no_output_of_that_size_are_a_miss(engine: Engine) -> None:
    """A slot's header decides what a worker is told to read."""
    engine.ask("a")
    (entry,) = engine.rig.cache.ram.entries.values()
    slot = engine.rig.slab.slot(entry.slot)
    whole = bytes(slot)
    for place in (0, 8, 16, 24):
        slot[:] = whole
        slot[place] ^= 0xFF
        assert slots.shape_of(slot, ROWS) is None
        assert engine.later("a") == ["a"]
        with pytest.raises(ValueError, match="does not hold"):
            slots.get(slot, ROWS)
    slot[:] = whole
    assert slots.shape_of(slot, ROWS + 1) is None
    assert engine.later("a") == []


@pytest.mark.parametrize("scope", [Scope(tenant=tenant_label("acme")), Scope(labels=frozenset({7})), Scope()])
def test_forgetting(engine: Engine, scope: Scope) -> None:
    """Invalidations take outputs, those too that are being stored; other tenants' stay."""
    mine, theirs = terms(labels=frozenset({7})), terms("globex")
    globex = ChunkKeyer(bytes(32), tenant=tenant_digest("globex"))
    engine.ask("t", keyer=globex, terms=theirs)
    engine.ask("a", terms=mine)
    record = engine.request("b", terms=mine)
    orders, todo = engine.plan(record)
    engine.rig.cache.invalidate([scope], lambda done: None)
    engine.run(orders, todo)
    assert engine.later("a", "b", terms=mine) == ["a", "b"]
    assert (engine.later("t", keyer=globex, terms=theirs) == []) is (scope != Scope())


def test_expiry(engine: Engine) -> None:
    """A time to live ends in RAM and on disk."""
    until = terms(expires_s=int(engine.rig.clock.unix()) + 10)
    engine.ask("a", terms=until)
    engine.rig.land()
    assert engine.later("a", terms=until) == []
    engine.rig.clock.advance(11)
    assert engine.later("a") == ["a"]


def test_a_hit_joins_terms(engine: Engine) -> None:
    """Who uses another's output may take it back."""
    engine.ask("a")
    engine.later("a", terms=terms(labels=frozenset({9})))
    engine.rig.cache.invalidate([Scope(labels=frozenset({9}))], lambda done: None)
    assert engine.later("a") == ["a"]


def test_a_reset_waits_for_workers(engine: Engine) -> None:
    """Slots in which a worker still writes or reads are nobody's until it reports; what it stored is not found, what
    the tier below had before is.
    """
    engine.ask("a")
    engine.rig.land()
    engine.forget()
    steps = [engine.plan(engine.request("a")), engine.plan(engine.request("b"))]
    engine.outputs.clear()
    engine.rig.cache.clear()
    assert engine.outputs.is_stale
    assert len(engine.rig.cache.ram._free) == 2
    for orders, todo in steps:
        engine.run(orders, todo)
    assert not engine.outputs.is_stale
    engine.rig.cache.end_clear()
    assert len(engine.rig.cache.ram._free) == 4
    assert engine.later("a", "b") == ["b"]


def test_orders_wait_for_a_step_that_computes(engine: Engine) -> None:
    """What was found for a request that got no room is let go, and found again."""
    engine.ask("a")
    engine.forget()
    record = engine.request("a")
    assert engine.scheduler.ensure_cache_available(record.request, 0)
    orders, todo = engine.plan(record, has_room=False)
    assert (orders.orders.number, todo) == (0, [])
    engine.outputs.forget(record.request.request_id)
    engine.rig.land()
    assert not engine.rig.cache.ram.is_pinned
    assert engine.ask("a") == []


def test_what_does_not_fit_is_not_kept(engine: Engine) -> None:
    """An output larger than a slot is encoded each time, takes no slot from others, and is not tried again."""
    many = SIZE // (WIDTH * 4)
    assert engine.ask("long", rows=many) == ["long"]
    assert engine.later("long", rows=many) == ["long"]
    assert not engine.rig.cache.ram.entries
    record = engine.request("long", rows=many)
    engine.forget()
    assert not engine.plan(record)[0].orders.stores
    engine.outputs.forget(record.request.request_id)
    assert engine.later("a") == ["a"]
    assert engine.later("a") == []


def test_a_worker_that_can_not_store(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes on, and the next one encodes again."""
    put = slots.put

    def broken(output: torch.Tensor, slot: memoryview) -> None:
        put(output, slot)
        raise RuntimeError("planted")

    monkeypatch.setattr(slots, "put", broken)
    assert engine.ask("a") == ["a"]
    monkeypatch.setattr(slots, "put", put)
    assert engine.later("a") == ["a"]
    engine.dtype = torch.float64  # a type that is not written down
    assert engine.later("b") == ["b"]
    assert engine.later("b") == ["b"]
    assert engine.later("a") == []


def test_without_room_in_ram(engine: Engine) -> None:
    """Where every slot is in use, media are encoded and not kept."""
    held = [engine.request(name) for name in "abcd"]
    steps = [engine.plan(record) for record in held]
    assert engine.ask("e") == ["e"]
    for orders, todo in steps:
        engine.run(orders, todo)
    engine.rig.land()
    assert engine.later("e") == ["e"]
    assert engine.later("e") == []
