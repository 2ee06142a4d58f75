"""What is promised of hits, faults and keys, in engines that `hotspan serve` does not start: docs/guarantees.md."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hotspan
from hotspan.config.settings import EncryptionSettings
from kit.engine import CHUNK, rig

from .test_plugin import asked, vllm_serving

pytestmark = pytest.mark.engine

LENGTH = 900
WHOLE = LENGTH // CHUNK * CHUNK


def keys(place: Path) -> EncryptionSettings:
    """A store of keys, as `hotspan keys init` makes it."""
    kek = f"file:{place / 'kek'}"
    words = ["keys", "init", "--store", str(place / "keys"), "--kek", kek, "--new-kek"]
    made = subprocess.run([sys.executable, "-m", "hotspan", *words], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return EncryptionSettings(kek, str(place / "keys"))


def damage(slab: Path) -> None:
    """Flip a bit of each KiB of what a disk holds."""
    data = bytearray(slab.read_bytes())
    for at in range(0, len(data), 1024):
        data[at] ^= 1
    slab.write_bytes(data)


def is_sealed(disk: Path) -> bool:
    """Whether nothing on a disk can be read without the keys: all that is there is locked to a check that has none."""
    done = subprocess.run(
        [sys.executable, "-m", "hotspan", "cache", "check", "--disk", str(disk), "--json"],
        capture_output=True,
        text=True,
    )
    tiers = json.loads(done.stdout)["replicas"][0]["tiers"]["disk"]
    return bool(tiers["chunks"] == tiers["locked"] > 0)


def test_an_llm_computes_what_a_disk_has_lost(tiny_model: Path, tmp_path: Path) -> None:
    """`LLM()` with keys: warm from its own disk after a restart, with the same answer; nothing is there in the clear; a
    disk whose every frame is damaged costs the computing, and no request.
    """
    disk, answers = tmp_path / "disk", []
    cache = {"is_served": False, "encryption": keys(tmp_path)}
    for turn in range(3):
        with rig(tiny_model, disk=disk, cache=cache) as engine:
            found = engine.ask(engine.text(1, LENGTH), 4)
            engine.settle()
            assert hotspan.control(engine.llm).stats()["replicas"][0]["is_encrypted"]
        answers.append(found.tokens)
        assert (found.cached >= WHOLE) is (turn == 1), (turn, found)
        if turn == 0:
            assert is_sealed(disk)
        elif turn == 1:
            damage(disk / "slab")
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_vllm_serve_computes_what_a_disk_has_lost(tiny_model: Path, tmp_path: Path) -> None:
    """The same of your own `vllm serve`."""
    disk, encryption = tmp_path / "disk", keys(tmp_path)
    tiers: dict[str, Any] = {"hotspan.ram_gib": 0.25, "hotspan.disk": str(disk), "hotspan.disk_gib": 1}
    tiers |= {"hotspan.kek": encryption.kek, "hotspan.key_store": encryption.store}
    config = {"kv_connector": "HotspanConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers}
    found = []
    for turn in range(3):
        with vllm_serving(tiny_model, config, tmp_path / "log") as url:
            found.append(asked(url, tiny_model))
        if turn == 0:
            assert is_sealed(disk)
        elif turn == 1:
            damage(disk / "slab")
    assert [cached >= 256 for _, cached in found] == [False, True, False], found
    assert len({text for text, _ in found}) == 1
