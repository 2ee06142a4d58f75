"""The log of generations: what it can't be sure of it says, and what it acknowledged is there."""

import errno
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspan.core.terms import Scope
from hotspan.testing.chunks import key_of
from hotspan.tiers.log import GenerationLog, Invalidation
from kit.simulated.faults import SHORT, FaultyFiles

SCOPES = [Scope(), Scope(tenant=7), Scope(labels=frozenset([1, 2]), keys=frozenset([key_of("a")]), namespace=bytes(32))]
ENTRIES = [Invalidation(generation, (scope,), 1000.5) for generation, scope in enumerate(SCOPES, 1)]


@pytest.fixture
def files() -> FaultyFiles:
    """System calls that a test can make fail."""
    return FaultyFiles()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log lives."""
    return tmp_path / "log"


@pytest.fixture
def log(files: FaultyFiles, path: Path) -> Iterator[GenerationLog]:
    """A log that begins at 0 and has ENTRIES."""
    log = GenerationLog(files, path)
    log.begin(0)
    for entry in ENTRIES:
        log.append(entry)
    yield log
    log.close()


def read(path: Path) -> tuple[int, list[Invalidation], bool]:
    """What a new process reads."""
    log = GenerationLog(FaultyFiles(), path)
    said = log.read()
    log.close()
    return said.generation, list(said.entries), said.is_whole


def test_entries_come_back_in_order(log: GenerationLog, path: Path) -> None:
    """A new process reads every entry that was appended, and goes on behind the last."""
    assert read(path) == (3, ENTRIES, True)
    again = GenerationLog(FaultyFiles(), path)
    again.read()
    again.append(Invalidation(4, (Scope(),), 0.0))
    again.close()
    assert read(path) == (4, [*ENTRIES, Invalidation(4, (Scope(),), 0.0)], True)


def test_beginning_anew_forgets_the_entries(log: GenerationLog, path: Path) -> None:
    """After `begin` the log knows of no invalidation and from which generation on; entries follow it."""
    log.begin(17)
    assert read(path) == (17, [], True)
    log.append(Invalidation(18, (Scope(),), 0.0))
    assert read(path) == (18, [Invalidation(18, (Scope(),), 0.0)], True)
    assert sorted(os.listdir(path.parent)) == ["log"]


def test_no_log_is_no_whole_log(path: Path) -> None:
    """A file that is new, empty or of something else does not know everything."""
    assert read(path) == (0, [], False)
    path.write_bytes(b"something else" * 10)
    assert read(path) == (0, [], False)


def test_a_log_without_its_beginning_is_whole_only_with_entries(log: GenerationLog, path: Path) -> None:
    """Every prefix of a log reads as the entries that are in it whole; only at their borders does it pass for whole."""
    data = path.read_bytes()
    borders = {0}
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        generation, entries, is_whole = read(path)
        assert entries == ENTRIES[: len(entries)] and generation == len(entries)
        if is_whole:
            borders.add(cut)
    assert len(borders) == 1 + 3  # nothing at all (which is not whole), and the end of each entry but the last


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(data=st.data())
def test_every_damage_is_noticed(log: GenerationLog, path: Path, data: st.DataObject) -> None:
    """With any byte changed the log is not whole, and what is read before the damage is what was written."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    _, entries, is_whole = read(path)
    path.write_bytes(whole)
    assert not is_whole and entries == ENTRIES[: len(entries)]


@pytest.mark.parametrize(
    "body",
    [
        *("[]", "{}", '{"generation": "x"}', '{"generation": 1, "scope": {}}', '{"generation": null}'),
        *(
            '{"generation": 1e999}',
            '{"generation": 4, "scope": ' + json.dumps(Scope().to_json()) + ', "at_s": 1' + "0" * 400 + "}",
            "[" * 100_000,
        ),
    ],
)
def test_a_whole_entry_of_something_else_is_damage(log: GenerationLog, path: Path, body: str) -> None:
    """An entry with a right check that is no invalidation makes the log untrusted, and raises nothing."""
    data = body.encode()
    with path.open("ab") as file:
        file.write(b"HSLG" + struct.pack("<I", len(data)) + xxhash.xxh3_64_digest(data) + data)
    assert read(path) == (3, ENTRIES, False)


@pytest.mark.parametrize(("kind", "error"), [("pwrite", errno.ENOSPC), ("pwrite", SHORT), ("sync", errno.EIO)])
def test_after_a_failure_nothing_is_appended(
    log: GenerationLog, files: FaultyFiles, path: Path, kind: str, error: int
) -> None:
    """A write or sync that fails is an OSError, and so is every append after it; what was acknowledged stays whole."""
    files.arm(1, error, kinds=[kind])
    with pytest.raises(OSError):
        log.append(Invalidation(4, (Scope(),), 0.0))
    files.disarm()
    with pytest.raises(OSError, match="failed before"):
        log.append(Invalidation(5, (Scope(),), 0.0))
    assert read(path) == (3, ENTRIES, True)


def test_half_an_entry_that_can_not_be_taken_back_is_damage(log: GenerationLog, files: FaultyFiles, path: Path) -> None:
    """If not even the cut after a short write succeeds, the next process finds the log damaged."""
    real = files.truncate
    files.truncate = lambda fd, size: real(-1, size)  # type: ignore[method-assign]
    files.arm(1, SHORT, kinds=["pwrite"])
    with pytest.raises(OSError):
        log.append(Invalidation(4, (Scope(),), 0.0))
    assert read(path) == (3, ENTRIES, False)


@pytest.mark.parametrize("kind", ["open", "pwrite", "sync", "replace"])
def test_a_failed_beginning_leaves_the_old_log(log: GenerationLog, files: FaultyFiles, path: Path, kind: str) -> None:
    """Whatever fails while the log begins anew, the old one is there, still works, and no descriptor leaks."""
    before = set(files.open_fds)
    files.arm(1, kinds=[kind])
    with pytest.raises(OSError):
        log.begin(9)
    files.disarm()
    assert files.open_fds == before and read(path) == (3, ENTRIES, True)
    log.append(Invalidation(4, (Scope(),), 0.0))
    assert read(path)[0] == 4


def test_a_beginning_whose_rename_may_not_last_ends_the_log(log: GenerationLog, files: FaultyFiles, path: Path) -> None:
    """If the new log has the name and the directory's sync failed, no entry goes into a file that nobody may find."""

    def replace(source: Path, target: Path) -> None:
        os.replace(source, target)
        raise OSError(errno.EIO, "the directory could not be synced")

    files.replace = replace  # type: ignore[method-assign]
    with pytest.raises(OSError):
        log.begin(3)
    with pytest.raises(OSError, match="failed before"):
        log.append(Invalidation(4, (Scope(),), 0.0))
    assert read(path) == (3, [], True)


def test_an_acknowledged_entry_was_synced(log: GenerationLog, files: FaultyFiles) -> None:
    """An append is one write and one sync after it."""
    before = files.calls.copy()
    log.append(Invalidation(4, (Scope(),), 0.0))
    assert files.calls - before == {"pwrite": 1, "sync": 1}


def test_entries_stand_where_the_document_says(log: GenerationLog, path: Path) -> None:
    """docs/frame.md, read with no help of the module: each entry's magic, length, check and JSON."""
    data, bodies = path.read_bytes(), []
    while data:
        assert data[:4] == b"HSLG"
        (size,) = struct.unpack_from("<I", data, 4)
        assert data[8:16] == xxhash.xxh3_64_digest(data[16 : 16 + size])
        bodies.append(json.loads(data[16 : 16 + size]))
        data = data[16 + size :]
    assert bodies[0] == {"generation": 0}
    assert bodies[3] == {
        "generation": 3,
        "at_s": 1000.5,
        "scope": {
            "tenant": None,
            "adapter": None,
            "labels": [1, 2],
            "keys": [key_of("a").hex()],
            "namespace": "00" * 32,
        },
    }
