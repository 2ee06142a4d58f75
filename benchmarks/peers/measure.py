"""One system beside the engine alone: what a question costs, what a restart finds, what damage does."""

import asyncio
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.peers.stores import Store
from benchmarks.peers.systems import Place, Running, System, start
from hotspan.bench.client import OpenAIClient
from hotspan.bench.counters import ProcessTreeCpu, settled_seconds
from hotspan.bench.prose import prose
from hotspan.bench.records import RequestRecord
from hotspan.bench.workloads.base import Prompt
from hotspan.bench.workloads.texts import fitted_prose
from hotspan.core.aftermath import Aftermath
from hotspan.demo.plan import EngineSettings

_TIMEOUT_S: Final = 600.0
_QUESTIONS: Final = (
    "What is its main subject, in one sentence?",
    "Which numbers does it name?",
    "Who is it written for?",
    "What does it leave open?",
)

Answered = dict[str, Any]
Begin = Callable[[], Awaitable[Running]]


class Asked:
    """A running system as a client sees it, with the CPU clocks of all its processes and of its store's."""

    def __init__(self, running: Running, store: Store | None = None) -> None:
        self.running = running
        self._clocks = [ProcessTreeCpu(pid) for pid in (*running.pids, *(store.pids if store else ()))]
        self._client = OpenAIClient(f"http://127.0.0.1:{running.server.port}", "", _TIMEOUT_S, time.monotonic)
        self._model = ""

    async def __aenter__(self) -> "Asked":
        await self._client.__aenter__()
        self._model = (await self._client.models())[0].name
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(None, None, None)

    async def fitted(self, number: int, tokens: int) -> str:
        """A text of that many tokens, another for each number."""
        return await fitted_prose(
            f"Document {number}: ", number, tokens, lambda text: self._client.count_tokens(self._model, text)
        )

    async def ask(self, text: str, tokens: int = 16, *, timed: bool = False) -> Answered:
        """One answer at temperature 0. timed: with the CPU-seconds until every process rests."""
        before = await self.cpu_s() if timed else 0.0
        record = await self.send(Prompt("peer", text, tokens))
        after = await self.cpu_s() if timed else 0.0
        return {
            "successful": record.successful,
            "answer": record.answer,
            "cached": record.cached_tokens or 0,
            "ttft_s": record.ttft,
            "cpu_s": after - before,
            "error": record.error,
        }

    async def send(self, prompt: Prompt, order: int = 0) -> RequestRecord:
        """One answer of exactly as many tokens as the prompt allows, at temperature 0."""
        return await self._client.chat(prompt, order, self._model, ignore_eos=True)

    async def metrics(self) -> str:
        """The server's page of metrics; empty if it has none."""
        return await self._client.metrics() or ""

    async def cpu_s(self) -> float:
        """CPU-seconds of all processes so far, once they rest. Raises: SystemExit if one has ended."""
        seconds = [await settled_seconds(clock.seconds) for clock in self._clocks]
        if None in seconds:
            raise SystemExit("a process ended while it was measured")
        return sum(each for each in seconds if each is not None)


def question(text: str, number: int) -> str:
    return f"{text}\n\nQuestion {number}: {_QUESTIONS[number]}"


async def compare(
    system: System,
    place: Place,
    engine: EngineSettings,
    aftermath: Aftermath,
    none: Asked,
    bound: Asked,
    texts: Sequence[str],
    more: Sequence[str],
) -> dict[str, Any]:
    """Everything about one system. `none` and `bound` run beside it all the time, and `bound` has all texts."""
    begin = partial(asyncio.to_thread, start, system, place, engine, aftermath)
    with system.store(place, aftermath) as store:
        return {"title": system.title} | await _compared(begin, store, none, bound, texts, more)


async def _compared(
    begin: Begin, store: Store | None, none: Asked, bound: Asked, texts: Sequence[str], more: Sequence[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    running = await begin()
    try:
        async with Asked(running, store) as asked:
            for n in range(2):
                await asked.ask(f"Warm-up {n}: {prose(n, 300)}", 4)
            stored = [await asked.ask(text, 1, timed=True) for text in texts]
            found["stored_cpu_s"] = statistics.median(row["cpu_s"] for row in stored)
            found["rows"] = await _beside(asked, none, bound, texts)
        found["query"] = _ratios(found["rows"])
        if store is not None:
            await asyncio.to_thread(running.end, signal.SIGTERM)
            running = await begin()
            found["restart"] = await _checked(running, none, bound, [question(text, 1) for text in texts])
            pages = await asyncio.to_thread(store.flip)
            asks = [question(text, 2) for text in texts]
            found["flipped"] = {"pages": pages} | await _checked(running, none, bound, asks)
            running = await _killed(running, store, begin, more)
            asks = [question(text, 3) for text in (*texts, *more)]
            found["killed"] = await _checked(running, none, bound, asks)
    finally:
        await asyncio.to_thread(running.end, signal.SIGTERM)
    return found


async def _beside(asked: Asked, none: Asked, bound: Asked, texts: Iterable[str]) -> list[dict[str, Answered]]:
    """A question about each text, to the system and to the engine alone, in turn."""
    rows = []
    for n, text in enumerate(texts):
        each = {"system": asked, "none": none, "bound": bound}
        order = [*each][n % 3 :] + [*each][: n % 3]
        row = {name: await each[name].ask(question(text, 0), timed=True) for name in order}
        rows.append({name: row[name] for name in each})
    return rows


def _ratios(rows: Sequence[Mapping[str, Answered]]) -> dict[str, Any]:
    """Medians within rows of what the system took beside what the engine alone did, and how many answers agree."""

    def median(figure: str, of: str, to: str) -> float:
        return round(statistics.median(row[of][figure] / row[to][figure] for row in rows), 3)

    return {
        "cpu_over_bound": median("cpu_s", "system", "bound"),
        "cpu_over_none": median("cpu_s", "system", "none"),
        "ttft_over_bound": median("ttft_s", "system", "bound"),
        "ttft_none_over": median("ttft_s", "none", "system"),
        "cached": sum(row["system"]["cached"] for row in rows),
        "cached_bound": sum(row["bound"]["cached"] for row in rows),
        "same_answers": sum(row["system"]["answer"] == row["bound"]["answer"] for row in rows),
        "answers": len(rows),
    }


async def _checked(running: Running, none: Asked, bound: Asked, asks: Sequence[str]) -> dict[str, Any]:
    """The tokens that were hits, the answers that are not the engine's own, and those that failed.

    The engine has two answers of its own: computed anew, and from its own hit. They may differ where two tokens are
    equally likely, since a prompt computed in other pieces is summed in another order.
    """
    async with Asked(running) as asked:
        rows = [(await asked.ask(ask), await bound.ask(ask), await none.ask(ask)) for ask in asks]
    return {
        "cached": sum(ours["cached"] for ours, *_ in rows),
        "cached_bound": sum(theirs["cached"] for _, theirs, _ in rows),
        "wrong_answers": sum(
            ours["successful"] and ours["answer"] not in [other["answer"] for other in own] for ours, *own in rows
        ),
        "failed": sum(not ours["successful"] for ours, *_ in rows),
        "answers": len(rows),
    }


async def _killed(running: Running, store: Store, begin: Begin, more: Sequence[str]) -> Running:
    """Every process is killed at the answer to the last of some new texts, while its KV is being written; then anew.

    The store is emptied first: its bytes were damaged.
    """
    await asyncio.to_thread(running.end, signal.SIGTERM)
    await asyncio.to_thread(store.clear)
    running = await begin()
    async with Asked(running) as asked:
        for text in more:
            await asked.ask(text, 1)
        await asyncio.to_thread(running.end, signal.SIGKILL)
    return await begin()
