"""Whether a tier stores chunks compressed: where its medium is slow enough that loading them is faster then.

    seconds a byte, plain       = link
    seconds a byte, compressed  = link / ratio + decoding / lanes

`lanes` transfers run at a time, so that one chunk is decoded while the bytes of others arrive. All of it is measured:
the link by the bytes that crossed it, whichever form they had. Until a chunk was loaded, the link is as fast as stores
found it.
"""

import logging
import threading
from typing import Literal, NamedTuple

from hotspan.core.types import Compress

logger = logging.getLogger(__name__)

_PRIOR_RATIO, _PRIOR_DECODING = 1.4, 1 / 1.2e9
_GAIN, _KEEP = 0.9, 0.97
"""Compression begins where it saves a tenth of the time, and ends where it saves less than 3 %."""

_PROBE_EVERY, _PROBE_RATIO = 32, 1.5
"""Of chunks that did not shrink, one in so many is tried again, if so good a ratio would pay."""

_WEIGHT = 1 / 8
_LEAST_SHARE = 0.1


class Speeds(NamedTuple):
    """Bytes of chunks a second that a tier loads, as estimated; 0 while nothing has crossed its link."""

    plain: float
    compressed: float


Choice = Literal["compressed", "left", "plain"]


class Packing(NamedTuple):
    """What became of one chunk.

    choice: "compressed", "left" if it does not shrink, or "plain" if that was not tried.
    stored_bytes: of its payload. seconds: of encoding or decoding.
    """

    choice: Choice
    stored_bytes: int
    seconds: float = 0.0

    @property
    def is_compressed(self) -> bool:
        return self.choice == "compressed"


class Compressing:
    """One tier's choice; any thread.

    mode:  "auto" chooses; "always" compresses all that shrinks. Compressed chunks are read in each mode.
    lanes: transfers that run at a time, at most as many as there are cores.
    """

    def __init__(self, mode: Compress, lanes: int) -> None:
        self._mode = mode
        self._lanes = max(1, lanes)
        self._lock = threading.Lock()
        self._latency_s = 0.0
        self._read_s = self._written_s = 0.0  # seconds a byte of the link; 0 while unknown
        self._ratio, self._decoding_s = _PRIOR_RATIO, _PRIOR_DECODING
        self._is_on = mode == "always"
        self._untried = 0

    def wants(self) -> bool:
        """Whether to try to compress the next chunk."""
        if self._mode != "auto":
            return self._is_on
        with self._lock:
            link_s = self._read_s or self._written_s
            is_on = self._seconds(link_s, self._ratio) < (_KEEP if self._is_on else _GAIN) * link_s
            if is_on != self._is_on:
                self._is_on = is_on
                logger.info("compression_chosen is_on=%s plain_gb_s=%.3g compressed_gb_s=%.3g", is_on, *self._gb_s())
            if is_on:
                self._untried = 0
                return True
            if self._ratio >= _PROBE_RATIO or self._seconds(link_s, _PROBE_RATIO) >= _GAIN * link_s:
                return False
            self._untried = (self._untried + 1) % _PROBE_EVERY
            return not self._untried

    def asked(self, seconds: float) -> None:
        """An answer without payload took so long: what a transfer takes besides its bytes."""
        with self._lock:
            self._latency_s = seconds if not self._latency_s else min(seconds, 1.02 * self._latency_s)

    def crossed(self, size: int, seconds: float, moving: int, *, is_load: bool) -> None:
        """`size` bytes crossed the link in `seconds`, while `moving` transfers shared it."""
        if size <= 0 or seconds <= 0:
            return
        with self._lock:
            taken_s = max(seconds - self._latency_s, _LEAST_SHARE * seconds) / (size * max(moving, 1))
            if is_load:
                self._read_s = _after(self._read_s, taken_s)
            else:
                self._written_s = _after(self._written_s, taken_s)

    def encoded(self, size: int, stored: int) -> None:
        """A chunk of `size` bytes takes `stored` bytes; 0 if it is left as it is."""
        with self._lock:
            self._ratio = _after(self._ratio, size / stored if stored else 1.0)

    def decoded(self, size: int, seconds: float) -> None:
        """A chunk was restored in `seconds`."""
        if size > 0 and seconds > 0:
            with self._lock:
                self._decoding_s = _after(self._decoding_s, seconds / size)

    def speeds(self) -> Speeds:
        """What is believed of the tier."""
        with self._lock:
            plain, compressed = self._gb_s()
        return Speeds(plain * 1e9, compressed * 1e9)

    def _seconds(self, link_s: float, ratio: float) -> float:
        """A byte, compressed."""
        return link_s / ratio + self._decoding_s / self._lanes

    def _gb_s(self) -> tuple[float, float]:
        link_s = self._read_s or self._written_s
        return (1e-9 / link_s, 1e-9 / self._seconds(link_s, self._ratio)) if link_s else (0.0, 0.0)


def _after(mean: float, value: float) -> float:
    """The mean of about the last eight values; 0 is none."""
    return mean + (value - mean) * _WEIGHT if mean else value
