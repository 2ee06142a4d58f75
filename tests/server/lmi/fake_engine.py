"""An app that answers as the engine's does: the same JSON, the same events, and the same way to notice a hang-up."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.requests import Request
from starlette.responses import Response

from hotspan.http.paths import OPENAI
from hotspan.server.principal import current_tenant

PROMPT_IDS = [1, 17]


@dataclass(frozen=True)
class Step:
    """What one step of the engine gives: several tokens under speculation, text that may lag behind them."""

    tokens: tuple[tuple[int, str], ...]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


HELLO = (
    Step(((5, "Hello"),), "Hello"),
    Step(((6, " wide"), (7, " world")), " wide world"),
    Step(((2, "</s>"),), "", "stop"),
)


@dataclass
class FakeEngine:
    """steps: what it generates. delay_s: between two of them. error: what it answers instead, (status, message, param).

    fails_at: the step at which its stream says that it failed.
    """

    steps: tuple[Step, ...] = HELLO
    delay_s: float = 0.0
    error: tuple[int, str, str | None] | None = None
    fails_at: int | None = None
    seen: list[tuple[str, Any, dict[str, str], str]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    aborted: int = 0
    stepped: int = 0
    running: int = 0

    @property
    def body(self) -> Any:
        """The last body that was asked."""
        return self.seen[-1][1]

    def app(self) -> FastAPI:
        app = FastAPI()
        for path in (*OPENAI, "/invocations"):
            app.add_api_route(path, self._cancellable(self._answer), methods=["POST"])
        app.add_api_route("/health", self._fine, methods=["GET"])
        app.add_api_route("/broken", self._broken, methods=["GET"])
        app.add_api_route("/receipt", self._receipt, methods=["POST"])
        return app

    async def _fine(self) -> PlainTextResponse:
        return PlainTextResponse("")

    async def _broken(self) -> None:
        raise RuntimeError("a bug of the engine's")

    async def _receipt(self) -> None:
        raise HTTPException(409, "nothing to do")

    def _cancellable(self, handler: Callable[[Request], Awaitable[Response]]) -> Any:
        async def wrapper(request: Request) -> Response:
            await request.body()
            work = asyncio.create_task(handler(request))  # type: ignore[arg-type]
            hung_up = asyncio.create_task(_disconnected(request))
            _, pending = await asyncio.wait({work, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            return work.result() if work.done() and not work.cancelled() else JSONResponse(None)

        return wrapper

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.raw.append(await request.body())
        self.seen.append((request.url.path, body, dict(request.headers), current_tenant()))
        if self.error is not None:
            status, message, param = self.error
            error = {"message": message, "type": "BadRequestError", "param": param, "code": status}
            return JSONResponse({"error": error}, status)
        if request.url.path == "/v1/embeddings":
            rows = [{"index": n, "embedding": [float(n), len(text)]} for n, text in enumerate(body["input"])]
            return JSONResponse({"object": "list", "data": rows[::-1]})
        is_chat = "messages" in body
        if body.get("stream"):
            return StreamingResponse(self._events(body, is_chat), media_type="text/event-stream")
        async for _ in self._stepped():
            pass
        choices = [self._whole(body, n, is_chat) for n in range(body.get("n", 1))]
        return JSONResponse({"object": "chat.completion" if is_chat else "text_completion", "choices": choices})

    def _whole(self, body: Any, index: int, is_chat: bool) -> Any:
        text = "".join(step.text for step in self.steps)
        last = self.steps[-1]
        choice: dict[str, Any] = {"index": index, "finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
        if is_chat:
            return choice | {"message": {"role": "assistant", "content": text}}
        tokens = [token for step in self.steps for token in step.tokens]
        choice |= {"text": text, "logprobs": None, "token_ids": None, "prompt_token_ids": None}
        if body.get("return_token_ids"):
            choice |= {"token_ids": [token for token, _ in tokens], "prompt_token_ids": PROMPT_IDS}
        if body.get("logprobs") is not None:
            prompt = [(1, "<s>"), (17, "Say")] if body.get("echo") else []
            choice["logprobs"] = _logprobs([*prompt, *tokens], has_start=bool(prompt))
        return choice

    async def _stepped(self) -> AsyncIterator[tuple[int, Step]]:
        self.running += 1
        try:
            for number, step in enumerate(self.steps):
                await asyncio.sleep(self.delay_s)
                self.stepped += 1
                yield number, step
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _events(self, body: Any, is_chat: bool) -> AsyncIterator[str]:
        async for number, step in self._stepped():
            if number == self.fails_at:
                error = {"message": "the engine failed", "type": "InternalServerError", "param": None, "code": 500}
                yield f"data: {json.dumps({'error': error})}\n\n"
                break
            yield f"data: {json.dumps({'choices': [self._delta(body, number, step, is_chat)]})}\n\n"
        yield "data: [DONE]\n\n"

    def _delta(self, body: Any, number: int, step: Step, is_chat: bool) -> Any:
        choice: dict[str, Any] = {"index": 0, "finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
        if is_chat:
            return choice | {"delta": {"content": step.text}}
        choice |= {"text": step.text, "logprobs": None}
        if body.get("return_token_ids"):
            choice |= {"token_ids": [token for token, _ in step.tokens]}
            choice |= {"prompt_token_ids": None if number else PROMPT_IDS}
        if body.get("logprobs") is not None:
            choice["logprobs"] = _logprobs(step.tokens)
        return choice


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _logprobs(tokens: Any, *, has_start: bool = False) -> Any:
    values: list[float | None] = [-float(token) / 10 for token, _ in tokens]
    if has_start:
        values[0] = None
    return {"tokens": [text for _, text in tokens], "token_logprobs": values, "text_offset": [], "top_logprobs": []}
