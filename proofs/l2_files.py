"""A shared directory in the place of the disk: its system calls fail, fall short or hang, and invalidations keep names.

FileStore calls Python's `os`; while it is `hooked` those calls ask a FaultyFiles first, on the threads of such stores
and on no other.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotspan.core.clock import Clock
from hotspan.core.terms import Scope
from hotspan.l2.base import LogPage, SharedInvalidation
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.file import FileStore
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.options import FileOptions
from kit.simulated.faults import FaultyFiles

HANG = -1
"""In the place of an errno: a call does not return until `release`."""

_THREADS = "hotspan-l2-files"
_CALLS = (
    *("open", "pread", "preadv", "pwritev", "fsync", "fstat", "stat", "lstat", "utime"),
    *("link", "rename", "replace", "unlink", "mkdir", "rmdir", "listdir"),
)
_LOG_ENTRIES = 64


class HangingFiles(FaultyFiles):
    """System calls that fail or hang as armed."""

    def __init__(self) -> None:
        super().__init__()
        self._going = threading.Event()
        self._hung: list[threading.Thread] = []

    def before(self, kind: str) -> bool:
        try:
            return super().before(kind)
        except OSError as error:
            if error.errno != HANG:
                raise
            self._hung.append(threading.current_thread())
            self._going.wait(60.0)
            return False

    def release(self) -> None:
        """What hangs goes on."""
        self._going.set()

    def join(self) -> None:
        """Wait for the threads that hung; their stores are closed."""
        for thread in self._hung:
            thread.join(60.0)


@contextlib.contextmanager
def hooked(files: FaultyFiles) -> Iterator[None]:
    """Calls of shared directories ask `files` first, and are counted there."""
    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            real = getattr(os, name)
            stack.callback(setattr, os, name, real)
            setattr(os, name, _hooked(name, real, files))
        yield


def _hooked(kind: str, real: Callable[..., Any], files: FaultyFiles) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name != _THREADS:
            return real(*args, **options)
        files.calls[kind] += 1
        if not files.before(kind):
            return real(*args, **options)
        if kind == "pread":
            return real(*args, **options)[: args[1] // 2]
        if kind in ("preadv", "pwritev"):
            fd, buffers, at = args
            return real(fd, [buffers[0][: len(buffers[0]) // 2]], at)
        return real(*args, **options)

    return call


@dataclass(slots=True)
class Said:
    """The invalidations that replicas asked for, as the objects they are: files keep only what they say.

    by_generation: those that were acknowledged. unsure: those that may be written, by who asked.
    """

    by_generation: dict[int, tuple[Scope, ...]] = field(default_factory=dict)
    unsure: list[tuple[str, tuple[Scope, ...]]] = field(default_factory=list)

    def scopes_of(self, entry: SharedInvalidation) -> tuple[Scope, ...]:
        """Of several that say the same, and are unsure, the oldest: it binds least."""
        if entry.generation in self.by_generation:
            return self.by_generation[entry.generation]
        return next((scopes for by, scopes in self.unsure if (by, scopes) == (entry.by, entry.scopes)), entry.scopes)


class SharedDirectory(FileStore):
    """A FileStore whose log gives back the scopes that were appended, and whose sweeps end before it goes on."""

    def __init__(
        self, root: Path, said: Said, clock: Clock, *, timeout_s: float = 5.0, capacity_gib: float | None = None
    ) -> None:
        super().__init__(root, FileOptions(timeout_s=timeout_s, capacity_gib=capacity_gib), clock=clock)
        self.log = _SaidLog(said, BlobLog(self.blobs, clock), _LOG_ENTRIES, clock)
        sweep_soon = self.blobs.sweep_soon

        def sweep(*, is_full: bool = False) -> None:
            sweep_soon(is_full=is_full)
            if self.blobs.sweeper is not None:
                self.blobs.sweeper.join()

        self.blobs.sweep_soon = sweep  # type: ignore[method-assign]


class _SaidLog(SharedInvalidationLog):
    def __init__(self, said: Said, *args: Any) -> None:
        super().__init__(*args)
        self._said = said

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        try:
            generation = super().append(scopes, by)
        except OSError:
            self._said.unsure.append((by, tuple(scopes)))
            raise
        self._said.by_generation[generation] = tuple(scopes)
        if len(self._said.by_generation) > 2 * _LOG_ENTRIES:
            del self._said.by_generation[min(self._said.by_generation)]  # the log has not kept it
        return generation

    def read(self, after: int) -> LogPage:
        page = super().read(after)
        return replace(page, entries=[replace(one, scopes=self._said.scopes_of(one)) for one in page.entries])
