"""Runs a comparison: which servers are the sides, which items they are asked, and the result of it."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.console import Console

from hotspan.ab.asking import Answer, Answers, Asking, Side, Watcher, model_of, play
from hotspan.ab.behind_router import split_sides
from hotspan.ab.compare import agreements, collect, differences, figures, judge, scores
from hotspan.ab.items import Item, generated_items, load_items
from hotspan.ab.result import AbResult
from hotspan.ab.review import write_review
from hotspan.ab.schedule import Phase, Visit, in_turn, interleaved
from hotspan.ab.servers import Serving, beside
from hotspan.ab.settings import AbSettings
from hotspan.ab.statistics import POWER, needed_items, share
from hotspan.bench.client import OpenAIClient
from hotspan.bench.failures import first_lines
from hotspan.bench.machine import machine_facts
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.core.redaction import redacted, redacted_text

MAX_FAILURES: Final = 20
"""Lines of a result."""


def run_ab(settings: AbSettings, console: Console, watcher: Watcher) -> AbResult:
    """Compare the two sides. Blocks until all is answered; failed requests are in the result.

    Raises: ConfigError if a server can't be reached or the settings can't work, EngineError if one can't be started.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    items = choose_items(settings, needed_items(settings.max_drift, settings.detect))
    watcher.says(power_line(settings, len(items), 0.0))
    with ExitStack() as stack:
        run = _Run(settings, items, watcher)
        phases = interleaved(len(items), settings.seed)
        if settings.router:
            answers = run.play(phases)
        elif settings.a_serve and settings.b_serve:
            answers = _started(run, stack.enter_context(Aftermath()), console)
        else:
            url = _served(settings, stack, console)
            answers = run.play(phases, {"A": settings.a or url, "B": settings.b or url})
    return replace(run.result(answers), started_at=started_at)


def _served(settings: AbSettings, stack: ExitStack, console: Console) -> str:
    """The URL of the one server that is started; "" if none is."""
    for title, text in (("A", settings.a_serve), ("B", settings.b_serve)):
        if text:
            serving = Serving.parse(title, text, f"--{title.lower()}-serve", settings.logs)
            aftermath = stack.enter_context(Aftermath())
            return stack.enter_context(serving.running(aftermath, settings.start_timeout_s, console))
    return ""


def _started(run: "_Run", aftermath: Aftermath, console: Console) -> Answers:
    """The answers of two servers that are started: together if they fit, else one after the other."""
    settings, count = run.settings, len(run.items)
    a = Serving.parse("A", settings.a_serve, "--a-serve", settings.logs)
    b = Serving.parse("B", settings.b_serve, "--b-serve", settings.logs)
    with beside(a, b, settings.start, aftermath, settings.start_timeout_s, console) as (a_url, b_url):
        if b_url is not None:
            return run.play(interleaved(count, settings.seed), {"A": a_url, "B": b_url})
        run.is_interleaved = False
        run.watcher.says("A and B run one after the other: their times are not compared")
        first, second = in_turn(count, settings.seed)
        found = run.play([first], {"A": a_url})
    with b.running(aftermath, settings.start_timeout_s, console) as b_url:
        return found | run.play([second], {"B": b_url})


def choose_items(settings: AbSettings, needed: int | None) -> list[Item]:
    """The items of the file, or generated ones: as many as were asked for, or as the verdict needs."""
    if settings.set is not None:
        items = load_items(settings.set)
        if settings.items > len(items):
            raise ConfigError(f"--set {settings.set} has {len(items):,} items: give a lower --items, or leave it out")
        return items[: settings.items or len(items)]
    count = settings.items or needed
    if count is None:
        raise ConfigError("no number of items tells --max-drift from --detect: set them further apart, or give --items")
    return generated_items(count, settings.seed)


def power_line(settings: AbSettings, asked: int, noise: float) -> str:
    """How many items the verdict needs, and how many are asked."""
    needed = needed_items(settings.max_drift, settings.detect, round(noise, 3))
    about = "more than a million" if needed is None else f"about {needed:,}"
    line = f"needs {about} items to see {settings.detect:.2%} at {POWER:.0%}, and to pass at no drift; {asked:,} asked"
    return line if needed is not None and asked >= needed else f'{line}: the verdict may be "can\'t tell"'


class _Run:
    """One comparison as it goes on."""

    def __init__(self, settings: AbSettings, items: Sequence[Item], watcher: Watcher) -> None:
        self.settings, self.items, self.watcher = settings, items, watcher
        self.is_interleaved = True
        self._untimed: frozenset[int] = frozenset()

    def play(self, phases: Iterable[Phase], urls: dict[str, str] | None = None) -> Answers:
        """The answers of the sides at these URLs, or behind the router."""
        try:
            return asyncio.run(self._play(phases, urls))
        finally:
            self.watcher.ends()

    async def _play(self, phases: Iterable[Phase], urls: dict[str, str] | None) -> Answers:
        settings = self.settings
        async with AsyncExitStack() as stack:
            if urls is None:
                client = await stack.enter_async_context(client_of(settings, settings.router))
                model = settings.model or await model_of(client, "A")
                split = await split_sides(client, settings.canary, model, asking_of(settings))
                sides = {each.title: each for each in split}
            else:
                sides = {}
                for title, url in urls.items():
                    client = await stack.enter_async_context(client_of(settings, url))
                    named = (settings.b_model if title == "B" else "") or settings.model
                    model = named or await model_of(client, title)
                    sides[title] = Side(title, client, model, asking_of(settings))

            async def ask(visit: Visit, item: Item) -> Answer:
                return await sides[visit.side].ask(item)

            answers: Answers = {}
            for phase in phases:
                self.watcher.begins(phase.title, len(phase.visits))
                found = await play(phase, self.items, ask, settings.concurrency, lambda _: self.watcher.answered())
                answers |= found
                self._after(phase, found)
        return answers

    def _after(self, phase: Phase, found: Answers) -> None:
        """Tell the noise floor as soon as it is known. What measured it was not asked beside B."""
        if {visit.side for visit in phase.visits} != {"A"}:
            return
        self._untimed = frozenset(visit.item for visit in phase.visits)
        pairs = [(found[Visit(item, "A", 1)], found[Visit(item, "A", 2)]) for item in sorted(self._untimed)]
        noise = share([not a.is_same(b) for a, b in pairs if a.is_whole and b.is_whole])
        self.watcher.says(f"noise floor: A differs from itself at {noise.count} of {noise.total} items")
        if noise.count:
            self.watcher.says(power_line(self.settings, len(self.items), noise.value))

    def result(self, answers: Answers) -> AbResult:
        """What the answers say. Writes the answers to review, if they are to be."""
        settings = self.settings
        untimed = self._untimed if self.is_interleaved else frozenset(range(len(self.items)))
        asked, failures = collect(self.items, answers, untimed)
        if settings.review is not None:
            write_review(settings.review, asked)
        drift = judge(asked, settings.max_drift, len(failures))
        found = agreements(asked, settings.seed)
        return AbResult(
            titles=_titles(settings),
            config=config_of(settings),
            verdict=drift.verdict,
            why=drift.why,
            max_drift=settings.max_drift,
            detect=settings.detect,
            needed=needed_items(settings.max_drift, settings.detect, round(found[0].different.value, 3)),
            items=len(self.items),
            compared=len(asked),
            is_interleaved=self.is_interleaved,
            drift=drift.apart,
            repeat_drift=drift.repeat,
            agreements=found,
            differences=differences(asked),
            figures=figures(asked, settings.seed),
            scores=scores(asked),
            failures=tuple(first_lines(failures, MAX_FAILURES)),
            command=settings.command,
            machine=machine_facts(),
        )


def client_of(settings: AbSettings, url: str) -> OpenAIClient:
    """A client of the server at a URL."""
    base = url.rstrip("/").removesuffix("/v1")
    return OpenAIClient(base, settings.api_key, settings.request_timeout, time.monotonic)


def asking_of(settings: AbSettings) -> Asking:
    """How the items are asked."""
    return Asking(
        settings.max_tokens, settings.temperature, settings.seed, settings.top_logprobs, is_fresh=settings.no_reuse
    )


def _titles(settings: AbSettings) -> tuple[str, str]:
    a, b = settings.a or settings.a_serve, settings.b or settings.b_serve
    if settings.router:
        a, b = f"the rest behind {settings.router}", ", ".join(settings.canary)
    return redacted_text(a), redacted_text(b)


def config_of(settings: AbSettings) -> dict[str, Any]:
    """The settings as they go into result files: without secrets."""
    return dict(redacted(msgspec.to_builtins(replace(settings, api_key=""), enc_hook=str)))
