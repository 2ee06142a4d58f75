"""Tenants' keys and the engine: what leaves RAM is sealed, comes back with the key only, and goes with the keys.

A shred takes also what comes in between, and nobody waits for anybody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotspan.config.environment import environment
from hotspan.config.settings import EncryptionSettings
from hotspan.core.clock import SystemClock
from hotspan.core.frame import ALGORITHM_AES_256_GCM
from hotspan.core.terms import tenant_label
from hotspan.keyring.records import StoreHeader
from hotspan.keyring.store import create_store
from hotspan.keyring.wrap import create_kek, open_wrapper

from .harness.core import CHUNK, HANG_S, Core, core

pytestmark = pytest.mark.usefixtures("books_agree")

LENGTH = 900
WHOLE = LENGTH // CHUNK * CHUNK


def keys_in(directory: Path) -> dict[str, EncryptionSettings]:
    """Settings with a key store of their own."""
    create_kek(directory / "kek")
    kek = f"file:{directory / 'kek'}"
    create_store(directory / "keys", StoreHeader(open_wrapper(kek, environment()).id, SystemClock().unix()))
    return {"encryption": EncryptionSettings(kek, str(directory / "keys"))}


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    directory = tmp_path_factory.mktemp("shredding")
    with core(tiny_model, disk=directory / "kv", cache=keys_in(directory)) as engine:
        yield engine


@pytest.fixture
def shreds(engine: Core, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(engine.administrator._keyring.shred)
    monkeypatch.setattr(engine.administrator._keyring, "shred", held)
    yield held
    held.go_on.set()


class Held:
    """The keyring's `shred`, which waits until it is let on."""

    def __init__(self, shred: Callable[[str], Any]) -> None:
        self._shred = shred
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()

    def __call__(self, tenant: str) -> Any:
        self.begun.release()
        assert self.go_on.wait(HANG_S)
        return self._shred(tenant)


def with_keys(engine: Core, tenant: str) -> dict[str, Any]:
    """A tenant whose keys are there."""
    assert engine.administrator._keyring.prepare([tenant], HANG_S) == ()
    return {"hotspan": {"tenant": tenant}}


def test_several_at_a_time_all_end(engine: Core, shreds: Held) -> None:
    """As many shreds as there are threads, and a check of the disk, begin before any ends: each is acknowledged."""
    tenants = [f"tenant-{n}" for n in range(4)]
    for n, tenant in enumerate(tenants):
        engine.stored(engine.text(n, LENGTH), **with_keys(engine, tenant))
    answers = [engine.begin(do="shred", tenant=tenant) for tenant in tenants]
    check = engine.begin(do="check")
    assert shreds.begun.acquire(timeout=HANG_S) and shreds.begun.acquire(timeout=HANG_S)
    shreds.go_on.set()
    for tenant, answer in zip(tenants, answers, strict=True):
        receipt = engine.answer(answer)
        assert receipt["is_durable"] and receipt["shredded"]["tenant"] == tenant and receipt["shredded"]["roots"]
        assert receipt["removed"]["disk_chunks"] >= LENGTH // CHUNK
    assert engine.answer(check)["tiers"]["disk"]["corrupt"] == {}


def test_what_comes_before_the_keys_are_gone_goes_too(engine: Core, shreds: Held) -> None:
    """A request that is admitted after the tenant's chunks were forgotten, and before its keys are destroyed, runs and
    stores; when the shred is acknowledged nothing of it is left on any tier, and one that still runs leaves nothing."""
    tenant = with_keys(engine, "acme")
    ended, running = engine.text(10, LENGTH), engine.text(11, LENGTH)
    answer = engine.begin(do="shred", tenant="acme")
    assert shreds.begun.acquire(timeout=HANG_S)
    engine.stored(ended, **tenant)
    assert engine.ask(ended, **tenant) >= WHOLE
    engine.start("running", running, 50, **tenant)
    engine.step()
    shreds.go_on.set()
    receipt = engine.answer(answer)
    assert receipt["is_durable"] and receipt["requests_in_flight"] >= 1
    assert receipt["removed"]["gpu_blocks"] and receipt["removed"]["disk_chunks"] >= LENGTH // CHUNK
    engine.finish()
    engine.settle()
    assert all(tenant_label("acme") not in tier.tenants for tier in engine.cache.usage().values())
    assert [engine.ask(text, **tenant) for text in (ended, running)] == [0, 0]


def test_keys_that_can_t_be_destroyed_are_no_receipt(engine: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key store does not take it: the caller gets that error; the tenant's chunks are forgotten all the same."""

    def fails(tenant: str) -> None:
        raise OSError("the key store is read-only")

    monkeypatch.setattr(engine.administrator._keyring, "shred", fails)
    prompt, tenant = engine.text(12, LENGTH), with_keys(engine, "globex")
    engine.stored(prompt, **tenant)
    with pytest.raises(OSError, match="read-only"):
        engine.administer(do="shred", tenant="globex")
    assert engine.ask(prompt, **tenant) == 0


def test_a_text_goes_with_its_tenant_while_no_keys_are_there(engine: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a tenant are not unwrapped: its text is forgotten, as one of all that it has, and it is said."""
    prompt = engine.text(13, LENGTH)
    engine.stored(prompt, **with_keys(engine, "initech"))
    with monkeypatch.context() as away:
        away.setattr(engine.administrator._keyring, "names", lambda tenant: None)
        receipt = engine.administer(do="invalidate", tenant="initech", tokens=prompt)
    assert receipt["widened"] == ["initech"] and receipt["removed"]["disk_chunks"] == LENGTH // CHUNK
    assert engine.ask(prompt, **with_keys(engine, "initech")) == 0


# -- over a restart ----------------------------------------------------------------------------------------------------


def algorithms(engine: Core) -> set[int]:
    """What the frames on disk say they are made with."""
    directory = engine.cache._lower.tiers[0].storage.directory
    slots = directory.table.slots()
    with (directory.path / "slab").open("rb") as slab:
        found = set()
        for slot in slots:
            slab.seek(slot * directory.geometry.slot_bytes + 10)
            found.add(int.from_bytes(slab.read(2), "little"))
    return found


def test_sealed_chunks_come_back_and_are_shredded(tiny_model: Path, tmp_path: Path) -> None:
    """A new engine with the key hits byte for byte; after the tenant's keys are destroyed nothing of it is found, on no
    tier and by no later engine, and the tenant goes on with fresh keys."""
    keys = keys_in(tmp_path)
    with core(tiny_model, disk=tmp_path / "kv", cache=keys) as engine:
        prompt = engine.stored(engine.text(1, LENGTH))
        assert algorithms(engine) == {ALGORITHM_AES_256_GCM}
    with core(tiny_model, disk=tmp_path / "kv", cache=keys) as engine:
        assert engine.ask(prompt, 8) == WHOLE
        assert engine.runner.read >= WHOLE and engine.runner.wrong == 0
        engine.settle()
        receipt = engine.administer(do="shred", tenant="default")
        assert receipt["is_durable"] and receipt["shredded"]["roots"]
        assert receipt["removed"]["gpu_blocks"] > 0 and receipt["removed"]["disk_chunks"] >= 3
        engine.ask(prompt, 1)  # the first request after it asks for new keys, and is not cached meanwhile
        engine.settle()
    with core(tiny_model, disk=tmp_path / "kv", cache=keys) as engine:
        fresh = engine.text(2, LENGTH)
        engine.ask(fresh, 1)
        engine.settle()
        engine.forget_gpu()
        assert engine.ask(fresh, 1) == WHOLE
        assert engine.administer(do="check")["tiers"]["disk"]["corrupt"] == {}


def test_without_keys_nothing_is_found_and_nothing_fails(tiny_model: Path, tmp_path: Path) -> None:
    """The disk of an encrypting engine, opened by one without keys: every request is answered, none from it."""
    keys = keys_in(tmp_path)
    with core(tiny_model, disk=tmp_path / "kv", cache=keys) as engine:
        prompt = engine.stored(engine.text(3, LENGTH))
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(prompt, 1) == 0
        engine.settle()
        engine.forget_gpu()
        assert engine.ask(prompt, 1) == LENGTH // CHUNK * CHUNK
