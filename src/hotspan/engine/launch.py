"""From arguments to a running engine and its app: what `server/` serves."""

import asyncio
import contextlib
import json
import logging
import signal
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from multiprocessing import resource_tracker
from typing import Any

from fastapi import FastAPI
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError, EngineError
from hotspan.core.threads import start
from hotspan.engine.adapters import EngineAdapters
from hotspan.engine.blend.cuts import cuts
from hotspan.engine.client_steps import ClientSteps
from hotspan.engine.compat import ask_cores
from hotspan.engine.contract import ENGINE, TRIED_WITH
from hotspan.engine.drafts import report_drafts
from hotspan.engine.entrypoints import build_app, init_app_state
from hotspan.engine.gpus import gpus_shown
from hotspan.engine.guard import RequestGuard, refuse_bodies
from hotspan.engine.traces import recorded_engine
from hotspan.engine.usage import report_counts

logger = logging.getLogger(__name__)

_WARM_SALT = "hotspan-warm-up"
_TELL_S = 0.25
_CHARS_PER_TOKEN = 128
"""Of the longest token, where the tokenizer does not tell."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine, the app that answers from it, and the guard between them. steps: whether it goes on."""

    app: FastAPI
    client: AsyncLLM
    guard: RequestGuard
    steps: ClientSteps

    @property
    def is_dead(self) -> bool:
        """Whether the engine has failed and will answer nothing any more."""
        return bool(self.client.errored) and not self.client.is_running

    async def warm(self, chunk_tokens: int) -> int:
        """Run the compute and the load path once, so that no user pays for first calls; returns the tokens loaded.

        The prompt is fixed and salted, so that after a restart it comes back from disk like everything else. Tokens by
        lot and log probabilities are asked for last, of one answer and of two: their kernels are compiled at first use.
        """
        most = self.client.model_config.max_model_len - 2
        prompt = TokensPrompt(prompt_token_ids=[1 + n % 64 for n in range(min(2 * chunk_tokens + 16, most))])
        prompt["cache_salt"] = _WARM_SALT
        greedy = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        drawn = [SamplingParams(max_tokens=2, temperature=1, ignore_eos=True, logprobs=1, n=n) for n in (1, 2)]
        cached = 0
        for turn, sampling in enumerate([greedy, greedy, *drawn]):
            async for output in self.client.generate(prompt, sampling, f"hotspan-warm-{turn}"):
                cached = output.num_cached_tokens or 0
            await self.client.reset_prefix_cache()
        return cached

    async def administer(self, command: Mapping[str, Any], timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Carry out one command of cache administration (engine/admin.py); the answer of each engine core.

        Raises: TimeoutError; what was begun goes on. EngineError with what the engine said.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await ask_cores(self.client.engine_core, "hotspan", dict(command))
        except TimeoutError:
            raise
        except Exception as error:  # the engine's answer is of no type
            raise EngineError(f"the engine did not carry it out: {first_line(error)}") from error

    def salt(self, tenant: str, salt: str | None) -> str | None:
        """What the engine salts a tenant's prefixes with, given the client's own salt."""
        return self.guard.salt(tenant, salt)

    async def trace(self, recording: str, block_tokens: int, *, is_last: bool) -> dict[str, Any] | None:
        """The requests since the last call, without their text (engine/traces.py); None if somebody else records.

        The last answer has the engine in `server`, too, as core/recorded.py reads it.
        """
        found = self.guard.traces.fetch(recording, block_tokens, is_last=is_last)
        if found is None or not is_last:
            return found
        config = self.client.vllm_config
        server = recorded_engine(config, min(self.names))
        return found | {"server": server, "engines": config.parallel_config.data_parallel_size}

    @property
    def max_tokens(self) -> int:
        """How many tokens a request may have in all, prompt and answer."""
        return int(self.client.model_config.max_model_len)

    @property
    def max_chars(self) -> int:
        """How many characters such a prompt may have: as many as the longest tokens have."""
        longest = getattr(self.tokenizer, "max_chars_per_token", None)
        return self.max_tokens * (int(longest) if longest else _CHARS_PER_TOKEN)

    async def tokens(self, prompt: str) -> list[int]:
        """A text's tokens, as /v1/completions makes them. Raises: ValueError for one that no request may have."""
        (rendered,) = await self.client.renderer.render_cmpl_async([TextPrompt(prompt=prompt)])
        return list(rendered["prompt_token_ids"])

    async def chat_tokens(self, body: Mapping[str, Any]) -> list[int]:
        """The tokens of a chat, as /v1/chat/completions makes them of the same fields. Raises: ValueError."""
        status, said = await _posted(self.app, "/tokenize", dict(body))
        if status != HTTPStatus.OK:
            raise ValueError(str(said.get("error", {}).get("message", said)) if isinstance(said, dict) else str(said))
        return list(said["tokens"])

    @property
    def names(self) -> frozenset[str]:
        """What the base model is called."""
        return frozenset(model.name for model in self.app.state.openai_serving_models.base_model_paths)

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer; None for a model without."""
        return self.client.renderer.tokenizer

    @property
    def is_embedding(self) -> bool:
        """Whether the model makes embeddings."""
        return bool(self.client.model_config.runner_type == "pooling")

    @property
    def takes_one_text(self) -> bool:
        """Whether a prompt is text or tokens and nothing else, and requests are no batches of texts by their nature."""
        model = self.client.model_config
        return not (model.is_multimodal_model or model.enable_prompt_embeds or self.is_embedding)

    def adapters(self) -> EngineAdapters | None:
        """Its adapters; None without LoRA. Call once. Mutates: the client, which counts their requests from then on."""
        if self.client.vllm_config.lora_config is None:
            return None
        return EngineAdapters(self.client, self.app.state.openai_serving_models)

    def adapter_path(self, name: str) -> str | None:
        """Where the files of a registered adapter are; None if there is no such adapter."""
        adapter = self.app.state.openai_serving_models.lora_requests.get(name)
        return None if adapter is None else str(adapter.lora_path)


@asynccontextmanager
async def launch(arguments: Namespace, guard: RequestGuard, aftermath: Aftermath) -> AsyncIterator[Engine]:
    """An engine for `arguments` (engine/arguments.py) behind `guard`, stopped on exit after its requests have ended.

    aftermath: ends the engine's processes if this one is killed.

    Blocks: while the model loads.
    Raises: ConfigError where vLLM refuses the configuration; EngineError where the engine does not come up.
    """
    client = _start(arguments, aftermath)
    try:
        guard.protect(client)
        report_counts(client)
        if (blend := _blend(client)) is not None and not client.model_config.skip_tokenizer_init:
            tokenizer = cached_tokenizer_from_config(client.model_config)
            guard.traces.separators = cuts(tokenizer, blend["separators"])
        tasks = await client.get_supported_tasks()
        app = build_app(arguments, tasks, client.model_config)
        await init_app_state(client, app.state, arguments, tasks)
        refuse_bodies(app)
        guard.protect_routes(app)
        if client.vllm_config.speculative_config is not None:
            report_drafts(app, client)
        await client.reset_mm_cache()
        with gpus_shown(client.vllm_config.parallel_config.world_size):
            engine = Engine(app, client, guard, ClientSteps(client))
            guard.chat_tokens = engine.chat_tokens
            yield engine
    finally:
        client.shutdown(timeout=client.vllm_config.shutdown_timeout)


async def _posted(app: FastAPI, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    """The status and the JSON of an app's own answer to a request for JSON."""
    headers = [(b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
    }
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    asked, status, parts = [json.dumps(body).encode()], 0, list[bytes]()

    async def receive() -> dict[str, Any]:
        if asked:
            return {"type": "http.request", "body": asked.pop(), "more_body": False}
        await asyncio.Event().wait()  # nobody hangs up: a route that listens for that ends with the answer
        raise AssertionError("nobody sets it")

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    try:
        return status, json.loads(b"".join(parts))
    except ValueError:
        return status, None


def _blend(client: AsyncLLM) -> Mapping[str, Any] | None:
    """How the engine reuses text that is no prefix; None if it does not."""
    transfer = client.vllm_config.kv_transfer_config
    tiers = transfer.kv_connector_extra_config.get("hotspan") if transfer is not None else None
    return tiers.get("blend") if tiers and ENGINE == TRIED_WITH else None


def _start(arguments: Namespace, aftermath: Aftermath) -> AsyncLLM:
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    try:
        config: Any = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"the engine refuses this configuration: {first_line(error)}") from error
    try:
        with _interrupts_kept_from_children(), told(aftermath):
            return AsyncLLM.from_vllm_config(
                vllm_config=config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=engine_arguments.enable_log_requests,
                aggregate_engine_logging=engine_arguments.aggregate_engine_logging,
                disable_log_stats=engine_arguments.disable_log_stats,
            )
    except RuntimeError as error:
        raise EngineError(f"the engine did not start: {first_line(error)} (its log above has the cause)") from error


@contextlib.contextmanager
def told(aftermath: Aftermath) -> Iterator[None]:
    """Tell `aftermath` of the engine's processes while they are started, on a thread: to load a model takes minutes."""
    started = threading.Event()

    def tell() -> None:
        while not started.wait(_TELL_S):
            aftermath.end_children()
            aftermath.unlink_shared()
        aftermath.end_children()
        aftermath.unlink_shared()

    thread = start("aftermath", tell)
    try:
        yield
    finally:
        started.set()
        thread.join()


@contextlib.contextmanager
def _interrupts_kept_from_children() -> Iterator[None]:
    """Start processes that never get SIGINT: Ctrl-C reaches the whole process group, and they must live on to drain.

    The signal mask is inherited, so this thread blocks SIGINT meanwhile; another one takes it, so that Ctrl-C still
    ends a long start.
    """
    resource_tracker.ensure_running()  # multiprocessing starts it with the first process, and unblocks SIGINT then
    started = threading.Event()
    taker = start("interrupts", started.wait)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        started.set()
        taker.join()


def first_line(error: BaseException) -> str:
    """What went wrong: pydantic's errors begin with a heading and have the sentence in the third line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Value error, ")), lines[0] if lines else repr(error))
    return said.removeprefix("Value error, ").split(" [type=")[0]
