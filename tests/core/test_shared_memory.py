"""Pages that are there before anybody needs them."""

import mmap
import os
from collections.abc import Iterator

import pytest

from hotspan.core.shared_memory import populate
from hotspan.core.types import PAGE_BYTES

PAGES = 64


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of an empty file in memory, of so many pages."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, PAGES * PAGE_BYTES)
    yield fd
    os.close(fd)


def pages_of(fd: int) -> int:
    """How many pages of a file there are."""
    return os.fstat(fd).st_blocks * 512 // PAGE_BYTES


@pytest.mark.parametrize("threads", [1, 2, 5, 100])
def test_all_pages_are_there_and_unchanged(memory: int, threads: int) -> None:
    """Every page exists afterwards, whatever the number of threads, and has the bytes it had."""
    os.pwrite(memory, b"mine", 3 * PAGE_BYTES)
    with mmap.mmap(memory, PAGES * PAGE_BYTES) as mapping:
        populate(mapping, threads=threads)
        assert pages_of(memory) == PAGES and mapping[3 * PAGE_BYTES : 3 * PAGE_BYTES + 4] == b"mine"


def test_a_part_is_populated_alone(memory: int) -> None:
    """Nothing outside the part is touched."""
    with mmap.mmap(memory, PAGES * PAGE_BYTES) as mapping:
        populate(mapping, 8 * PAGE_BYTES, 16 * PAGE_BYTES, threads=3)
        assert pages_of(memory) == 16
        populate(mapping, 60 * PAGE_BYTES)
        assert pages_of(memory) == 20


def test_memory_that_is_not_to_be_had_is_an_error(memory: int) -> None:
    """Where touching a page would kill the process, OSError says so instead."""
    with mmap.mmap(memory, PAGES * PAGE_BYTES) as mapping:
        os.ftruncate(memory, PAGES // 2 * PAGE_BYTES)
        with pytest.raises(OSError, match="no memory"):
            populate(mapping, threads=2)
