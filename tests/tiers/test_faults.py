"""R4: whichever system call fails or falls short, nothing raises, no byte is wrong, and nothing leaks."""

import errno
import itertools
import os
from collections import Counter
from pathlib import Path

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, DurableSpy
from hotspan.tiers.base import Fault
from hotspan.tiers.disk import DiskOptions, DiskTier
from kit.simulated.faults import SHORT, FaultyFiles, HookedFiles, VanishedFiles
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys

SIZE, SLOTS = 3 * 4096, 5
TAGGED, OTHERS = chain("tagged", 2), chain("others", 3)
TAG = tag_labels(["x"])


class Run:
    """A scenario on a disk that may fail: each answer of the tier is held against what it was told before."""

    def __init__(self, path: Path, files: HookedFiles, sealed: bool) -> None:
        self.path, self.files, self.sealed = path, files, sealed
        self.writers = itertools.count()
        self.versions: Counter[ChunkKey] = Counter()
        self.gone: set[ChunkKey] = set()  # acknowledged as invalidated, and not stored since
        self.faults: list[Fault | None] = []

    def whole(self) -> None:
        """Store, load, join, invalidate, discard, store anew, reopen, load."""
        self.reopen()
        for chunk in TAGGED:
            self.store(chunk.key, chunk.parent, Terms(labels=TAG))
        for chunk in OTHERS:
            self.store(chunk.key, chunk.parent, Terms())
        self.load_all()
        self.tier.join(OTHERS[2].key, Terms(labels=TAG))
        self.tier.discard(OTHERS[1].key)
        self.invalidate()
        self.store(TAGGED[0].key, None, Terms())
        self.load_all()
        self.close()
        self.reopen()
        self.load_all()
        self.close()

    def reopen(self) -> None:
        """Open the directory, again if that fails: the fault may hit the opening, and says so."""
        for attempt in (1, 2):
            self.queues = InlineQueues(attempt)
            options = DiskOptions(
                *(self.path, SLOTS * (SIZE + 4096), 2),
                keys=FixedKeys(next(self.writers)) if self.sealed else None,
                files=self.files,
                queue=self.queues.queue,
            )
            try:
                self.tier = DiskTier(options, NAMESPACE, SIZE, SimulatedClock())
                return
            except DirectoryError:
                assert attempt == 1, "the fault is over and the directory does not open"
                assert not self.files.open_fds
        raise AssertionError("not reached")

    def store(self, key: ChunkKey, parent: ChunkKey | None, terms: Terms) -> None:
        self.versions[key] += 1
        chunk = next(chunk for chunk in TAGGED + OTHERS if chunk.key == key)
        if self.tier.submit_store(chunk, terms, aligned(SIZE, content(key, SIZE, self.versions[key]))):
            self.settle(key)
            self.gone.discard(key)
        else:
            self.versions[key] -= 1

    def load_all(self) -> None:
        for chunk in TAGGED + OTHERS:
            into = aligned(SIZE)
            if self.tier.submit_load(chunk.key, into) and self.settle(chunk.key) is None:
                assert into == content(chunk.key, SIZE, self.versions[chunk.key])
                assert chunk.key not in self.gone, "an invalidated chunk is back"

    def settle(self, key: ChunkKey) -> Fault | None:
        self.queues.run()
        (transfer,) = self.tier.finished()
        assert transfer.key == key
        self.faults.append(transfer.fault)
        return transfer.fault

    def invalidate(self) -> None:
        spy = DurableSpy()
        self.tier.invalidate([Scope(labels=TAG)], spy)
        self.queues.run()
        assert self.tier.finished() == []
        assert not any(self.tier.lookup(chunk.key) for chunk in [*TAGGED, OTHERS[2]])
        if spy.wait(self.tier):
            self.gone = {chunk.key for chunk in [*TAGGED, OTHERS[2]]}

    def close(self) -> None:
        self.tier.check()
        self.tier.close(5.0)
        assert not self.files.open_fds, "a descriptor leaked"


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    "error", [errno.EIO, errno.ENOSPC, errno.EMFILE, SHORT], ids=["eio", "enospc", "emfile", "short"]
)
def test_any_single_call_may_fail(tmp_path: Path, error: int, sealed: bool) -> None:
    """For all n, with the n-th call of the scenario failing: no exception, no wrong byte, no leak, all reported."""
    before = len(os.listdir("/proc/self/fd"))
    nth, hits = 0, 1
    while hits:
        nth += 1
        files = FaultyFiles()
        files.arm(nth, error)
        run = Run(tmp_path / str(nth), files, sealed)
        run.whole()
        hits = files.hits
        allowed = {None, Fault.IO, Fault.CORRUPT, Fault.FULL if error == errno.ENOSPC else Fault.IO}
        assert set(run.faults) <= allowed, f"call {nth}"
        if not hits:
            assert set(run.faults) == {None} and len(run.faults) == 6 + 5 + 2 + 2
    assert nth > 70
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("kinds", [["pwritev"], ["preadv"], ["pwrite"], ["sync"], None], ids=str)
def test_a_disk_may_fail_for_good(tmp_path: Path, kinds: list[str] | None, sealed: bool) -> None:
    """With all calls of a kind failing from any moment on, the rest of the run is misses, and nothing is wrong."""
    for nth in range(1, 26, 2):
        files = FaultyFiles()
        run = Run(tmp_path / str(nth), files, sealed)
        run.reopen()
        files.arm(nth, kinds=kinds, lasting=True)
        for chunk in TAGGED + OTHERS:
            run.store(chunk.key, chunk.parent, Terms(labels=TAG))
        run.load_all()
        run.invalidate()
        run.load_all()
        run.close()
        files.disarm()
        run.reopen()
        run.load_all()
        run.close()


def test_an_invalidation_that_failed_is_told_so(tmp_path: Path) -> None:
    """If the log can't be written, `durable` is told False, then and for all later ones, until it is reopened."""
    for kind in ("sync", "pwrite"):
        files = FaultyFiles()
        run = Run(tmp_path / kind, files, False)
        run.reopen()
        files.arm(2 if kind == "sync" else 1, kinds=[kind])
        spies = [DurableSpy() for _ in range(3)]
        for spy in spies:
            run.tier.invalidate([Scope()], spy)
            run.queues.run()
        assert [spy.told for spy in spies] == [[False]] * 3
        assert run.tier.can_store()
        run.close()
        run.reopen()
        spy = DurableSpy()
        run.tier.invalidate([Scope()], spy)
        run.queues.run()
        assert spy.told == [True]
        run.close()


def test_a_drive_that_is_pulled_and_put_back(tmp_path: Path) -> None:
    """While a drive is away every transfer is a fault; once it is back, what it holds is found again."""
    files = VanishedFiles()
    run = Run(tmp_path / "disk", files, False)
    run.reopen()
    for chunk in OTHERS:
        run.store(chunk.key, chunk.parent, Terms())
    files.go_away()
    run.load_all()
    run.store(TAGGED[0].key, None, Terms())
    assert run.faults[-4:] == [Fault.IO] * 4
    run.tier.close(5.0)
    with pytest.raises(DirectoryError):
        DiskTier(run_options(run), NAMESPACE, SIZE)
    files.come_back()
    run.reopen()
    run.faults.clear()
    run.load_all()
    assert run.faults == [None] * 3
    run.close()


def run_options(run: Run) -> DiskOptions:
    """Of the run's directory."""
    return DiskOptions(run.path, SLOTS * (SIZE + 4096), files=run.files, queue=InlineQueues().queue)


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_faults_in_the_middle_of_a_frame(tmp_path: Path, sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of several I/Os, of which any fails or falls short, are faults, and the next store heals them."""
    monkeypatch.setattr("hotspan.core.frame.MIB", 8192)  # several segments, and several I/Os a frame
    monkeypatch.setattr("hotspan.tiers.io.IO_BYTES", 8192)
    size = 5 * 8192 + 4096
    (chunk,) = chain("a", 1)
    for nth, (kind, error) in itertools.product(
        range(1, 7), itertools.product(("pwritev", "preadv"), (errno.EIO, SHORT))
    ):
        files, queues = FaultyFiles(), InlineQueues()
        keys = FixedKeys() if sealed else None
        options = DiskOptions(
            tmp_path / f"{nth}{kind}{error}", 3 * (size + 4096), files=files, queue=queues.queue, keys=keys
        )
        tier = DiskTier(options, NAMESPACE, size, SimulatedClock())
        faults = []
        files.arm(nth, error, kinds=[kind])
        for _ in range(2):
            tier.submit_store(chunk, Terms(), aligned(size, content(chunk.key, size)))
            queues.run()
            faults += [transfer.fault for transfer in tier.finished()]
            into = aligned(size)
            if tier.submit_load(chunk.key, into):
                queues.run()
                faults += [transfer.fault for transfer in tier.finished()]
                assert faults[-1] is not None or into == content(chunk.key, size)
        assert faults.count(Fault.IO) == files.hits == 1, f"{kind} {nth}"
        assert into == content(chunk.key, size)
        tier.check()
        tier.close(5.0)
