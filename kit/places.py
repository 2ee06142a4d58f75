"""Where a proof works: a directory in memory, or one on a disk; gone when the proof ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hotspan.core.shared_memory import SHARED_MEMORY


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A directory of a tmpfs where there is one: nothing that is proved in it depends on a disk."""
    with TemporaryDirectory(prefix="hotspan-proof-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as path:
        yield Path(path)


@contextlib.contextmanager
def on_disk(directory: Path) -> Iterator[Path]:
    """A directory inside `directory`, on whatever disk that is."""
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="hotspan-proof-", dir=directory) as path:
        yield Path(path)
