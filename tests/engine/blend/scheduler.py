"""The scheduler's half of blending over a cache, without an engine: requests, and a worker that does as it is told."""

from types import SimpleNamespace
from typing import Any

from hotspan.cache.tiered import TieredCache
from hotspan.config.settings import BlendSettings
from hotspan.core.clock import Clock
from hotspan.core.namespace import ChunkKeyer
from hotspan.engine.blend.admission import Blending
from hotspan.engine.blend.orders import Orders, Report, Speed
from hotspan.engine.requests import RequestRecord

WINDOW, BLOCK = 64, 16
SPEED = Speed(token_s=1e-3, move_s=1e-6)
KEYER = ChunkKeyer(bytes(32))


def document(number: int, tokens: int = 2 * WINDOW) -> list[int]:
    return [1000 * (number + 1) + place for place in range(tokens)]


class Scheduler:
    """Requests as vLLM's scheduler has them, computed in one step each, and a worker that does as it is told."""

    def __init__(
        self, cache: TieredCache, mode: Any = "first_k", clock: Clock | None = None, keyer: ChunkKeyer = KEYER
    ) -> None:
        self.cache = cache
        self.keyer = keyer
        settings = BlendSettings(mode, first_k=4, min_tokens=WINDOW, check_every=2)
        self.blending = Blending(settings, cache, WINDOW, BLOCK, 1024, [[7, 7]], clock)
        self.blending.note(Report(speed=SPEED))
        self._names = 0

    def request(self, *documents: int, **fields: Any) -> Any:
        """A prompt with these documents, in that order."""
        self._names += 1
        tokens = [900 + self._names] * 20
        for number in documents:
            tokens += [7, 7, *document(number)]
        given: dict[str, Any] = {
            "mm_features": [],
            "lora_request": None,
            "pooling_params": None,
            "prompt_embeds": None,
            "skip_reading_prefix_cache": False,
            "num_preemptions": 0,
            "num_output_tokens": 0,
            "num_computed_tokens": 0,
            "cache_salt": None,
        }
        hashes = [bytes([self._names, at]) for at in range(len(tokens) // BLOCK)]
        names = {"request_id": f"r{self._names}", "prompt_token_ids": tokens, "block_hashes": hashes}
        return SimpleNamespace(**given | names | fields)

    def match(self, request: Any, record: RequestRecord | None = None, loaded: int = 0) -> int | None:
        record = record or RequestRecord(request=request, keyer=self.keyer, groups=())
        return self.blending.match(request, record, 0, loaded)

    def step(self, request: Any, tokens: int | None = None) -> Orders | None:
        """Schedule so many tokens of a request."""
        count = len(request.prompt_token_ids) if tokens is None else tokens
        scheduled: Any = SimpleNamespace(
            num_scheduled_tokens={request.request_id: count}, total_num_scheduled_tokens=count
        )
        return self.blending.orders(scheduled)

    def run(self, request: Any, record: RequestRecord | None = None) -> dict[str, Any] | None:
        """One request from its look-up to its end; what its answer says of blending."""
        claimed = self.match(request, record)
        if claimed:
            assert self.blending.begin(request, list(range(99))) is not None
        orders = self.step(request, 1 if claimed else None)
        if orders is not None:
            stored, ended = [store.key for store in orders.stores], [job.number for job in orders.blends]
            checks = [check.number for check in orders.checks]
            self.blending.note(Report(stored=stored, ended=ended, done=orders.number, running=checks))
        return self.blending.end(request.request_id)

    @property
    def windows(self) -> int:
        """How many RAM has."""
        return sum(entry.terms.is_window for entry in self.cache.ram.entries.values())


def learnt(scheduler: Scheduler, **fields: Any) -> None:
    """Both documents' windows are in RAM."""
    assert scheduler.run(scheduler.request(0, 1, **fields)) is None and scheduler.windows == 0
    assert scheduler.run(scheduler.request(1, 0, **fields)) is None and scheduler.windows == 4
