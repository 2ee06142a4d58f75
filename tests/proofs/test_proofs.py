"""R1 to R14, small: each proof passes, was about something, and fails when what it guards is taken away."""

import errno
import gc
from pathlib import Path
from typing import Any

import pytest

from hotspan.cache.entry import Entry
from hotspan.cache.ram import RamTier
from hotspan.cache.tiered import TieredCache
from hotspan.cache.withdrawals import Withdrawals
from hotspan.core import planes
from hotspan.core.directives import parse_directives
from hotspan.core.terms import Scope
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2.base import Found
from hotspan.l2.follower import LogFollower
from hotspan.l2.node import ChosenLog, NodeStore
from hotspan.l2.view import LogView
from hotspan.router import answers
from hotspan.tiers.log import GenerationLog
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.table import DiskTable
from kit.proof import Proof
from kit.simulated.inline import InlineQueues
from proofs import bad_places, compression, fault, flip, fuzz, kill, model, power, replica, replicas, simulate, soak
from proofs.power_run import open_tier


def silent(done: int, of: int) -> None:
    """Nobody watches."""


def accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plain frame is taken for the right one."""
    monkeypatch.setattr("hotspan.tiers.io.verify_header", lambda *a, **k: None)
    monkeypatch.setattr("hotspan.tiers.io.verify_part", lambda *a, **k: None)


def forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalidations are acknowledged and not written down."""
    monkeypatch.setattr(GenerationLog, "append", lambda self, entry: None)
    monkeypatch.setattr(DiskTable, "flush", lambda self: None)


def keep_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalidations leave RAM alone."""
    monkeypatch.setattr(RamTier, "matched", lambda self, scope, namespace: [])


def passed(proof: Proof) -> dict[str, Any]:
    """The figures of a proof that passed."""
    assert proof.passed, (proof.failures, proof.figures)
    return proof.figures


def test_kill_is_right(tmp_path: Path) -> None:
    """R1: 30 kills: no wrong byte, no failed opening, nothing back."""
    found = kill.run(kill.Options(cycles=30, table_chunks=2_000, directory=tmp_path), silent).figures
    assert found["cycles"] == 30 and found["stores_acknowledged"] > 0
    assert found["wrong_bytes"] == found["failed_opens"] == found["resurrected"] == 0


@pytest.mark.slow
def test_kill(tmp_path: Path) -> None:
    """R1: 1,000 kills: no wrong byte, no failed opening, 99 % of what was acknowledged 1 s before, nothing back."""
    proof = kill.run(kill.Options(cycles=1000, table_chunks=20_000, directory=tmp_path), silent)
    found = passed(proof)
    assert found["cycles"] == 1000
    assert found["wrong_bytes"] == found["failed_opens"] == found["resurrected"] == 0
    assert found["survival_of_chunks_acknowledged_over_1_s_before"] >= 0.99
    assert found["stores_acknowledged"] > 1000 and found["invalidations_acknowledged"] > 50
    assert found["bad_slots_set_aside"] > 0


@pytest.mark.slow
def test_kill_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frames that are not verified, what was half written is found."""
    accept_all(monkeypatch)
    proof = kill.run(kill.Options(cycles=480, table_chunks=100, directory=tmp_path), silent)
    assert not proof.passed and proof.figures["wrong_bytes"] + proof.figures["resurrected"] > 0


def test_power() -> None:
    """R2: 1,000 power losses: no wrong byte, nothing resurrected."""
    found = passed(power.run(power.Options(images=1000), silent))
    assert found["images"] == 1000 and found["wrong_bytes"] == found["resurrected"] == found["failed_opens"] == 0
    assert found["chunks_loaded"] > 500 and found["evictions"] > 0 and found["reopenings"] > 0
    assert found["calls_at_bad_places"] > 0


@pytest.mark.parametrize("mutation", [accept_all, forget_nothing])
def test_power_can_fail(mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frames that are not verified there are wrong bytes; without a log, forgotten chunks come back."""
    mutation(monkeypatch)
    proof = power.run(power.Options(images=400), silent)
    assert not proof.passed and proof.failures
    assert proof.figures["wrong_bytes" if mutation is accept_all else "resurrected"] > 0


def test_closed_tiers_leave_no_mappings(tmp_path: Path) -> None:
    """A proof opens more tiers than a process may have mappings: each closed one gives its own back at once."""
    maps = Path("/proc/self/maps")
    counts = []
    gc.disable()
    try:
        for number in range(50):
            counts.append(len(maps.read_text().splitlines()))
            open_tier(tmp_path / f"{number % 2}", InlineQueues(), None).close(5.0)
    finally:
        gc.enable()
    assert counts[-1] - counts[1] < 20


def test_a_failing_case_is_replayed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`only` repeats one case of a seed, and finds the same failures."""
    forget_nothing(monkeypatch)
    proof = power.run(power.Options(images=400, seed=1), silent)
    case = proof.failures[0].case
    again = power.run(power.Options(images=400, seed=1, only=case), silent)
    assert again.failures == tuple(failure for failure in proof.failures if failure.case == case)


def test_flip() -> None:
    """R3: every header bit, 20,000 payload bits, cut, swapped and old frames: all are misses."""
    found = passed(flip.run(flip.Options(flips=20_000), silent))
    assert found["detected"] == found["injected"] > 80_000
    assert found["plain_header_bits"] == found["sealed_header_bits"] == "32768 of 32768"


def test_flip_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With payloads that are not verified, flipped bits are hits."""
    monkeypatch.setattr("hotspan.tiers.io.verify_part", lambda *a, **k: None)
    proof = flip.run(flip.Options(flips=200), silent)
    assert not proof.passed and proof.figures["detected"] < proof.figures["injected"]


def test_fault() -> None:
    """R4: each call fails once in each way, and from then on: all is right, nothing leaks, the tier comes back."""
    found = passed(fault.run(fault.Options(), silent))
    assert found["failures"] == found["leaked_descriptors"] == 0 and found["healed_after_s_max"] <= 30
    assert found["runs"] == 8 * (found["calls_plain"] + found["calls_sealed"]) + found["bad_places"]
    assert found["trips"] > 0 and found["bad_places"] == 100 and found["bad_slots_set_aside"] > 20


def test_fault_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that never opens its tier again does not heal."""
    monkeypatch.setattr(LowerTier, "_heal", lambda self, now: None)
    proof = fault.run(fault.Options(every=17), silent)
    assert not proof.passed and any("not back" in failure.what for failure in proof.failures)
    assert fault.ERRORS["EIO"] == errno.EIO


def test_model() -> None:
    """R6: 10,000 calls, with crashes: hits are what a dict would have said."""
    found = passed(model.run(model.Options(steps=10_000), silent))
    assert found["steps"] >= 10_000 and found["crashes"] > 0 and found["disk_hits"] > 100


def test_model_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that keeps in RAM what was invalidated is found out."""
    keep_in_ram(monkeypatch)
    assert not model.run(model.Options(steps=4_000), silent).passed


def test_simulate() -> None:
    """R7: 150 simulations of everything at once; each promise holds after each step."""
    found = passed(simulate.run(simulate.Options(seeds=150), silent))
    assert found["simulations"] == 150 and found["failures"] == 0
    assert found["power_losses"] > 20 and found["faults_armed"] > 50 and found["disk_hits"] > 100


def test_simulate_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a log, power losses bring back what was invalidated."""
    forget_nothing(monkeypatch)
    assert any(simulate.run(simulate.Options(only=case), silent).failures for case in range(100))


def test_simulations_follow_from_the_seed() -> None:
    """The same seed gives the same figures, another one others."""
    one, same = (simulate.run(simulate.Options(seeds=6, seed=5), silent).figures for _ in range(2))
    assert one == same
    assert one != simulate.run(simulate.Options(seeds=6, seed=6), silent).figures


def test_replicas() -> None:
    """R11: 150 simulations of replicas that share an L2, which fails, loses all, trims its log, or comes late, while
    servers hold texts, copy requests and announce them."""
    found = passed(replicas.run(replicas.Options(seeds=150), silent))
    assert found["failures"] == 0
    assert min(found[name] for name in ("invalidations", "crashes", "losses", "faults", "late")) > 50
    assert found["l2_hits"] > 15
    assert min(found[name] for name in ("read", "withdrawn", "announced", "copied")) > 200


@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        *(("view", 0), ("applied", 6), ("parents", 0), ("held", 4), ("late", 27), ("unread", 0)),
        *(("copies", 0), ("announcements", 13)),
    ],
)
def test_replicas_can_fail(monkeypatch: pytest.MonkeyPatch, broken: str, found_by: int) -> None:
    """With a log that nobody heeds, stores that claim to be newer than they are, or gaps, old bytes are hits; also if
    held texts are stored whatever happened, a daemon's log is not followed, or what others wrote is not forgotten; if
    copies of requests are stored like requests, or an invalidation spares what an announcement holds.

    found_by: the first case that finds it; it is tried before all others.
    """
    if broken == "view":
        monkeypatch.setattr(LogView, "matched_at", lambda *a: 0)
    elif broken == "applied":
        present = property(lambda self: self.generation, lambda self, value: None)
        monkeypatch.setattr(LogFollower, "applied", present, raising=False)
    elif broken == "parents":
        monkeypatch.setattr("hotspan.l2.remote.readable", every_one)
    elif broken == "copies":
        monkeypatch.setattr(replica, "COPIED", {})
    elif broken == "announcements":
        monkeypatch.setattr(TieredCache, "_forget_one", spares_announced)
    elif broken == "held":
        monkeypatch.setattr(Withdrawals, "first_of", lambda *a: None)
    elif broken == "late":
        monkeypatch.setattr(ChosenLog, "_chooses_shared", lambda self: False)
        monkeypatch.setattr(NodeStore, "_store", lambda self: self.own if self.is_own else self.by_http)
    else:
        monkeypatch.setattr(LogFollower, "foreign", unheard)
    cases = (found_by, *range(400))
    assert any(not replicas.run(replicas.Options(only=case), silent).passed for case in cases)


def spares_announced(cache: TieredCache, entry: Entry) -> None:
    """An invalidation leaves in RAM what was announced, until that is used or its time is over."""
    if any(each.entries.get(entry.chunk.key) is entry for each in cache.prefetches._all.values()):
        return
    FORGET_ONE(cache, entry)


FORGET_ONE = TieredCache._forget_one


def test_copies_are_made_as_the_router_makes_them() -> None:
    """The proof knows nothing of the router; its copies have the router's directives."""
    assert replica.COPIED == answers._LEAVES_NOTHING


def unheard(follower: LogFollower) -> list[Scope]:
    """What others invalidated is taken for applied, and not forgotten."""
    follower.applied = follower.generation
    return []


def every_one(chunks: list[Chunk], found: dict[ChunkKey, Found], *_: object) -> tuple[list[Found], list[ChunkKey]]:
    """All that is there, as if there were no log and no ancestors."""
    return list(found.values()), []


def test_fuzz() -> None:
    """R8: 10,000 inputs of all kinds are refused in words, or taken for what they are."""
    found = passed(fuzz.run(fuzz.Options(cases=10_000), silent))
    assert found["failures"] == 0
    for kind in fuzz.KINDS:
        assert found[kind] > found[f"{kind}_taken"] > 0, f"{kind}: all were refused, or all taken"


def test_fuzz_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that takes anything is found out."""
    monkeypatch.setattr("proofs.fuzz.verify", lambda *a: None)
    assert not fuzz.run(fuzz.Options(cases=300), silent).passed


def test_a_lone_surrogate_is_refused() -> None:
    """JSON can spell half a character; a tag of it is refused in words, and not when its label is made."""
    for params in ({"tags": ["\ud800"]}, {"session": "a\udfff"}):
        with pytest.raises(ValueError, match="lone surrogates"):
            parse_directives(params)


def soaked(directory: Path, seconds: float) -> Proof:
    """A small soak of so many seconds."""
    return soak.run(soak.Options(hours=seconds / 3600, duty=0.9, slots=64, directory=directory), silent)


def test_soak(tmp_path: Path) -> None:
    """R10: ten seconds of churn, longer on a machine that stands still: no wrong byte, and nothing grows."""
    for seconds in (10, 20, 40):
        proof = soaked(tmp_path, seconds)
        assert proof.figures["wrong_bytes"] == 0
        if proof.passed and proof.figures["samples"] >= 40:
            break
    found = passed(proof)
    assert found["churn_over_capacity_plain"] > 10 < found["churn_over_capacity_sealed"]
    assert found["of_them_from_disk"] > 0 and found["samples"] >= 40
    assert found["bad_slots"] > 0 and found["room_with_bad_slots"] >= 0.95


def test_soak_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is invalidated and stays is found; and what grows drifts."""
    keep_in_ram(monkeypatch)
    for seconds in (10, 20, 40):
        proof = soaked(tmp_path, seconds)
        if proof.figures["wrong_bytes"]:
            break
    assert not proof.passed and proof.figures["wrong_bytes"] > 0
    assert soak.drift([100.0] * 10 + [102.0] * 10) > 0.01 > soak.drift([100.0, 99.0, 101.0] * 8)


def test_compression() -> None:
    """R12: a thousand chunks of all types come back, and damaged ones are refused."""
    found = passed(compression.run(compression.Options(cases=1000), silent))
    assert found["damaged"] > 300 and min(found[kind] for kind in compression.KINDS) > 100


def test_compression_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With planes in the wrong order nothing comes back."""
    join = planes.join
    monkeypatch.setattr("hotspan.core.compression.join", lambda parts, into: join(parts[::-1], into))
    assert not compression.run(compression.Options(cases=100), silent).passed


def test_bad_places() -> None:
    """R14: two simulated hours on two disks with bad slots: the others are served, and every request is right."""
    found = passed(bad_places.run(bad_places.Options(hours=2, seeds=2), silent))
    assert found["room_min"] >= 0.95 and found["set_aside"] > 0 and found["hours"] > 3


def test_bad_places_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk engine that tests no slot after a fault sets none aside."""
    monkeypatch.setattr("hotspan.tiers.slab_transfers.is_suspect", lambda transfer: False)
    assert not bad_places.run(bad_places.Options(hours=1, seeds=1), silent).passed
