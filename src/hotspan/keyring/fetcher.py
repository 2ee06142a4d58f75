"""Fetches tenants' keys in the background: few at a time, each tried again only some seconds after it failed."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hotspan.core.clock import Clock
from hotspan.core.deadline import Deadline
from hotspan.core.threads import start_worker

logger = logging.getLogger(__name__)

RETRY_S = 5.0
_THREADS = 4
_MAX_WAITING = 4096
_POLL_S = 0.25
_CLOSE_S = 1.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One tenant's fetch: `cancelled` means that its outcome is no longer wanted."""

    tenant: str
    due_s: float
    cancelled: bool = False
    busy: bool = False
    failures: int = 0


class Fetcher:
    """Calls `fetch(ticket)` in threads of its own until it returns True. What `fetch` raises is a failure."""

    def __init__(self, fetch: Callable[[Ticket], bool], clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[str, Ticket] = {}
        self._closed = False
        # Now, because starting a thread waits for it to run, and `ask` may not wait.
        is_over = lambda: self._closed  # noqa: E731
        self._threads = [start_worker(f"keyring-{index}", self._run, is_over=is_over) for index in range(_THREADS)]

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, tenant: str) -> None:
        """Have `tenant` fetched, now or when its last failure is long enough ago. Returns at once."""
        with self._changed:
            self._add(tenant)

    def cancel(self, tenant: str) -> None:
        """Forget that `tenant` was asked for; a fetch under way learns it from its ticket."""
        with self._changed:
            ticket = self._waiting.pop(tenant, None)
            if ticket is not None:
                ticket.cancelled = True

    def fetch_now(self, tenants: Iterable[str], timeout_s: float) -> None:
        """Have all `tenants` tried now; returns when each was, or after `timeout_s`."""
        deadline = Deadline(timeout_s)
        with self._changed:
            before = {}
            for tenant in tenants:
                ticket = self._add(tenant)
                if ticket is not None:
                    ticket.due_s = self._clock.monotonic()
                    before[tenant] = ticket.failures
            while not all(self._tried(tenant, failures) for tenant, failures in before.items()):
                left_s = deadline.rest_s()
                if not left_s or self._closed:
                    return
                self._changed.wait(left_s)

    def close(self) -> None:
        """Stop. A fetch that is stuck in the KMS is left to end by itself, its ticket cancelled."""
        with self._changed:
            self._closed = True
            for ticket in self._waiting.values():
                ticket.cancelled = True
            self._waiting.clear()
            self._changed.notify_all()
        deadline = Deadline(_CLOSE_S)
        for thread in self._threads:
            thread.join(deadline.rest_s())

    def _add(self, tenant: str) -> Ticket | None:
        ticket = self._waiting.get(tenant)
        if ticket is None and not self._closed and len(self._waiting) < _MAX_WAITING:
            ticket = self._waiting[tenant] = Ticket(tenant, self._clock.monotonic())
            self._changed.notify_all()
        return ticket

    def _tried(self, tenant: str, failures: int) -> bool:
        ticket = self._waiting.get(tenant)
        return ticket is None or ticket.failures > failures

    def _run(self) -> None:
        while (ticket := self._take()) is not None:
            done = self._fetched(ticket)
            with self._changed:
                ticket.busy = False
                if not done:
                    ticket.failures += 1
                    ticket.due_s = self._clock.monotonic() + RETRY_S
                elif self._waiting.get(ticket.tenant) is ticket:
                    del self._waiting[ticket.tenant]
                self._changed.notify_all()

    def _fetched(self, ticket: Ticket) -> bool:
        try:
            return self._fetch(ticket)
        except Exception:  # a mistake of ours is a failure like any other: it is tried again, and no thread is lost
            logger.exception("keyring_fetch_failed")
            return False

    def _take(self) -> Ticket | None:
        """The next ticket that is due; waits for it. None when closed."""
        with self._changed:
            while not self._closed:
                now_s = self._clock.monotonic()
                for ticket in self._waiting.values():
                    if not ticket.busy and ticket.due_s <= now_s:
                        ticket.busy = True
                        return ticket
                self._changed.wait(_POLL_S if self._waiting else None)
            return None
