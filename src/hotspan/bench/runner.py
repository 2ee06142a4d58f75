"""Plays a workload's rounds against a server and measures them."""

import asyncio
import contextlib
import gc
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hotspan.bench.client import ModelCard, OpenAIClient
from hotspan.bench.config import BenchConfig
from hotspan.bench.counters import CacheCounters, ProcessTreeCpu, settled_seconds
from hotspan.bench.kv_size import tokens_per_gib
from hotspan.bench.machine import machine_facts
from hotspan.bench.records import AnswerCheck, BenchResult, RequestRecord, RoundName, RoundResult, TimedUse
from hotspan.bench.summary import summarize
from hotspan.bench.tokenizer import TOKENIZER_FILE, ModelTokenizer
from hotspan.bench.workloads.base import ClosedLoop, Prompt, Round, RunClock
from hotspan.config.admin_token import HOW_TO_GIVE
from hotspan.core.errors import ConfigError

# An engine publishes its counters a moment after the last token has left it.
_SETTLE_S: Final = 0.3

_SAMPLE_S: Final = 1.0


class Progress:
    """Is told how a run goes on, on the event loop, between two events: be quick. This one shows nothing."""

    def preparing(self, what: str) -> None: ...

    def found(self, what: str) -> None:
        """What the server is like, before the first round."""

    def round_started(self, name: RoundName, expected: int) -> None: ...

    def request_finished(self, name: RoundName, record: RequestRecord) -> None: ...

    def round_finished(self, result: RoundResult) -> None: ...


def run_rounds(
    config: BenchConfig, progress: Progress | None = None, command: str = "", clock: RunClock | None = None
) -> BenchResult:
    """Play the configured rounds and return what they measured. Blocks until all is answered.

    Failed requests are in the result, not raised.
    clock: of all times in the result; None for seconds since now.
    Raises: ConfigError if the server can't be reached or the configuration can't work with it.
    """
    return asyncio.run(play_rounds(config, progress or Progress(), command, clock))


async def play_rounds(
    config: BenchConfig, progress: Progress, command: str = "", clock: RunClock | None = None
) -> BenchResult:
    """`run_rounds` for callers that have an event loop."""
    clock = clock or _run_clock()
    cpu = ProcessTreeCpu(config.engine_pid) if config.engine_pid else None
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    async with client_of(config, clock) as client:
        cards = await client.models()
        progress.found(await look_first(config, client, cards))
        config = await resolve(config, client, cards)
        check_fit(config, cards)
        progress.preparing("making the texts")
        rounds = await _rounds(config, client, progress)
        player = _Player(config, client, clock, cpu, progress)
        await player.start()
        played = tuple([await player.play(config.paced(each)) for each in rounds if each.name in config.played])
        check = await _checked(config, client, rounds, progress) if config.check else None
    return BenchResult(config.to_flat(), played, started_at, command, machine_facts(), check)


async def _rounds(config: BenchConfig, client: OpenAIClient, progress: Progress) -> Sequence[Round]:
    """The workload's rounds, with a tokenizer where they take one and --model-config has it."""
    options, directory = config.options, Path(config.model_config)
    if options.takes_tokenizer:
        tokenizer = ModelTokenizer.load(directory) if config.model_config else None
        if tokenizer is not None:
            progress.found(f"requests: LMCache's, made with the tokenizer of {directory}")
            return options.token_rounds(config.scale, config.seed, tokenizer)
        progress.found(
            f"requests: hotspan's own, without a tokenizer; --model-config DIR with a {TOKENIZER_FILE} sends LMCache's"
        )
    return await options.rounds(config.scale, config.seed, lambda text: client.count_tokens(config.model, text))


async def _checked(
    config: BenchConfig, client: OpenAIClient, rounds: Sequence[Round], progress: Progress
) -> AnswerCheck:
    """What comes of asking some of the workload's questions again."""
    progress.preparing("checking answers")
    (questions,) = (r for r in rounds if isinstance(r, ClosedLoop) and r.name is RoundName.CHECK)

    async def ask(prompt: Prompt, salt: str = "") -> RequestRecord:
        salt, more = salt or config.salt, config.options.body
        return await client.chat(prompt, 0, config.model, ignore_eos=config.ignore_eos, salt=salt, more=more)

    count = min(config.check, len(questions.prompts))  # spread evenly over them
    return await _compared([questions.prompts[index * len(questions.prompts) // count] for index in range(count)], ask)


async def _compared(prompts: Sequence[Prompt], ask: Callable[..., Awaitable[RequestRecord]]) -> AnswerCheck:
    """Whether cached answers are the engine's own: questions asked again, one at a time, and then computed anew.

        asked   the question as it stands: answered from whatever cache holds its text
        anew    the same with a `cache_salt` that nobody has used: found in no cache, so that the engine computes it all
        again   the same salt once more: found in the engine's own prefix cache

    An answer is the engine's own if it equals one of the last two. Prompts that are computed in pieces of other sizes
    are summed in another order, so that at a tie between two tokens `anew` alone may differ from a hit without a fault.
    All are asked as they stand first: what is computed anew takes room in the caches that they are to come from.
    """
    asked = [await ask(prompt) for prompt in prompts]
    same, hits, different, failed, not_anew = 0, 0, [], [], []
    for prompt, found in zip(prompts, asked, strict=True):
        salt = new_salt()
        anew, again = await ask(prompt, salt), await ask(prompt, salt)
        if not (found.successful and anew.successful and again.successful):
            failed.append(prompt.request_id)
        elif anew.cached_tokens:
            not_anew.append(prompt.request_id)
        elif found.answer in (anew.answer, again.answer):
            same += 1
        else:
            different.append(prompt.request_id)
        hits += bool(found.cached_tokens)
    knows_hits = all(record.cached_tokens is not None for record in asked if record.successful)
    return AnswerCheck(
        same + len(different), same, hits if knows_hits else None, tuple(different), tuple(failed), tuple(not_anew)
    )


def client_of(config: BenchConfig, clock: RunClock) -> OpenAIClient:
    """A client of the server that is measured."""
    return OpenAIClient(config.base_url, config.api_key, config.request_timeout, clock, admin_token=config.admin_token)


def check_fit(config: BenchConfig, cards: Sequence[ModelCard]) -> None:
    """Raises: ConfigError if no request of the workload's lengths fits the model, as far as the server tells."""
    length = config.options.length
    most = next((card.max_tokens for card in cards if card.name == config.model), None)
    if length is not None and most is not None and length.tokens > most:
        raise ConfigError(
            f"{config.model} takes {most:,} tokens, prompt and answer, and a request of {config.options.NAME} has at "
            f"least {length.tokens:,}: lower {' or '.join(length.flags)}"
        )


async def look_first(config: BenchConfig, client: OpenAIClient, cards: Sequence[ModelCard]) -> str:
    """Whether the server serves the model, and has caches that are cold or warm, in words."""
    names = [card.name for card in cards]
    unlisted = f"it does not list {config.model}" if config.model and config.model not in names else ""
    page = await client.metrics()
    counters = CacheCounters.parse(page) if page else None
    unknown = (
        f"/metrics is for the administrator: {HOW_TO_GIVE}" if client.is_refused else "no cache counters at /metrics"
    )
    caches = f"hit rates are unknown: {unknown}" if counters is None else counters.describe()
    return "; ".join(filter(None, (f"{config.base_url} answers", unlisted, caches)))


def repetition(config: BenchConfig, number: int) -> BenchConfig:
    """The configuration of one repetition, counted from 0: the same requests, which find nothing of earlier ones.

    The server must support `cache_salt`, as vLLM and hotspan do.
    """
    return replace(config, salt=new_salt()) if number else config


def new_salt() -> str:
    """A `cache_salt` that nobody has used."""
    return f"hotspan-bench-{secrets.token_hex(16)}"


async def resolve(config: BenchConfig, client: OpenAIClient, cards: Sequence[ModelCard]) -> BenchConfig:
    """The configuration with the model's name and tokens per GiB filled in, as far as the workload needs them.

    Raises: ConfigError if they can't be found out.
    """
    needs_scale = config.options.needs_scale and not config.tokens_per_gb_kvcache
    if config.model and not needs_scale:
        return config
    model = config.model or (cards[0].name if cards else "")
    if not model:
        raise ConfigError(f"{config.base_url} lists no model; pass --model NAME")
    per_gib = config.tokens_per_gb_kvcache
    if needs_scale:
        per_gib = await tokens_per_gib(config, model, cards, client)
    return replace(config, model=model, tokens_per_gb_kvcache=per_gib)


def resolve_now(config: BenchConfig) -> BenchConfig:
    """`resolve` for callers without an event loop and a client."""

    async def ask() -> BenchConfig:
        async with client_of(config, time.monotonic) as client:
            return await resolve(config, client, await client.models())

    return asyncio.run(ask())


def _run_clock() -> RunClock:
    zero = time.monotonic()
    return lambda: time.monotonic() - zero


def _increments(before: CacheCounters, samples: Iterable[tuple[float, CacheCounters]]) -> Iterator[TimedUse]:
    """What was used between each sample and the one before it."""
    for at_s, counters in samples:
        yield TimedUse(at_s, counters.since(before))
        before = counters


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What exists is not looked at by the garbage collector: that takes 30 ms, in which no request is sent."""
    gc.freeze()  # without a collection first: what is garbage now is collected after the round
    try:
        yield
    finally:
        gc.unfreeze()


class _Player:
    """Plays rounds one after the other, with the server's counters read between them."""

    def __init__(
        self,
        config: BenchConfig,
        client: OpenAIClient,
        clock: RunClock,
        cpu: ProcessTreeCpu | None,
        progress: Progress,
    ) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._cpu = cpu
        self._progress = progress
        self._cpu_before: float | None = None
        self._counters_before: CacheCounters | None = None

    async def start(self) -> None:
        """Read the counters that the first round starts from."""
        self._counters_before = await self._scrape()
        self._cpu_before = await settled_seconds(self._cpu.seconds) if self._cpu else None

    async def play(self, round: Round) -> RoundResult:
        """One round with its figures.

        What a local server still does in the background once all is answered, such as writing KV to disk, is waited
        for: its CPU time is in this round's figure, and the time it takes in none.
        """
        records: list[RequestRecord] = []
        sent = 0

        async def send(prompt: Prompt, due_time: float | None = None) -> RequestRecord:
            nonlocal sent
            order, sent = sent, sent + 1
            config = self._config
            salt = new_salt() if round.name is RoundName.ANEW else config.salt
            ignore_eos, more = config.ignore_eos, config.options.body
            record = await self._client.chat(prompt, order, config.model, ignore_eos=ignore_eos, salt=salt, more=more)
            record = replace(record, due_time=due_time)
            records.append(record)
            self._progress.request_finished(round.name, record)
            return record

        self._progress.round_started(round.name, round.expected)
        samples: list[tuple[float, CacheCounters]] = []
        with _uncollected():
            started = self._clock()
            async with self._sampling(round.name, samples):
                await round.play(send, self._clock)
            elapsed_s = self._clock() - started
        cpu_now = await self._settle()
        counters = await self._scrape()
        cpu_s = None if cpu_now is None or self._cpu_before is None else cpu_now - self._cpu_before
        before = self._counters_before
        use = counters.since(before) if counters else None
        self._cpu_before, self._counters_before = cpu_now, counters
        records.sort(key=lambda record: record.order)
        unsent = round.expected - sent
        summary = summarize(records, elapsed_s, cpu_s, use, slo=self._config.slo, unsent=unsent)
        if samples and counters:
            samples.append((started + elapsed_s, counters))
        timeline = tuple(_increments(before, samples)) if before else ()
        result = RoundResult(round.name, summary, tuple(records), round.loop, timeline)
        self._progress.round_finished(result)
        return result

    @contextlib.asynccontextmanager
    async def _sampling(self, name: RoundName, samples: list[tuple[float, CacheCounters]]) -> AsyncGenerator[None]:
        """Read the counters every second of the query round, unless CPU time is measured: that takes some."""
        if name is not RoundName.QUERY or self._cpu is not None or self._counters_before is None:
            yield
            return

        async def sample() -> None:
            while True:
                await asyncio.sleep(_SAMPLE_S)
                if (counters := await self._scrape()) is not None:
                    samples.append((self._clock(), counters))

        sampler = asyncio.create_task(sample())
        try:
            yield
        finally:
            sampler.cancel()
            await asyncio.wait((sampler,))

    async def _settle(self) -> float | None:
        """Wait until the server's counters and CPU time are those of all it was asked; return the CPU-seconds."""
        if self._cpu is not None:
            return await settled_seconds(self._cpu.seconds)
        if self._counters_before is not None:
            await asyncio.sleep(_SETTLE_S)
        return None

    async def _scrape(self) -> CacheCounters | None:
        text = await self._client.metrics()
        return CacheCounters.parse(text) if text else None
