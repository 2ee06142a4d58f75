"""The daemon of HyperPod's managed tiered storage as a client speaks to it: put, lease, release; and its shared memory.

A lease says where in the segment an object's bytes are, and pins them for a time. Nothing in it is proven: what it says
is compared with the segment as it is, before and after each copy.
"""

import errno
import json
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import quote

from hotspan.core.buffers import placed
from hotspan.core.clock import Clock
from hotspan.core.deadline import Deadline
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.core.threads import start_worker
from hotspan.l2.http_client import Buffer, ConnectionPool, HttpResponse, Request
from hotspan.l2.options import HyperpodOptions

logger = logging.getLogger(__name__)

_MAX_RELEASES = 64
_MAX_REASON = 200
_WARN_EVERY_S = 60.0
_ERRNO = {413: errno.EFBIG, 507: errno.ENOSPC}
_MISSES = (404, 409, 504)


class Fragment(NamedTuple):
    """A part of an object, from `offset` of the segment on."""

    offset: int
    size: int


class SegmentIdentity(NamedTuple):
    """Which file a segment is: another one under the same name holds other bytes."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Where an object is.

    segment:   the one there was before the lease was asked for; None if there was none.
    expires_s: counted on the clock's monotonic time, from before the lease was asked for.
    """

    id: str
    fragments: tuple[Fragment, ...]
    size: int
    segment: SegmentIdentity | None
    expires_s: float


class SharedSegment:
    """The daemon's shared memory, opened for each copy, so that none ever holds an old one.

    It is read and not mapped: where the file is cut short under a mapping, the kernel kills the process (SIGBUS); a
    read just ends there. And no resource tracker sees it, which would unlink the daemon's segment at exit.
    """

    def __init__(self, name: str) -> None:
        self.path = SHARED_MEMORY / name.removeprefix("/")

    def identity(self) -> SegmentIdentity | None:
        """Of the segment there is now."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return SegmentIdentity(found.st_dev, found.st_ino)

    def read(self, lease: Lease, start: int, into: Sequence[memoryview]) -> bool:
        """Copy an object's bytes from `start` on; False if the segment is another one, or the lease lies beyond it.

        Shape: into uint8, in all not more than the object has from `start` on. Raises: OSError.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or SegmentIdentity(found.st_dev, found.st_ino) != lease.segment:
                return False
            if any(offset + size > found.st_size for offset, size in lease.fragments):
                return False
            return all(_filled(fd, offset, part) for offset, part in placed(into, lease.fragments, start))
        finally:
            os.close(fd)


class HyperpodDaemon:
    """One node's daemon. Methods block, each for `timeout_s` at most; threads may share it.

    Raises: OSError from every method when the daemon can't be reached, or speaks something else; with ENOSPC, EFBIG or
            EBUSY when it answers that it does not take a value: it is well then.
    """

    def __init__(self, host: str, port: int, options: HyperpodOptions, clock: Clock) -> None:
        self.options = options
        self.refused: Counter[str] = Counter()
        """Leases that were not believed or not granted, by reason; those of what is not there are not counted."""
        self._name = f"{host}:{port}"
        self._clock = clock
        self._segment = SharedSegment(options.shared_memory_name)
        self._pool = ConnectionPool(
            host, port, options.connections, use_https=options.use_https, chunk_bytes=options.put_stream_chunk_bytes
        )
        self._can_delete: tuple[SegmentIdentity | None, bool] | None = None
        self._warned_s: dict[str, float] = {}
        self._releases: SimpleQueue[Lease | None] = SimpleQueue()
        self._releasing: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def put(self, name: str, value: Sequence[Buffer]) -> bool:
        """Store an object; False if there is one of that name already."""
        size, most = sum(memoryview(part).nbytes for part in value), self.options.max_bytes
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"an object of {size} bytes is over sagemaker_hyperpod_max_lease_size_mb")
        (stored,) = self.put_all({name: value}, Deadline(self.options.timeout_s))
        return stored

    def put_all(self, values: Mapping[str, Sequence[Buffer]], deadline: Deadline) -> list[bool]:
        """Store small objects together; for each, False if there is one of that name already."""
        requests = [Request("PUT", self._target(name), value) for name, value in values.items()]
        answers = [_said(answer) for answer in self._pool.ask_all(requests, deadline)]
        for status, _ in answers:
            if status not in (200, 409):
                raise OSError(_ERRNO.get(status, errno.EBUSY), f"{self._name} answered {status} to a put")
        return [status == 200 for status, _ in answers]

    def lease_all(
        self, names: Sequence[str], deadline: Deadline, *, hold: bool = False, is_sure: bool = False
    ) -> list[Lease | None]:
        """A lease of each object, None for one that is not there. Release what you got.

        hold:    wait for an object that is being written.
        is_sure: an object that may be there and is not leased is an OSError with EBUSY; else it is None.
        """
        wait_ms = self.options.lease_wait_timeout_ms if hold else 0
        query = f"timeout_ms={wait_ms}&ttl_s={self.options.lease_ttl_s!r}"
        requests = [Request("POST", f"{self._target(name)}/leases?{query}") for name in names]
        segment, expires_s = self._segment.identity(), self._clock.monotonic() + self.options.lease_ttl_s
        answers = self._pool.ask_all(requests, deadline.within(self.options.lease_timeout_s))
        absent: tuple[int, ...] = _MISSES
        if is_sure and not all(isinstance(each, OSError) or each.status in (200, 404) for each in answers):
            # HyperPod's daemon may say 504 of what is not there; hotspan's has it on its disk, or is being given it.
            try:
                absent = (404,) if self.can_delete(deadline) else _MISSES
            except OSError:  # not known, and there are leases to release
                absent = (404,)
        leases = [self._granted(answer, segment, expires_s, absent, is_sure=is_sure) for answer in answers]
        failure = next((lease for lease in leases if isinstance(lease, OSError)), None)
        granted = [lease for lease in leases if not isinstance(lease, OSError)]
        if failure is None:
            return granted
        self.release_all(granted)
        raise failure

    def read(self, lease: Lease, start: int, into: Sequence[memoryview]) -> bool:
        """Copy an object's bytes from `start` on; False if they may not be its own (any more)."""
        if self.is_over(lease):
            return False
        try:
            was_read = self._segment.read(lease, start, into)
        except FileNotFoundError as error:
            hint = "set sagemaker_hyperpod_shared_memory_name as the daemon has it, and let the container see /dev/shm"
            raise FileNotFoundError(f"{self._name} leases what is not at {self._segment.path}: {hint}") from error
        if not was_read:
            self._refuse("segment")
        return was_read and not self.is_over(lease)

    def is_over(self, lease: Lease) -> bool:
        """Whether the daemon may have reused the bytes."""
        return self._clock.monotonic() >= lease.expires_s

    def release_all(self, leases: Iterable[Lease | None]) -> None:
        """Let go of leases, in the background: where that fails, their time runs out."""
        with self._starting:
            if self._releasing is None and not self._closed:
                self._releasing = start_worker("l2-release", self._release, is_over=lambda: self._closed)
        for lease in leases:
            if lease is not None:
                self._releases.put(lease)

    def health(self, deadline: Deadline) -> dict[str, Any]:
        """What hotspan's own daemon says of itself; nothing for one that is not hotspan's, but an answer."""
        status, body = self._pool.ask(Request("GET", "/health"), deadline)
        said = _json(body) if status == 200 else None
        return said if isinstance(said, dict) and said.get("service") == "hotspan-daemon" else {}

    def can_delete(self, deadline: Deadline) -> bool:
        """Whether it is hotspan's own. Asked once for each segment: another daemon would have made it anew."""
        segment = self._segment.identity()
        asked = self._can_delete
        if asked is None or asked[0] != segment or segment is None:
            asked = self._can_delete = segment, bool(self.health(deadline))
        return asked[1]

    def delete_all(self, names: Sequence[str], deadline: Deadline) -> list[bool]:
        """Delete objects of a daemon that `can_delete`; for each, whether it was there."""
        requests = [Request("DELETE", self._target(name)) for name in names]
        answers = [_said(answer) for answer in self._pool.ask_all(requests, deadline)]
        for status, _ in answers:
            if status not in (200, 204, 404):
                self._can_delete = None
                raise OSError(f"{self._name} answered {status} to a delete")
        return [status != 404 for status, _ in answers]

    def close(self) -> None:
        """Let go of connections, once the releases that wait are done or have had a second."""
        with self._starting:
            releasing, self._releasing = self._releasing, None
            self._closed = True
        if releasing is not None:
            self._releases.put(None)
            releasing.join(min(1.0, self.options.timeout_s))
        self._pool.close()
        if releasing is not None:
            releasing.join(self.options.timeout_s)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> str:
        return f"/v1/kv/{quote(self.options.bucket, safe='@')}/{quote(name, safe='@')}"

    def _granted(
        self,
        answer: HttpResponse | OSError,
        segment: SegmentIdentity | None,
        expires_s: float,
        absent: Container[int],
        *,
        is_sure: bool,
    ) -> Lease | OSError | None:
        """A lease; None for an object that is not there: with one of the statuses `absent`, or any if not `is_sure`."""
        if isinstance(answer, OSError):
            return answer
        if answer.status != 200:
            if answer.status not in _MISSES:
                self._refuse(f"status_{answer.status}", _reason(answer.body))
            is_refused = is_sure and answer.status not in absent
            return OSError(errno.EBUSY, f"{self._name} answered {answer.status} to a lease") if is_refused else None
        said = _json(answer.body)
        if not isinstance(said, dict) or not isinstance(said.get("id"), str) or "offsets" not in said:
            return ConnectionError(f"{self._name} answered no lease: does a HyperPod daemon listen there?")
        fragments = _fragments(said["offsets"]) or ()
        lease = Lease(said["id"], fragments, sum(size for _, size in fragments), segment, expires_s)
        most = self.options.max_bytes
        if not fragments or (most is not None and lease.size > most):
            self._refuse("size" if fragments else "offsets")
            self.release_all([lease])
            return OSError(errno.EBUSY, f"{self._name} leases bytes of no object") if is_sure else None
        return lease

    def _refuse(self, reason: str, said: str = "") -> None:
        self.refused[reason] += 1
        now = self._clock.monotonic()
        if now - self._warned_s.get(reason, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned_s[reason] = now
            logger.warning("l2_lease_refused daemon=%s reason=%s said=%r", self._name, reason, said)

    def _release(self) -> None:
        is_last = False
        while not is_last:
            taken = [self._releases.get()]
            while len(taken) < _MAX_RELEASES and not self._releases.empty():
                taken.append(self._releases.get())
            is_last = None in taken
            leases = [lease for lease in taken if lease is not None and not self.is_over(lease)]
            try:
                requests = [
                    Request("POST", f"/v1/leases/{quote(lease.id, safe='', errors='surrogatepass')}/release")
                    for lease in leases
                ]
                self._pool.ask_all(requests, Deadline(self.options.timeout_s))
            except Exception:  # a mistake of ours: their time runs out, and later ones are released
                logger.exception("l2_release_failed leases=%d", len(leases))


def _said(answer: HttpResponse | OSError) -> HttpResponse:
    if isinstance(answer, OSError):
        raise answer
    return answer


def _json(body: bytes) -> Any:
    """What a body says; None if it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _reason(body: bytes) -> str:
    """What a daemon gives as its reason; "" if it gives none."""
    said = _json(body)
    error = said.get("error") if isinstance(said, dict) else None
    return error[:_MAX_REASON] if isinstance(error, str) else ""


def _fragments(said: Any) -> tuple[Fragment, ...] | None:
    """The fragments that a lease names; None unless they can be parts of one object."""
    if not isinstance(said, list):
        return None
    fragments = []
    for part in said:
        offset, size = (part.get("offset"), part.get("len")) if isinstance(part, dict) else (None, None)
        if type(offset) is not int or type(size) is not int or offset < 0 or size <= 0:
            return None
        fragments.append(Fragment(offset, size))
    end = 0
    for fragment in sorted(fragments):
        if fragment.offset < end:
            return None  # two parts share bytes
        end = fragment.offset + fragment.size
    return tuple(fragments)


def _filled(fd: int, offset: int, part: memoryview) -> bool:
    """Read all of `part`; False if the file ends before that."""
    done = 0
    while done < len(part):
        moved = os.preadv(fd, [part[done:]], offset + done)
        if not moved:
            return False
        done += moved
    return True
