"""Applies the numbered messages of one replica to the index, and notices when one is missing.

    live      seq == next                    apply
              seq >  next                    a gap: ask for a replay from the last one that was applied
              seq <  next                    the same bytes again: skip. Else the replica began anew
    replay    its first message is compared with what was applied under that number: another one tells a new life
              (messages carry the time, so two lives never say the same)
    lost      what can't be replayed or read: forget everything, go on with what comes

After a loss what is known is true but not all, so the replica counts as approximate, until it clears its cache, begins
anew, is replayed from 0, or has said so much that what was there before can hardly matter: a thousand blocks, and as
many as are known by then, in a row without one that is not known.

Pure: no sockets, no clock. What sockets say is given to it, and it says from where a replay is needed.
"""

from array import array
from collections.abc import Callable, Iterator

from xxhash import xxh3_64_intdigest

from hotspan.router.blocks import Blocks
from hotspan.router.event_messages import Event, Removed, Stored, UnknownMessage, events_of
from hotspan.router.index import PrefixIndex
from hotspan.router.types import Medium

_REMEMBERED = 16_384
"""So many messages are known again when they come twice."""

_LEAST_RUN = 1000
_ANEW = -1
"""Replay from 0 and forget what was known, where other numbers go on from what was applied."""

_MAX_REPLAYS = 3
"""In a row without a new message, for one gap."""

_MAX_LIVES = 2
"""Replays from 0 for one gap: a message that fits none of them fits nothing."""

OnState = Callable[[bool, str], None]
"""Is told whether all is known, and if not, why: one of REASONS."""

REASONS = ("starting", "replaying", "disconnected", "no_replay", "gap", "unreadable", "replay_incomplete")


class EventSync:
    """Applies the messages of one replica.

    replica:  its number in the index. blocks: what is known of its blocks.
    on_state: called with whether all is known, and why not. is_exact, reason: the same.
    messages, gaps, losses, restarts, duplicates: counted.
    """

    def __init__(self, replica: int, blocks: Blocks, index: PrefixIndex, on_state: OnState) -> None:
        self._replica, self.blocks, self._index = replica, blocks, index
        self._on_state = on_state
        self._digests = array("Q", bytes(8 * _REMEMBERED))
        self._next: int | None = None
        self._is_complete = self._is_linked = False
        self._filling: Iterator[tuple[Medium, list[int]]] | None = None
        self._missing = "starting"
        self._run = 0
        self._held: tuple[int, bytes] | None = None  # a live message that waits for a replay
        self._start: int | None = None  # of the replay under way
        self._has_begun = False
        self._replays = self._lives = 0
        self.is_exact, self.reason = False, "starting"
        self.messages = self.gaps = self.losses = self.restarts = self.duplicates = 0

    # -- from the sockets --------------------------------------------------------------------------------------------

    def connected(self) -> int:
        """A connection is up, or has been quiet for long: the number from which to replay."""
        return self._ask()

    def disconnected(self) -> None:
        """The connection is gone, and who comes back may be another: nothing is claimed until that is known."""
        self._held = None
        self._unlink("disconnected")

    def live(self, seq: int, payload: bytes) -> int | None:
        """A message came; from where to replay before the next one, if need be."""
        if self._is_linked and seq == self._next:
            self._apply(seq, payload)
            return None
        is_known = self._is_known(seq, payload)
        if seq == 0 and not is_known:
            self.restarts += bool(self._next)
            self._begin()
            self._is_complete = True
            self._apply(seq, payload)
            self._link()
            return None
        if self._is_linked and is_known:
            self.duplicates += 1
            return None
        self._held = (seq, payload)
        if self._is_linked and self._next is not None:
            self.gaps += seq > self._next
            if seq < self._next:
                self.restarts += 1
                self._replays = self._lives = 0
                return self._replay_anew()
        return self._ask()

    def replayed(self, seq: int, payload: bytes) -> None:
        """A replayed message, in order; those behind a gap are for the next replay."""
        start = self._start
        if start is None:
            return
        if not self._has_begun:
            self._has_begun = True
            if start == _ANEW:
                self._begin()
                self._is_complete, self._next = seq == 0, seq
            elif seq == start and self._is_known(seq, payload):
                return
            else:
                self._start = None  # another life, or the buffer is too short to tell
                return
        if seq == self._next:
            if start != _ANEW:
                self._replays = 0
            self._apply(seq, payload)

    def replay_ended(self, *, is_whole: bool) -> int | None:
        """The replay is over; from where to replay again, if need be.

        is_whole: its end was said. It is not if it broke off, or there is none to be had.
        """
        start, self._start = self._start, None
        if not self._has_begun:
            if not is_whole:
                if self._held is not None or not self._is_linked:
                    self._lose("no_replay")
                return None
            if start != _ANEW:
                return self._replay_anew()  # it does not have what was here already
            self._begin()
            self._is_complete, self._next = True, 0
        elif start is None:
            return self._replay_anew()
        return self._settle(is_whole)

    def fill(self) -> bool:
        """Put some of what is known into an index that was cleared; whether there is more. A few milliseconds.

        What is not done of it is done at once before the next message is applied.
        """
        if self._filling is None:
            return False
        told = next(self._filling, None)
        if told is None:
            self._filling = None
            return False
        self._index.add(self._replica, *told)
        return True

    # -- inside: the ways on -----------------------------------------------------------------------------------------

    def _ask(self) -> int:
        """Where a replay begins that goes on behind what was applied, if that is still the same life."""
        self._replays = self._lives = 0
        found = self._replay_on() if self._next else self._replay_anew()
        return found or 0

    def _replay_on(self) -> int | None:
        return self._replay((self._next or 1) - 1)

    def _replay_anew(self) -> int | None:
        self._lives += 1
        if self._lives > _MAX_LIVES:
            self._lose("gap")
            return None
        self._unlink("replaying")  # what a replay tells on its way is the past
        return self._replay(_ANEW)

    def _replay(self, start: int) -> int | None:
        self._replays += 1
        if self._replays > _MAX_REPLAYS:
            self._lose("gap")
            return None
        self._start, self._has_begun = start, False
        return max(start, 0)

    def _settle(self, is_whole: bool) -> int | None:
        """After a replay: go on with the message that waited for it."""
        if self._held is not None:
            seq, payload = self._held
            if self._next is None or seq > self._next:
                return self._replay_on() if self._next else self._replay_anew()
            if seq < self._next and not self._is_known(seq, payload):
                return self._replay_anew()
            self._held = None
            if seq == self._next:
                self._apply(seq, payload)
        elif not is_whole:
            return self._replay_on() if self._next else self._replay_anew()
        self._link()
        return None

    def _lose(self, reason: str) -> None:
        """Something is missing for good: forget all, and go on with the message at hand."""
        self.losses += 1
        self._begin()
        self._missing, self._start = reason, None
        self._tell(False, reason)
        if self._held is not None:
            (seq, payload), self._held = self._held, None
            self._apply(seq, payload)
        self._link()

    def _begin(self) -> None:
        """Know nothing."""
        self.blocks.clear()
        self._clear_index()
        self._digests = array("Q", bytes(8 * _REMEMBERED))
        self._next, self._run = None, 0
        self._is_complete, self._missing, self._filling = False, "replay_incomplete", None

    def _link(self) -> None:
        """From here on the index says what the messages say."""
        if not self._is_linked:
            self._is_linked = True
            self._filling = self.blocks.held()
        self._tell(self._is_complete, self._missing)

    def _unlink(self, reason: str) -> None:
        if self._is_linked:
            self._is_linked, self._filling = False, None
            self._clear_index()
        self._tell(False, reason)

    def _tell(self, is_exact: bool, reason: str) -> None:
        reason = "" if is_exact else reason
        if (is_exact, reason) == (self.is_exact, self.reason):
            return
        self.is_exact, self.reason = is_exact, reason
        self._on_state(is_exact, reason)

    def _clear_index(self) -> None:
        """What replicas share, L2, is not this one's to forget."""
        for medium in (Medium.GPU, Medium.RAM, Medium.DISK):
            self._index.clear(self._replica, medium)

    # -- inside: messages --------------------------------------------------------------------------------------------

    def _is_known(self, seq: int, payload: bytes) -> bool:
        """Whether this is what was applied under this number."""
        if self._next is None or not self._next - _REMEMBERED <= seq < self._next:
            return False
        return self._digests[seq % _REMEMBERED] == _digest(payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self.messages += 1
        self._next = seq + 1
        try:
            events = events_of(payload)
        except UnknownMessage:
            self.losses += 1
            self._begin()
            self._next, self._missing, events = seq + 1, "unreadable", []
            if self._is_linked:
                self._tell(False, "unreadable")
        self._digests[seq % _REMEMBERED] = _digest(payload)
        for event in events:
            self._happen(event)
        if not self._is_complete and self._is_linked and self._run >= max(_LEAST_RUN, len(self.blocks)):
            self._is_complete = True
            self._tell(True, "")

    def _happen(self, event: Event) -> None:
        while self.fill():
            pass
        blocks, unknown = self.blocks, self.blocks.unknown
        if isinstance(event, Stored):
            told = blocks.store(event)
            if told is not None and self._is_linked and told[1]:
                self._index.add(self._replica, *told)
        elif isinstance(event, Removed):
            told = blocks.remove(event)
            if told is not None and self._is_linked and told[1]:
                self._index.remove(self._replica, *told)
        else:
            blocks.clear()
            if self._is_linked:
                self._clear_index()
            self._is_complete = True
            if self._is_linked:
                self._tell(True, "")
            return
        if not self._is_complete:
            self._run = self._run + len(event.block_hashes) if unknown == blocks.unknown else 0


def _digest(payload: bytes) -> int:
    return xxh3_64_intdigest(payload) or 1
