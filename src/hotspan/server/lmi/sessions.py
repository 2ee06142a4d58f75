"""Sessions: one directory per tenant, one file per session that contains its expiry time.

    DIR/TENANT/ID

A session outlives a restart of the server as long as the directory does. It holds nothing but its end: what belongs
to it is in the cache, under its id.
"""

import contextlib
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.private import private_directory
from hotspan.core.terms import tenant_label
from hotspan.http.errors import HttpError
from hotspan.http.head import SESSION_HEADER

NEW = "NEW_SESSION"
CLOSE = ("CLOSE", "CLOSE_SESSION")

MAX_SESSIONS = 10_000
"""Of one tenant; each takes a page of the directory's memory."""

_MAX_ID = 256
_ID = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")


@dataclass(frozen=True, slots=True)
class Session:
    """A session that was made. ends_s: in Unix time."""

    id: str
    ends_s: float

    @property
    def header(self) -> str:
        """The value of the response's header."""
        ends = datetime.fromtimestamp(self.ends_s, UTC)
        return f"{self.id}; Expires={ends:%Y-%m-%dT%H:%M:%SZ}"


class Sessions:
    """The sessions of all tenants, which can't see each other's.

    Raises: ConfigError if the directory can't be used.
    """

    def __init__(
        self,
        directory: Path,
        lasts_s: float,
        *,
        is_strict: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._directory = directory
        self._lasts_s = lasts_s
        self._is_strict = is_strict
        self._clock = clock or SystemClock()
        self._ends: dict[Path, OrderedDict[str, float]] = {}  # of full places, the next to end first
        private_directory(directory, "sessions", "give another place (option.sessions_path)")

    def create(self, tenant: str) -> Session:
        """A new session. Raises: HttpError 429 where the tenant has too many."""
        place = self._place(tenant)
        place.mkdir(mode=0o700, exist_ok=True)
        if len(os.listdir(place)) >= MAX_SESSIONS and not self._sweep(place):
            raise HttpError(429, f"{MAX_SESSIONS} sessions are open, as many as may be: close some", retry_s=60)
        session = Session(str(uuid.uuid4()), self._clock.unix() + self._lasts_s)
        self._keep(place, session)
        return session

    def use(self, tenant: str, name: str) -> str | None:
        """The session that a request belongs to; None if the one it names is over.

        Raises: HttpError 400 where the id is none, or unknown in strict mode.
        """
        _check(name)
        ends_s = _ends_s(self._place(tenant) / name)
        if ends_s is None and self._is_strict:
            raise _unknown(name)
        return name if ends_s is None or self._clock.unix() < ends_s else None

    def close(self, tenant: str, name: str) -> None:
        """End a session. Raises: HttpError 400 where the id is none, or unknown in strict mode."""
        _check(name)
        if (ends := self._ends.get(self._place(tenant))) is not None:
            ends.pop(name, None)
        try:
            (self._place(tenant) / name).unlink()
        except FileNotFoundError as error:
            if self._is_strict:
                raise _unknown(name) from error

    @contextlib.contextmanager
    def closing(self, tenant: str, name: str) -> Iterator[None]:
        """End a session. If what is done inside fails, the session is there again, so that closing can be repeated.

        Raises: as `close`.
        """
        _check(name)
        place = self._place(tenant)
        ends_s = _ends_s(place / name)
        self.close(tenant, name)
        try:
            yield
        except BaseException:
            if ends_s is not None:
                self._ends.pop(place, None)  # its sessions are read again: this one is not the last to end
                self._keep(place, Session(name, ends_s))
            raise

    # -- inside --------------------------------------------------------------------------------------------------------

    def _keep(self, place: Path, session: Session) -> None:
        part = place / f".{session.id}"
        part.write_text(repr(session.ends_s))
        part.rename(place / session.id)
        if place in self._ends:
            self._ends[place][session.id] = session.ends_s

    def _place(self, tenant: str) -> Path:
        return self._directory / f"{tenant_label(tenant):016x}"

    def _sweep(self, place: Path) -> int:
        """Remove expired sessions; returns how many."""
        ends, gone = self._ends.get(place), 0
        if not ends:  # reading all takes 0.1 s, in which no stream goes on: once
            found = sorted((_ends_s(place / name) or 0.0, name) for name in os.listdir(place))
            ends = self._ends[place] = OrderedDict((name, ends_s) for ends_s, name in found)
        while ends and next(iter(ends.values())) <= self._clock.unix():
            name, _ = ends.popitem(last=False)
            with contextlib.suppress(FileNotFoundError):
                (place / name).unlink()
            gone += 1
        return gone


def _ends_s(file: Path) -> float | None:
    try:
        return float(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _check(name: str) -> None:
    if len(name) > _MAX_ID or not _ID.fullmatch(name):
        raise HttpError(
            400, f"{name!r:.80} is no session id: give 1 to {_MAX_ID} letters, digits and hyphens", param=SESSION_HEADER
        )


def _unknown(name: str) -> HttpError:
    return HttpError(
        400, f"there is no session {name}: create one ({NEW}), or send no session id", param=SESSION_HEADER
    )
