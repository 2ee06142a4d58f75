"""Whether one server repeats its answers: over repetitions, batch sizes, cache hits and, if started here, restarts.

Every answer is compared with the item's first one, which was computed alone. All requests have the same seed.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console

from hotspan.ab.asking import Answer, Side, Watcher, model_of, play
from hotspan.ab.divergence import divergence
from hotspan.ab.items import Item
from hotspan.ab.result import Condition, SameResult, Verdict
from hotspan.ab.run import MAX_FAILURES, asking_of, choose_items, client_of, config_of
from hotspan.ab.schedule import Phase, Visit
from hotspan.ab.servers import Serving
from hotspan.ab.settings import AbSettings
from hotspan.ab.statistics import items_to_pass, share
from hotspan.bench.failures import first_lines
from hotspan.bench.machine import machine_facts
from hotspan.core.aftermath import Aftermath
from hotspan.core.redaction import redacted_text


@dataclass(frozen=True, slots=True)
class _Pass:
    """All items, asked `repeats` times under one condition."""

    title: str
    concurrency: int = 1
    repeats: int = 1
    is_fresh: bool = False


def run_same(settings: AbSettings, console: Console, watcher: Watcher) -> SameResult:
    """Check one server. Blocks until all is answered. Raises: as `run_ab`."""
    needed = items_to_pass(settings.max_drift)
    items = choose_items(settings, needed)
    watcher.says(f"needs {needed:,} items, all answered alike, to pass; {len(items):,} asked")
    check = _Check(settings, items, watcher)
    if settings.same:
        check.play(settings.same, _passes(settings))
        return check.result()
    with ExitStack() as stack:
        aftermath = stack.enter_context(Aftermath())
        serving = Serving.parse("same", settings.same_serve, "--same-serve", settings.logs)
        anew = _Pass("computed anew, alone", is_fresh=True)
        with serving.running(aftermath, settings.start_timeout_s, console) as url:
            check.play(url, [*_passes(settings), anew])
        with serving.running(aftermath, settings.start_timeout_s, console) as url:
            check.play(url, [_Pass("after a restart, alone"), replace(anew, title="after a restart, computed anew")])
    return check.result()


def _passes(settings: AbSettings) -> list[_Pass]:
    alone = _Pass("again, alone", 1, settings.repeats)
    levels = sorted(set(settings.levels) - {1})
    return [alone, *(_Pass(f"{level} at a time", level, settings.repeats) for level in levels)]


class _Check:
    """One check as it goes on: the first answers, and what was compared with them."""

    def __init__(self, settings: AbSettings, items: Sequence[Item], watcher: Watcher) -> None:
        self._settings, self._items, self._watcher = settings, items, watcher
        self._first: list[Answer] = []
        self._conditions: list[Condition] = []
        self._failures: list[str] = []

    def play(self, url: str, passes: Sequence[_Pass]) -> None:
        """Ask the server at a URL under each condition; the first time also for the answers to compare with."""
        try:
            asyncio.run(self._play(url, passes))
        finally:
            self._watcher.ends()

    async def _play(self, url: str, passes: Sequence[_Pass]) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(client_of(settings, url))
            side = Side(
                "the server", client, settings.model or await model_of(client, "the server"), asking_of(settings)
            )
            if not self._first:
                self._first = await self._asked(side, _Pass("first, alone"))
            for each in passes:
                side.asking = replace(asking_of(settings), is_fresh=each.is_fresh or settings.no_reuse)
                repeats = [await self._asked(side, each) for _ in range(each.repeats)]
                self._conditions.append(self._compared(each, repeats))

    async def _asked(self, side: Side, how: _Pass) -> list[Answer]:
        """One answer to each item."""
        phase = Phase(how.title, tuple(Visit(at, "A", 1) for at in range(len(self._items))))
        self._watcher.begins(how.title, len(phase.visits))
        found = await play(
            phase, self._items, lambda _, item: side.ask(item), how.concurrency, lambda _: self._watcher.answered()
        )
        answers = [found[visit] for visit in phase.visits]
        self._failures += [
            f"{item.name}, {how.title}: {each.record.error}"
            for item, each in zip(self._items, answers, strict=True)
            if not each.is_whole
        ]
        return answers

    def _compared(self, how: _Pass, repeats: Sequence[Sequence[Answer]]) -> Condition:
        """How many items have any answer that is not the first one; those with a failure are left out."""
        found, cached, prompts = [], 0, 0
        for first, *others in zip(self._first, *repeats, strict=True):
            if first.is_whole and all(each.is_whole for each in others):
                apart = [divergence(first, each) for each in others]
                found.append(min((each.first for each in apart if each.first is not None), default=None))
                cached += sum(each.record.cached_tokens or 0 for each in others)
                prompts += sum(each.record.num_input_tokens for each in others)
        places = [at for at in found if at is not None]
        return Condition(
            how.title,
            how.repeats,
            share([at is not None for at in found]),
            median(places) if places else None,
            cached / prompts if prompts else 0.0,
        )

    def result(self) -> SameResult:
        settings, verdict = self._settings, Verdict.PASS
        shares = [each.different for each in self._conditions]
        if any(each.low > settings.max_drift for each in shares):
            verdict = Verdict.DRIFT
        elif self._failures or any(each.high > settings.max_drift for each in shares):
            verdict = Verdict.UNKNOWN
        return SameResult(
            title=redacted_text(settings.same or settings.same_serve),
            config=config_of(settings),
            verdict=verdict,
            max_drift=settings.max_drift,
            items=len(self._items),
            conditions=tuple(self._conditions),
            failures=tuple(first_lines(self._failures, MAX_FAILURES)),
            command=settings.command,
            machine=machine_facts(),
        )
