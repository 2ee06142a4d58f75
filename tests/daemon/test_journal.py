"""What the daemon notes: there after any end if it was confirmed, and believed only if nothing of that is missing."""

import asyncio
import errno
import random
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.daemon.journal import Journal
from hotspan.tiers.files import Files
from proofs.simulated.faults import SHORT, FaultyFiles, SlowFiles
from proofs.simulated.inline import InlineQueues
from proofs.simulated.power import RecordingFiles, power_loss_images

NAMES = st.sampled_from([b"a", b"b", b"", b"c" * 255])
STEPS = st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=40), st.sampled_from(["", "wait", "reopen"])))


class Notebook:
    """A journal whose thread runs when the test says so."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.queues = InlineQueues()
        self.losses = 0
        self.journal = Journal(files or Files(), path, self._lost, self.queues.queue)

    def put(self, name: bytes, data: bytes | None) -> None:
        self.journal.put(name, data)

    def settled(self) -> bool:
        """Whether what was put is confirmed."""
        told: list[bool] = []
        self.journal.settle(told.append)
        self.queues.run()
        assert len(told) == 1
        return told[0]

    def _lost(self) -> None:
        self.losses += 1


def found(path: Path) -> Mapping[bytes, bytes]:
    """What the next start finds."""
    notebook = Notebook(path)
    said = dict(notebook.journal.found)
    notebook.journal.close(1.0)
    return said


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_what_was_put_last_is_found(steps: list[tuple[bytes, bytes | None, str]]) -> None:
    """Whatever is put, taken back, confirmed and opened again in any order, the last of each name is found."""
    with TemporaryDirectory() as directory:
        path, model = Path(directory) / "journal", dict[bytes, bytes]()
        notebook = Notebook(path)
        for name, data, then in steps:
            notebook.put(name, data)
            model.pop(name, None)
            if data is not None:
                model[name] = data
            if then:
                assert notebook.settled()
            if then == "reopen":
                notebook.journal.close(1.0)
                notebook = Notebook(path)
                assert notebook.journal.found == model
        notebook.journal.close(1.0)
        assert found(path) == model


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    """One name put again and again leaves a file of bounded size, and what was said last."""
    notebook = Notebook(tmp_path / "journal")
    for n in range(40):
        notebook.put(b"a", bytes([n]) * (1 << 20))
        assert notebook.settled()
    assert (tmp_path / "journal").stat().st_size < 20 << 20
    notebook.journal.close(1.0)
    assert found(tmp_path / "journal") == {b"a": bytes([39]) * (1 << 20)}
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_a_power_loss_takes_nothing_that_was_confirmed(tmp_path: Path) -> None:
    """Whatever of the unsynced writes is lost, torn or reordered: it is as it was confirmed, or as it became later."""
    home, image_path = tmp_path / "home", tmp_path / "image"
    home.mkdir()
    files, rng = RecordingFiles(home), random.Random(3)
    notebook = Notebook(home / "journal", files)
    history: list[dict[bytes, bytes]] = [{}]
    confirmed_later = 0
    for n in range(60):
        model = dict(history[-1])
        name, data = rng.choice([b"a", b"b", b"c"]), rng.choice([None, b"%d" % n * rng.choice([1, 700])])
        notebook.put(name, data)
        model.pop(name, None)
        if data is not None:
            model[name] = data
        history.append(model)
        if rng.random() < 0.4:
            assert notebook.settled()
            files.mark(len(history) - 1)
        else:
            notebook.queues.run()
        if rng.random() < 0.1:
            notebook.journal._begin()
    for image in power_loss_images(files.recording, seed=5, count=150):
        image.restore(image_path)
        said = found(image_path / "journal")
        confirmed = max(image.marks, default=0)
        assert said in history[confirmed:], (image.cut, confirmed)
        confirmed_later += confirmed > 10
    assert confirmed_later > 40


def test_what_is_damaged_is_not_believed(tmp_path: Path) -> None:
    """A wrong byte in what was confirmed, and followed by more, costs everything; a torn end costs that end only."""
    path = tmp_path / "journal"
    notebook = Notebook(path)
    for n in range(6):
        notebook.put(b"%d" % n, b"x" * 50)
        assert notebook.settled()
    whole = path.read_bytes()
    end_of_last_but_one = len(whole) - len(whole) // 6
    for at in range(0, end_of_last_but_one - 1, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert found(path) == {}, at
    for size in range(end_of_last_but_one, len(whole)):
        path.write_bytes(whole[:size])
        assert found(path) == {b"%d" % n: b"x" * 50 for n in range(5)}, size


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, SHORT])
@pytest.mark.parametrize("nth", range(1, 6))
def test_nothing_is_confirmed_that_a_fault_took(tmp_path: Path, nth: int, error: int) -> None:
    """Whichever call fails: what is confirmed is found, or nothing is; and the daemon is told once that it is lost."""
    files = FaultyFiles()
    path = tmp_path / "journal"
    notebook = Notebook(path, files)
    notebook.put(b"a", b"old")
    assert notebook.settled()
    files.arm(nth, error)
    notebook.put(b"a", None)
    confirmed = [notebook.settled()]
    notebook.put(b"b", b"new")
    confirmed.append(notebook.settled())
    assert confirmed == [True, True] and notebook.losses == (nth <= 4 and (nth, error) not in _UNHURT)
    assert found(path) == ({} if notebook.losses else {b"b": b"new"})


_UNHURT = {(2, SHORT), (4, SHORT)}  # a sync can't fall short


def test_what_can_not_be_emptied_either_is_never_confirmed(tmp_path: Path) -> None:
    """While the disk takes nothing at all no deletion is confirmed; it is once the disk can be emptied again."""
    files = FaultyFiles()
    notebook = Notebook(tmp_path / "journal", files)
    notebook.put(b"a", b"old")
    assert notebook.settled()
    files.arm(1, lasting=True)
    notebook.put(b"a", None)
    assert not notebook.settled() and not notebook.settled() and notebook.losses == 1
    files.disarm()
    assert notebook.settled() and found(tmp_path / "journal") == {}


async def test_a_disk_that_hangs_holds_nobody(tmp_path: Path) -> None:
    """While it hangs putting takes no time, confirmation is refused in time, and closing ends; then it goes on."""
    files = SlowFiles(kinds=("pwrite", "sync"))
    journal = Journal(files, tmp_path / "journal")
    loop = asyncio.get_running_loop()
    assert await journal.settled(60.0)
    files.hang()
    began = loop.time()
    journal.put(b"a", b"x")
    assert not await journal.settled(0.1)
    for n in range(1000):
        journal.put(b"b", b"%d" % n)
    assert loop.time() - began < 20, "it waited for what hangs for a minute"
    files.release()
    assert await journal.settled(60.0)
    files.hang()
    journal.put(b"c", b"y")
    files.wait_hanging(timeout_s=60.0)
    began = loop.time()
    assert not journal.close(0.1) and loop.time() - began < 20
    files.release()
