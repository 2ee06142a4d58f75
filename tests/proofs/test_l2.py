"""R1, R3, R4 and R10 with an L2 in the place of the disk, small; each fails when what it guards is taken away."""

import os
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from hotspan.l2.file_room import FileRoom
from hotspan.l2.shared_files import FileCall, SharedFiles
from hotspan.l2.view import LogView
from hotspan.tiers.files import Buffer
from hotspan.tiers.lower import LowerTier
from kit.proof import Findings
from proofs import l2, l2_fault
from proofs.engine import Broken
from proofs.l2_fault import Fault, Tally, meet, sweep
from proofs.l2_files import HangingFiles
from proofs.l2_flip import change
from proofs.l2_soak import Churn, churn

from .test_proofs import silent


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of a shared directory hangs because the machine stands still."""
    monkeypatch.setattr(l2_fault, "_TIMEOUT_S", 60.0)
    monkeypatch.setattr(l2_fault, "_HANG_TIMEOUT_S", 3.0)


def accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame that is not sealed is taken for the right one."""
    for name in ("verify", "verify_header", "verify_part"):
        monkeypatch.setattr(f"hotspan.l2.jobs.{name}", lambda *a: None)
    monkeypatch.setattr("hotspan.tiers.packer.decompress", lambda stored, into: True)


def publish_as_it_is_written(
    self: SharedFiles, path: Path, buffers: Sequence[Buffer], call: FileCall, *, is_durable: bool = False
) -> bool:
    """A file has its name and its size before it has its bytes."""
    path = self.root / path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    try:
        views = [memoryview(buffer) for buffer in buffers]
        os.truncate(fd, sum(map(len, views)))
        at = 0
        for view in views:
            at += os.pwritev(fd, [view], at)
    finally:
        os.close(fd)
    return True


def test_l2() -> None:
    """Some calls fail in each way, hang, or are the last; bits, cuts and swaps; some seconds of churn: all is right."""
    proof = l2.run(l2.Options(every=1001, flips=600, hours=2 / 3600), silent)
    assert proof.passed, (proof.failures, proof.figures)
    found = proof.figures
    assert found["healed_after_s_max"] <= 30 and found["changes_detected"] == found["changes_injected"] > 600
    assert min(found[f"runs_{kind}"] for kind in (*l2_fault.ERRORS, "kill")) > 0
    assert min(found["calls_plain"], found["calls_sealed"]) > 300
    assert min(found[name] for name in ("trips", "l2_hits", "invalidations", "soak_l2_hits")) > 0


def test_faults_follow_from_the_seed() -> None:
    """One fault alone is the same again, and passes without the other parts."""
    one, same = (l2.run(l2.Options(only=700), silent) for _ in range(2))
    assert one.passed and one.figures == same.figures and "soak_samples" not in one.figures


def test_faults_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that never opens its tier again does not come to rest."""
    monkeypatch.setattr(LowerTier, "_heal", lambda self, now: None)
    with pytest.raises(Broken, match="not all replicas are at rest"):
        meet(Fault(0, 100, "EIO", is_lasting=True, is_sealed=False), 200, 0, Tally())


def test_resurrection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a log that nobody heeds, what was invalidated is a hit."""
    monkeypatch.setattr(LogView, "matched_at", lambda *a: 0)
    findings = Findings()
    sweep(200, 1 << 20, 0, None, findings, silent)
    assert "is a hit" in findings.kept[0].what


def test_kills_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With files that are seen before they are whole, and frames that are not verified, half an object is a hit."""
    accept_all(monkeypatch)
    monkeypatch.setattr(SharedFiles, "publish", publish_as_it_is_written)
    monkeypatch.setattr(HangingFiles, "arm", partialmethod(HangingFiles.arm, kinds=("pwritev",)))
    with pytest.raises(Broken, match="wrong bytes"):
        for nth in range(40, 80):
            meet(Fault(0, nth, "kill", is_lasting=True, is_sealed=False), 200, 0, Tally())


def test_flips_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With frames that are not verified, changed payloads are hits."""
    accept_all(monkeypatch)
    findings = Findings()
    changes = change(60, 0, findings, silent)
    assert any("wrong bytes" in failure.what for failure in findings.kept)
    assert changes.detected["plain payload bits"] < changes.injected["plain payload bits"] == 5


def test_the_soak_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that nobody sweeps exceeds its capacity; and what grows, or was about nothing, is not steady."""
    sweeps: Any = lambda self, call, is_full=False: self.look(call)  # noqa: E731
    monkeypatch.setattr(FileRoom, "sweep", sweeps)
    assert churn(600 / 3600, 0, Findings(), silent).over > 2.0  # it ends as soon as it is so
    steady = Churn(churn=20.0, l2_hits=1, invalidations=1, samples=9, over=1.2, drifts={"fds": 0.0})
    assert steady.is_steady
    for name, value in (("churn", 1.0), ("samples", 0), ("left", 1), ("over", 2.5), ("drifts", {"fds": 0.1})):
        setattr(one := Churn(churn=20.0, samples=9, over=1.2, drifts={"fds": 0.0}), name, value)
        assert not one.is_steady
