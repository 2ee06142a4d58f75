"""What is told of each request on its way through the scheduler, to whoever notes it: spans, traces."""

from hotspan.engine.requests import RequestRecord


class RequestWatcher:
    """The manager calls it on the scheduler's thread; a kind of watcher overrides what it needs."""

    def admit(self, record: RequestRecord) -> None:
        """A request came."""

    def choose(self, record: RequestRecord) -> None:
        """What a request is to load was decided."""

    def begin(self, record: RequestRecord) -> None:
        """The engine has begun with a request: its look-up and its wait are over."""

    def load(self, record: RequestRecord, load_s: float, size: int) -> None:
        """A request's chunks, `size` bytes, were copied in the last `load_s` seconds."""

    def step(self) -> None:
        """A step is about to be scheduled."""

    def retire(self, record: RequestRecord) -> None:
        """A request ended."""
