"""vLLM's message buffers after all processes that could unlink them were killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from hotspan.core import message_buffers
from hotspan.core.message_buffers import BufferNote, mapped, sweep_buffers
from hotspan.core.shared_memory import SHARED_MEMORY
from kit.waiting import until

from .test_aftermath import gone

ENGINE = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
from hotspan.core.aftermath import Aftermath
from hotspan.core.message_buffers import BufferNote
with Aftermath() as second:
    buffer = SharedMemory(create=True, size=4096)
    note = BufferNote()
    second.unlink_shared()
    reader = subprocess.Popen([sys.executable, "-c", sys.argv[1], buffer.name])
    print(buffer.name, second._process.pid, reader.pid, note._path, flush=True)
    time.sleep(600)
"""
READER = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
reader = SharedMemory(sys.argv[1])
time.sleep(600)
"""


class Engine(NamedTuple):
    """Processes, and what they have in /dev/shm."""

    process: "subprocess.Popen[str]"
    second: int
    reader: int
    buffer: Path
    note: Path


def kill(engine: Engine, *, but: int | None = None) -> None:
    """SIGKILL to all at once, the second process and the trackers among them."""
    family = [*psutil.Process(engine.process.pid).children(recursive=True), psutil.Process(engine.process.pid)]
    family = [each for each in family if each.pid != but]
    for each in family:
        each.suspend()
    for each in family:
        each.kill()
    engine.process.wait(60)
    until(lambda: all(gone(each.pid) for each in family), "a killed process lives on")


def started() -> Engine:
    process = subprocess.Popen([sys.executable, "-c", ENGINE, READER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name, second, reader, note = process.stdout.readline().split()
    return Engine(process, int(second), int(reader), SHARED_MEMORY / name, Path(note))


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A process with a second one that cleans up after it, one that reads its buffer, and their trackers."""
    engine = started()
    until(lambda: engine.buffer.name in str(mapped(engine.reader)), "nobody reads the buffer")
    yield engine
    if engine.process.poll() is None:
        kill(engine)
    if not gone(engine.reader):
        psutil.Process(engine.reader).kill()
    for path in (engine.buffer, engine.note):
        path.unlink(missing_ok=True)


def test_the_next_start_unlinks_what_all_left(engine: Engine) -> None:
    """With the second process killed, too, the buffer stays until a sweep; a living engine's is left alone."""
    sweep_buffers()
    assert engine.buffer.exists() and engine.note.exists()
    kill(engine)
    assert engine.buffer.exists() and engine.note.exists()
    sweep_buffers()
    assert not engine.buffer.exists() and not engine.note.exists()


def test_a_buffer_that_is_read_still_stays(engine: Engine) -> None:
    """While any process has it mapped; once that has ended the next sweep takes it."""
    kill(engine, but=engine.reader)
    sweep_buffers()
    assert engine.buffer.exists() and engine.note.exists()
    psutil.Process(engine.reader).kill()
    until(lambda: gone(engine.reader), "the reader lives on")
    sweep_buffers()
    assert not engine.buffer.exists() and not engine.note.exists()


def test_the_second_process_unlinks_the_note(engine: Engine) -> None:
    """As it does the buffer, where it lives."""
    kill(engine, but=engine.second)
    until(lambda: gone(engine.second), "the second process lives on")
    assert not engine.buffer.exists() and not engine.note.exists()


@pytest.fixture
def noted(tmp_path: Path) -> Iterator[Path]:
    """A buffer of a process that has ended, and a note of it."""
    buffer, note = tmp_path / "psm_0a1b", tmp_path / "hotspan-buffers-1-ended"
    buffer.touch(0o600)
    note.write_text(json.dumps({"since": 1 << 40, "buffers": [["psm_0a1b", buffer.stat().st_ino]]}))
    yield buffer


def test_what_was_noted_is_unlinked(noted: Path) -> None:
    """So the others below stay for the reason that each has."""
    assert sweep_buffers(noted.parent) == 1 and not list(noted.parent.iterdir())


def test_another_file_of_that_name_stays(noted: Path) -> None:
    """By its inode: somebody else's."""
    (noted.parent / "keep").hardlink_to(noted)
    noted.unlink()
    noted.touch()
    assert sweep_buffers(noted.parent) == 0 and noted.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
@pytest.mark.parametrize("which", ["buffer", "note"])
def test_what_is_another_users_stays(noted: Path, which: str) -> None:
    """Neither a buffer of another user goes, nor what another user's note names."""
    given = noted if which == "buffer" else noted.parent / "hotspan-buffers-1-ended"
    os.chown(given, 12345, 12345)
    assert sweep_buffers(noted.parent) == 0 and noted.exists()


def test_nothing_goes_while_a_process_of_this_user_can_not_be_seen(
    noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the buffer mapped, unless it is older than the engine."""

    def refuse(pid: int, directory: Path) -> set[tuple[str, int]]:
        if pid == os.getpid():
            raise PermissionError
        return set()

    monkeypatch.setattr(message_buffers, "mapped", refuse)
    note = noted.parent / "hotspan-buffers-1-ended"
    said = json.loads(note.read_text())
    note.write_text(json.dumps(said | {"since": 0}))
    assert sweep_buffers(noted.parent) == 0 and noted.exists()
    note.write_text(json.dumps(said))
    assert sweep_buffers(noted.parent) == 1 and not noted.exists()


@pytest.mark.parametrize(
    "said",
    ["", "{}", "[1]", '{"since": 0, "buffers": [["../keep", 1]]}', '{"since": 0, "buffers": [["psm_0a1b", "x"]]}'],
)
def test_a_note_that_says_nothing_names_nothing(noted: Path, said: str) -> None:
    """Whatever it holds, no file but buffers is touched."""
    (noted.parent / "hotspan-buffers-1-ended").write_text(said)
    assert sweep_buffers(noted.parent) == 0 and noted.exists()


def test_a_process_without_buffers_notes_nothing(tmp_path: Path) -> None:
    """An engine of one rank has none."""
    BufferNote(tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_an_engine_that_ends_in_order_leaves_no_note() -> None:
    """Who made a buffer unlinks it then."""
    buffer = SharedMemory(create=True, size=4096)
    try:
        note = BufferNote()
        assert note._path is not None and note._path.exists()
        path = note._path
        note.close()
        assert not path.exists()
    finally:
        buffer.close()
        buffer.unlink()
