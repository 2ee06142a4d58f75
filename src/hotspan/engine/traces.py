"""Records which requests ask for the same text, without the text: rows in Mooncake's format (core/trace.py).

    generate ---- a row begins ---- admitted: its tokens become keys ---- outputs are counted ---- the row is fetched

A key is a keyed hash of a block and all before it, salt, adapter and media included. Its secret is the recording's
name, which whoever records draws at random, gives to all replicas and does not keep: nobody finds out later whether a
guessed text is in the trace. Nothing is kept while nobody fetches.

A row has how its answer ended, as the engine tells it: `stop`, `length`, or `abort` if nobody waited for the end. An
answer that asks for a tool is `stop` there. The time to the first token of an answer that comes whole is the one that
the engine tells. Requests that name a session have a key of it, hashed in the same way.

Where the engine blends, rows name the sections between separators, too: by the same kind of hash of their own tokens.
"""

import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from hotspan.core.requests import ABORT
from hotspan.core.trace import BLOCK_TOKENS
from hotspan.engine.blend.windows import as_tokens, sections

_KEPT_S: Final = 30.0
"""A recording ends if nobody fetches for so long."""

_MAX_KEYS: Final = 2_000_000
"""Kept between two fetches, about 70 MiB. Rows beyond are dropped and counted."""

_WHOLE: Final = RequestOutputKind.FINAL_ONLY
_SECTION_TOKENS: Final = 128
"""Shorter sections are not named: nothing of them is reused."""


@dataclass(slots=True)
class Row:
    """A request on its way. Times in seconds; `keys` is None until it comes to the engine."""

    began_s: float
    session: int | None = None
    tokens: int = 0
    keys: list[int] | None = None
    sections: list[list[int]] = field(default_factory=list)
    first_s: float | None = None
    answer_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = ""  # None where it can't be told


_current: ContextVar[Row | None] = ContextVar("hotspan-trace-row", default=None)


@dataclass(slots=True)
class Recording:
    """What is kept between two fetches. running: requests that have not ended. dropped: rows that had no room."""

    name: str = field(repr=False)
    block_tokens: int
    began_s: float
    fetched_s: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    kept_keys: int = 0
    running: int = 0
    dropped: int = 0

    @property
    def secret(self) -> bytes:
        """What its keys are hashed with."""
        return blake2b(self.name.encode(), digest_size=32, person=b"hotspan-trace").digest()

    def row(self, began_s: float, session: str | None) -> Row:
        """That of a request. session: names its conversation among those of all tenants; None if it has no name."""
        return Row(began_s, None if session is None else session_key(session, self.secret))


class Traces:
    """The recording of one server, if there is one. On its event loop.

    separators: texts that cut prompts into sections, as token ids; without any, rows have no sections.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.separators: Sequence[Sequence[int]] = ()
        self._clock = clock
        self._recording: Recording | None = None

    def fetch(self, name: str, block_tokens: int = BLOCK_TOKENS, *, is_last: bool = False) -> dict[str, Any] | None:
        """The rows since the last fetch of the recording of that name, which begins with the first one.

        block_tokens: that a key stands for; the first fetch of a recording says it.
        is_last:      ends the recording.
        `age_s` of the answer: for how long the recording goes on; one that ended unnoticed began anew.
        None while another recording goes on.
        """
        now, found = self._clock(), self.active()
        if found is not None and found.name != name:
            return None
        if found is None:
            found = self._recording = Recording(name, block_tokens, now, now)
        found.fetched_s = now
        rows, found.rows, found.kept_keys = found.rows, [], 0
        if is_last:
            self._recording = None
        age_s = round(now - found.began_s, 3)
        return {"rows": rows, "running": found.running, "dropped": found.dropped, "age_s": age_s}

    def followed(
        self, outputs: AsyncGenerator[Any, None], kind: RequestOutputKind, session: str | None = None
    ) -> AsyncGenerator[Any, None]:
        """The outputs of one request, noted on their way if there is a recording.

        session: names its conversation among those of all tenants; None if it has no name.
        """
        if (found := self.active()) is None:
            return outputs
        row = found.row(self._clock(), session)
        return self._follow(found, row, outputs, kind)

    def admitted(self, request: EngineCoreRequest) -> None:
        """Note the prompt of the request that the current task makes, as the engine gets it."""
        row, found = _current.get(), self._recording
        if row is not None and found is not None:
            self.note_prompt(found, row, request)

    def note_prompt(self, found: Recording, row: Row, request: EngineCoreRequest | Request) -> None:
        """Note a request's prompt in its row, once; a prompt that has no tokens is not noted."""
        if row.keys is not None or request.prompt_token_ids is None:
            return
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        media = [(each.mm_position.offset, each.identifier) for each in request.mm_features or ()]
        row.tokens = len(request.prompt_token_ids)
        root = f"{request.cache_salt}|{adapter}"
        row.keys = block_keys(request.prompt_token_ids, root, media, found.secret, found.block_tokens)
        if self.separators and not media:
            row.sections = section_keys(request.prompt_token_ids, root, self.separators, found.secret)

    def takes(self, found: Recording, tokens: int) -> bool:
        """Whether a recording goes on and has room for a prompt; what has none is counted. Mutates: the recording."""
        if found is not self.active():
            return False
        has_room = found.kept_keys + tokens // found.block_tokens < _MAX_KEYS
        found.dropped += not has_room
        return has_room

    def active(self) -> Recording | None:
        """The recording, if there is one that somebody fetches."""
        if self._recording is not None and self._clock() - self._recording.fetched_s > _KEPT_S:
            self._recording = None
        return self._recording

    async def _follow(
        self, found: Recording, row: Row, outputs: AsyncGenerator[Any, None], kind: RequestOutputKind
    ) -> AsyncGenerator[Any, None]:
        row.began_s, is_delta = self._clock(), kind is RequestOutputKind.DELTA
        found.running += 1
        _current.set(row)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    counted = sum(len(each.token_ids) for each in output.outputs)
                    row.answer_tokens = row.answer_tokens + counted if is_delta else max(row.answer_tokens, counted)
                    row.cached_tokens = output.num_cached_tokens or row.cached_tokens
                    row.finish_reason = next((each.finish_reason for each in output.outputs if each.finish_reason), "")
                    if row.first_s is None and counted:
                        row.first_s = self._clock() if kind is not _WHOLE else _first_s(row, output)
                    yield output
        finally:
            found.running -= 1
            self.end(found, row)

    def end(self, found: Recording, row: Row) -> None:
        """Keep the row of a request that was answered, at least in part."""
        if row.keys is None or not row.answer_tokens or not self.takes(found, row.tokens):
            return
        found.kept_keys += len(row.keys) + len(row.sections)
        found.rows.append(
            {
                "timestamp": max(0, round((row.began_s - found.began_s) * 1000)),
                "input_length": row.tokens,
                "output_length": row.answer_tokens,
                "hash_ids": row.keys,
                "cached_length": row.cached_tokens,
                "block_tokens": found.block_tokens,
                "duration_ms": round((self._clock() - row.began_s) * 1000, 3),
            }
            | ({} if row.finish_reason is None else {"finish_reason": row.finish_reason or ABORT})
            | ({} if row.first_s is None else {"ttft_ms": round((row.first_s - row.began_s) * 1000, 3)})
            | ({} if row.session is None else {"session": row.session})
            | ({"sections": row.sections} if row.sections else {})
        )


def _first_s(row: Row, output: Any) -> float | None:
    """When the first token of an answer came that the engine tells of as a whole; None if it keeps no times."""
    latency_s = getattr(getattr(output, "metrics", None), "first_token_latency", 0.0)
    return row.began_s + latency_s if latency_s else None


def recorded_engine(config: VllmConfig, name: str) -> dict[str, Any]:
    """An engine as core/recorded.py reads it. name: of its model."""
    return {
        "model": name,
        "block_tokens": config.cache_config.block_size,
        "gpu_tokens": int(getattr(config.cache_config, "kv_cache_size_tokens", None) or 0),
        "step_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_running": config.scheduler_config.max_num_seqs,
    }


def session_key(session: str, secret: bytes) -> int:
    """A session's name in one recording."""
    name = session.encode(errors="surrogatepass")
    return int.from_bytes(blake2b(name, key=secret, digest_size=8, person=b"session").digest(), "big")


def block_keys(
    tokens: Sequence[int],
    root: str,
    media: Iterable[tuple[int, str]],
    secret: bytes,
    block_tokens: int = BLOCK_TOKENS,
) -> list[int]:
    """A key for each block of the prompt, also for the last, partial one.

    media: where each image or sound begins, and what it is: all of them have the same tokens.
    """
    key = root.encode()
    placed = deque(sorted(media))
    found = []
    for at in range(0, len(tokens), block_tokens):
        block = array("q", tokens[at : at + block_tokens]).tobytes()
        inside = []
        while placed and placed[0][0] < at + block_tokens:
            inside.append(placed.popleft()[1])
        seen = "|".join(inside).encode()
        key = blake2b(len(key).to_bytes(4, "big") + key + block + seen, key=secret, digest_size=8).digest()
        found.append(int.from_bytes(key, "big"))
    return found


def section_keys(
    tokens: Sequence[int], root: str, separators: Sequence[Sequence[int]], secret: bytes
) -> list[list[int]]:
    """The sections of a prompt: where each begins, its tokens, and a key that does not depend on what is before it."""
    ids, found, salt = as_tokens(tokens), [], root.encode()
    for run in sections(ids, separators):
        if run.tokens >= _SECTION_TOKENS:
            text = ids[run.start : run.stop].tobytes()
            key = blake2b(len(salt).to_bytes(4, "big") + salt + text, key=secret, digest_size=8, person=b"section")
            found.append([run.start, run.tokens, int.from_bytes(key.digest(), "big")])
    return found
