"""Keys and the engine: what leaves RAM is sealed, comes back with the key, and never without."""

import secrets
from pathlib import Path

import pytest

from hotspan.config.environment import environment
from hotspan.config.settings import EncryptionSettings
from hotspan.core.clock import SystemClock
from hotspan.core.frame import ALGORITHM_AES_256_GCM
from hotspan.keyring.records import StoreHeader
from hotspan.keyring.store import create_store
from hotspan.keyring.wrap import open_wrapper

from .harness.core import CHUNK, Core, core
from .test_forgetting import LENGTH, WHOLE, stored


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, EncryptionSettings]:
    kek = tmp_path / "kek"
    kek.write_bytes(secrets.token_bytes(32))
    kek.chmod(0o600)
    wrapper = open_wrapper(f"file:{kek}", environment())
    create_store(tmp_path / "keys", StoreHeader(wrapper.id, SystemClock().unix()))
    return {"encryption": EncryptionSettings(f"file:{kek}", str(tmp_path / "keys"))}


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


def test_sealed_chunks_come_back_and_are_shredded(
    tiny_model: Path, tmp_path: Path, keys: dict[str, EncryptionSettings]
) -> None:
    """A new engine with the key hits byte for byte; after the tenant's keys are destroyed nothing of it is found, on no
    tier and by no later engine, and the tenant goes on with fresh keys."""
    with core(tiny_model, disk=tmp_path / "kv", cache=keys) as engine:
        prompt = stored(engine, 1)
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


def test_without_keys_nothing_is_found_and_nothing_fails(
    tiny_model: Path, tmp_path: Path, keys: dict[str, EncryptionSettings]
) -> None:
    """The disk of an encrypting engine, opened by one without keys: every request is answered, none from it."""
    with core(tiny_model, disk=tmp_path / "kv", cache=keys) as engine:
        prompt = stored(engine, 3)
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(prompt, 1) == 0
        engine.settle()
        engine.forget_gpu()
        assert engine.ask(prompt, 1) == LENGTH // CHUNK * CHUNK
